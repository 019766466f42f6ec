"""Proposer: what drafts tokens of rows, and what a step tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ..state import Run


class Proposer:
    """Drafts for rows of one ``RowState``. All calls come from the compute thread, in the order of plans.

    A draft that is wrong costs time and changes nothing: ``verify.py`` keeps a token only where it is the one that
    would have been drawn. Nothing is to be undone for what was not kept; the rows say at the next ``propose`` what was.
    """

    wants_hidden = False
    """``ran`` is given the final hidden states of all tokens."""

    def propose(self, rows: np.ndarray, most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drafts for int64 [R] ``rows``, which have ``known`` tokens each and blocks for ``most`` (int64 [R], 0 for
        none) further ones. Asked at the beginning of a step, when the plan's changes to rows are made.

        Returns int32 [R, K], K >= 1 and no less than the most drafted, and how many of each row count, int64 [R].
        """
        raise NotImplementedError

    def ran(self, run: Run, hidden: torch.Tensor | None) -> None:
        """The model has run these tokens, of prompts or drafted; which of those are kept is not known yet. ``hidden``
        [T, hidden_size], in the order of the tokens, where that is wanted."""

    def kept(self, rows: list[int], tried: list[int], kept: list[int]) -> None:
        """Of ``tried`` drafted tokens of each of ``rows`` so many were right."""

    def admit(self, row: int) -> None:
        """``row`` has a new owner."""

    def drop(self, rows: list[int]) -> None:
        """``rows`` are nobody's."""

    def fork(self, src: list[int], dst: list[int]) -> None:
        """Rows ``dst`` are what rows ``src`` were; a row may be in both."""

    def copy_blocks(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Blocks ``dst`` of the cache are what blocks ``src`` were, int64 [N] each."""

    def reset(self) -> None:
        """All rows are nobody's."""
