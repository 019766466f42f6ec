"""Pooling: from the last layer's hidden states of a prompt to the vector, or the rows of vectors, that it asks for.

A prompt may come in chunks. Its row keeps what the chunks so far give: their sum (MEAN), the first token's state (CLS),
or all of them (ALL); LAST needs nothing but the end. The device pools and runs a classifier's head; the rest (cutting,
normalising, softmax) is done on the host, in float32, by whoever waits for the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.messages import Lease, SlotFailed, SlotPooled, StepResult
from ..proto.pooling import PoolingParams
from ..proto.work import Pool
from .outcome import ROOM, Outcome
from .sampling.sample_batch import Failure
from .state import PlanError, Run

if TYPE_CHECKING:
    from .models.model import Model
    from .transfer import Download

_NAN = Failure(500, "the model's hidden states of this prompt are not finite, so it cannot be pooled.", corrupted=True)
_NO_ROOM = Failure(503, "the vectors of all tokens do not fit one step's answer beside others'; try again.")


@dataclass(slots=True)
class Piece:
    """What one compute row gives in this step: the states of ``count`` tokens of the batch from ``first`` on. Its
    prompt, of ``length`` tokens so far, ends with sample slot ``slot`` (-1: not in this step)."""

    row: int
    work: Pool
    first: int
    count: int
    length: int
    slot: int


class Pooler:
    """Pools for the rows of one device."""

    def __init__(self, config: PoolerConfig, model: Model):
        self.config, self.model = config, model
        self._kept: dict[int, tuple[Pool, list[torch.Tensor]]] = {}  # by row, what earlier chunks gave

    def pieces(self, run: Run, pooled: dict[int, Pool]) -> list[Piece]:
        """What each compute row is wanted for, but for those with nothing to give yet. Raises PlanError."""
        drawing = run.sample_rows
        if (run.rows[run.sample_src] != drawing).any() or len(np.unique(drawing)) < len(drawing):
            raise PlanError("a row that is pooled has one slot, of its own last chunk")
        slots = {src: slot for slot, src in enumerate(run.sample_src.tolist())}
        for row in self._kept.keys() - pooled.keys():
            del self._kept[row]
        pieces, at = [], 0
        for index, row in enumerate(run.rows.tolist()):
            if row not in pooled:
                raise PlanError(f"row {row} was admitted to generate, and this worker pools")
            start, count, slot = int(run.starts[index]), int(run.counts[index]), slots.get(index, -1)
            first, wanted = at, count
            if (kind := _kind(pooled[row])) == "LAST":
                first, wanted = at + count - 1, int(slot >= 0)
            elif kind == "CLS":
                wanted = int(start == 0)
            if wanted or slot >= 0:
                pieces.append(Piece(row, pooled[row], first, wanted, start + count, slot))
            at += count
        return pieces

    def outcome(self, download: Download, pieces: list[Piece], hidden: torch.Tensor, slots: int) -> PooledOutcome:
        """Pool ``hidden``, the pieces' states one after another; answers for those of ``slots`` that end here."""
        at = 0
        ended: list[tuple[Piece, torch.Tensor]] = []
        for piece in pieces:
            states, at = hidden[at : at + piece.count], at + piece.count
            whole = self._gather(piece, states)
            if whole is not None:
                ended.append((piece, whole))
        vectors = torch.cat([whole for _, whole in ended]) if ended else None
        if vectors is not None and (self.config.convert == "classify" or self.config.late_interaction):
            vectors = self.model.logits(vectors.to(self.model.dtype)).float()
        sizes = [(piece, len(whole)) for piece, whole in ended]
        tokens = torch.zeros(slots, dtype=torch.int32, device=hidden.device)
        return PooledOutcome(download, tokens, vectors, sizes, self.config.activation)

    def _gather(self, piece: Piece, states: torch.Tensor) -> torch.Tensor | None:
        """All of a prompt's states that count, float32 [n, hidden], or None while there is more to come."""
        kind = _kind(piece.work)
        states = states.float().sum(0, keepdim=True) if kind == "MEAN" else states.float()
        owner, kept = self._kept.pop(piece.row, (piece.work, []))
        parts = [*(kept if owner is piece.work else []), states]  # another's, of a row that changed hands, are not it
        if piece.slot < 0:
            self._kept[piece.row] = piece.work, [*parts[:-1], states.clone()]
            return None
        whole = torch.cat(parts) if len(parts) > 1 else states
        return whole.sum(0, keepdim=True) / piece.length if kind == "MEAN" else whole


def _kind(work: Pool) -> str:
    return work.params.pooling or "ALL"


class PooledOutcome(Outcome):
    """One launched step of prompts. ``vectors`` [N, size or labels]: those of each piece that ended, in order."""

    def __init__(
        self,
        download: Download,
        tokens: torch.Tensor,
        vectors: torch.Tensor | None,
        sizes: list[tuple[Piece, int]],
        activation: str,
    ):
        super().__init__(download, tokens, beside=() if vectors is None else (vectors,))
        self._sizes, self._activation = sizes, activation

    def result(self, lease: Lease, step: int) -> StepResult:
        """Cut, normalised, activated and packed; sleeps until it is there."""
        result = StepResult(lease, step, self.arrival.wait())
        if self._sizes:
            at, room, (values,) = 0, ROOM, self.arrival.extras()
            for piece, count in self._sizes:
                params = piece.work.params
                found, at = finish(values[at : at + count], params, self._activation), at + count
                room -= found.nbytes
                if not np.isfinite(found).all():
                    result.failed.append(SlotFailed(piece.slot, *_NAN))
                elif room < 0:
                    result.failed.append(SlotFailed(piece.slot, *_NO_ROOM))
                else:
                    rows = count if params.per_token else 0
                    result.pooled.append(SlotPooled(piece.slot, rows, found.tobytes()))
        return result


def finish(values: np.ndarray, params: PoolingParams, activation: str) -> np.ndarray:
    """float32 [n, size] embeddings cut and normalised, or [n, labels] logits as probabilities, as ``params`` ask."""
    if params.embeds:
        values = values[:, : params.dimensions]
        if not params.normalize:
            return np.ascontiguousarray(values)
        return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))
    if not params.use_activation or activation == "identity":
        return values
    if activation == "sigmoid":
        return np.float32(0.5) * (np.tanh(values * np.float32(0.5)) + 1)  # which overflows nowhere
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
