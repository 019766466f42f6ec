"""Proposer: what drafts tokens of rows, and what a step tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .verify import wide_run

if TYPE_CHECKING:
    from ..kv_cache import KVCache
    from ..models.model import Model
    from ..state import RowState, Run


class Proposer:
    """Drafts for rows of one ``RowState``. All calls come from the compute thread, in the order of plans.

    A draft that is wrong costs time and changes nothing: ``verify.py`` keeps a token only where it is the one that
    would have been drawn. Nothing is to be undone for what was not kept; the rows say at the next ``propose`` what was.
    """

    wants_hidden = False
    """``ran`` is given the final hidden states of all tokens."""
    lags = False
    """It computes the tokens that were drawn without it before it drafts."""

    beside: Sequence[tuple[Model, KVCache]] = ()
    """The models that it runs, each with its keys and values."""

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drafts for int64 [R] ``rows``, which have ``known`` tokens each and blocks for ``most`` (int64 [R], 0 for
        none) further ones. Asked at the beginning of a step, when the plan's changes to rows are made.

        Returns int32 [R, K], K >= 1 and no less than the most drafted, and how many of each row count, int64 [R].
        """
        raise NotImplementedError

    def draft(self, state: RowState, rows: list[int], most: list[int]) -> list[int]:
        """On a CPU: ``propose``, with the drafts written to ``state`` behind the tokens of their rows. Returns how many
        of each."""
        drafts, found = self.propose(np.array(rows), np.array(most))
        counts = [min(count, limit) for count, limit in zip(found.tolist(), most, strict=True)]
        for row, count, draft in zip(rows, counts, drafts, strict=True):
            known = state.known.item(row)
            state.tokens_host[row, known : known + count] = draft[:count]
        return counts

    def seconds(self, count: int) -> float:
        """What each of ``count`` drafts takes, where that is much; asked before the first row is admitted."""
        return 0.0

    def ran(self, run: Run, hidden: torch.Tensor | None) -> None:
        """The model has run these tokens, of prompts or drafted; which of those are kept is not known yet. ``hidden``
        [T, hidden_size], in the order of the tokens, where that is wanted, the plan is one of few rows, and drafts are
        likely to follow. Without it, this is told once of each row that goes on so, and of every step of a plan that
        drafts or has drafts follow."""

    def verified(self, rows: list[int], starts: list[int], counts: list[int], hidden: torch.Tensor | None) -> None:
        """``ran`` of a step of nothing but ``rows`` that speculate: ``counts`` tokens of each from ``starts`` on."""
        if type(self).ran is not Proposer.ran:
            self.ran(wide_run(rows, starts, counts).run, hidden)

    def kept(self, rows: list[int], tried: list[int], kept: list[int]) -> None:
        """Of ``tried`` drafted tokens of each of ``rows`` so many were right."""

    def admit(self, rows: list[int]) -> None:
        """``rows`` have new owners."""

    def given(self, rows: np.ndarray, blocks: np.ndarray) -> None:
        """The block tables of ``rows`` have ``blocks`` that were not in them, int64 [N] each."""

    def drop(self, rows: list[int]) -> None:
        """``rows`` are nobody's."""

    def fork(self, src: list[int], dst: list[int]) -> None:
        """Rows ``dst`` are what rows ``src`` were; a row may be in both."""

    def copy_blocks(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Blocks ``dst`` of the cache are what blocks ``src`` were, int64 [N] each."""
