"""A PEFT folder read for the part of the model that this process holds, a few megabytes at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...proto.checkpoint.lora_config import WEIGHTS, AdapterConfig, check_adapter
from ...proto.config import ConfigError
from ..lora.target import Adapter, Fused, Matrices, Targets
from .files import Entry, Tensors, some

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB]))")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_COPY = re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight")


@dataclass
class _Pair:
    """The two tensors of a module, read as far as they are needed. ``rank``: of A as the file has it."""

    a: Entry | None = None
    b: Entry | None = None


@dataclass
class _Reading:
    """An adapter while it is read: ``pieces`` by target."""

    config: AdapterConfig
    targets: Targets
    rounded: torch.dtype
    dtype: torch.dtype
    pieces: dict[str, list[Matrices | None]] = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)  # targets whose parameters of all experts had tensors

    def put(
        self, name: str, at: int, pair: tuple[Entry, Entry], a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> None:
        """What the tensors ``pair`` have for a piece of a target; ``a``: as much of it as this process holds. Raises
        ConfigError."""
        target, rank = self.targets.targets[name], int(b.shape[1])
        pieces = self.pieces.setdefault(name, [None] * len(target.pieces))
        if pieces[at] is not None:
            raise _twice(pair[0], target.pieces[at].module)
        a, b = (_rounded(entry, each, self.rounded) for entry, each in zip(pair, (a, b), strict=True))
        pieces[at] = Matrices(a.to(self.dtype), b.to(self.dtype), scale, rank, target.rows_of_a(rank).start)


def _rounded(entry: Entry, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = values.to(dtype).contiguous()
    if not bool(torch.isfinite(rounded).all()):
        raise ConfigError(f"{entry.file}: {entry.name} has values that are no finite numbers in {str(dtype)[6:]}; "
                          "train the adapter again, or take a --lora-dtype with a wider range.")  # fmt: skip
    return rounded


def _twice(entry: Entry, module: str) -> ConfigError:
    return ConfigError(f"{entry.file}: {entry.name} is for {module}, for which other tensors were there; save the "
                       "adapter again.")  # fmt: skip


def read_adapter(
    name: str, folder: Path, targets: Targets, max_rank: int, rounded: torch.dtype, dtype: torch.dtype | None = None
) -> Adapter:
    """The adapter in ``folder``, its matrices rounded to ``rounded``, in ``dtype`` (None: the same).

    Raises ConfigError, one line that names the file and the tensor: one that no module of the model has, that is
    missing, or of another shape; a rank over ``max_rank``; and what ``check_adapter`` refuses.
    """
    reading = _Reading(check_adapter(folder, max_rank), targets, rounded, dtype or rounded)
    file = folder / WEIGHTS
    with Tensors.open(file) as tensors:
        pairs = _pairs(reading, file, tensors)
        if not pairs:
            raise ConfigError(f"{folder} doesn't contain tensors; save the adapter again.")
        _check_targets(reading, file, pairs)
        for module, pair in pairs.items():
            if pair.a is None or pair.b is None:
                there, lacks = (pair.a, "B") if pair.b is None else (pair.b, "A")
                assert there is not None  # one of the two made the pair
                raise ConfigError(
                    f"{file}: {there.name} is there and lora_{lacks} of {module} is not; save the adapter again."
                )
            _read(reading, module, pair.a, pair.b)
        _check_fused(reading, file)
    return Adapter(name, {target: tuple(pieces) for target, pieces in reading.pieces.items()})


def _pairs(reading: _Reading, file: Path, entries: Iterable[Entry]) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    for entry in entries:
        found = _TENSOR.fullmatch(entry.name)
        if found is None:
            _check_copy(reading, file, entry)
            continue
        pair = pairs.setdefault(found[1], _Pair())
        if (pair.a if (found[2] or found[3]) == "A" else pair.b) is not None:
            raise _twice(entry, found[1])
        if (found[2] or found[3]) == "A":
            pair.a = entry
        else:
            pair.b = entry
        _check_known(reading, file, entry, found[1], embedding=found[3] is not None)
    return pairs


def _check_copy(reading: _Reading, file: Path, entry: Entry) -> None:
    """PEFT saves the base model's own rows beside adapters of the embedding; nothing else may be there."""
    found = _COPY.fullmatch(entry.name)
    shape = None if found is None else reading.targets.shapes.get(found[1])
    if found is None or shape is None or not found[1].endswith(("embed_tokens", "lm_head", "wte", "embed_in")):
        raise ConfigError(f"{file}: {entry.name} is unsupported LoRA weight; only lora_A and lora_B of modules that "
                          "this model has are read.")  # fmt: skip
    if entry.shape != shape:
        raise ConfigError(f"{file}: {entry.name} has shape {entry.shape} where the model has {shape}; adapters that "
                          "add tokens are not supported.")  # fmt: skip


def _fused(targets: Targets, module: str) -> tuple[Fused, ...]:
    return targets.fused.get(module.removesuffix(".base_layer"), ())


def _check_known(reading: _Reading, file: Path, entry: Entry, module: str, embedding: bool) -> None:
    targets, config = reading.targets, reading.config
    if _fused(targets, module) and not embedding:
        return
    if module not in targets.modules or embedding != (targets.modules[module][0] == "embed"):
        raise ConfigError(f"{file}: {entry.name} is for {module}, which this model has not, or not as a layer that "
                          "adapters can change; check that the adapter belongs to it.")  # fmt: skip
    if config.changes(module) is False:
        wanted = some(sorted(config.targets or ()))
        raise ConfigError(f"While loading {file.parent}, expected target modules in {{{wanted}}} but received "
                          f"{{{entry.name}}}. Please verify that the loaded LoRA module is correct")  # fmt: skip


def _check_targets(reading: _Reading, file: Path, pairs: dict[str, _Pair]) -> None:
    """Every module that the config's list names has tensors; of a module's several names one is enough. An expert's
    may be called as no other model does: it has them where the same module of another expert has."""
    begun = {_EXPERT.sub(".experts.*.", module) for module in pairs}
    for module, at in reading.targets.modules.items():
        if not reading.config.changes(module) or module in pairs:
            continue
        if ".experts." in module:
            lacks = _EXPERT.sub(".experts.*.", module) in begun
        else:
            others = (name for name, same in reading.targets.modules.items() if same == at and at[1] >= 0)
            lacks = at[1] >= 0 and not any(name in pairs for name in others) and not _unprefixed(reading, module)
        if lacks:
            raise ConfigError(f"{file} lacks base_model.model.{module}.lora_A.weight, which target_modules of "
                              "adapter_config.json asks for; save the adapter again.")  # fmt: skip


def _check_fused(reading: _Reading, file: Path) -> None:
    """Every parameter of all experts that the config names has had tensors, and no other where it names any."""
    names, wanted, known = reading.config.parameters, {}, set()
    for module, fused in reading.targets.fused.items():
        for each in fused:
            full = f"{module}.{each.parameter}"
            if found := [name for name in names if full == name or full.endswith(f".{name}")]:
                wanted[each.target] = full
                known.update(found)
    whole = {name for name in names for module in reading.targets.modules if f".{module}.weight".endswith(f".{name}")}
    if unknown := [name for name in names if name not in known | whole]:
        raise ConfigError(f"{file.parent}: target_parameters has {unknown[0]!r}, which this model has not, or not as a "
                          "parameter that adapters can change; check that the adapter belongs to it.")  # fmt: skip
    for target in wanted.keys() - reading.fused:
        raise ConfigError(f"{file} lacks lora_A and lora_B of {wanted[target]}, which target_parameters of "
                          "adapter_config.json asks for; save the adapter again.")  # fmt: skip
    if names and (more := sorted(reading.fused - wanted.keys())):
        raise ConfigError(f"{file} has tensors for {more[0]}, which target_parameters of adapter_config.json does not "
                          "name; save the adapter again.")  # fmt: skip


def _unprefixed(reading: _Reading, module: str) -> bool:
    """Whether ``module`` is a name without prefix, of one that has another."""
    return any(name.endswith(f".{module}") for name in reading.targets.modules)


def _read(reading: _Reading, module: str, a: Entry, b: Entry) -> None:
    config, targets = reading.config, reading.targets
    if fused := _fused(targets, module):
        _read_fused(reading, module, fused, a, b)
        return
    name, at = targets.modules[module]
    outputs, inputs = targets.shapes[module]
    if name == "embed":
        outputs, inputs = inputs, outputs
    rank = config.rank_of(module)
    target = targets.targets.get(name)
    padded = target is not None and at >= 0 and target.pieces[at].padded
    _check_shape(a, (rank, inputs))
    if not padded or b.shape[1:] != (rank,) or b.shape[0] < outputs:
        _check_shape(b, (outputs, rank))
    if target is None or at < 0:
        return
    columns = slice(target.columns.start, target.columns.stop)
    rows, mine = torch.from_numpy(target.pieces[at].rows), target.rows_of_a(rank)
    held = a.read(slice(mine.start, mine.stop), columns)
    reading.put(name, at, (a, b), held, b.read().index_select(0, rows), config.scale_of(module))


def _check_shape(entry: Entry, shape: tuple[int, ...]) -> None:
    entry.check(torch.float32)
    if entry.shape != shape:
        raise ConfigError(f"{entry.file}: {entry.name} has shape {entry.shape} where adapter_config.json and the model "
                          f"make it {shape}; check that the adapter belongs to this model.")  # fmt: skip


def _read_fused(reading: _Reading, module: str, fused: tuple[Fused, ...], a: Entry, b: Entry) -> None:
    """Adapters of a parameter of all experts: A is [rank * E, inputs], by experts, and B [outputs, rank * E], by ranks.

    PEFT before 0.18 took an expert's outputs for its inputs: A is [rank * E, outputs] then, and B [inputs, rank * E].
    """
    config, targets = reading.config, reading.targets
    found, turned = (a.shape[1:], b.shape[:1]), False
    of = next((each for each in fused if found == ((each.inputs,), (each.outputs,))), None)
    if of is None:
        of, turned = next((each for each in fused if found == ((each.outputs,), (each.inputs,))), None), True
    if of is None:
        wanted = " or ".join(str((each.outputs, each.inputs)) for each in fused)
        raise ConfigError(f"{a.file}: {a.name} and lora_B have shapes {a.shape} and {b.shape}, of no parameter of "
                          f"experts {wanted}; check that the adapter belongs to this model.")  # fmt: skip
    if of.target in reading.fused:
        raise _twice(a, of.parameter)
    reading.fused.add(of.target)
    name = f"{module.removesuffix('.base_layer')}.{of.parameter}"  # PEFT's patterns are of the parameter's name
    rank = config.rank_of(name)
    inputs, outputs = (of.outputs, of.inputs) if turned else (of.inputs, of.outputs)
    _check_shape(a, (rank * of.experts, inputs))
    _check_shape(b, (outputs, rank * of.experts))
    target = targets.targets.get(of.target)
    if target is None or not target.experts:
        return
    scale = config.scale_of(name)
    all_a, all_b = a.read().view(of.experts, rank, inputs), b.read().view(outputs, rank, of.experts)
    for expert in range(target.experts):
        own_a, own_b = all_a[of.first_expert + expert], all_b[:, :, of.first_expert + expert]
        if turned:
            own_a, own_b = own_b.t(), own_a.t()
        start = 0
        for at in range(expert * target.each, (expert + 1) * target.each):
            stop = start + len(target.pieces[at].rows)
            reading.put(of.target, at, (a, b), own_a, own_b[start:stop], scale)
            start = stop


def adapter_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """The dtype for --lora-dtype ``name`` beside a model in ``model``. Raises ConfigError."""
    known = {"auto": model, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise ConfigError(f"Unknown lora_dtype: {name}. Must be one of {sorted(known)}.")
    return known[name]
