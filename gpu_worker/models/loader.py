"""From a model folder to a Model: tensors streamed into fused parameters, or random weights from a config.

A checkpoint's tensors are read one at a time, of each only the rows this process holds, and copied to their place in
the decoder's parameters; a product is packed for its device as soon as its last row is there. So memory peaks at one
model and one parameter. Every tensor must have a place and every parameter all its rows: what is missing or left over
ends the load.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from ...proto.checkpoint.model_config import ModelConfig
from ...proto.checkpoint.pooler_config import PoolerConfig
from ...proto.config import ConfigError
from ..layers.linear import Linear
from ..parallel.parallel import Group
from ..spec import DecoderSpec, Layout, Shard, WeightNames
from .decoder import Decoder
from .dtypes import resolve_dtype
from .encoder import Encoder
from .fallback import load_fallback, uses_fallback
from .families import find_family
from .files import Entry, Tensors, check_load_format, some, trim, weight_files
from .model import Model
from .parameters import Parameter, parameters
from .pooled import find_pooled
from .weights import Weights

__all__ = ["load_model", "resolve_dtype"]

log = logging.getLogger(__name__)

_DUMMY_STD = 0.02
# Random values drawn for dummy weights, then repeated: a prime, so that no two rows of a matrix are the same.
_POOL = 4194319
# Reads of one tensor; where its rows lie more scattered, all between the first and the last are read.
_MOST_READS = 512


@torch.inference_mode()
def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = False,
    group: Group | None = None,
    pooler: PoolerConfig | None = None,
) -> Model:
    """The model of ``config`` on ``device`` in ``dtype``, or the part of it that ``group.shard`` says.

    ``load_format``: auto or safetensors read the folder, pt its pickled tensors; dummy makes random weights from
    ``seed``, no file needed. An architecture that the table does not know is left to ``fallback.py``. Raises
    ConfigError, one line that names the file and the remedy.
    """
    check_load_format(load_format)
    group = group or Group.alone()
    with _named(config):
        if pooler is None and uses_fallback(config):
            return load_fallback(config, dtype, device, load_format, seed, group)
        spec, names = _family(config, pooler)
        room = spec.positions - spec.position_offset
        if 0 < room < config.max_model_len:
            raise ConfigError(
                f"max_model_len={config.max_model_len} is more than the {room} positions that {spec.architecture} has "
                f"learned; use --max-model-len {room} at most."
            )
        parts = _Parts(spec, dtype, device, group.shard)
        if load_format == "dummy":
            _fill_dummy(parts, seed, progress)
        else:
            _fill_from_files(parts, names, Path(config.path), load_format, progress)
        if pooler is not None and pooler.whole:
            return Encoder(spec, parts.weights())
        return Decoder(spec, parts.weights(), config.max_model_len, group)


def spec_of(config: ModelConfig, pooler: PoolerConfig | None) -> DecoderSpec:
    """The spec of a model that is not transformers' own. Raises ConfigError as ``load_model`` does."""
    with _named(config):
        return _family(config, pooler)[0]


class _Malformed(Exception):
    """A value of config.json that no family's reader could take."""


def _family(config: ModelConfig, pooler: PoolerConfig | None) -> tuple[DecoderSpec, WeightNames]:
    try:
        found = find_family(config.hf) if pooler is None else find_pooled(config.hf, pooler)
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise _Malformed(f"{type(error).__name__}: {error}") from error
    if quantised := config.hf.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"config.json: quantization_config ({method}) is not supported; use the model's float weights, or, where "
            "they are what the folder has, --hf-overrides '{\"quantization_config\": null}'."
        )
    return found


@contextmanager
def _named(config: ModelConfig) -> Iterator[None]:
    """Put the folder before what is said of a config.json; families see only its values."""
    try:
        yield
    except _Malformed as error:
        raise ConfigError(
            f"{config.path}/config.json holds a value of another kind than {config.architecture} needs ({error}); "
            "correct it, or download it again."
        ) from error
    except ConfigError as error:
        text = str(error)
        if config.path in text:
            raise
        if not text.startswith("config.json: "):
            raise ConfigError(f"{config.path}: {text}") from error
        if "support" not in text:
            text = text.removesuffix(".") + "; correct it, or download it again."
        raise ConfigError(f"{config.path}/{text}") from error


class _Parts:
    """The parameters of one process while they fill up."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.parameters = {parameter.name: parameter for parameter in parameters(spec, shard)}
        self._tensors: dict[str, torch.Tensor] = {}
        self._linears: dict[str, Linear] = {}
        self._open: dict[str, torch.Tensor] = {}
        self._left = {
            name: {index for index, part in enumerate(p.parts) if len(part)} for name, p in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            if not self._left[name]:  # a rank without any of the few experts there are
                self.finish(parameter, torch.empty(parameter.shape, dtype=dtype, device=device))

    def rows(self, parameter: Parameter, index: int) -> torch.Tensor:
        """The place of part ``index`` in the parameter's tensor, made at the first call."""
        whole = self._open.get(parameter.name)
        if whole is None:
            dtype = torch.float32 if parameter.stem == "correction.bias" else self.dtype
            whole = self._open[parameter.name] = torch.empty(parameter.shape, dtype=dtype, device=self.device)
        start = sum(map(len, parameter.parts[:index]))
        return whole[start : start + len(parameter.parts[index])]

    def filled(self, parameter: Parameter, index: int) -> None:
        """Part ``index`` is complete."""
        left = self._left[parameter.name]
        left.discard(index)
        if not left and parameter.name in self._open:
            self.finish(parameter, self._open.pop(parameter.name))
            trim()

    def finish(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        """Take ``tensor`` as the whole of ``parameter``, in the model's dtype, on its device."""
        self._left[parameter.name].clear()
        if parameter.kind == "product":
            self._linears[parameter.name.removesuffix(".weight")] = Linear(tensor)
        else:
            self._tensors[parameter.name] = tensor

    def missing(self) -> list[tuple[str, int]]:
        """(parameter, part) still without rows, in the model's order."""
        return [(name, part) for name, left in self._left.items() for part in sorted(left)]

    def weights(self) -> Weights:
        """The finished parameters."""
        if self.spec.tied and "embed.weight" in self._tensors:
            self._linears["lm_head"] = Linear(self._tensors["embed.weight"])
        for name in list(self._tensors):
            if name.endswith(".bias") and (product := self._linears.get(name.removesuffix(".bias"))) is not None:
                product.bias = self._tensors.pop(name)
        return Weights(self.spec, self._tensors, self._linears, self.dtype, self.device)


@dataclass(frozen=True)
class _Place:
    """What one tensor of a checkpoint holds: ``parts`` of ``parameter`` (the whole model's), in order."""

    parameter: Parameter
    parts: tuple[int, ...]
    layout: Layout
    experts: int = 0  # pieces along the first axis, each with ``parts`` of its own expert; 0: no such axis


def _places(spec: DecoderSpec, names: WeightNames) -> dict[str, _Place]:
    """Checkpoint tensor -> what it holds, for all of the model, whatever this process has of it."""
    outer = {"embed": names.embed, "final_norm": names.final_norm, "lm_head": names.lm_head, **names.outer}
    found: dict[str, _Place] = {}
    for parameter in parameters(spec):
        module, suffix = parameter.stem.rsplit(".", 1)
        modules: tuple[str, ...]
        if parameter.layer < 0:
            modules, base = (outer.get(parameter.stem) or f"{outer[module]}.{suffix}",), ""
        else:
            base = names.layer_prefix.format(parameter.layer)
            modules = names.layer.get(parameter.stem) or tuple(f"{each}.{suffix}" for each in names.layer[module])
        layout = names.layouts.get(parameter.stem) or names.layouts.get(module) or Layout()
        for name, place in _places_of(parameter, modules, layout, spec):
            found[base + name] = place
    return found


def _places_of(
    parameter: Parameter, modules: tuple[str, ...], layout: Layout, spec: DecoderSpec
) -> Iterator[tuple[str, _Place]]:
    count = len(parameter.parts)
    experts = spec.moe.experts if spec.moe is not None and parameter.stem.startswith("experts_") else count
    each = count // experts  # parts of one expert, or of one head
    if layout.per_expert or "{e}" in modules[0]:
        for place, module in enumerate(modules):
            own = tuple(range(each)) if len(modules) == 1 else (place,)
            if layout.per_expert:
                yield module, _Place(parameter, own, layout, experts)
                continue
            for expert in range(experts):
                mine = tuple(expert * each + part for part in own)
                yield module.replace("{e}", str(expert)), _Place(parameter, mine, layout)
    elif len(modules) == 1:
        yield modules[0], _Place(parameter, tuple(range(count)), layout)
    elif len(modules) == count:
        for index, module in enumerate(modules):
            yield module, _Place(parameter, (index,), layout)
    else:
        raise ValueError(f"{len(modules)} modules are named for {parameter.name}, which has {count} parts")


def _fill_from_files(parts: _Parts, names: WeightNames, folder: Path, load_format: str, progress: bool) -> None:
    places = _places(parts.spec, names)
    skip = re.compile("|".join([*names.skip, *([re.escape(names.lm_head) + r"\.weight"] if parts.spec.tied else [])]))
    left_over: list[str] = []
    read: dict[str, Path] = {}
    files = weight_files(folder, load_format)
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
        for file in files:
            with Tensors.open(file) as tensors:
                for entry in tensors:
                    name = entry.name
                    for old, new in names.renamed:
                        name = name.replace(old, new)
                    place = name if name in places else names.prefix + name
                    if place in places:
                        if place in read:
                            raise _twice(entry, read[place])
                        read[place] = file
                        _put(parts, places[place], entry)
                    elif not skip.fullmatch(entry.name) and not skip.fullmatch(name):
                        left_over.append(entry.name)
                    bar.update(entry.nbytes)
        bar.update(total - bar.n)  # what the files hold besides weights: their headers
    _check_complete(parts, places, left_over, folder)


def _twice(entry: Entry, first: Path) -> ConfigError:
    where = "twice under two names" if entry.file == first else f"in {first.name} too"
    return ConfigError(
        f"{entry.file}: {entry.name} is {where}, and only one of them can be meant; remove the file or the copy that "
        "does not belong to the model, or download the folder again."
    )


def _check_complete(parts: _Parts, places: dict[str, _Place], left_over: list[str], folder: Path) -> None:
    checkpoint = {(place.parameter.name, part): name for name, place in places.items() for part in place.parts}
    missing = [checkpoint.get(each) or checkpoint[each[0], 0] for each in parts.missing()]
    if missing == ["score.weight"] and not parts.spec.architecture.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{folder}: the weights lack score.weight, which makes classes: {parts.spec.architecture} cannot classify; "
            "use a model that ends in ForSequenceClassification, or --convert embed."
        )
    if missing:
        raise ConfigError(
            f"{folder}: the weights lack {some(list(dict.fromkeys(missing)))}, which {parts.spec.architecture} with "
            "this config.json needs; download the folder again, or correct config.json."
        )
    if left_over:
        raise ConfigError(
            f"{folder}: the weights hold {some(left_over)}, which {parts.spec.architecture} with this config.json "
            "has no place for; check that config.json belongs to these weights."
        )


def _put(parts: _Parts, place: _Place, entry: Entry) -> None:
    """Read what this process holds of ``entry`` into its parameter."""
    if not place.experts:
        _check_shape(place, entry)
    local = parts.parameters.get(place.parameter.name)
    if local is None:
        return
    if place.experts:
        _put_experts(parts, place, local, entry)
        return
    base = 0
    for index in place.parts:
        part = local.parts[index]
        if len(part):
            order = place.layout.order
            rows = np.arange(base + part.start, base + part.stop)
            rows = rows if order is None else order(parts.spec, local.layer)[rows]
            _read(parts.rows(local, index), rows, local, place.layout, entry)
            parts.filled(local, index)
        base += part.total


def _check_shape(place: _Place, entry: Entry) -> None:
    parameter = place.parameter
    rows = sum(parameter.parts[index].total for index in place.parts)
    shape = (rows,) if parameter.columns is None else (rows, parameter.columns.total)
    shape = shape[::-1] if place.layout.transposed else shape
    if place.layout.padded and len(entry.shape) == len(shape) and entry.shape[0] > rows:
        shape = (entry.shape[0], *shape[1:])
    if entry.shape != shape and (len(shape) == 1 or (1, *entry.shape) != shape):
        raise _wrong_shape(entry, entry.shape, shape)


def _wrong_shape(entry: Entry, found: tuple[int, ...], wanted: tuple[int, ...]) -> ConfigError:
    return ConfigError(
        f"{entry.file}: {entry.name} has shape {found} where config.json makes it {wanted}; "
        "check that config.json belongs to these weights."
    )


def _read(into: torch.Tensor, rows: np.ndarray, parameter: Parameter, layout: Layout, entry: Entry) -> None:
    """Copy ``rows`` of the tensor, and the parameter's columns of them."""
    columns = None if parameter.columns is None else slice(parameter.columns.start, parameter.columns.stop)
    if len(entry.shape) == 1 and columns is not None:  # one head's weights, a row of ours
        into.copy_(entry.read(columns))
        return
    if layout.transposed and columns is not None:
        first, last = int(rows.min()), int(rows.max()) + 1
        found = entry.read(columns, slice(first, last)).t()
        into.copy_(found if len(rows) == last - first and (np.diff(rows) == 1).all() else found[rows - first])
        return
    if layout.convert is not None:
        into.copy_(layout.convert(entry.read(slice(int(rows[0]), int(rows[-1]) + 1), columns)))
        return
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)  # each run of neighbouring rows is one read
    if len(starts) > _MOST_READS:
        first = int(rows.min())
        into.copy_(entry.read(slice(first, int(rows.max()) + 1), columns)[rows - first])
        return
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        entry.copy_to(into[start:stop], slice(int(rows[start]), int(rows[stop - 1]) + 1), columns)


def _put_experts(parts: _Parts, place: _Place, local: Parameter, entry: Entry) -> None:
    """A tensor of all experts: each one's piece is read, converted, and cut into the expert's parts."""
    each = len(local.parts) // place.experts
    size, odd = divmod(entry.shape[0] if entry.shape else 0, place.experts)
    if odd or not size:
        raise _wrong_shape(entry, entry.shape, (place.experts, *entry.shape[1:]))
    for expert in range(place.experts):
        indices = [expert * each + part for part in place.parts]
        if not len(local.parts[indices[0]]):
            continue
        piece = entry.read(slice(expert * size, (expert + 1) * size))
        piece = piece[0] if size == 1 else piece
        piece = piece if place.layout.convert is None else place.layout.convert(piece)
        rows = sum(local.parts[index].total for index in indices)
        shape = (rows,) if local.columns is None else (rows, local.columns.total)
        if tuple(piece.shape) != shape:
            raise _wrong_shape(entry, tuple(piece.shape), shape)
        for index, found in zip(indices, piece.split([local.parts[i].total for i in indices]), strict=True):
            parts.rows(local, index).copy_(found)
            parts.filled(local, index)


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
