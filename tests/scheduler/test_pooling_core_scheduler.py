"""Pooling requests in the scheduler: chunks, the prefix cache, losses, whole prompts, refusals."""

import pytest
from pooling_rig import PoolRig
from scheduler_rig import VOCAB, Rig

from quire.proto.codec import BadFrame, from_i32, i32
from quire.proto.messages import Failed, Lease, SlotPooled, StepResult
from quire.scheduler.fake.page_store import PageStore
from quire.scheduler.replica import Replica


def test_a_prompt_is_pooled_in_chunks_beside_others():
    rig = PoolRig()  # 32 tokens a step
    uids = [rig.pool(n) for n in (1, 7, 100, 32, 33, 16)]
    rig.run()
    assert sorted(rig.answers()) == uids
    stats = rig.core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (189, 0)


def test_rows_of_every_token():
    rig = PoolRig()
    uid = rig.pool(70, pooling="ALL", task="token_embed")
    rig.run()
    assert rig.answers()[uid].rows == 70


@pytest.mark.parametrize(("pooling", "cached"), [("LAST", 40), ("MEAN", 0), ("CLS", 0)])
def test_only_what_needs_the_last_token_alone_reads_the_prefix_cache(pooling, cached):
    rig = PoolRig()
    prompt = list(range(1, 46))
    rig.pool(prompt)
    rig.run()
    uid = rig.pool(prompt, pooling=pooling)
    rig.run()
    assert rig.started[uid] == cached
    assert len(rig.answers()) == 2


def test_the_prefix_cache_can_be_left_alone():
    rig = PoolRig()
    prompt = list(range(1, 46))
    rig.pool(prompt)
    rig.run()
    uid = rig.pool(prompt, skip_reading_prefix_cache=True)
    rig.run()
    assert rig.started[uid] == 0


def test_whole_prompts_are_neither_split_nor_cached():
    rig = PoolRig(whole=True)
    prompt = list(range(1, 31))
    uids = [rig.pool(prompt, pooling="CLS") for _ in range(5)] + [rig.pool(n) for n in (3, 30, 2, 32, 1)]
    rig.run()  # the store refuses a piece
    assert sorted(rig.answers()) == uids
    assert set(rig.started.values()) == {0}
    rig.pool(33)
    failed = rig.failed()
    assert failed.status == 400
    assert "33 tokens and a step runs at most max_num_batched_tokens=32 and runs a prompt whole" in failed.message


@pytest.mark.parametrize("whole", [True, False])
def test_without_a_flag_a_cpu_pools_in_steps_as_long_as_any_device(whole: bool):
    rig = PoolRig(600, 2048, device="cpu, 2 threads", whole=whole, max_num_batched_tokens=None)
    uids = [rig.pool(2048), rig.pool(2000)]
    plan = rig.plan()
    assert sum(from_i32(plan.counts)) == 2048
    rig.work()
    rig.run()
    assert sorted(rig.answers()) == uids


def test_a_prompt_may_fill_the_context():
    rig = PoolRig(max_model_len=64)
    uid = rig.pool(64)
    rig.run()
    assert uid in rig.answers()
    rig.pool(65)
    assert rig.failed().message.startswith("This model's maximum context length is 64 tokens. However, your prompt")


def test_a_lost_worker_loses_no_answer():
    rig = PoolRig(blocks=[64, 64])
    uids = [rig.pool(90, pooling="MEAN") for _ in range(6)]
    for number in (0, 1):
        rig.plan(number)
    rig.work(0)
    rig.core.end_lease(rig.core.replicas[0])
    rig.plans.pop(0), rig.stores.pop(0)
    rig.run()
    assert sorted(rig.answers()) == uids


def test_a_request_that_kills_workers_is_given_up():
    rig = PoolRig()
    uid = rig.pool(20)
    for _ in range(3):
        assert rig.plan() is not None
        rig.core.end_lease(rig.replica)
        rig.add(0, 64)
    failed = rig.failed()
    assert (failed.uid, failed.status) == (uid, 500)


def test_preemption_priority_and_aborts_hold_for_prompts_too():
    rig = PoolRig(scheduling_policy="priority")
    first, second = rig.pool(100), rig.pool(100)
    rig.plan()
    rig.core.abort(first, 0)
    rig.work()
    rig.run()
    assert sorted(rig.answers()) == [second]


def test_each_kind_of_request_needs_its_kind_of_worker():
    rig = PoolRig()
    rig.submit(5)
    failed = rig.failed()
    assert (failed.status, failed.message.split(":")[0]) == (400, "The workers here pool and do not generate")
    rig = Rig()
    PoolRig.pool(rig, 5)
    assert "generate and do not pool" in rig.failed().message


def test_both_kinds_side_by_side():
    rig = PoolRig(blocks=[64])
    config = rig.core.config
    rig.plans[1] = type(rig.plans[0])()
    rig.stores[1] = PageStore(config.max_num_seqs, 64, config.block_size, VOCAB)
    rig.core.add_replica(Replica(1, Lease(1, 1, 9), "w1", config.max_num_seqs, 64, config.block_size, 256, VOCAB))
    uid, other = rig.submit(20), rig.pool(20)
    rig.run()
    assert len(rig.tokens[uid, 0]) == 4
    assert list(rig.answers()) == [other]


@pytest.mark.parametrize(
    "pooled",
    [[], [SlotPooled(0, 0, b"")], [SlotPooled(0, 0, b"123")], [SlotPooled(0, 3, bytes(12))],
     [SlotPooled(1, 0, bytes(8))], [SlotPooled(0, 0, bytes(8))] * 2],
)  # fmt: skip
def test_a_result_without_its_vectors_ends_the_lease(pooled):
    rig = PoolRig()
    rig.pool(4)
    plan = rig.plan()
    with pytest.raises(BadFrame):
        rig.core.commit(rig.replica, StepResult(plan.lease, plan.step, i32([0]), pooled=pooled))
    rig.work()
    assert not [m for m in rig.other if isinstance(m, Failed)]


def test_a_failed_slot_fails_its_request_alone():
    rig = PoolRig()
    bad, good = rig.pool(4), rig.pool(4)
    rig.stores[0].failing.add(bad)
    rig.run()
    assert list(rig.answers()) == [good]
    assert rig.failed().uid == bad
