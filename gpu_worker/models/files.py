"""Weight files: which of a folder's are read, and the tensors, or slices of them, in each.

A safetensors file is read, not mapped: the pages of a mapping count as this process's memory until the file is
closed, which for one large file would be the model a second time. What is asked for is copied to its place in pieces
of at most ``_PIECE`` bytes. Pickles (.bin, .pt) are read only where asked for, and only tensors are taken from them.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...proto.checkpoint.gguf import gguf_file, gguf_files
from ...proto.config import ConfigError
from ...proto.readable import is_file, unreadable
from .gguf_files import gguf_tensors

LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
_INDEX = "model.safetensors.index.json"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
# What trainers leave beside the weights.
_NO_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt"}
_PIECE = 8 << 20
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
# Types that torch lacks (those of less than a byte) stand as bits8, which nothing is made of.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool,
}  # fmt: skip


def check_load_format(load_format: str) -> None:
    """Raises ConfigError for one that is not among LOAD_FORMATS."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"Unknown load format: {load_format}. Must be one of {list(LOAD_FORMATS)}.")


def weight_files(folder: Path, load_format: str = "auto", pickled: bool = False) -> list[Path]:
    """The files of ``folder`` with the model's weights: safetensors, or pickles for ``load_format`` pt, and for auto
    where there are no others and ``pickled`` says that they are expected.

    Those of the index, else the one of the usual name, else all of the kind. Raises ConfigError.
    """
    check_load_format(load_format)
    if (gguf := gguf_file(folder)) is not None:
        if load_format != "auto":
            raise ConfigError(f"{gguf} is a GGUF file, which --load-format {load_format} does not read; leave it out.")
        return gguf_files(gguf)
    if load_format == "pt":
        found = _indexed(folder, _PICKLE_INDEX, "weights") or _single(folder, "pytorch_model.bin") or _pickles(folder)
        if not found:
            raise ConfigError(f"{folder} holds no .bin or .pt file; download the weights, or leave out --load-format.")
        return found
    found = _indexed(folder, _INDEX, "safetensors") or _single(folder, "model.safetensors")
    found = found or [file for file in _kind(folder, "safetensors") if not file.name.startswith("consolidated")]
    if found:
        return found
    pickles = _pickles(folder)
    if pickles and pickled and load_format == "auto":
        return weight_files(folder, "pt")
    if pickles:
        raise ConfigError(
            f"{folder} holds no .safetensors file, but {some([file.name for file in pickles])}: read pickled weights "
            "with --load-format pt, or convert them (model.save_pretrained(folder) in transformers)."
        )
    raise ConfigError(
        f"{folder} holds no .safetensors file; download the weights, convert them "
        "(model.save_pretrained(folder) in transformers), read .bin files with --load-format pt, or use "
        "--load-format dummy."
    )


def some(names: list[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _indexed(folder: Path, name: str, kind: str) -> list[Path]:
    index = folder / name
    if not is_file(index):
        return []
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        files = [folder / shard for shard in shards]
    except PermissionError as error:
        raise unreadable(index) from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not a {kind} index ({error}); download it again.") from error
    if not files:
        raise ConfigError(f"{index} is not a {kind} index (it names no file); download it again.")
    if outside := [shard for shard in shards if Path(shard).is_absolute() or ".." in Path(shard).parts]:
        raise ConfigError(f"{index} names {some(outside)}, which lies outside the folder; download it again.")
    try:
        absent = [file.name for file in files if not file.is_file()]
    except PermissionError as error:
        raise unreadable(folder) from error
    except OSError as error:
        raise ConfigError(f"{index} names what cannot be a file ({error.strerror}); download it again.") from error
    if absent:
        raise ConfigError(f"{index} names {some(absent)}, which the folder lacks; download the missing files.")
    return files


def _single(folder: Path, name: str) -> list[Path]:
    return [folder / name] if is_file(folder / name) else []


def _pickles(folder: Path) -> list[Path]:
    return sorted(file for kind in ("bin", "pt") for file in _kind(folder, kind) if file.name not in _NO_WEIGHTS)


def _kind(folder: Path, suffix: str) -> list[Path]:
    """The files of that suffix; a link to nothing, as a pruned cache leaves it, is none."""
    return sorted(file for file in folder.glob(f"*.{suffix}") if is_file(file))


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file, not read yet. ``rows(start, stop)`` are slices of its first dim, valid until the next."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self, wanted: torch.dtype) -> None:
        """Raises ConfigError where its numbers mean something else in ``wanted``: quantized ones are no floats.

        Whole numbers may be wider than ``wanted``; ``cast`` sees whether each of them fits. Narrower ones are others:
        words of codes do not lie in bytes.
        """
        floats, others = self.dtype in _FLOATS and wanted in _FLOATS, _wider(self.dtype, wanted)
        power = self.dtype == torch.float8_e8m0fnu and wanted == torch.float32  # a scale in one byte
        if not floats and not others and not power and self.dtype != wanted:
            raise ConfigError(
                f"{self.file}: {self.name} is {str(self.dtype)[6:]}, a quantised weight, which is not supported; "
                "use the model's float weights."
                if wanted in _FLOATS
                else f"{self.file}: {self.name} is {str(self.dtype)[6:]}, where config.json's quantization makes it "
                f"{str(wanted)[6:]}; check that config.json belongs to these weights."
            )

    def read(self, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """The tensor, or its ``rows`` (dim 0) and ``columns`` (dim 1), as they are in the file. See ``copy_to``."""
        shape = list(self.shape)
        for dim, part in enumerate((rows, columns)):
            if part is not None:
                shape[dim] = len(range(*part.indices(shape[dim])))
        out = torch.empty(shape, dtype=self.dtype)
        self.copy_to(out, rows, columns)
        return out

    def copy_to(self, out: torch.Tensor, rows: slice | None = None, columns: slice | None = None) -> None:
        """Copy the tensor, or its ``rows`` and ``columns`` (slices without a step), to ``out``, cast to its dtype.

        Takes ``_PIECE`` bytes of memory, or one row where that is more. Raises ConfigError for a file that ends early.
        """
        if not self.shape:
            self.cast(out, self.rows(0, 1).view(()))
            return
        start, stop, _ = (rows or slice(None)).indices(self.shape[0])
        step = max(1, _PIECE // max(1, math.prod(self.shape[1:]) * self.dtype.itemsize))
        for at in range(start, stop, step):
            end = min(at + step, stop)
            piece = self.rows(at, end)
            self.cast(out[at - start : end - start], piece if columns is None else piece[:, columns])

    def cast(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        """Copy ``piece``, some of the tensor's numbers, to ``out``. Raises ConfigError where whole ones do not fit."""
        if _wider(piece.dtype, out.dtype) and piece.numel():
            limits, (least, most) = torch.iinfo(out.dtype), (int(value) for value in piece.aminmax())
            if least < limits.min or most > limits.max:
                raise ConfigError(
                    f"{self.file}: {self.name} is {str(piece.dtype)[6:]} and holds values from {least} to {most}, "
                    f"where config.json's quantization makes it {str(out.dtype)[6:]}; check that config.json belongs "
                    "to these weights."
                )
        out.copy_(piece)


def _wider(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether both are whole numbers, ``dtype`` with more bytes."""
    return dtype in _INTEGERS and wanted in _INTEGERS and dtype.itemsize > wanted.itemsize


class Tensors:
    """The tensors of one file, in the order they lie in it. A context manager: entries are read while it is open."""

    def __init__(self, entries: list[Entry], close: Callable[[], None]) -> None:
        self._entries, self._close = entries, close

    @staticmethod
    def open(file: Path) -> Tensors:
        """Read what the file says of its tensors. Raises ConfigError, one line that names the file and the remedy."""
        if file.suffix == ".gguf":
            return _open_gguf(file)
        return _open_pickle(file) if file.suffix in (".bin", ".pt") else _open_safetensors(file)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._entries = []
        self._close()


def _cut_short(file: Path, error: object) -> ConfigError:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(f"{file} is cut short or no safetensors file ({first}); download it again.")


def _open_safetensors(file: Path) -> Tensors:
    try:
        data = file.open("rb")
    except PermissionError as error:
        raise unreadable(file) from error
    except OSError as error:
        raise _cut_short(file, error) from error
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass  # its library has checked the header: every tensor lies in the file, and none over another
        length = int.from_bytes(data.read(8), "little")
        header: dict[str, Any] = json.loads(data.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        data.close()
        raise _cut_short(file, error) from error
    header.pop("__metadata__", None)
    scratch = torch.empty(_PIECE, dtype=torch.uint8)

    def reader(start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[int, int], torch.Tensor]:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize

        def rows(first: int, last: int) -> torch.Tensor:
            nonlocal scratch
            size = (last - first) * row_bytes
            if size > len(scratch):
                scratch = torch.empty(size, dtype=torch.uint8)
            data.seek(8 + length + start + first * row_bytes)
            try:
                found = data.readinto(memoryview(scratch.numpy())[:size])  # type: ignore[arg-type]
            except OSError as error:
                raise _cut_short(file, error) from error
            if found != size:
                raise _cut_short(file, "it ends within a tensor")
            return scratch[:size].view(dtype).view(last - first, *shape[1:])

        return rows

    entries = []
    for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, dtype = tuple(said["shape"]), _DTYPES.get(said["dtype"], torch.bits8)
        entries.append(Entry(file, name, shape, dtype, reader(said["data_offsets"][0], shape, dtype)))
    return Tensors(entries, data.close)


def _open_gguf(file: Path) -> Tensors:
    data = file.open("rb", buffering=0)
    try:
        return Tensors([Entry(file, *each) for each in gguf_tensors(file, data)], data.close)
    except BaseException:
        data.close()
        raise


def _open_pickle(file: Path) -> Tensors:
    try:
        with file.open("rb") as data:
            mapped = data.read(4) == b"PK\x03\x04"  # files of torch before 1.6 are no archives, and cannot be mapped
        table = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except PermissionError as error:
        raise unreadable(file) from error
    except Exception as error:  # an unpickler that reads other bytes than it should raises many kinds
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise ConfigError(
                f"{file} holds more than tensors ({code[1]}), which is never run; use safetensors weights, or save the "
                "tensors alone (torch.save(model.state_dict(), file))."
            ) from error
        raise ConfigError(
            f"{file} is cut short or no file of torch.save ({_first_sentence(error)}); download it again."
        ) from error
    if isinstance(table, dict):  # SqueezeLLM counts its sparse values beside the tensors
        table = {name: torch.tensor(value) if _is_count(value) else value for name, value in table.items()}
    if not isinstance(table, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in table.items()
    ):
        raise ConfigError(f"{file} is no table of tensors by name; save it again from model.state_dict().")
    _check_plain(file, table)

    read: list[torch.Tensor] = []  # the last one, whose pages are in memory

    def reader(tensor: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        def rows(first: int, last: int) -> torch.Tensor:
            if mapped and read:
                _let_go(read.pop())
            read.append(tensor)
            return tensor[first:last] if tensor.dim() else tensor

        return rows

    entries = [Entry(file, name, tuple(tensor.shape), tensor.dtype, reader(tensor)) for name, tensor in table.items()]

    def close() -> None:
        read.clear()
        table.clear()

    return Tensors(entries, close)


def _check_plain(file: Path, table: dict[str, torch.Tensor]) -> None:
    """Raises ConfigError for tensors that are no plain numbers, or more of them than their file holds."""
    kinds = set(_DTYPES.values())
    plain = {name for name, each in table.items() if each.layout == torch.strided and each.dtype in kinds}
    if odd := [name for name, each in table.items() if name not in plain or each.is_meta]:
        raise ConfigError(
            f"{file}: {some(odd)} hold no plain numbers (sparse, empty, complex or torch's own quantized tensors); "
            "save them as dense."
        )
    # The same few numbers over and over (a stride of 0) would become as many as the shape says.
    if odd := [name for name, each in table.items() if each.nbytes > each.untyped_storage().nbytes()]:
        raise ConfigError(f"{file}: {some(odd)} have more values than the file holds; save them with clone().")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def trim() -> None:
    """Give freed memory back to the system. glibc keeps up to 64 MB, much of what a small model needs."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _let_go(tensor: torch.Tensor) -> None:
    """Let the system take back what it has read of a mapped tensor's pages; it reads them again where need be."""
    storage, page = tensor.untyped_storage(), mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    if (length := storage.data_ptr() + storage.nbytes() - start) > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _first_sentence(error: Exception) -> str:
    kind, text = type(error).__name__, str(error).strip()
    return f"{kind}: {text.splitlines()[0].split('. ')[0]}" if text else kind
