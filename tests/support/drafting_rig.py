"""A Rig whose workers draft."""

from __future__ import annotations

from typing import TypeGuard

from scheduler_rig import Rig

from quire.proto.messages import SpeculativePlan
from quire.scheduler.draft_worth import DraftWorth
from quire.scheduler.fake.page_store import PageStore
from quire.scheduler.replica import Replica

K = 4


def verifies(plan: object) -> TypeGuard[SpeculativePlan]:
    """Whether some rows of ``plan`` speculate."""
    return isinstance(plan, SpeculativePlan) and plan.draft_rows != b""


class Drafting(Rig):
    """A rig whose workers draft. ``measured``: where that is quicker; else always."""

    def __init__(
        self, *args: object, drafts: int = K, draft_rows: int = 8, measured: bool = False, **flags: object
    ):  # fmt: skip
        self.drafting, self.measured = (drafts, draft_rows), measured
        super().__init__(*args, **{"max_num_batched_tokens": 128, **flags})  # type: ignore[arg-type]

    def add(self, number: int, blocks: int) -> Replica:
        replica = super().add(number, blocks)
        replica.drafts, replica.draft_rows = self.drafting
        replica.draft_worth = DraftWorth(replica.draft_rows, not self.measured)
        self.core.speculation.expect(replica.drafts)
        config = self.core.config
        self.stores[number] = PageStore(
            config.max_num_seqs, blocks, config.block_size, self.vocab, drafts=self.drafting[0]
        )
        return replica
