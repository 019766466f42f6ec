"""``python -m quire.gpu_worker.inspect_device [FOLDER]``: what a worker would find here, as one JSON object.

`quire doctor` runs it as a process of its own, because it needs torch. Nothing is allocated on a device. With a model's
FOLDER it tells the dtypes that a worker would choose, too.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from ..proto.checkpoint.model_config import load_model_config
from ..proto.config import ConfigError, EngineArgs


def inspect(folder: str | None) -> dict[str, Any]:
    """``gpus``, ``driver`` and ``cpu``; with a folder ``model``. What cannot be had has an "error" in its place.
    A GPU's ``flash`` is why FlashAttention cannot be asked for; empty where it can."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "built_for": torch.version.cuda or torch.version.hip or "cpu"}
    found["gpus"] = [_gpu(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    found["cpu"] = _cpu()
    if folder is not None:
        found["model"] = _model(folder)
    return found


def _gpu(number: int) -> dict[str, Any]:
    import torch

    from .kernels.attention_flash import choose_flash
    from .kernels.card import card_of, check_card

    device = torch.device("cuda", number)
    card, (free, total) = card_of(device), torch.cuda.mem_get_info(device)
    told: dict[str, Any] = {"name": card.name, "arch": card.arch, "free": free, "total": total}
    try:
        check_card(card)
    except ConfigError as error:
        return told | {"error": str(error)}
    try:
        choose_flash("flash", card)
        return told | {"flash": ""}
    except ConfigError as error:
        return told | {"flash": str(error)}


def _cpu() -> dict[str, Any]:
    from .kernels.cpu.library import library
    from .layers.formats.dense import cpu_backend, cpu_flags
    from .memory import memory_limits

    free, source = min(memory_limits())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    told: dict[str, Any] = {"free": free, "source": source, "sets": [name for name in wanted if name in cpu_flags()[1]]}
    with _Said() as said:
        try:
            kernels = library()
            told |= {"kernels": kernels.name if kernels else None, "products": cpu_backend()}
        except ConfigError as error:
            told["error"] = str(error)
    return told | {"why": "; ".join(said.lines)}


def _model(folder: str) -> dict[str, Any]:
    from .device import choose_device
    from .models.cache_dtype import resolve_cache_dtype
    from .models.dtypes import resolve_dtype, stored_dtype
    from .models.fallback import uses_fallback

    try:
        config, device = load_model_config(folder), choose_device("auto")
        with _Said() as said:
            dtype = resolve_dtype("auto", config, device)
            cache = resolve_cache_dtype(EngineArgs(), config, dtype, device)
        return {
            "device": device.type, "dtype": str(dtype)[6:], "stored": str(stored_dtype(config))[6:],
            "cache": str(cache)[6:], "runs": "transformers" if uses_fallback(config) else "quire",
            "why": "; ".join(said.lines),
        }  # fmt: skip
    except ConfigError as error:
        return {"error": str(error)}


class _Said(logging.Handler):
    """What our modules log meanwhile, in ``lines``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> _Said:
        logger = logging.getLogger("quire")
        self._before = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return self

    def __exit__(self, *error: object) -> None:
        logger = logging.getLogger("quire")
        logger.removeHandler(self)
        logger.setLevel(self._before[0])
        logger.propagate = self._before[1]


if __name__ == "__main__":
    print(json.dumps(inspect(sys.argv[1] if len(sys.argv) > 1 else None)))
