"""Small quantized checkpoints with one thing wrong, and what must come of loading them.

A damaged checkpoint either loads, and its logits are numbers of the right shape, or is refused by a ConfigError of one
line that names the file. Anything else is an error of quire's.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantized
import torch
from safetensors.torch import load_file, save_file
from thread_ranks import PROMPT, hidden, load

from quire.proto.checkpoint.gguf import TYPES, read_gguf
from quire.proto.config import ConfigError

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
CHECKPOINTS = {
    "gptq": ("gptq-4-act-order", "llama"), "auto-round": ("gptq-4-act-order", "llama"), "awq": ("awq", "llama"),
    "fp8": ("fp8", "llama"),
    "fp8-blocks": ("fp8-blocks", "llama"), "w8a8": ("compressed-tensors-w8a8", "llama"),
    "w4a16": ("compressed-tensors-w4a16", "llama"), "nf4": ("bitsandbytes-nf4-double", "llama"),
    "int8": ("bitsandbytes-int8", "llama"), "squeezellm": ("squeezellm-4-sparse", "llama"),
    "mxfp4": ("mxfp4", "gpt-oss"), "gguf": ("gguf-q4_k_m", "llama"), "experts": ("gptq-4-act-order", "mixtral"),
}  # fmt: skip
"""Name -> a row of ``quantized``, and the model."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 1 << 20, 1 << 40, 10**30, 3.0, 4.5, -0.5, float("nan"), float("inf"), "", "4",
    "\u00b2", "[", "re:(", "group", "int", "float", "a\nb", [], [None], [[]], ["", 5], [1 << 70, 128], [0, 0], {},
    {"a": None}, {"a": {"b": [None]}}, {"": {"bits": "x"}},
)  # fmt: skip
"""What a field of a config may hold instead."""
MORE: dict[str, tuple[str, ...]] = {
    "gptq": ("dynamic", "modules_in_block_to_quantize", "is_marlin_format", "lm_head", "format"),
    "auto-round": ("packing_format", "backend", "data_type", "act_bits", "extra_config"),
    "awq": ("modules_to_not_convert", "checkpoint_format", "w_bit"),
    "fp8": ("ignored_layers", "modules_to_not_convert", "weight_block_size", "fmt", "scale_fmt"),
    "w4a16": ("sparsity_config", "transform_config"), "nf4": ("bnb_4bit_blocksize", "llm_int8_skip_modules"),
}  # fmt: skip
"""Fields that the writers leave out."""
_DEEP: Any = []
for _ in range(40):
    _DEEP = [_DEEP]


@dataclass(frozen=True)
class Checkpoint:
    """``weights``: the file of its tensors. ``names``: of its quantized weights' tensors."""

    name: str
    folder: Path
    weights: Path

    @property
    def path(self) -> Path:
        """What a user names."""
        return self.weights if self.weights.suffix == ".gguf" else self.folder


def checkpoint(name: str, folder: Path) -> Checkpoint:
    """Write one of CHECKPOINTS below ``folder``."""
    row, model = CHECKPOINTS[name]
    source = folder / f"{name}-plain"
    prefix, values = quantized.MODELS[model]
    quantized.tiny_models.save(
        prefix, source, quantized.SEED, **{**quantized.tiny_models.BASE, **values, **SIZES}
    )  # fmt: skip
    out = folder / name
    quantized.writers()[row].write(source, out)
    shutil.rmtree(source)
    (out / "values").unlink(missing_ok=True)
    if name == "auto-round":
        config = {"bits": 4, "group_size": 32, "sym": False, "desc_act": True}
        quantized.configure(out, quantization_config={"quant_method": "auto-round", **config})
    (weights,) = [file for kind in ("safetensors", "pt", "gguf") for file in out.glob(f"*.{kind}")]
    return Checkpoint(name, out, weights)


class Trouble(AssertionError):
    """What came of a damaged checkpoint is neither logits nor one line."""


def outcome(made: Checkpoint, what: str, hints: tuple[str, ...] = ()) -> str:
    """Load ``made``, which ``what`` is wrong with: the line that refuses it, or "" where its logits are numbers.

    Raises Trouble where it is neither, where the line has none of ``hints``, or where it took seconds.
    """
    began = time.process_time()
    try:
        model = load(made.path)
        found = hidden(model)
        logits = model.logits(found[-1:])
    except ConfigError as error:
        said = str(error)
        if "\n" in said or len(said) > 1500 or str(made.folder) not in said:
            raise Trouble(f"{what}: not one line that names the file: {said!r}") from error
        if hints and not any(hint in said for hint in hints):
            raise Trouble(f"{what}: names none of {hints}: {said!r}") from error
        return said
    except Exception as error:
        raise Trouble(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        if time.process_time() - began > 5.0:
            raise Trouble(f"{what}: took {time.process_time() - began:.1f} s of the processor")
    if found.shape[0] != len(PROMPT) or logits.shape != (1, model.whole.vocab_size) or not logits.isfinite().all():
        raise Trouble(f"{what}: hidden states {tuple(found.shape)}, logits {tuple(logits.shape)}, "
                      f"{int((~logits.isfinite()).sum())} of them no numbers")  # fmt: skip
    return ""


def _fields(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all fields within ``value``, objects themselves included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from _fields(each, (*path, key))


def config_damage(made: Checkpoint) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each field of the quantization_config (and it as a whole) with each of VALUES, and without."""
    file = made.folder / "config.json"
    whole = json.loads(file.read_text())

    def changed(path: tuple[str | int, ...], *value: Any) -> Callable[[], None]:
        def change() -> None:
            config = copy.deepcopy(whole)
            at = config
            for key in path[:-1]:
                at = at[key]
            if value:
                at[path[-1]] = value[0]
            else:
                at.pop(path[-1], None) if isinstance(at, dict) else at.pop(path[-1])
            file.write_text(json.dumps(config))

        return change

    top = ("quantization_config",)
    places = [top, *_fields(whole[top[0]], top), *((*top, key) for key in MORE.get(made.name, ()))]
    for path in places:
        called = ".".join(map(str, path))
        yield f"{called} left out", changed(path)
        for value in (*VALUES, _DEEP):
            yield f"{called} = {value!r:.60}", changed(path, value)


def _other_shapes(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "flat", tensor.flatten()
    yield "a dim more", tensor[None]
    yield "empty", tensor.flatten()[:0]
    yield "one number", tensor.flatten()[:1].reshape(())
    yield "doubled", torch.cat([tensor, tensor]) if tensor.dim() else torch.stack([tensor, tensor])
    if tensor.dim():
        yield "a row less", tensor[:-1]
    if tensor.dim() > 1:
        yield "transposed", tensor.transpose(-1, -2)
        yield "a column less", tensor[..., :-1]


_TYPES = (torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
          torch.float8_e4m3fn, torch.float64)  # fmt: skip


def _other_values(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.dtype == torch.bool or not tensor.numel():
        return
    values = [float("nan"), float("inf"), -1.0, 0.0] if tensor.is_floating_point() else [-1, 0, 1, 127, 255, 2**31 - 1]
    for value in values:
        limits = None if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        if limits and not limits.min <= value <= limits.max:
            continue
        for where, at in (("one", slice(0, 1)), ("all", slice(None))):
            made = (tensor.float() if tensor.is_floating_point() else tensor).clone().flatten()
            made[at] = value
            yield f"{where} {value}", made.view(tensor.shape).to(tensor.dtype)


def tensor_damage(made: Checkpoint) -> Iterator[tuple[str, tuple[str, ...], Callable[[], None]]]:
    """Each tensor of a layer missing, there twice, of another shape or dtype, or with other values."""
    pickled = made.weights.suffix == ".pt"
    tensors = torch.load(made.weights, weights_only=True) if pickled else load_file(made.weights)
    tensors = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in tensors.items()}

    def written(file: Path, name: str, *tensor: torch.Tensor) -> Callable[[], None]:
        def write() -> None:
            found = {key: value for key, value in tensors.items() if key != name} if file == made.weights else {}
            if tensor:
                found[name] = tensor[0].contiguous()
            torch.save(found, file) if pickled else save_file(found, file)

        return write

    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or "layers.0." not in name or "norm" in name:
            continue
        stem = name.rsplit(".", 1)[0].removesuffix(".weight.quant_state").removesuffix(".weight")
        hints = (stem, name, "g_idx orders inputs otherwise")
        yield f"{name} missing", hints, written(made.weights, name)
        yield f"{name} twice", hints, written(made.folder / f"second{made.weights.suffix}", name, tensor)
        for shape, other in _other_shapes(tensor):
            yield f"{name} {shape}", hints, written(made.weights, name, other)
        for dtype in _TYPES:
            if dtype != tensor.dtype:
                yield f"{name} as {dtype}", hints, written(made.weights, name, tensor.to(dtype))
        if tensor.dtype != torch.float32 or not name.endswith((".weight", "sinks", "bias")):
            for which, other in _other_values(tensor):
                yield f"{name} with {which}", hints, written(made.weights, name, other)


def file_damage(made: Checkpoint, count: int, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The file cut off, and with bytes of its head changed."""
    whole, rng = made.weights.read_bytes(), random.Random(seed)
    head = len(whole) if made.weights.suffix == ".pt" else 8 + int.from_bytes(whole[:8], "little")

    def write(data: bytes) -> Callable[[], None]:
        return lambda: made.weights.write_bytes(data) and None

    for at in (0, 1, 7, 8, 9, head - 1, head, head + 1, len(whole) // 2, len(whole) - 1):
        yield f"cut off at {at} of {len(whole)}", write(whole[:at])
    yield "a byte more", write(whole + b"\0")
    for _ in range(count):
        data, at = bytearray(whole), rng.randrange(head)
        data[at] = rng.randrange(256)
        yield f"byte {at} is {data[at]}", write(bytes(data))


def gguf_damage(made: Checkpoint, count: int, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Types, dims and places of tensors changed in the head, and the data cut off.

    Any bytes are numbers of MXFP4, however large, and floats are not looked at one by one.
    """
    whole, rng = made.weights.read_bytes(), random.Random(seed)
    tensors = list(read_gguf(made.weights).tensors.values())

    def write(data: bytes) -> Callable[[], None]:
        return lambda: made.weights.write_bytes(data) and None

    for tensor in tensors:
        yield f"cut off within {tensor.name}", write(whole[: tensor.start + tensor.nbytes // 2])
        name = tensor.name.encode()
        at = whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)  # the number of dims
        dims = len(tensor.shape)
        kind = at + 4 + 8 * dims
        for number, type in TYPES.items():
            if type != tensor.type and type.name != "MXFP4" and not tensor.name.endswith("norm.weight"):
                data = bytearray(whole)
                data[kind : kind + 4] = struct.pack("<I", number)
                yield f"{tensor.name} is {type.name}", write(bytes(data))
        for dim, size in itertools.product(range(dims), (0, 1, 2, 31, 32, 64, 256, 1 << 20, 1 << 40, (1 << 64) - 1)):
            data = bytearray(whole)
            data[at + 4 + 8 * dim : at + 12 + 8 * dim] = struct.pack("<Q", size)
            yield f"{tensor.name} dim {dim} is {size}", write(bytes(data))
        for number in (0, 1, 3, 4, 5, 1 << 31):
            data = bytearray(whole)
            data[at : at + 4] = struct.pack("<I", number)
            yield f"{tensor.name} has {number} dims", write(bytes(data))
        for start in (0, 32, 33, 1 << 20, 1 << 63):
            data = bytearray(whole)
            data[kind + 4 : kind + 12] = struct.pack("<Q", start)
            yield f"{tensor.name} begins at {start}", write(bytes(data))
    for _ in range(count):
        data, at = bytearray(whole), rng.randrange(tensors[0].start)
        data[at] = rng.randrange(256)
        yield f"byte {at} is {data[at]}", write(bytes(data))


def resident() -> int:
    """The most memory that this process had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
