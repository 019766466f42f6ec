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
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from ...proto.config import ConfigError
from ..batch import StepBatch
from .card import Card
from .scores import Scores

log = logging.getLogger(__name__)

LARGEST_HEAD = 256
REMEDY = "pip install 'quire[flash]'"


@dataclass(frozen=True, slots=True)
class Library:
    """One of the libraries: where its entry is, and which cards and scores it is made for."""

    name: str
    module: str
    entry: str
    majors: tuple[int, ...]  # compute capabilities
    softcap: bool


LIBRARIES = (
    Library("FlashAttention 3", "flash_attn_interface", "flash_attn_with_kvcache", (9,), True),
    Library("FlashAttention 4", "flash_attn.cute", "flash_attn_varlen_func", (9, 10), False),
)
"""The first that is installed and made for the card is taken."""


@dataclass(slots=True)
class Flash:
    """A library that is there, and made for this card."""

    library: Library
    call: Callable[..., Any]
    _told: set[str] = field(default_factory=set)

    def takes(self, q: torch.Tensor, scores: Scores) -> bool:
        """Whether it computes attention of q [T, heads, head_dim] with these scores. Logs once for each reason why
        Triton's kernel does it instead."""
        lacks = {
            "ALiBi slopes": scores.slopes is not None,
            "attention sinks": scores.sinks is not None,
            "a soft cap": scores.softcap > 0 and not self.library.softcap,
            f"{q.dtype}": q.dtype.itemsize != 2,
            f"heads of {q.shape[2]} dims": q.shape[2] > LARGEST_HEAD or q.shape[2] % 8 != 0,
        }
        why = next((what for what, lacking in lacks.items() if lacking), None)
        if why is not None and why not in self._told:
            self._told.add(why)
            log.info("layers with %s are not for %s: Triton's kernel computes their prefills", why, self.library.name)
        return why is None


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
        """Attention of one layer, into the rows' part of ``out``."""
        window = (-1, -1) if scores.window is None else (scores.window - 1, 0)
        got = self.flash.call(
            q[self.first :], k_cache, v_cache, softmax_scale=scores.scale, window_size=window, softcap=scores.softcap,
            **self.shared,
        )  # fmt: skip
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
    made = [library for library in LIBRARIES if card.backend == "cuda" and int(card.arch) // 10 in library.majors]
    if not made:
        raise ConfigError(
            f"attention_backend=flash: FlashAttention for a paged cache is made for Hopper and B200 (compute "
            f"capability 9.0 and 10.0), and this is {card.name if card.backend else 'a CPU'}; use "
            "--attention-backend=triton."
        )
    for library in made:
        try:
            return Flash(library, getattr(import_module(library.module), library.entry))
        except (ImportError, AttributeError) as error:
            log.debug("%s: %s", library.name, error)
    raise ConfigError(f"attention_backend=flash: FlashAttention is not installed; {REMEDY}, or use triton.")
