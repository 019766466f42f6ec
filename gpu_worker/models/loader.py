"""From a model folder to a Decoder: safetensors streamed into fused parameters, or random weights from a config.

A checkpoint's tensors are read one at a time and copied to their rows of the decoder's parameters; a product is packed
for its device as soon as its last row is there. So memory peaks at one model and one parameter. Every tensor must
have a place and every parameter all its rows: what is missing or left over ends the load.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm  # type: ignore[import-untyped]

from ...proto.config import ConfigError
from ...proto.model_config import ModelConfig
from ..layers.linear import Linear
from .decoder import Decoder, Parameter, parameters
from .dtypes import resolve_dtype
from .families import find_family
from .spec import DecoderSpec, WeightNames

__all__ = ["load_model", "resolve_dtype"]

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_DUMMY_STD = 0.02
# Random values drawn for dummy weights, then repeated: a prime, so that no two rows of a matrix are the same.
_POOL = 4194319


@torch.inference_mode()
def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = False,
) -> Decoder:
    """The model of ``config`` on ``device`` in ``dtype``.

    ``load_format``: auto or safetensors read the folder; dummy makes random weights from ``seed``, no file needed.
    Raises ConfigError, one line that names the file and the remedy.
    """
    spec, names = find_family(config.hf)
    parts = _Parts(spec, dtype, device)
    if load_format == "dummy":
        _fill_dummy(parts, seed, progress)
    elif load_format in ("auto", "safetensors"):
        _fill_from_files(parts, names, Path(config.path), progress)
    else:
        raise ConfigError(f"Unknown load format: {load_format}. Must be one of ['auto', 'safetensors', 'dummy'].")
    return parts.decoder(config.max_model_len)


class _Parts:
    """The decoder's parameters while they fill up."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.parameters = {parameter.name: parameter for parameter in parameters(spec)}
        self._weights: dict[str, torch.Tensor] = {}
        self._products: dict[str, Linear] = {}
        self._open: dict[str, torch.Tensor] = {}
        self._rows_left = {name: set(range(len(p.rows))) for name, p in self.parameters.items()}

    def put(self, name: str, part: int | None, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` to part ``part`` of parameter ``name`` (None: all of it), cast to the model's dtype."""
        parameter = self.parameters[name]
        whole = self._open.get(name)
        if whole is None:
            whole = self._open[name] = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
        rows = whole
        if part is not None:
            start = sum(parameter.rows[:part])
            rows = whole[start : start + parameter.rows[part]]
        rows.copy_(tensor)
        self._rows_left[name] -= {part} if part is not None else self._rows_left[name]
        if not self._rows_left[name]:
            self.finish(parameter, self._open.pop(name))

    def finish(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        """Take ``tensor`` as the whole of ``parameter``, in the model's dtype, on its device."""
        self._rows_left[parameter.name].clear()
        if parameter.kind == "product":
            self._products[parameter.name.removesuffix(".weight")] = Linear(tensor)
        else:
            self._weights[parameter.name] = tensor

    def missing(self) -> list[tuple[str, int]]:
        """(parameter, part) still without rows, in the model's order."""
        return [(name, part) for name, left in self._rows_left.items() for part in sorted(left)]

    def decoder(self, max_model_len: int) -> Decoder:
        """The finished model."""
        for name, parameter in self.parameters.items():
            if parameter.kind == "bias":
                self._products[name.removesuffix(".bias")].bias = self._weights.pop(name)
        if self.spec.tied:
            self._products["lm_head"] = Linear(self._weights["embed.weight"])
        return Decoder(self.spec, self._weights, self._products, max_model_len)


# Checkpoint tensor -> (parameter, part or None for all of it)
_Places = dict[str, tuple[str, int | None]]


def _places(parts: _Parts, names: WeightNames) -> _Places:
    found: _Places = {}
    outer = {"embed": names.embed, "final_norm": names.final_norm, "lm_head": names.lm_head}
    for name, parameter in parts.parameters.items():
        *prefix, stem, suffix = name.split(".")
        if prefix:
            modules = names.layer[stem]
            base = names.layer_prefix.format(prefix[1])
        else:
            modules, base = (outer[stem],), ""
        for part, module in enumerate(modules):
            fused = len(modules) == 1
            if not fused and len(modules) != len(parameter.rows):
                raise ValueError(f"{names} names {len(modules)} modules for {name}, which has {len(parameter.rows)}")
            found[f"{base}{module}.{suffix}"] = (name, None if fused else part)
    return found


def _fill_from_files(parts: _Parts, names: WeightNames, folder: Path, progress: bool) -> None:
    places = _places(parts, names)
    skip = re.compile("|".join([*names.skip, *([re.escape(names.lm_head) + r"\.weight"] if parts.spec.tied else [])]))
    left_over: list[str] = []
    files = _files(folder)
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
        for file in files:
            for name, tensor in _tensors(file):
                bar.update(tensor.nbytes)
                if name in places:
                    _put_checked(parts, places[name], name, tensor, file)
                elif not skip.fullmatch(name):
                    left_over.append(name)
        bar.update(total - bar.n)  # what the files hold besides weights: their headers
    checkpoint = {place: name for name, place in places.items()}
    missing = [checkpoint.get((name, part)) or checkpoint[name, None] for name, part in parts.missing()]
    if missing:
        raise ConfigError(
            f"{folder}: the weights lack {_some(list(dict.fromkeys(missing)))}, which {parts.spec.architecture} with "
            "this config.json needs; download the folder again, or correct config.json."
        )
    if left_over:
        raise ConfigError(
            f"{folder}: the weights hold {_some(left_over)}, which {parts.spec.architecture} with this config.json "
            "has no place for; check that config.json belongs to these weights."
        )


def _put_checked(parts: _Parts, place: tuple[str, int | None], name: str, tensor: torch.Tensor, file: Path) -> None:
    parameter = parts.parameters[place[0]]
    rows = sum(parameter.rows) if place[1] is None else parameter.rows[place[1]]
    shape = (rows,) if parameter.columns is None else (rows, parameter.columns)
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"{file}: {name} has shape {tuple(tensor.shape)} where config.json makes it {shape}; "
            "check that config.json belongs to these weights."
        )
    if not tensor.is_floating_point():
        raise ConfigError(
            f"{file}: {name} is {str(tensor.dtype)[6:]}, a quantised weight, which is not supported; "
            "use the model's float weights."
        )
    parts.put(*place, tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index, else model.safetensors, else all but consolidated."""
    index = folder / _INDEX
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is not a safetensors index ({error}); download it again.") from error
        files = [folder / str(shard) for shard in shards]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ConfigError(f"{index} names {_some(absent)}, which the folder lacks; download the missing files.")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise ConfigError(
            f"{folder} holds no .safetensors file; download the weights, convert them "
            "(model.save_pretrained(folder) in transformers), or use --load-format dummy."
        )
    return files


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file in the order they lie in it."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.offset_keys() if hasattr(tensors, "offset_keys") else tensors.keys():
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{file} is cut short or no safetensors file ({first}); download it again.") from error


def _fill_dummy(parts: _Parts, seed: int, progress: bool) -> None:
    """Weights N(0, 0.02), norms around the identity. The same seed gives the same weights on the same device."""
    generator = torch.Generator(parts.device).manual_seed(seed)
    pool = torch.empty(_POOL, device=parts.device).normal_(0.0, _DUMMY_STD, generator=generator).to(parts.dtype)
    at = 0
    for parameter in tqdm(parts.parameters.values(), desc="Making random weights", disable=not progress):
        tensor = torch.empty(parameter.shape, dtype=parts.dtype, device=parts.device)
        flat = tensor.view(-1)
        done = 0
        while done < flat.numel():
            count = min(_POOL - at, flat.numel() - done)
            flat[done : done + count] = pool[at : at + count]
            done, at = done + count, (at + count) % _POOL
        if parameter.kind == "norm" and not parts.spec.norm_plus_one:
            tensor += 1
        parts.finish(parameter, tensor)
