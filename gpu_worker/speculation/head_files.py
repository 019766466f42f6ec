"""Folders of heads, as they are published: EAGLE, EAGLE-3, Medusa, and MTP layers in the target's own files.

Every tensor must have a place and every place its tensor; what is missing, left over or of another shape is refused by
file and name. Safetensors are read, or else pickles, of which tensors alone are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...proto.checkpoint.config_numbers import check_numbers
from ...proto.checkpoint.model_config import read_json
from ...proto.config import ConfigError
from ...proto.readable import is_file
from ..layers.formats.base import whole
from ..layers.formats.dense import dense
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..models.families.common import Config, integer
from ..models.files import Entry, Tensors, some, weight_files
from ..models.parameters import Parameter, parameters
from ..models.weights import Weights
from ..spec import DecoderSpec, WeightNames


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor of a folder, read whole."""

    file: Path
    tensor: torch.Tensor


class HeadFiles:
    """The tensors of ``files``, taken one by one under the name that each has there.

    ``wanted``: which names are read; ``renamed`` maps a name to the one that is asked for.
    """

    def __init__(
        self, folder: Path, files: Sequence[Path], wanted: Callable[[str], bool] = lambda name: True,
        renamed: Callable[[str], str] = lambda name: name,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._found: dict[str, Found] = {}
        for file in files:
            with Tensors.open(file) as tensors:
                for entry in tensors:
                    name = renamed(entry.name)
                    if not wanted(name):
                        continue
                    if name in self._found:
                        raise ConfigError(f"{file}: {entry.name} is in {self._found[name].file.name} too; remove one.")
                    self._found[name] = Found(file, _read(entry))

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor ``name``. Raises ConfigError where there is none."""
        self._check(name)
        return tuple(self._found[name].tensor.shape)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor ``name``, which must be of ``shape``; floats are cast to ``dtype``. Raises ConfigError."""
        self._check(name)
        found = self._found.pop(name)
        if tuple(found.tensor.shape) != shape:
            raise ConfigError(
                f"{found.file}: {name} has shape {tuple(found.tensor.shape)} where config.json makes it {shape}; "
                "check that config.json belongs to these weights, and the head to this model."
            )
        if found.tensor.is_floating_point() != dtype.is_floating_point:
            kind = str(found.tensor.dtype).removeprefix("torch.")
            raise ConfigError(f"{found.file}: {name} is {kind}; use the head's float weights.")
        return found.tensor.to(device, dtype)

    def drop(self, name: str) -> None:
        """Leave the tensor ``name`` unread, where there is one."""
        self._found.pop(name, None)

    def finish(self) -> None:
        """Raises ConfigError where tensors are left that nothing took."""
        if self._found:
            raise ConfigError(
                f"{self.folder}: the weights hold {some(sorted(self._found))}, which this head has no place for; check "
                "that config.json belongs to these weights."
            )

    def _check(self, name: str) -> None:
        if name not in self._found:
            raise ConfigError(f"{self.folder}: the weights lack {name}, which this head needs; download it again.")


def _read(entry: Entry) -> torch.Tensor:
    if entry.dtype == torch.bool:  # EAGLE-3's t2d
        return torch.cat(
            [entry.rows(at, min(at + 65536, entry.shape[0])).clone() for at in range(0, entry.shape[0], 65536)]
        )
    return entry.read()


def head_config(folder: str) -> Config:
    """The values of a head's config.json. Raises ConfigError."""
    path = Path(folder) / "config.json"
    if not is_file(path):
        raise ConfigError(f"{path} does not exist; a head is a folder with a config.json and its weights.")
    check_numbers(str(path), found := read_json(path))
    return found


def head_files(folder: str, name: str = "") -> list[Path]:
    """The weight files of a head's folder; ``name``: of this stem, where such a file is there. Raises ConfigError."""
    for suffix in ("safetensors", "pt", "bin"):
        if name and is_file(file := Path(folder) / f"{name}.{suffix}"):
            return [file]
    return weight_files(Path(folder), "auto", pickled=True)


@dataclass(frozen=True, slots=True)
class Taker:
    """Makes layers of a folder's tensors."""

    files: HeadFiles
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A float tensor."""
        return self.files.take(name, shape, self.dtype, self.device)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """An RMS norm."""
        return RMSNorm(self.tensor(f"{name}.weight", size), eps)

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """A linear layer, with a bias where the folder has one."""
        made = Linear.of(self.tensor(f"{name}.weight", rows, columns))
        if f"{name}.bias" in self.files:
            made.bias = self.tensor(f"{name}.bias", rows)
        return made

    def layer(self, spec: DecoderSpec, names: WeightNames, inputs: int | None = None) -> Weights:
        """The weights of the one layer of ``spec``; ``inputs``: of its attention, where that is not hidden_size."""
        linears: dict[str, Linear] = {}
        tensors: dict[str, torch.Tensor] = {}
        biases: dict[str, torch.Tensor] = {}
        for each in parameters(spec):
            if each.layer < 0:
                continue
            if each.stem == "qkv.weight" and inputs is not None:
                each = replace(each, columns=whole(inputs))
            stacked = torch.cat(list(self._parts(each, names)))
            if each.kind == "linear":
                weight = each.as_weight(self.dtype, self.device)
                linears[each.name.removesuffix(".weight")] = Linear(dense(weight), {"weight": stacked}, weight)
            elif each.kind == "bias" and "norm" not in each.name:
                biases[each.name.removesuffix(".bias")] = stacked
            else:
                tensors[each.name] = stacked
        for name, bias in biases.items():
            linears[name].bias = bias
        return Weights(spec, linears, {}, {}, tensors, self.dtype, self.device)

    def _parts(self, parameter: Parameter, names: WeightNames) -> Iterator[torch.Tensor]:
        module, suffix = parameter.stem.rsplit(".", 1)
        modules = names.layer[module]
        if len(modules) not in (1, len(parameter.parts)):
            raise ValueError(f"{len(modules)} modules are named for {parameter.name}")
        rows = [part.total for part in parameter.parts] if len(modules) > 1 else [parameter.shape[0]]
        for name, count in zip(modules, rows, strict=True):
            shape = (count,) if parameter.columns is None else (count, parameter.columns.total)
            yield self.tensor(f"{names.layer_prefix.format(parameter.layer)}{name}.{suffix}", *shape)


def one_layer(hf: Config) -> None:
    """Raises ConfigError for a head of several layers."""
    if (count := integer(hf, "num_hidden_layers", 1)) != 1:
        raise ConfigError(f"config.json: num_hidden_layers {count} is not supported in a head; it may be 1.")


def without_prefix(prefix: str) -> Callable[[str], str]:
    """``prefix``, a regular expression, is left off names."""
    return lambda name: re.sub(f"^(?:{prefix})", "", name)
