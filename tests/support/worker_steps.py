"""A prompt and its decodes, asked of a real worker by hand."""

from worker_toys import GREEDY, plan

from quire.proto.codec import from_i32, i32
from quire.proto.messages import Admit, StepResult
from quire.proto.work import Generate

IDS = [7, 3, 99, 4, 5]


def steps(scheduler, peer, lease, count):
    """Prefill IDS in row 0, then decode, two plans in flight: the tokens."""
    scheduler.send(peer, plan(
        1, lease, admits=[Admit(0, 1, 0, i32(IDS), len(IDS), Generate(GREEDY, 0))],
        delta_rows=[0, 0], delta_slots=[0, 1], delta_blocks=[2, 1],
        rows=[0], starts=[0], counts=[len(IDS)], sample_src=[0], sample_rows=[0],
    ))  # fmt: skip
    tokens = []
    for step in range(2, count + 2):
        at = len(IDS) + step - 2
        scheduler.send(peer, plan(step, lease, rows=[0], starts=[at], counts=[1], sample_src=[0], sample_rows=[0]))
        result = scheduler.get(StepResult, peer)[1]
        assert result.step == step - 1 and result.lease == lease
        tokens += from_i32(result.tokens)
    scheduler.get(StepResult, peer)
    return tokens
