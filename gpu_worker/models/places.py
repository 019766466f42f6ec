"""Which tensor of a checkpoint holds what, and reading of each what one process holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ...proto.config import ConfigError
from ..layers.formats.base import Format, Part, Sources, TensorError
from ..layers.formats.registry import Found, Quantization
from ..spec import DecoderSpec, Layout, WeightNames
from .files import Entry
from .parameters import Parameter, parameters
from .parts import Parts, in_tensors

# Reads of one tensor; where its rows lie more scattered, all between the first and the last are read.
_MOST_READS = 512


@dataclass(frozen=True)
class Place:
    """What one tensor of a checkpoint holds: ``parts`` of ``parameter`` (the whole model's), in order."""

    parameter: Parameter
    parts: tuple[int, ...]
    layout: Layout
    experts: int = 0  # pieces along the first axis, each with ``parts`` of its own expert; 0: no such axis


@dataclass(frozen=True)
class Gathering:
    """Tensors of ``module`` that are read whole, until the format can make of them what its ``places`` take.

    ``waiting``: which of the sources are still to be read. ``shape``: (rows, columns) of the module.
    """

    module: str
    sources: Sources
    shape: tuple[int, int]
    places: dict[str, Place]
    waiting: set[str]
    found: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, parts: Parts, name: str, entry: Entry) -> None:
        """Read the source ``name``; the last one fills the places. Raises ConfigError."""
        self.waiting.discard(name)
        if any(self._held(parts, place) for place in self.places.values()):
            self.found[name] = entry.read()
            if not self.waiting:
                self.fill(parts, entry.file)

    @staticmethod
    def _held(parts: Parts, place: Place) -> bool:
        local = parts.parameters.get(place.parameter.name)
        return local is not None and any(len(local.parts[index]) for index in place.parts)

    def fill(self, parts: Parts, file: Path) -> None:
        """Make of what was found what the places take. Raises ConfigError, which begins with ``file``."""
        made = dict(self.sources.make(self.found, self.shape, f"{file}: {self.module}"))
        self.found.clear()
        for name, place in self.places.items():
            tensor = made.pop(name)
            entry = Entry(file, f"{self.module}.{name}", tuple(tensor.shape), tensor.dtype, _rows_of(tensor))
            if self._held(parts, place):
                put(parts, place, entry.name, entry, tensor if tensor.is_sparse else None)


def _rows_of(tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: tensor[start:stop] if tensor.dim() else tensor


def formats_of(
    spec: DecoderSpec, names: WeightNames, found: Quantization, present: Found | None = None
) -> dict[str, Format]:
    """The formats of the weights that are not plain, by parameter. ``present``: the tensors that the files hold, where
    that is known. Raises ConfigError where fused modules differ.
    """
    formats: dict[str, Format] = {}

    def format_of(module: str, columns: int) -> Format | None:
        if present is not None and found.marks and not any(module + mark in present for mark in found.marks):
            return None
        said = found.format_of(module)
        return said if present is None or not found.fit else found.fit(said, module, columns, present)

    for parameter in parameters(spec):
        if present is None and parameter.name.endswith(found.floats):
            continue
        if parameter.kind in ("linear", "experts") or parameter.name == "embed.weight":
            modules = [
                module.replace("{e}", str(expert))
                for module in modules_of(parameter, names)[0] for expert in range(parameter.experts or 1)
            ]  # fmt: skip
            columns, each = parameter.columns.total if parameter.columns is not None else 1, parameter.experts or 1
            found_each = [format_of(module, columns) for module in modules]
            apart = [found_each[at : at + each] for at in range(0, len(modules), each)]
            alike = all(format == apart[0][0] for own in apart for format in own)
            if not alike and (found.fuse is None or any(format != own[0] for own in apart for format in own)):
                raise ConfigError(
                    f"config.json: Detected some but not all shards of {', '.join(modules)} are quantized. All shards "
                    "of fused layers to have the same precision."
                )
            first = apart[0][0] if alike or found.fuse is None else found.fuse([own[0] for own in apart])
            if first is not None:
                formats[parameter.name] = first
    return formats


def places(parts: Parts, names: WeightNames, present: Collection[str] = ()) -> dict[str, Place | Gathering]:
    """Checkpoint tensor -> what it holds, for all of the model, whatever this process has of it. ``present``: the
    tensors that the files hold, for formats with sources.
    """
    found: dict[str, Place | Gathering] = {}
    for parameter in parameters(parts.spec):
        modules, whole = modules_of(parameter, names)
        module, suffix = parameter.stem.rsplit(".", 1)
        layout = names.layouts.get(parameter.stem) or names.layouts.get(module) or Layout()
        for each in in_tensors(parameter, parts.formats, parts.dtype, parts.device):
            tail = f".{suffix}" if each.stored is None else f".{each.stored.name}"
            if whole:  # "gate_up_proj" itself, "gate_up_proj_scale", "gate_up_proj_blocks"
                tail = tail.removeprefix(f".{suffix}").replace(".", "_")
            own = _layout_of(each, layout) if parameter.name in parts.formats else layout
            for name, place in places_of(each, tuple(module + tail for module in modules), own):
                if each.stored is not None and each.stored.part not in (None, place.parts[0] % _parts_of_one(each)):
                    continue
                if each.stored is None or each.stored.sources is None:
                    found[name] = place
                else:
                    _gather(found, parameter, name.removesuffix(tail), place, present)
    return found


def _parts_of_one(parameter: Parameter) -> int:
    """Parts of the weight, or of one expert's."""
    return len(parameter.parts) // max(1, parameter.experts)


def _gather(
    found: dict[str, Place | Gathering], parameter: Parameter, module: str, place: Place, present: Collection[str]
) -> None:
    """Add ``place`` to the gathering of its module, under the names of its sources."""
    stored = place.parameter.stored
    assert stored is not None
    assert stored.sources is not None
    if place.experts:
        raise ConfigError(f"{module}: one tensor of all experts has no place in this format.")
    first = stored.sources.names[0]
    gathering = found.get(f"{module}.{first}")
    if not isinstance(gathering, Gathering):
        waiting = {name for name in stored.sources.names if f"{module}.{name}" in present}
        columns = 1 if parameter.columns is None else parameter.columns.total
        shape = (parameter.rows_of(place.parts), columns)
        gathering = Gathering(module, stored.sources, shape, {}, waiting)
        found |= {f"{module}.{name}": gathering for name in (first, *waiting)}
    gathering.places[stored.name] = place


def modules_of(parameter: Parameter, names: WeightNames) -> tuple[tuple[str, ...], bool]:
    """The checkpoint's modules whose rows ``parameter`` stacks, and whether these are the names of tensors already."""
    module = parameter.stem.rsplit(".", 1)[0]
    if parameter.layer < 0:
        outer = {"embed": names.embed, "final_norm": names.final_norm, "lm_head": names.lm_head, **names.outer}
        whole = parameter.stem in outer
        return (outer[parameter.stem if whole else module],), whole
    base, whole = names.layer_prefix.format(parameter.layer), parameter.stem in names.layer
    return tuple(base + each for each in names.layer[parameter.stem if whole else module]), whole


def _layout_of(parameter: Parameter, layout: Layout) -> Layout:
    """The layout of one tensor of a quantized weight: its format's, in the family's order of rows."""
    stored, family = parameter.stored, layout.order
    assert stored is not None  # it is in a format
    if layout.convert is not None and stored.convert is None:
        raise ConfigError(f"{parameter.name}: this family's float weights are converted, and quantized ones cannot be.")

    def order(spec: DecoderSpec, layer: int) -> np.ndarray:
        assert family is not None
        return stored.rows.order(family(spec, layer), parameter.name)

    ordered = family is not None and not parameter.repeated
    return replace(layout, transposed=stored.transposed, convert=stored.convert, order=order if ordered else None)


def places_of(parameter: Parameter, modules: tuple[str, ...], layout: Layout) -> Iterator[tuple[str, Place]]:
    count = len(parameter.parts)
    experts = parameter.experts or count
    each = count // experts  # parts of one expert, or of one head
    if layout.per_expert or "{e}" in modules[0]:
        for place, module in enumerate(modules):
            own = tuple(range(each)) if len(modules) == 1 else (place,)
            if layout.per_expert:
                yield module, Place(parameter, own, layout, experts)
                continue
            for expert in range(experts):
                mine = tuple(expert * each + part for part in own)
                yield module.replace("{e}", str(expert)), Place(parameter, mine, layout)
    elif len(modules) == 1:
        yield modules[0], Place(parameter, tuple(range(count)), layout)
    elif len(modules) == count:
        for index, module in enumerate(modules):
            yield module, Place(parameter, (index,), layout)
    else:
        raise ValueError(f"{len(modules)} modules are named for {parameter.name}, which has {count} parts")


def put(parts: Parts, place: Place | Gathering, name: str, entry: Entry, sparse: torch.Tensor | None = None) -> None:
    """Read what this process holds of ``entry``, which is ``name`` among the places, into its parameter, or take all of
    it as ``sparse``. Raises ConfigError, which names the tensor, or TensorError.
    """
    if isinstance(place, Gathering):
        place.take(parts, name.removeprefix(place.module + "."), entry)
        return
    try:
        if sparse is None:
            _put(parts, place, entry)
        else:
            _put_sparse(parts, place, sparse)
    except TensorError:
        raise
    except ConfigError as error:
        if str(entry.file) in str(error):
            raise
        # What a format finds in the tensors of a weight, of which this was the last.
        stored = place.parameter.stored
        name = entry.name if stored is None else re.sub(rf"[._]{re.escape(stored.name)}$", "", entry.name)
        raise ConfigError(f"{entry.file}: {name}: {error}") from error


def _put_sparse(parts: Parts, place: Place, tensor: torch.Tensor) -> None:
    """``put`` of a sparse tensor, of all the rows and columns that its module has."""
    local = parts.parameters[place.parameter.name]
    assert local.columns is not None
    base = 0
    for index in place.parts:
        part = local.parts[index]
        if len(part):
            rows = np.arange(base + part.start, base + part.stop)
            order = place.layout.order
            rows = rows if order is None else order(parts.spec, local.layer)[rows]
            parts.take_sparse(local, index, _cut(tensor, rows, local.columns))
        base += part.total


def _cut(tensor: torch.Tensor, rows: np.ndarray, columns: Part) -> torch.Tensor:
    """``rows``, in their order, and ``columns`` of a coalesced sparse tensor, coalesced again.

    torch's index_select of tens of thousands of entries works in threads that are not in inference mode, and raises.
    """
    row_of = torch.full((len(tensor),), -1)
    row_of[torch.from_numpy(rows)] = torch.arange(len(rows))
    row, column = row_of[tensor.indices()[0]], tensor.indices()[1]
    kept = (row >= 0) & (column >= columns.start) & (column < columns.stop)
    indices = torch.stack((row[kept], column[kept] - columns.start))
    shape = (len(rows), len(columns))
    return torch.sparse_coo_tensor(indices, tensor.values()[kept], shape, check_invariants=False).coalesce()


def _put(parts: Parts, place: Place, entry: Entry) -> None:
    if not place.experts:
        _check_shape(place, entry)
    local = parts.parameters.get(place.parameter.name)
    if local is None:
        return
    entry.check(parts.dtype_of(local))
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
        base += 0 if local.repeated else part.total


def _check_shape(place: Place, entry: Entry) -> None:
    parameter = place.parameter
    rows = parameter.rows_of(place.parts)
    shape = (rows,) if parameter.columns is None else (rows, parameter.columns.total)
    shape = shape[::-1] if place.layout.transposed else shape
    if place.layout.padded and len(entry.shape) == len(shape) and entry.shape[0] > rows:
        shape = (entry.shape[0], *shape[1:])
    if entry.shape != shape and ((len(shape) == 1 and not parameter.repeated) or (1, *entry.shape) != shape):
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
        entry.cast(into, entry.read(columns))
        return
    if layout.transposed and columns is not None:
        first, last = int(rows.min()), int(rows.max()) + 1
        found = entry.read(columns, slice(first, last)).t()
        entry.cast(into, found if len(rows) == last - first and (np.diff(rows) == 1).all() else found[rows - first])
        return
    if layout.convert is not None:
        entry.cast(into, layout.convert(entry.read(slice(int(rows[0]), int(rows[-1]) + 1), columns)))
        return
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)  # each run of neighbouring rows is one read
    if len(starts) > _MOST_READS:
        first = int(rows.min())
        entry.cast(into, entry.read(slice(first, int(rows.max()) + 1), columns)[rows - first])
        return
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        entry.copy_to(into[start:stop], slice(int(rows[start]), int(rows[stop - 1]) + 1), columns)


def _put_experts(parts: Parts, place: Place, local: Parameter, entry: Entry) -> None:
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
        piece = piece.mT if place.layout.transposed else piece
        rows = local.rows_of(tuple(indices))
        shape = (rows,) if local.columns is None else (rows, local.columns.total)
        if tuple(piece.shape) != shape and not (local.repeated and piece.numel() == rows):
            raise _wrong_shape(entry, tuple(piece.shape), shape)
        each_part = [piece] * len(indices) if local.repeated else piece.split([local.parts[i].total for i in indices])
        for index, found in zip(indices, each_part, strict=True):
            entry.cast(parts.rows(local, index), found)
            parts.filled(local, index)
