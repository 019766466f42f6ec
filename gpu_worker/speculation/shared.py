"""Speculation in the processes of one replica: the leader drafts, and tells the others what and which draws failed.

Every process verifies the same drafts and keeps the same tokens, for all of them must be in the same places when the
next plan comes. What drafts is whole on the leader; the others have nothing of it.
"""

from __future__ import annotations

import numpy as np
import torch

from ..parallel.parallel import Group
from ..sampling.sample_batch import Failure
from .proposer import Proposer
from .verify import Draws

ELSEWHERE = Failure(500, "No token can be drawn; the leader of this replica says why.")


class Absent(Proposer):
    """In the place of a proposer where another process drafts. ``wants_hidden`` must be as in that one: the exchanges
    of a step depend on which hidden states are computed."""

    def __init__(self, wants_hidden: bool) -> None:
        self.wants_hidden = wants_hidden


def share_drafts(
    group: Group, drafts: list[list[int]] | None, rows: int, most: int, device: torch.device
) -> list[list[int]]:
    """The leader's ``drafts`` of so many rows, of ``most`` tokens at most, in all processes; the others give None."""
    table = np.zeros((rows, 1 + most), np.int32)
    for line, draft in zip(table, drafts or (), strict=False):
        line[0], line[1 : 1 + len(draft)] = len(draft), draft
    told: list[list[int]] = group.share_tokens(torch.from_numpy(table).to(device)).tolist()
    return [line[1 : 1 + line[0]] for line in told]


def share_failures(group: Group, draws: Draws, slots: list[int], device: torch.device) -> None:
    """Those of ``slots`` that failed at the leader have failed in all processes."""
    mine = torch.tensor([slot in draws.failed for slot in slots], dtype=torch.int32, device=device)
    for slot, failed in zip(slots, group.share_tokens(mine).tolist(), strict=True):
        if failed:
            draws.failed.setdefault(slot, ELSEWHERE)
