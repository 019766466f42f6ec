"""From a model folder to a Model: tensors streamed into fused parameters, or random weights from a config.

A checkpoint's tensors are read one at a time, of each only the rows this process holds, and copied to their place in
the decoder's parameters; a weight is packed for its device as soon as its last row is there. So memory peaks at one
model and one parameter. Every tensor must have a place and every parameter all its rows: what is missing or left over
ends the load.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from ...proto.checkpoint.gguf_config import in_keys
from ...proto.checkpoint.model_config import ModelConfig
from ...proto.checkpoint.pooler_config import PoolerConfig
from ...proto.checkpoint.quantization import online
from ...proto.config import ConfigError
from ...proto.process import shows_bars
from ..kernels.company import batch_invariant
from ..layers.formats.at_load import NOTHING, AtLoad, check_quantization
from ..layers.formats.base import TensorError
from ..layers.formats.registry import Found
from ..layers.formats.registry import quantization as checkpoint_quantization
from ..lora.card import CardSlots
from ..lora.linear import AdaptedExperts, AdaptedLinear
from ..lora.slots import LoraSpec, Slots
from ..lora.target import Targets
from ..parallel.parallel import Group
from ..spec import DecoderSpec, Shard, WeightNames
from .adapter_targets import targets_of
from .decoder import Decoder
from .dtypes import resolve_dtype
from .encoder import Encoder
from .fallback import load_fallback, uses_fallback
from .families import find_family
from .files import Entry, Tensors, check_load_format, some, weight_files
from .kv_scales import CheckpointScales
from .model import Model
from .parameters import parameters
from .parts import Parts, in_tensors
from .places import Gathering, Place, formats_of, places, put
from .pooled import find_pooled
from .token_head import made_head
from .weights import Weights

__all__ = ["load_model", "resolve_dtype"]

log = logging.getLogger(__name__)

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
    group: Group | None = None,
    pooler: PoolerConfig | None = None,
    quantization: str | None = None,
    quantize_lm_head: bool | None = None,
    kv_scales: CheckpointScales | None = None,
    lora: LoraSpec | None = None,
) -> Model:
    """The model of ``config`` on ``device`` in ``dtype``, or the part of it that ``group.shard`` says.

    ``load_format``: auto or safetensors read the folder, pt its pickled tensors; dummy makes random weights from
    ``seed``, no file needed. An architecture that the table does not know is left to ``fallback.py``. Raises
    ConfigError, one line that names the file and the remedy. ``quantization``: the flag's; see ``formats.at_load``.
    ``kv_scales`` takes what the checkpoint says of the scales of an fp8 cache. ``lora``: which adapters it may have.
    """
    check_load_format(load_format)
    group = group or Group()
    at_load = AtLoad(online(config.hf, quantization), quantize_lm_head, group.maximum)
    with _named(config):
        foreign = pooler is None and uses_fallback(config)
        check_quantization(at_load, device, foreign)
        _check_served(config, foreign, lora is not None and (foreign or (pooler is not None and pooler.whole)))
        if foreign:
            return load_fallback(config, dtype, device, load_format, seed, group)
        spec, names = _family(config, pooler)
        found = checkpoint_quantization(config.hf)
        names = replace(names, skip=(*names.skip, *found.skip), renamed=(*names.renamed, *found.renamed))
        room = spec.positions - spec.position_offset
        if 0 < room < config.max_model_len:
            raise ConfigError(
                f"max_model_len={config.max_model_len} is more than the {room} positions that {spec.architecture} has "
                f"learned; use --max-model-len {room} at most."
            )
        files = [] if load_format == "dummy" else weight_files(Path(config.path), load_format, found.pickled)
        present = _present(files, names) if files and (found.marks or found.fit) else None
        names = names.found_in(present or ())
        parts = Parts(spec, dtype, device, group.shard, formats_of(spec, names, found, present), at_load)
        if load_format == "dummy":
            _fill_dummy(parts, seed, progress)
        else:
            scales = kv_scales or CheckpointScales()
            head = made_head(files, names, pooler.head_rows) if pooler is not None and pooler.head_rows else None
            _fill_from_files(parts, names, Path(config.path), files, present, found.zero, scales, progress, head)
        weights, quantized = parts.weights(), config.hf.get("quantization_config")
        for line in parts.summary.lines(str(quantized["quant_method"] if quantized else at_load.method)):
            log.info("%s", line)
        if pooler is not None and pooler.whole:
            return Encoder(spec, weights)
        return _decoder(spec, weights, config.max_model_len, group, names, lora)


def _check_served(config: ModelConfig, foreign: bool, lora: bool) -> None:
    """Raises ConfigError for what a model cannot do: one that transformers runs, or one without places for adapters."""
    if lora:
        raise ConfigError(f"enable_lora is for decoders that quire knows, and {config.architecture} is none; leave it "
                          "out.")  # fmt: skip
    if foreign and config.hf.get("quantization_config"):
        raise ConfigError("quantized weights are supported for the architectures that quire knows, and "
                          "transformers runs this one; use the model's float weights.")  # fmt: skip
    if foreign and batch_invariant():
        raise ConfigError("batch_invariant is for the architectures that quire knows, and this one is run by "
                          "transformers; leave it out.")  # fmt: skip


def _decoder(
    spec: DecoderSpec, weights: Weights, max_model_len: int, group: Group, names: WeightNames, lora: LoraSpec | None
) -> Decoder:
    if lora is None:
        return Decoder(spec, weights, max_model_len, group)
    dtype = weights.dtype if lora.dtype is None else lora.dtype
    kind = Slots if weights.device.type == "cpu" else CardSlots
    targets = targets_of(spec, names, group.shard, lora.fully_sharded)
    slots = kind(targets, lora.slots, lora.max_rank, dtype, weights.device, group)
    for name, linear in weights.linears.items():
        if name in slots.targets.targets:
            weights.linears[name] = AdaptedLinear(linear, slots, name)
    for name, experts in weights.experts.items():
        weights.experts[name] = AdaptedExperts(experts, slots, name)
    model = Decoder(spec, weights, max_model_len, group)
    model.adapters = slots
    return model


def size_of(
    config: ModelConfig, pooler: PoolerConfig | None, dtype: torch.dtype, shard: Shard, at_load: AtLoad = NOTHING
) -> tuple[DecoderSpec, int, float]:
    """Of a model that is not transformers' own: its spec, the number of parameters that ``shard`` holds, and the bytes
    that each of them takes, in ``dtype`` or in the tensors of its format. Raises ConfigError as ``load_model`` does.
    """
    with _named(config):
        spec, names = _family(config, pooler)
        formats, held = formats_of(spec, names, checkpoint_quantization(config.hf)), list(parameters(spec, shard))
    count, device = sum(math.prod(parameter.shape) for parameter in held), torch.device("cpu")
    size = 0.0
    for parameter in held:
        made = at_load.format_of(parameter.name) if parameter.kind in ("linear", "experts") else None
        for each in in_tensors(parameter, formats, dtype, device):
            if each.stored and each.stored.sparse:
                continue  # only the file knows how much that is
            itemsize = made.bits / 8 if made else ((each.stored and each.stored.dtype) or dtype).itemsize
            size += math.prod(each.shape) * itemsize
    return spec, count, size / count


def adapted_targets(config: ModelConfig, pooler: PoolerConfig | None, shard: Shard, fully_sharded: bool) -> Targets:
    """What adapters may change of the part ``shard`` of a model that is not transformers' own. Raises ConfigError."""
    with _named(config):
        return targets_of(*_family(config, pooler), shard, fully_sharded)


def _family(config: ModelConfig, pooler: PoolerConfig | None) -> tuple[DecoderSpec, WeightNames]:
    try:
        found = find_family(config.hf) if pooler is None else find_pooled(config.hf, pooler)
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{config.path}/config.json holds a value of another kind than {config.architecture} needs "
            f"({type(error).__name__}: {error}); correct it, or download it again."
        ) from error
    return found


@contextmanager
def _named(config: ModelConfig) -> Iterator[None]:
    """Put the folder before what is said of a config.json, or name a GGUF file's keys; families see only values."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        if config.path not in text:
            of_config = text.startswith("config.json: ")
            if of_config and "support" not in text:
                text = text.removesuffix(".") + "; correct it, or download it again."
            text = f"{config.path}{'/' if of_config else ': '}{text}"
        raise ConfigError(in_keys(config.path, text, config.overrides)) from error


def _called(name: str, names: WeightNames) -> str:
    """What a tensor is called now, of what an old file may call it."""
    for old, new in names.renamed:
        name = name.replace(old, new)
    return name


def _present(files: list[Path], names: WeightNames) -> Found:
    """The tensors that ``files`` hold, with and without the prefix that files may leave out."""
    found = {}
    for file in files:
        with Tensors.open(file) as tensors:
            for entry in tensors:
                name = _called(entry.name, names)
                found[name] = found[names.prefix + name] = entry.dtype, entry.shape
    return found


def _fill_from_files(
    parts: Parts, names: WeightNames, folder: Path, files: list[Path], present: Found | None, zero: tuple[str, ...],
    kv_scales: CheckpointScales, progress: bool, head: Entry | None,
) -> None:  # fmt: skip
    place_of = places(parts, names, present or ())
    for found in place_of.values():
        if isinstance(found, Gathering) and not found.waiting:  # of optional tensors that are not there
            found.fill(parts, folder)
    if head is not None:
        put(parts, place_of.pop(f"{names.lm_head}.weight"), head.name, head)
    skip = re.compile("|".join([*names.skip, *([re.escape(names.lm_head) + r"\.weight"] if parts.spec.tied else [])]))
    left_over: list[str] = []
    read: dict[str, Path] = {}
    total = sum(file.stat().st_size for file in files)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not (progress and shows_bars())
    ) as bar:
        for file in files:
            with Tensors.open(file) as tensors:
                for entry in tensors:
                    name = _called(entry.name, names)
                    place = name if name in place_of else names.prefix + name
                    if place in place_of:
                        if place in read:
                            raise _twice(entry, read[place])
                        read[place] = file
                        try:
                            put(parts, place_of[place], place, entry)
                        except TensorError as error:
                            raise _meaningless(error, parts, place_of, place, read) from error
                    elif not (
                        kv_scales.take(name, entry, names) or skip.fullmatch(entry.name) or skip.fullmatch(name)
                        or _nothing(entry, zero)
                    ):  # fmt: skip
                        left_over.append(entry.name)
                    bar.update(entry.nbytes)
        bar.update(total - bar.n)  # what the files hold besides weights: their headers
    _check_complete(parts, place_of, left_over, folder)


def _nothing(entry: Entry, zero: tuple[str, ...]) -> bool:
    """Whether it matches one of ``zero`` and is all 0."""
    return any(re.fullmatch(each, entry.name) for each in zero) and not entry.read().any()


def _meaningless(
    error: TensorError, parts: Parts, place_of: dict[str, Place | Gathering], last: str, read: dict[str, Path]
) -> ConfigError:
    """What is said of one tensor of the weight that ``last`` has completed, with the name and file of that tensor."""
    place = place_of[last]
    if isinstance(place, Gathering):
        place = next(iter(place.places.values()))
    wanted = place.parameter.weight.removesuffix("weight") + error.stored
    held = [index for index, part in enumerate(parts.parameters[wanted].parts) if len(part)]
    for name, each in place_of.items():
        if isinstance(each, Gathering) or each.parameter.name != wanted:
            continue
        if each.experts or held[error.part] in each.parts:
            return ConfigError(f"{read[name]}: {name} {error.said}")
    return ConfigError(f"{read[last]}: {error}")


def _twice(entry: Entry, first: Path) -> ConfigError:
    where = "twice under two names" if entry.file == first else f"in {first.name} too"
    return ConfigError(
        f"{entry.file}: {entry.name} is {where}, and only one of them can be meant; remove the file or the copy that "
        "does not belong to the model, or download the folder again."
    )


def _check_complete(parts: Parts, place_of: dict[str, Place | Gathering], left_over: list[str], folder: Path) -> None:
    checkpoint = {
        (place.parameter.name, part): name
        for name, found in place_of.items()
        for place in (found.places.values() if isinstance(found, Gathering) else (found,)) for part in place.parts
    }  # fmt: skip
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


def _fill_dummy(parts: Parts, seed: int, progress: bool) -> None:
    """Weights N(0, 0.02), norms around the identity; integers are 0. Of one seed and device the same weights."""
    generator = torch.Generator(parts.device).manual_seed(seed)
    pool = torch.empty(_POOL, device=parts.device).normal_(0.0, _DUMMY_STD, generator=generator).to(parts.dtype)
    at = 0
    for parameter in tqdm(
        parts.parameters.values(), desc="Making random weights", disable=not (progress and shows_bars())
    ):
        tensor = parts.zeros(parameter)
        if tensor.is_sparse or not tensor.is_floating_point():
            parts.finish(parameter, tensor)
            continue
        if parameter.stored is not None and parameter.stored.name == "input_scale":
            parts.finish(parameter, tensor.fill_(1.0))  # what activations are divided by
            continue
        flat = tensor.view(-1)
        done = 0
        while done < flat.numel():
            count = min(_POOL - at, flat.numel() - done)
            flat[done : done + count] = pool[at : at + count]
            done, at = done + count, (at + count) % _POOL
        if parameter.kind == "norm" and not parts.spec.norm_plus_one:
            tensor += 1
        parts.finish(parameter, tensor)
