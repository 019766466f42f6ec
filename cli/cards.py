"""GPUs: memory, bandwidth and products a second, as their makers give them. `quire fit` and the benchmarks read this.

Memory is what nvidia-smi shows, which is a little less than on the box. Bandwidth and dense products that sum in
float32: the makers' data sheets (of H100 and newer without sparsity).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.config import ConfigError
from ..proto.flag_parser import nearest

_MIB = 2**20


@dataclass(frozen=True)
class Sheet:
    """``memory`` in bytes, ``bandwidth`` in bytes a second, ``products`` in bfloat16 operations a second."""

    name: str
    memory: int
    bandwidth: float
    products: float


def _sheet(name: str, mib: int, terabytes: float, teraflops: float) -> Sheet:
    return Sheet(name, mib * _MIB, round(terabytes * 1e12), round(teraflops * 1e12))


SHEETS = {
    sheet.name: sheet
    for sheet in (
        _sheet("A10", 23028, 0.6, 125),
        _sheet("A100-40GB", 40960, 1.555, 312),
        _sheet("A100-80GB", 81920, 2.039, 312),
        _sheet("RTX-A6000", 49140, 0.768, 154.8),
        _sheet("RTX-3090", 24576, 0.936, 71),
        _sheet("RTX-4090", 24564, 1.008, 165.2),
        _sheet("RTX-5090", 32607, 1.792, 209.5),
        _sheet("L4", 23034, 0.3, 121),
        _sheet("L40S", 46068, 0.864, 362),
        _sheet("H100", 81559, 3.35, 989.4),
        _sheet("H100-PCIe", 81559, 2.0, 756),
        _sheet("H200", 143771, 4.8, 989.4),
        _sheet("B200", 183359, 8.0, 2250),
        _sheet("MI300X", 196592, 5.3, 1307.4),
    )
}  # fmt: skip
"""By name. H100 is the SXM card."""

_OTHER_NAMES = {"a100": "A100-80GB", "h100-sxm": "H100", "h100-80gb": "H100", "rtx3090": "RTX-3090",
                "3090": "RTX-3090", "4090": "RTX-4090", "5090": "RTX-5090", "a6000": "RTX-A6000"}  # fmt: skip


def sheet_of(name: str) -> Sheet:
    """The card of a name in any case, with blanks or underscores for dashes. Raises ConfigError, which lists them."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    by_key = {each.lower(): each for each in SHEETS} | _OTHER_NAMES
    if key in by_key:
        return SHEETS[by_key[key]]
    like = nearest(key.upper(), SHEETS)
    raise ConfigError(f"there is no figure of a GPU {name!r}{like}; known are {', '.join(SHEETS)}, and cpu.")


def sheet_of_device(name: str) -> Sheet | None:
    """The card that a driver calls ``name`` ("NVIDIA H100 80GB HBM3"); None for one without figures."""
    text = name.lower().replace(" ", "-")
    if "h100" in text:
        return SHEETS["H100-PCIe" if "pcie" in text else "H100"]
    if "a100" in text:
        return SHEETS["A100-40GB" if "40gb" in text else "A100-80GB"]
    known = sorted(SHEETS, key=len, reverse=True)
    found = next((each for each in known if f"-{each.lower()}-" in f"-{text}-"), None)
    return None if found is None else SHEETS[found]
