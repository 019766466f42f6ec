"""What adapters (LoRA) add to a product by the native kernels: ctypes' twins of adapt.h, and the call on tensors."""

from __future__ import annotations

import functools
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, sizeof

import torch
import torch.nn.functional as F

from ....proto.config import ConfigError
from .library import BF16, F32, Library, library

PANEL = 64
"""Outputs of a panel of B: adapt.h's Q_ADAPTER_PANEL."""
TYPES = {torch.float32: F32, torch.bfloat16: BF16}


class Adapter(Structure):
    """q_adapter: one adapter's part of one product, or of a module in it. The memory is the caller's."""

    _fields_ = [("a", c_void_p), ("b", c_void_p), ("scale", c_float), ("rank", c_int32), ("type", c_int32)]


class Piece(Structure):
    """q_piece: the outputs of a product that one module has."""

    _fields_ = [("first", c_int32), ("outputs", c_int32)]


class Adapted(Structure):
    """q_adapted: a product to which adapters add."""

    _fields_ = [
        ("pieces", c_int32), ("experts", c_int32), ("inputs", c_int32), ("most_rank", c_int32), ("piece", c_void_p),
        ("adapters", c_void_p),
    ]  # fmt: skip


class Work(Structure):
    """q_adapt_work: its adapters at work on the rows of a buffer."""

    _fields_ = [
        ("of", c_void_p), ("rows", c_void_p), ("source", c_void_p), ("source_stride", c_int64), ("ids", c_void_p),
        ("out", c_void_p), ("out_stride", c_int64), ("shrunk", c_void_p), ("scale", c_float), ("source_type", c_int32),
        ("top_k", c_int32), ("dense", c_int32), ("places", c_void_p), ("experts", c_void_p),
    ]  # fmt: skip


_STRUCTS: tuple[type[Structure], ...] = (Adapter, Piece, Adapted, Work)


def native_adapters() -> bool:
    """Whether there are native kernels."""
    return library() is not None


def panels(b: torch.Tensor) -> torch.Tensor:
    """B [outputs, rank] as the kernels read it, [panels, rank, PANEL]."""
    padded = F.pad(b, (0, 0, 0, -b.shape[0] % PANEL))
    return padded.view(-1, PANEL, b.shape[1]).transpose(1, 2).contiguous()


@functools.cache
def _native() -> Library:
    found = library()
    if found is None:
        raise ConfigError("there are no native CPU kernels; install quire where a C compiler is.")
    sizes = (c_int64 * len(_STRUCTS))()
    found.c.q_adapt_sizes(sizes)
    if list(sizes) != [sizeof(struct) for struct in _STRUCTS]:
        raise ConfigError("the native CPU kernels are of another version of quire; install it again.")
    found.c.q_adapt.argtypes = (c_void_p, POINTER(Work), c_void_p, c_int32, c_int32)
    return found


def add(
    of: Adapted, slots: torch.Tensor, count: int, x: torch.Tensor, out: torch.Tensor, expert: int | None = None
) -> None:
    """Add to ``out`` float32 [T, outputs] what the adapters make of ``x`` [T, inputs], float32 or bfloat16.

    ``slots`` int32 [T]: the adapter of each row, -1: none, of ``count``. A row has the same bits whatever the others.
    ``expert``: whose adapters; None: the product has no experts. Raises ValueError where ``slots`` are of other rows.
    """
    if not len(slots) == len(x) == len(out):
        raise ValueError(f"adapters of {len(slots)} rows are to be added to {len(out)} rows of {len(x)} inputs")
    x = x if x.stride(1) == 1 else x.contiguous()
    shrunk = torch.empty(len(x) * of.pieces * of.most_rank)
    size = x.element_size()
    work = Work(
        0, None, x.data_ptr(), x.stride(0) * size, None, out.data_ptr(), out.stride(0) * 4, shrunk.data_ptr(), 1.0
    )
    if expert is not None:
        places, experts = torch.arange(len(x), dtype=torch.int32), torch.full((len(x),), expert, dtype=torch.int32)
        work.top_k, work.places, work.experts = 1, places.data_ptr(), experts.data_ptr()
    _run(work, of, slots, count, TYPES[x.dtype])


def add_rows(of: Adapted, slots: torch.Tensor, count: int, ids: torch.Tensor, out: torch.Tensor) -> None:
    """``add`` for a table of embeddings, whose rows ``ids`` int32 [T] were looked up."""
    if not len(slots) == len(ids) == len(out):
        raise ValueError(f"adapters of {len(slots)} rows are to be added to {len(out)} embeddings of {len(ids)} ids")
    shrunk = torch.empty(len(ids) * of.pieces * of.most_rank)
    work = Work(0, None, None, 0, ids.data_ptr(), out.data_ptr(), out.stride(0) * 4, shrunk.data_ptr(), 1.0)
    _run(work, of, slots, count, F32)


def _run(work: Work, of: Adapted, slots: torch.Tensor, count: int, kind: int) -> None:
    found = _native()
    work.of, work.source_type = addressof(of), kind
    if found.c.q_adapt(found.team(torch.get_num_threads()), byref(work), slots.data_ptr(), len(slots), count):
        raise MemoryError(f"no memory to sort {len(slots)} rows by their adapters")
