"""FlashAttention for prefills, on cards it is made for: ``--attention-backend flash``.

Two libraries of Dao-AILab's flash-attention compute attention of rows of any length over keys and values in pages of
any size, and either serves: FlashAttention 3 (module ``flash_attn_interface``; Hopper alone; built from source, or
from PyTorch's own index of wheels), whose entry for that is ``flash_attn_with_kvcache``, and FlashAttention 4
(package ``flash-attn-4``, which ``quire[flash]`` installs; Hopper and Blackwell), whose entry is
``flash_attn_varlen_func`` with a ``page_table``. FlashAttention 2 takes pages of 256 tokens alone.

Their window (left, right) is how many keys before and behind a query are seen beside its own position's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from ...proto.config import ConfigError
from ..batch import StepBatch
from .card import Card
from .scores import Scores

log = logging.getLogger(__name__)

REMEDY = "pip install 'quire[flash]'"
TILE_ROWS = 128
"""Rows (tokens x query heads that share a key head) up to which FlashAttention 4 compiles a kernel of one stage of
queries for compute capability 10.x, and one of two stages above (``q_stage`` in flash_attn/cute/interface.py)."""


@dataclass(frozen=True, slots=True)
class Library:
    """One of the libraries: where its entry is, and which cards and scores it is made for."""

    name: str
    module: str
    entry: str
    majors: Mapping[int, int]  # major compute capabilities, and the dims of the largest head it takes there
    softcap: bool


LIBRARIES = (
    Library("FlashAttention 3", "flash_attn_interface", "flash_attn_with_kvcache", {9: 256}, True),
    Library("FlashAttention 4", "flash_attn.cute", "flash_attn_varlen_func", {9: 256, 10: 128}, False),
)
"""The first that is installed and made for the card is taken. FlashAttention 4 has a kernel for heads of 256 dims on
10.x too, but for pages of 128 tokens alone."""


@dataclass(slots=True)
class Flash:
    """A library that is there, and made for this card."""

    library: Library
    call: Callable[..., Any]
    largest_head: int  # dims
    warm: bool = False  # the warm-up is over: what fails from now on is no matter of what was installed
    _told: set[str] = field(default_factory=set)

    def takes(self, q: torch.Tensor, scores: Scores) -> bool:
        """Whether it computes attention of q [T, heads, head_dim] with these scores. Logs once for each reason why
        Triton's kernel does it instead."""
        lacks = {
            "ALiBi slopes": scores.slopes is not None,
            "attention sinks": scores.sinks is not None,
            "a soft cap": scores.softcap > 0 and not self.library.softcap,
            f"{q.dtype}": q.dtype.itemsize != 2,
            f"heads of {q.shape[2]} dims": q.shape[2] > self.largest_head or q.shape[2] % 8 != 0,
        }
        why = next((what for what, lacking in lacks.items() if lacking), None)
        if why is not None and why not in self._told:
            self._told.add(why)
            log.info("layers with %s are not for %s: Triton's kernel computes their prefills", why, self.library.name)
        return why is None

    def failure(self, error: Exception) -> Exception:
        """What an ``error`` of the library is to the worker: a ConfigError before it serves, unless memory ran out."""
        if self.warm or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return error
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")
        return ConfigError(
            f"attention_backend=flash: {self.library.name} fails on this card ({said}); use --attention-backend=triton."
        )


_flash: Flash | None = None


def use_flash(flash: Flash | None) -> None:
    """What all prefills of this process, which serves one model, go through where it takes their kind of scores."""
    global _flash
    _flash = flash


def flash_in_use() -> Flash | None:
    """The same; None: Triton's kernel serves all."""
    return _flash


def flash_variant(query_len: int, group: int) -> Hashable:
    """What the library compiles a kernel for in a step whose longest row has ``query_len`` tokens, beside what the
    model says; ``group`` query heads share a key head."""
    return "flash", query_len * group > TILE_ROWS


class FlashPrefill:
    """The rows of ``batch`` behind its decodes, for every layer of one step."""

    def __init__(self, flash: Flash, batch: StepBatch) -> None:
        self.flash, self.first = flash, batch.num_decodes
        # A decode is one token, so the others start at token ``first``.
        starts = batch.query_starts[self.first :] - self.first if self.first else batch.query_starts
        self.shared: dict[str, Any] = {
            "cu_seqlens_q": starts, "page_table": batch.block_tables[self.first :],
            "max_seqlen_q": batch.max_query_len, "causal": True,
        }  # fmt: skip
        lengths = batch.context_lens[self.first :]
        if flash.library.entry == "flash_attn_with_kvcache":
            self.shared["cache_seqlens"] = lengths
        else:
            self.shared |= {"seqused_k": lengths, "max_seqlen_k": batch.max_context_len}

    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, scores: Scores
    ) -> None:
        """Attention of one layer, into the rows' part of ``out``. Raises ConfigError where the library fails before
        the worker serves: the warm-up tries all that it compiles."""
        window = (-1, -1) if scores.window is None else (scores.window - 1, 0)
        try:
            got = self.flash.call(
                q[self.first :], k_cache, v_cache, softmax_scale=scores.scale, window_size=window,
                softcap=scores.softcap, **self.shared,
            )  # fmt: skip
        except Exception as error:
            if (failure := self.flash.failure(error)) is error:
                raise
            raise failure from error
        out[self.first :] = got[0] if isinstance(got, tuple) else got


def choose_flash(backend: str, card: Card) -> Flash | None:
    """The library for ``--attention-backend``: None with ``auto`` and ``triton``.

    ``auto`` stays with Triton's kernel, which serves every model on every card, until the libraries have been measured
    beside it.

    Raises:
        ConfigError: ``flash`` on a card that no library is made for, or without a library.
    """
    if backend != "flash":
        return None
    major = int(card.arch) // 10 if card.backend == "cuda" else 0
    made = [library for library in LIBRARIES if major in library.majors]
    if not made:
        raise ConfigError(
            f"attention_backend=flash: FlashAttention for a paged cache is made for Hopper and B200 (compute "
            f"capability 9.0 and 10.0), and this is {card.name if card.backend else 'a CPU'}; use "
            "--attention-backend=triton."
        )
    for library in made:
        try:
            return Flash(library, getattr(import_module(library.module), library.entry), library.majors[major])
        except (ImportError, AttributeError) as error:
            log.debug("%s: %s", library.name, error)
    raise ConfigError(f"attention_backend=flash: FlashAttention is not installed; {REMEDY}, or use triton.")
