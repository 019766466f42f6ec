"""Which modules of a checkpoint an adapter may change, and where their outputs lie in this process's products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ..layers.formats.base import Part, whole
from ..lora.target import Fused, Piece, Target, Targets
from ..spec import DecoderSpec, Layout, Shard, WeightNames
from .parameters import Parameter, parameters
from .places import Place, modules_of, places_of


def targets_of(spec: DecoderSpec, names: WeightNames, shard: Shard, fully_sharded: bool = False) -> Targets:
    """The linear layers, experts and the embedding of ``spec``, by their names in checkpoints and in transformers.

    ``fully_sharded``: both matrices of linear layers are divided among the tensor ranks, where the layer is.
    """
    held = {parameter.name: parameter for parameter in parameters(spec, shard)}
    targets: dict[str, Target] = {}
    modules: dict[str, tuple[str, int]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    fused: dict[str, tuple[Fused, ...]] = {}
    for parameter in _adapted(spec):
        name = parameter.name.removesuffix(".weight")
        local = held.get(parameter.name) or (held.get("embed.weight") if name == "lm_head" and shard.last else None)
        found = list(_named(parameter, names))
        if local is not None and not (name == "embed" and not shard.first):
            targets[name] = _target(spec, name, parameter, local, found)
            if fully_sharded and shard.size > 1 and parameter.kind == "linear":
                targets[name] = _divided(targets[name], shard)
        for index, (module, place) in enumerate(found):
            there = index - _before(parameter, local) if local is not None else -1
            count = len(targets[name].pieces) if name in targets else 0
            at = name, there if 0 <= there < count else -1
            columns = 1 if parameter.columns is None else parameter.columns.total
            for alias in _aliases(module, names):
                modules.setdefault(alias, at)
                shapes.setdefault(alias, (parameter.rows_of(place.parts), columns))
        if parameter.kind == "experts":
            _add_fused(fused, parameter, local, name, names)
    return Targets(targets, modules, shapes, fused)


def _adapted(spec: DecoderSpec) -> Iterator[Parameter]:
    """Weights of the whole model that products use; outputs tied to the embedding have one of their own."""
    for parameter in parameters(spec):
        if spec.outputs >= 0 and parameter.name in ("head.weight", "lm_head.weight"):
            continue  # of classes, from pooled rows
        if parameter.kind in ("linear", "experts") or parameter.name == "embed.weight":
            yield parameter
            if parameter.name == "embed.weight" and spec.tied and spec.outputs < 0:
                yield Parameter("lm_head.weight", "linear", parameter.parts, parameter.columns)


def _named(parameter: Parameter, names: WeightNames) -> Iterator[tuple[str, Place]]:
    """The modules of ``parameter``, with the outputs of each, in the order of its parts."""
    modules, _ = modules_of(parameter, names)
    key = parameter.stem.rsplit(".", 1)[0]
    layout = names.layouts.get(parameter.stem) or names.layouts.get(key) or Layout()
    if parameter.kind == "experts" and "{e}" not in modules[0]:
        modules = _apart(parameter, modules, names)
    found = list(places_of(parameter, modules, Layout(order=layout.order, padded=layout.padded)))
    yield from sorted(found, key=lambda each: each[1].parts)


def _apart(parameter: Parameter, modules: tuple[str, ...], names: WeightNames) -> tuple[str, ...]:
    """Names for each expert's modules where a family's files have all experts in one tensor."""
    key = parameter.stem.rsplit(".", 1)[0]
    base = names.layer_prefix.format(parameter.layer)
    if key in names.apart:
        return tuple(base + each for each in names.apart[key])
    stem = modules[0].rsplit(".", 1)[0]
    own = ("gate_proj", "up_proj") if key == "experts_gate_up" else ("down_proj",)
    return tuple(f"{stem}.{{e}}.{each}" for each in own)


def _before(parameter: Parameter, local: Parameter) -> int:
    """Modules of experts that lie before those of this process."""
    if not parameter.experts:
        return 0
    each = len(parameter.parts) // parameter.experts
    return next((at for at in range(0, len(local.parts), each) if len(local.parts[at])), 0)


def _target(
    spec: DecoderSpec, name: str, parameter: Parameter, local: Parameter, found: list[tuple[str, Place]]
) -> Target:
    pieces, first = [], 0
    each = len(local.parts) // max(1, parameter.experts)
    for module, place in found:
        if parameter.experts and not len(local.parts[place.parts[0]]):
            continue
        if place.parts[0] % each == 0:
            first = 0
        rows = _rows(spec, local, place)
        total = parameter.rows_of(place.parts)
        pieces.append(Piece(module, total, rows, first, place.layout.padded))
        first += len(rows)
    columns = local.columns or whole(1)
    held = len(pieces) // max(1, len(found) // parameter.experts) if parameter.experts else 0
    if name == "embed":  # B has the hidden size's rows, and A is cut like the vocabulary
        width = columns.total
        pieces = [Piece(found[0][0], width, np.arange(width), 0)]
        columns = local.parts[0]
    return Target(name, parameter.kind, columns, tuple(pieces), held)


def _divided(target: Target, shard: Shard) -> Target:
    """Fully sharded: where inputs are divided B is too, by outputs, and where outputs are A is, by ranks. A layer that
    every rank has whole stays so."""
    if len(target.columns) < target.columns.total:
        pieces = []
        for piece in target.pieces:
            mine = shard.share(len(piece.rows))
            pieces.append(replace(piece, rows=piece.rows[mine.start : mine.stop], first=piece.first + mine.start))
        return replace(target, pieces=tuple(pieces), among=shard)
    if any(len(piece.rows) < piece.outputs for piece in target.pieces):
        return replace(target, among=shard, by_rank=True)
    return target


def _rows(spec: DecoderSpec, local: Parameter, place: Place) -> np.ndarray:
    """Which outputs of a module this process holds, in the order of its product."""
    held, base = [], 0
    for index in place.parts:
        part = local.parts[index]
        held.append(np.arange(base + part.start, base + part.stop))
        base += part.total
    rows = np.concatenate(held)
    return rows if place.layout.order is None or not len(rows) else place.layout.order(spec, local.layer)[rows]


def _aliases(module: str, names: WeightNames) -> Iterator[str]:
    """What a module may be called: as in files, without the prefix that files may leave out, and by newer names."""
    yield module
    if names.prefix and module.startswith(names.prefix):
        yield module.removeprefix(names.prefix)
    for old, new in names.renamed:
        if new.strip(".") and new in f"{module}.":
            module = f"{module}.".replace(new, old)[:-1]
            yield module


def _add_fused(
    fused: dict[str, tuple[Fused, ...]], parameter: Parameter, local: Parameter | None, name: str, names: WeightNames
) -> None:
    """The experts' module of a layer, of which transformers has ``gate_up_proj`` and ``down_proj``."""
    modules, _ = modules_of(parameter, names)
    layout = names.layouts.get(parameter.stem) or names.layouts.get(parameter.stem.rsplit(".", 1)[0]) or Layout()
    if layout.convert not in (None, torch.Tensor.t):
        return  # whose outputs lie in another order
    each = len(parameter.parts) // parameter.experts
    part: Part = parameter.columns or whole(1)
    outputs = sum(one.total for one in parameter.parts[:each])
    first = 0 if local is None else _before(parameter, local) // each
    called = "down_proj" if name.endswith("down") else "gate_up_proj" if each > 1 else "up_proj"
    found = Fused(name, called, parameter.experts, outputs, part.total, first)
    stem = modules[0].split(".{e}")[0] if "{e}" in modules[0] else modules[0].rsplit(".", 1)[0]
    for alias in _aliases(stem, names):
        fused[alias] = (*fused.get(alias, ()), found)
