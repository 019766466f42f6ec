"""Whose keys and values a block has: names for all that its bytes depend on beside its hash.

A block's hash is of tokens alone. So blocks on disk lie in a folder that ``digest_of`` names, and workers exchange
pages only where ``identity_of`` is the same.
"""

from __future__ import annotations

import logging
import os
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.config import EngineArgs
from ...proto.version import __version__
from .adapter_reader import adapter_dtype
from .fallback import TransformersModel
from .fallback_probe import CHANGING

if TYPE_CHECKING:
    from .model import Model

log = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Parts of each weight file that are read to tell it from others."""


def digest_of(args: EngineArgs, config: ModelConfig, told: str, shard: str, model: Model) -> str:
    """What names a folder of files: 32 hex digits of all that the bytes of a block depend on beside its hash.

    That is the model's files and what the flags make of them, the layout and its part (``told``, ``shard``), and what
    computes it: another processor, or another version of quire or torch, may round otherwise.
    """
    lora = adapter_dtype(args.lora_dtype, model.dtype) if args.enable_lora else None
    return _hex([
        f"quire {__version__} torch {torch.__version__} {_processor(model.device)}", told, shard,
        f"length {config.max_model_len} {args.batch_invariant} {args.attention_backend} adapters {lora}",
        f"transformers {version('transformers')}" if isinstance(model, TransformersModel) else "",
        *_model(args, config, model, times=True),
    ])  # fmt: skip


def identity_of(args: EngineArgs, config: ModelConfig, model: Model) -> str:
    """32 hex digits of the model alone, and of what the flags make of it. The same on another processor, with another
    part of the layers, and where the files are copies: workers with equal ones go on with each other's blocks. Where
    the files are gone nobody knows, so it is equal to none."""
    turns = any(kind in repr(config.hf) for kind in CHANGING)
    try:
        return _hex([str(config.max_model_len if turns else 0), *_model(args, config, model, times=False)])
    except OSError as error:
        log.warning("blocks of this worker's sequences are not moved: its model's files cannot be read (%s)", error)
        return os.urandom(16).hex()


def _hex(parts: list[str]) -> str:
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(blake2b(part.encode(), digest_size=16).digest())
    return made.hexdigest()


def _model(args: EngineArgs, config: ModelConfig, model: Model, times: bool) -> list[str]:
    return [
        f"{model.dtype} {model.whole!r} {args.quantization} {args.quantize_lm_head}",
        f"{args.load_format} {args.seed if args.load_format == 'dummy' else 0} {args.model_impl}",
        repr(sorted(config.hf.items(), key=str)),
        *_files(Path(config.path), args.load_format == "dummy", times),
    ]


def _processor(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    from ..kernels.cpu.library import library

    found = library()
    return f"cpu {found.name if found is not None else torch.backends.cpu.get_cpu_capability()}"


def _files(folder: Path, dummy: bool, times: bool) -> list[str]:
    """Each file of a checkpoint: its name, size, time if ``times`` are asked for, and what stands at places all over
    it."""
    told = []
    for path in [folder] if folder.is_file() else sorted(folder.iterdir()):
        if dummy or path.suffix not in (".safetensors", ".bin", ".pt", ".gguf") or not path.is_file():
            continue
        at, made = path.stat(), blake2b(digest_size=16)
        with open(path, "rb") as file:
            for start in np.linspace(0, max(0, at.st_size - SAMPLE_BYTES), SAMPLES, dtype=np.int64).tolist():
                file.seek(start)
                made.update(file.read(SAMPLE_BYTES))
        told.append(f"{os.path.basename(path)} {at.st_size} {at.st_mtime_ns if times else ''} {made.hexdigest()}")
    return told
