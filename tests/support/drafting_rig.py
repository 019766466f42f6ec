"""A Rig whose workers draft."""

from __future__ import annotations

from scheduler_rig import Rig

from quire.scheduler.fake.page_store import PageStore
from quire.scheduler.replica import Replica

K = 4


class Drafting(Rig):
    """A rig whose workers draft."""

    def __init__(self, *args: object, drafts: int = K, draft_rows: int = 8, **flags: object):
        self.drafting = drafts, draft_rows
        super().__init__(*args, **{"max_num_batched_tokens": 128, **flags})  # type: ignore[arg-type]

    def add(self, number: int, blocks: int) -> Replica:
        replica = super().add(number, blocks)
        replica.drafts, replica.draft_rows = self.drafting
        self.core.speculation.expect(replica.drafts)
        config = self.core.config
        self.stores[number] = PageStore(
            config.max_num_seqs, blocks, config.block_size, self.vocab, drafts=self.drafting[0]
        )
        return replica
