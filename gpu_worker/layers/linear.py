"""Products with a fixed weight, in the form that is fastest where the weight lives.

On a GPU that is ``F.linear``. On a CPU the weight is packed once, at load, into the blocks its product kernel reads.
Which library packs is a rule, not a race, so that a restarted worker rounds as the one before it did:

- oneDNN (``mkldnn``) unless the processor is Intel's: MKL's fp32 kernels are for Intel, and take 1.3 to 2.3 times
  as long on AMD at 8 to 128 rows (``bench/cpu_layers.py`` prints both).
- MKL on Intel, for fp32.
- ``F.linear`` where torch has neither, and for weights too small to matter.

``QUIRE_CPU_LINEAR`` = onednn | mkl | plain overrides the rule.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

# Packing costs MKL some 6 MB a weight whatever its size, and saves nothing below this many values.
SMALL = 1 << 16
# Fewer rows are filled up with zeros. Below four the libraries sum in another order; from four on a row's product has
# the same bits in any company, so that a token does not depend on its batch. With oneDNN four rows are also faster.
LEAST_ROWS = 4
# Rows that a packed weight is laid out for; one layout serves every count of rows (measured 1 to 2048).
_PACK_ROWS = 32


@functools.cache
def cpu_flags() -> tuple[str, frozenset[str]]:
    """The processor's vendor and instruction sets as /proc/cpuinfo names them; empty elsewhere than on Linux."""
    vendor, flags = "", frozenset[str]()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                key = key.strip()
                if key in ("vendor_id", "CPU implementer"):
                    vendor = value.strip()
                elif key in ("flags", "Features"):
                    return vendor, frozenset(value.split())
    except OSError:
        pass
    return vendor, flags


def cpu_has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 itself; without that, bf16 products are slower than fp32."""
    return bool(cpu_flags()[1] & {"avx512_bf16", "amx_bf16", "bf16"})


# (x, bias) -> product
Run = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def _onednn(weight: torch.Tensor) -> Run:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x, bias: run(x, packed, bias, "none", [], "")


def _mkl(weight: torch.Tensor) -> Run:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS)
    run = torch.ops.mkl._mkl_linear
    # The op reads the unpacked weight only when told another count of rows than x has; here it is told x's own.
    shape = torch.empty(1, dtype=weight.dtype).expand(weight.shape)
    return lambda x, bias: run(x, packed, shape, bias, x.shape[0])


def _plain(weight: torch.Tensor) -> Run:
    return lambda x, bias: F.linear(x, weight, bias)


_RUNS: dict[str, Callable[[torch.Tensor], Run]] = {"onednn": _onednn, "mkl": _mkl, "plain": _plain}


def cpu_backend(dtype: torch.dtype = torch.float32) -> str:
    """The packing that the rule above chooses on this machine: onednn, mkl or plain."""
    asked = os.environ.get("QUIRE_CPU_LINEAR", "")
    if asked == "plain":
        return asked
    mkl = torch.backends.mkl.is_available() and dtype == torch.float32
    onednn = torch.backends.mkldnn.is_available() and dtype in (torch.float32, torch.bfloat16)
    if mkl and (asked == "mkl" or not onednn or (not asked and cpu_flags()[0] == "GenuineIntel")):
        return "mkl"
    return "onednn" if onednn else "plain"


class Linear:
    """``x [T, in] -> x @ weight.T + bias [T, out]`` for a fixed weight [out, in].

    Where the weight is packed the caller may drop it. ``bias`` may be set later.
    """

    __slots__ = ("_least", "_run", "_unit", "bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._run = _plain(weight)
        self._least = 0 if weight.device.type != "cpu" else LEAST_ROWS
        self._unit = LEAST_ROWS if self._least else 1  # small plain products round otherwise between the multiples
        if self._least and weight.numel() >= SMALL:
            self._run, self._unit = _RUNS[cpu_backend(weight.dtype)](weight), 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        missing = max(self._least - rows, -rows % self._unit)
        if missing <= 0:
            return self._run(x, self.bias)
        return self._run(F.pad(x, (0, 0, 0, missing)), self.bias)[:rows]
