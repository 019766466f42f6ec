"""What a model's folder says of it to who asks over HTTP: sizes, types, the template."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..proto.checkpoint.gguf import gguf_file, gguf_files, read_gguf
from ..proto.checkpoint.model_config import ModelConfig
from ..proto.config import ConfigError

_KINDS = ("*.safetensors", "*.bin", "*.pt")
_MOST_HEAD = 100 << 20  # bytes; safetensors' own limit
_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class ModelCard:
    """``parameters`` is 0 where the files do not tell, as where weights are packed; ``size`` is bytes of the weight
    files; ``modified`` is seconds of the epoch; ``digest`` is 64 hexadecimal digits, another one for other files."""

    format: str = ""
    quantization: str = ""
    parameters: int = 0
    size: int = 0
    modified: float = 0.0
    digest: str = "0" * 64
    template: str = ""
    license: str = ""
    hf: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """config.json's model_type."""
        return str(self.hf.get("model_type") or "")

    @property
    def parameter_size(self) -> str:
        """ "7.6B", as people say it; empty where it is not known."""
        for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.1f}{letter}"
        return str(self.parameters or "")


def read_card(model: ModelConfig, template: str) -> ModelCard:
    """The card of a model in its folder, or GGUF file. What cannot be read is left out: a card is no check."""
    home, gguf = Path(model.path), gguf_file(model.path)
    found = (sorted(home.glob(kind)) for kind in _KINDS)
    files = gguf_files(gguf) if gguf is not None else next(filter(None, found), [])
    stats = [file.stat() for file in files]
    told = [(file.name, stat.st_size, int(stat.st_mtime)) for file, stat in zip(files, stats, strict=True)]
    digest = hashlib.sha256(json.dumps([model.hf, told], sort_keys=True, default=str).encode()).hexdigest()
    config = model.hf.get("quantization_config")
    try:
        tensors = list(_tensors(files))
    except (ConfigError, OSError, ValueError):
        tensors = []
    kinds = Counter[str]()
    for kind, count in tensors:
        kinds[kind] += count
    packed = isinstance(config, dict) and gguf is None
    license = next((file for name in ("LICENSE", "LICENSE.txt", "LICENSE.md") if (file := home / name).is_file()), None)
    return ModelCard(
        format="gguf" if gguf is not None else files[0].suffix[1:] if files else "",
        quantization=_packed(config) if packed else _kind(kinds, model.hf),
        parameters=0 if packed else sum(kinds.values()),
        size=sum(stat.st_size for stat in stats),
        modified=max((stat.st_mtime for stat in stats), default=0.0),
        digest=digest, template=template, hf=model.hf,
        license="" if license is None else license.read_text("utf-8", "replace"),
    )  # fmt: skip


def _kind(kinds: Counter[str], hf: dict[str, Any]) -> str:
    """The type that most of the numbers have, by the files or else by config.json."""
    said = str(hf.get("dtype") or hf.get("torch_dtype") or "")
    return kinds.most_common(1)[0][0] if kinds else _SHORT.get(said, said)


def _packed(config: Any) -> str:
    bits = config.get("bits") or config.get("w_bit")
    method = str(config.get("quant_method") or "")
    return f"{method}-int{bits}" if isinstance(bits, int) else method


def _tensors(files: list[Path]) -> Iterator[tuple[str, int]]:
    """The type of each tensor, and how many numbers it has."""
    for file in files:
        if file.suffix == ".gguf":
            for tensor in read_gguf(file).tensors.values():
                yield tensor.type.name, math.prod(tensor.shape)
        elif file.suffix == ".safetensors":
            with file.open("rb") as data:
                size = int.from_bytes(data.read(8), "little")
                head = json.loads(data.read(size)) if size <= _MOST_HEAD else {}
            for name, entry in head.items():
                if name != "__metadata__":
                    yield entry["dtype"], math.prod(entry["shape"])
