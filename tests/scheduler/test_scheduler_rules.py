"""Each rule of the scheduler by itself, with workers that keep pages so that tokens tell when a rule is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_rig import VOCAB, Rig

from quire.proto.codec import BadFrame, from_i32, i32, i64
from quire.proto.hashing import hash_blocks, root_of
from quire.proto.messages import (
    Child,
    Finish,
    Logprobs,
    PromptChunk,
    Reconcile,
    SlotFailed,
    StepPlan,
    StepResult,
    Stopped,
    Submit,
    Unknown,
)
from quire.proto.params import SamplingParams
from quire.proto.work import Generate
from quire.scheduler.fake.fake_model import expected_logprobs, expected_tokens, join
from quire.scheduler.logprobs import skip_logprobs


def oracle(rig: Rig, length: int, uid: int, count: int, index: int = 0) -> list[int]:
    return expected_tokens(rig.prompt(length, uid), uid + index, count, VOCAB)


def columns(plan: StepPlan) -> list[tuple[int, int, int]]:
    return list(zip(from_i32(plan.rows), from_i32(plan.starts), from_i32(plan.counts), strict=True))


# ---------------------------------------------------------------- continuous batching


def test_decodes_come_first_then_chunks_under_the_budget() -> None:
    rig = Rig()
    first = rig.submit(10, max_tokens=20)
    assert columns(rig.step()) == [(0, 0, 10)]
    second = rig.submit(50)
    assert columns(rig.step()) == [(0, 10, 1), (1, 0, 31)]
    plan = rig.step()
    assert columns(plan) == [(0, 11, 1), (1, 31, 19)]
    assert (from_i32(plan.sample_src), from_i32(plan.sample_rows)) == ([0, 1], [0, 1])
    rig.run()
    assert rig.tokens[first, 0] == oracle(rig, 10, first, 20)
    assert rig.tokens[second, 0] == oracle(rig, 50, second, 4)
    assert rig.ends[second, 0] == (Finish.LENGTH, -1)


def test_on_a_cpu_the_first_token_of_a_prompt_waits_for_few_tokens_of_others_and_none_of_half_a_prompt() -> None:
    plans = {}
    for device in ("cpu, 2 threads", "cuda:0 NVIDIA H100"):
        rig = Rig(blocks=400, max_model_len=1000, device=device, max_num_batched_tokens=700)
        rig.submit(10, max_tokens=20)
        rig.step()
        for tokens in (900, 300, 100, 90, 80):
            rig.submit(tokens)
        plans[device] = [[tokens for _, _, tokens in columns(rig.step())] for _ in range(5)]
    on_cpu, on_gpu = plans.values()
    assert on_cpu == [[1, 699], [1, 201], [1, 1, 300], [1, 1, 1, 100, 90], [1, 1, 1, 1, 1, 80]]
    assert on_gpu == [[1, 699], [1, 201, 300, 100, 90, 8], [1, 1, 1, 1, 1, 72], [1] * 6, [1] * 6]


@pytest.mark.parametrize(
    ("device", "flags", "tokens"),
    [
        ("cpu, 2 threads", {}, 896), ("cuda:0 NVIDIA H100", {}, 2048), ("", {}, 2048),
        ("cpu, 1 thread", {"max_num_seqs": 1000}, 1256), ("cuda:0", {"max_num_seqs": 2500}, 2756),
        ("cpu, 1 thread", {"max_num_batched_tokens": 700}, 700), ("cuda:0", {"max_num_batched_tokens": 700}, 700),
        ("cpu, 1 thread", {"enable_chunked_prefill": False}, 1900),
    ],
)  # fmt: skip
def test_without_a_flag_a_cpu_has_shorter_steps_and_every_sequence_a_place_in_one(
    device: str, flags: dict[str, Any], tokens: int
) -> None:
    rig = Rig(600, 2000, device=device, **{"max_num_batched_tokens": None, **flags})
    for _ in range(2):
        rig.submit(1900, max_tokens=1)
    plan = rig.plan()
    assert sum(count for _, _, count in columns(plan)) == tokens
    rig.work()
    rig.run()
    assert not rig.core.requests


def test_a_chunk_that_does_not_end_the_prompt_draws_nothing() -> None:
    rig = Rig()
    rig.submit(40)
    plan = rig.step()
    assert plan.sample_src == b""
    assert rig.tokens == {}


def test_no_chunks_when_chunked_prefill_is_off() -> None:
    rig = Rig(enable_chunked_prefill=False)
    rig.submit(20, max_tokens=30)
    rig.submit(20)
    assert columns(rig.step()) == [(0, 0, 20)]  # the second does not fit whole
    assert columns(rig.step()) == [(0, 20, 1), (1, 0, 20)]


def test_a_prompt_as_long_as_the_budget_gets_a_step_to_itself() -> None:
    rig = Rig(enable_chunked_prefill=False)
    rig.submit(5, max_tokens=60)
    rig.step()
    uids = [rig.submit(32, max_tokens=3), rig.submit(32, max_tokens=3)]
    shapes = [columns(rig.step()) for _ in range(4)]
    assert [[count for _, _, count in shape] for shape in shapes] == [[32], [1, 1], [32], [1, 1, 1]]
    rig.run()
    for uid in uids:
        assert rig.tokens[uid, 0] == oracle(rig, 32, uid, 3)


def test_a_plan_needs_no_token_of_the_one_before_and_no_third_is_made() -> None:
    rig = Rig()
    uid = rig.submit(5, max_tokens=9)
    assert columns(rig.plan()) == [(0, 0, 5)]
    assert columns(rig.plan()) == [(0, 5, 1)]
    assert rig.plan() is None
    rig.run()
    assert rig.tokens[uid, 0] == oracle(rig, 5, uid, 9)


def test_nothing_is_planned_past_the_last_token() -> None:
    rig = Rig()
    rig.submit(5, max_tokens=1)
    rig.submit(5, max_tokens=2)
    rig.plan()
    assert columns(rig.plan()) == [(1, 5, 1)]
    rig.work()
    rig.work()
    assert rig.plan() is None
    assert not rig.core.requests


def test_max_model_len_ends_a_sequence() -> None:
    rig = Rig(max_model_len=20)
    uid = rig.submit(15, max_tokens=100)
    rig.run()
    assert len(rig.tokens[uid, 0]) == 5
    assert rig.ends[uid, 0] == (Finish.LENGTH, -1)


def test_the_overrun_of_a_row_that_ended_is_dropped_and_its_row_used_again() -> None:
    rig = Rig(max_num_seqs=1)
    first_token = oracle(rig, 5, 1, 1)[0]
    uid = rig.submit(5, max_tokens=9, eos=(first_token,))
    rig.plan()
    rig.plan()  # the overrun
    rig.work()
    assert rig.ends[uid, 0] == (Finish.STOP, -1)
    other = rig.submit(6)
    plan = rig.plan()
    assert (from_i32(plan.drops), [a.row for a in plan.admits]) == ([0], [0])
    rig.run()
    assert rig.tokens[uid, 0] == [first_token]
    assert rig.tokens[other, 0] == oracle(rig, 6, other, 4)


def test_stop_ids_and_eos() -> None:
    rig = Rig()
    stream = oracle(rig, 5, 1, 6)
    uid = rig.submit(5, max_tokens=6, stop_token_ids=[stream[3]])
    rig.run()
    assert (rig.tokens[uid, 0], rig.ends[uid, 0]) == (stream[:4], (Finish.STOP, stream[3]))
    uid = rig.submit(rig.prompt(5, 1), uid=1, max_tokens=6, stop_token_ids=[stream[3]], eos=(stream[3],))
    rig.tokens.clear()
    rig.run()
    assert (rig.tokens[uid, 0], rig.ends[uid, 0]) == (stream[:4], (Finish.STOP, -1))


# ---------------------------------------------------------------- blocks


def test_a_prefix_is_found_once_its_step_has_committed() -> None:
    rig = Rig(max_num_batched_tokens=64)
    prompt = rig.prompt(24, 9)
    rig.submit(prompt, max_tokens=1)
    rig.plan()
    early = rig.submit(prompt, max_tokens=1)
    rig.plan()
    rig.work()
    rig.work()
    late = rig.submit(prompt, max_tokens=1)
    plan = rig.step()
    assert rig.started[early] == 0  # planned while the step that wrote the prefix was in flight
    assert rig.started[late] == 16  # the last token is always run
    assert columns(plan)[-1][1:] == (16, 8)
    rig.run()
    assert (rig.core.prefix_queries, rig.core.prefix_hits) == (72, 16)


@pytest.mark.parametrize("how", [{}, {"n": 2, "temperature": 1.0}, {"use_beam_search": True, "best_of": 2,
                                                                    "temperature": 0.0}])  # fmt: skip
def test_blocks_are_shared_only_under_one_cache_salt(how: dict[str, Any]) -> None:
    rig = Rig(max_num_batched_tokens=64)
    prompt, found = rig.prompt(24, 9), []
    for salt in ("", "a", "b", "a", "", "b"):
        uid = rig.submit(prompt, cache_salt=salt, **how)
        rig.run()
        found.append(rig.started[uid])
    assert found == [0, 0, 0, 16, 16, 16]


def test_a_cache_salt_holds_for_blocks_that_fill_while_decoding_and_for_resumed_requests() -> None:
    rig = Rig(max_num_batched_tokens=64)
    uid = rig.submit(5, max_tokens=30, cache_salt="a")  # shorter than a block
    rig.run()
    history = rig.prompt(5, uid) + rig.tokens[uid, 0]
    found = []
    for salt in ("", "b", "a"):
        turn = rig.submit([*history, 5, 6, 7], max_tokens=2, cache_salt=salt)
        rig.run()
        found.append(rig.started[turn])
    assert found == [0, 0, 32]
    for salt, cached in (("c", 0), ("a", 32)):  # after a loss: the prompt, and outputs that the client has
        before, children = rig.core.prefix_hits, [Child(0, i32(history[5:]))]
        rig.submit(history[:5], attempt=1, max_tokens=40, cache_salt=salt, children=children)
        rig.run()
        assert rig.core.prefix_hits - before == cached


def test_hashes_that_are_missing_are_made_with_the_salt() -> None:
    rig = Rig(max_num_batched_tokens=64)
    first = rig.submit(24, cache_salt="a")
    rig.run()
    ids, work = i32(rig.prompt(24, first)), Generate(SamplingParams(max_tokens=4), 1)
    for uid, salt, cached in ((50, "", 0), (51, "a", 16)):  # of a detokenizer that did not know the block size yet
        rig.core.submit("detok", Submit(uid, 0, ids, b"", work, float(uid), root=root_of(salt)))
        rig.run()
        assert rig.started[uid] == cached


def test_blocks_in_flight_are_not_registered() -> None:
    rig = Rig()
    rig.submit(60)
    rig.plan()
    rig.plan()
    rig.work()
    hashes = hash_blocks(i32(rig.prompt(60, 1)), 8)
    assert len(rig.replica.pool.find(hashes, 8)) == 4  # the second chunk's three are still being written
    rig.run()


def test_the_next_turn_of_a_chat_finds_generated_tokens() -> None:
    rig = Rig(max_num_batched_tokens=64)
    uid = rig.submit(21, max_tokens=30)
    rig.run()
    history = rig.prompt(21, uid) + rig.tokens[uid, 0]
    turn = rig.submit([*history, 5, 6, 7], max_tokens=2)
    rig.run()
    assert rig.started[turn] == 48
    assert rig.tokens[turn, 0] == expected_tokens([*history, 5, 6, 7], turn, 2, VOCAB)


def test_prefix_caching_off_finds_nothing() -> None:
    rig = Rig(max_num_batched_tokens=64, enable_prefix_caching=False)
    for _ in range(2):
        rig.submit(rig.prompt(24, 3), max_tokens=1)
        rig.run()
    assert rig.core.prefix_hits == 0
    assert set(rig.started.values()) == {0}


def test_a_wait_for_room_leaves_one_block_for_each_running_row() -> None:
    rig = Rig(blocks=5, max_num_batched_tokens=64)
    rig.submit(16, max_tokens=9)  # two blocks, one more to come
    rig.submit(17, max_tokens=7)  # three: they fit, but then nobody could grow
    rig.step()
    assert rig.replica.running == 1
    rig.run()
    assert rig.core.preemptions == 0


def test_who_came_last_is_preempted_and_keeps_its_place() -> None:
    rig = Rig(blocks=6, max_num_batched_tokens=64)
    uids = [rig.submit(8, max_tokens=20) for _ in range(3)]
    rig.step_until_preempted()
    assert [seq.uid for seq in rig.replica.decoding] == uids[:2]
    late = rig.submit(3, max_tokens=2)
    assert [seq.uid for seq in rig.core.queue] == [uids[2], late]
    rig.run()
    for uid in uids:
        assert rig.tokens[uid, 0] == oracle(rig, 8, uid, 20)


def test_a_prompt_under_way_is_preempted_for_an_earlier_decode_and_nobody_takes_its_room() -> None:
    rig = Rig(blocks=20, max_num_batched_tokens=8)
    first = rig.submit(8, max_tokens=40)
    rig.step()
    last = rig.submit(136, max_tokens=2)  # all that is left but one block
    small = rig.submit(3, max_tokens=2)
    plan = rig.step_until_preempted()
    assert columns(plan) == [(0, plan.step + 6, 1)]
    assert plan.admits == []
    assert [seq.uid for seq in rig.core.queue] == [last, small]
    assert rig.core.preemptions == 1
    rig.run()
    for uid, length, count in ((first, 8, 40), (last, 136, 2), (small, 3, 2)):
        assert rig.tokens[uid, 0] == oracle(rig, length, uid, count)


def test_the_lowest_priority_is_preempted_and_waits_last() -> None:
    rig = Rig(blocks=6, max_num_batched_tokens=64, scheduling_policy="priority")
    low = rig.submit(8, max_tokens=20, priority=5)
    high = [rig.submit(8, max_tokens=20), rig.submit(8, max_tokens=20, priority=-1)]
    rig.step_until_preempted()
    assert [seq.uid for seq in rig.replica.decoding] == high[::-1]
    assert [seq.uid for seq in rig.core.queue] == [low]
    rig.submit(3, uid=99, priority=4)
    assert [seq.uid for seq in rig.core.queue] == [99, low]
    rig.run()
    assert rig.tokens[low, 0] == oracle(rig, 8, low, 20)


def test_priority_means_nothing_to_fcfs() -> None:
    rig = Rig(max_num_seqs=1)
    for uid, priority in ((5, 3), (6, -3)):
        rig.submit(4, uid=uid, priority=priority)
    assert [seq.uid for seq in rig.core.queue] == [5, 6]


# ---------------------------------------------------------------- n > 1


def test_children_of_a_short_prompt_share_its_blocks_and_one_prefill() -> None:
    rig = Rig()
    uid = rig.submit(12, n=4, max_tokens=6)
    plan = rig.step()
    assert columns(plan) == [(0, 0, 12)]
    assert from_i32(plan.sample_src) == [0, 0, 0, 0]
    assert from_i32(plan.sample_rows) == [0, 1, 2, 3]
    assert rig.replica.pool.used == 2
    plan = rig.plan()
    assert len(from_i32(plan.copy_src)) == 3  # the last one left writes in place
    assert len(set(from_i32(plan.copy_src))) == 1
    assert rig.replica.pool.used == 5
    rig.run()
    for index in range(4):
        assert rig.tokens[uid, index] == oracle(rig, 12, uid, 6, index)
        assert rig.ends[uid, index] == (Finish.LENGTH, -1)


def test_children_of_a_long_prompt_are_forked_from_its_row() -> None:
    rig = Rig()
    uid = rig.submit(40, n=3, max_tokens=5)
    rig.step()
    plan = rig.step()
    assert (from_i32(plan.fork_src), from_i32(plan.fork_dst)) == ([0, 0], [1, 2])
    assert columns(plan) == [(0, 32, 8)]
    plan = rig.plan()
    assert plan.copy_src == b""  # the prompt fills its blocks: nothing to copy
    rig.run()
    for index in range(3):
        assert rig.tokens[uid, index] == oracle(rig, 40, uid, 5, index)


def test_children_beyond_the_rows_come_later_through_the_cache() -> None:
    rig = Rig(max_num_seqs=2)
    uid = rig.submit(17, n=5, max_tokens=3)
    rig.run()
    assert rig.core.prompt_tokens == 17
    assert rig.core.prefix_hits == 3 * 16
    for index in range(5):
        assert rig.tokens[uid, index] == oracle(rig, 17, uid, 3, index)


def test_each_child_has_its_own_end() -> None:
    rig = Rig()
    streams = [oracle(rig, 5, 1, 8, index) for index in range(3)]
    uid = rig.submit(5, n=3, max_tokens=8, stop_token_ids=[streams[1][2]])
    rig.step()
    rig.step()
    rig.core.stopped(Stopped(uid, 0, 2, 1))
    rig.run()
    assert rig.ends == {(uid, 0): (Finish.LENGTH, -1), (uid, 1): (Finish.STOP, streams[1][2])}
    assert rig.tokens[uid, 1] == streams[1][:3]
    assert rig.tokens[uid, 2] == streams[2][:2]


def test_a_child_that_ends_before_its_prefill_lets_its_siblings_go_on() -> None:
    rig = Rig()
    uid = rig.submit(40, n=3)
    rig.step()
    rig.core.stopped(Stopped(uid, 0, 0, 0))
    rig.core.stopped(Stopped(uid, 0, 2, 0))
    rig.core.check_integrity()
    rig.run()
    assert list(rig.tokens) == [(uid, 1)]
    assert rig.tokens[uid, 1] == oracle(rig, 40, uid, 4, 1)


# ---------------------------------------------------------------- attempts


def test_a_higher_attempt_goes_on_from_what_each_child_has() -> None:
    rig = Rig()
    streams = [oracle(rig, 10, 1, 12, index) for index in range(3)]
    uid = rig.submit(10, n=3, max_tokens=12)
    rig.step()
    rig.tokens.clear()
    children = [Child(0, i32(streams[0][:9])), Child(2, b"")]  # child 1 ended in an earlier life
    rig.submit(rig.prompt(10, 1), uid=uid, attempt=2, children=children, n=3, max_tokens=12)
    rig.run()
    assert rig.tokens == {(uid, 0): streams[0][9:], (uid, 2): streams[2]}


def test_lower_and_equal_attempts_are_ignored() -> None:
    rig = Rig()
    uid = rig.submit(10, attempt=3, max_tokens=12)
    for attempt in (2, 3):
        rig.submit(7, uid=uid, attempt=attempt)
    rig.core.abort(uid, 2)
    rig.core.stopped(Stopped(uid, 2, 0, 0))
    rig.run()
    assert rig.tokens[uid, 0] == oracle(rig, 10, uid, 12)
    assert rig.other == []


def test_a_child_that_had_ended_is_ended_before_anything_is_queued() -> None:
    rig = Rig()
    stream = oracle(rig, 10, 1, 4)
    children = [Child(0, i32(stream)), Child(1, i32([7, 8]))]
    uid = rig.submit(10, attempt=2, children=children, n=2, stop_token_ids=[8])
    rig.receive()
    assert rig.ends == {(uid, 0): (Finish.LENGTH, -1), (uid, 1): (Finish.STOP, 8)}
    assert rig.tokens == {(uid, 0): [], (uid, 1): []}
    assert not rig.core.requests


def test_abort_frees_everything_at_once() -> None:
    rig = Rig(max_num_seqs=2)
    uid = rig.submit(20, n=4, max_tokens=50)
    waiting = rig.submit(5)
    rig.step()
    rig.plan()
    rig.core.abort(uid, 1)
    rig.core.abort(waiting, 1)
    rig.core.abort(12345, 1)
    assert rig.replica.pool.used == 0
    assert not rig.core.requests
    rig.run()


def test_open_and_gone() -> None:
    rig = Rig()
    kept, dropped = rig.submit(5, attempt=2), rig.submit(5)
    rig.core.open("detok", Reconcile(i64([kept, 77]), i32([2, 1])))
    assert list(rig.core.requests) == [kept]
    assert dropped not in rig.core.requests
    rig.receive()
    assert rig.other == [Unknown(i64([77]), i32([1]))]
    rig.core.open("detok", Reconcile(i64([kept]), i32([1])))  # it believes in an attempt long replaced
    assert not rig.core.requests
    with pytest.raises(BadFrame):
        rig.core.open("detok", Reconcile(i64([1]), b""))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("length", "params", "flags", "words"),
    [
        (256, {}, {}, ["256", "maximum context length"]),
        (100, {"max_tokens": 60}, {}, ["100", "60", "20 KV", "has 16"]),
        (33, {}, {"enable_chunked_prefill": False}, ["33", "max_num_batched_tokens=32"]),
    ],
)
def test_what_no_replica_could_ever_hold_is_refused_with_the_numbers(
    length: int, params: dict, flags: dict, words: list[str]
) -> None:
    rig = Rig(blocks=16, **flags)
    rig.submit(length, **params)
    failed = rig.failed()
    assert failed.status == 400
    assert failed.param
    assert all(word in failed.message for word in words), failed.message
    assert not rig.core.requests


@pytest.mark.parametrize("prompt", [[1, VOCAB], [-1, 4], []])
def test_impossible_prompts_are_refused(prompt: list[int]) -> None:
    rig = Rig()
    rig.submit(prompt)
    assert rig.failed().status == 400


def test_a_request_waits_for_a_replica_and_is_checked_when_one_is_ready() -> None:
    rig = Rig(blocks=[])
    fits, too_long = rig.submit(10), rig.submit(30, max_tokens=100)
    rig.receive()
    assert rig.other == []
    rig.add(0, 8)
    assert rig.failed().uid == too_long
    rig.run()
    assert rig.tokens[fits, 0] == oracle(rig, 10, fits, 4)


def test_a_larger_replica_on_its_way_may_hold_it() -> None:
    rig = Rig(blocks=8)
    rig.core.expect_replica(1)
    uid = rig.submit(60, max_tokens=30)
    assert rig.plan() is None
    rig.add(1, 32)
    rig.run()
    assert rig.tokens[uid, 0] == oracle(rig, 60, uid, 30)


def test_a_full_queue_is_429_with_the_time_to_wait() -> None:
    rig = Rig(max_num_seqs=1, max_num_queued_reqs=2)
    rig.submit(5, max_tokens=3)
    rig.step()
    for _ in range(3):
        rig.submit(5, max_tokens=1)
    failed = rig.failed()
    assert (failed.status, failed.retry_after) == (429, 1.0)
    assert "limit is 2" in failed.message
    rig.now = 20.0
    rig.submit(5)
    assert rig.failed().retry_after == 20.0  # nothing has ended yet: as long again as it has been full
    rig.step()
    rig.now = 24.0
    rig.step()
    rig.step()
    rig.submit(5)
    rig.submit(5)
    assert rig.failed().retry_after == 12.0  # two places became free in 24 s
    rig.submit(5, attempt=1)  # a resubmission is never refused for load
    rig.receive()
    assert rig.other == []
    rig.run()


def test_the_queue_is_bounded_in_tokens_too() -> None:
    rig = Rig(max_num_seqs=1, max_num_queued_tokens=30)
    rig.submit(40)  # alone it may always wait
    rig.submit(1)
    assert "limit of 30" in rig.failed().message
    rig.run()


# ---------------------------------------------------------------- replicas


def test_a_dead_replicas_requests_go_on_elsewhere() -> None:
    rig = Rig(blocks=[64, 64])
    uids = [rig.submit(9, max_tokens=15) for _ in range(4)]
    for number in (0, 1, 0, 1):
        rig.step(number)
    for number in (0, 1):
        rig.plan(number)
    assert {len(r.decoding) for r in rig.core.replicas.values()} == {2}
    rig.core.end_lease(rig.core.replicas[0])
    rig.run()
    for uid in uids:
        assert rig.tokens[uid, 0] == oracle(rig, 9, uid, 15)


def test_placement_prefers_a_cached_prefix_then_the_idle() -> None:
    rig = Rig(blocks=[64, 64], max_num_batched_tokens=200)
    prompt = rig.prompt(100, 1)
    rig.submit(prompt, max_tokens=1)
    rig.step(1) or rig.step(0)
    rig.run()
    home = next(n for n, r in rig.core.replicas.items() if r.last_step)
    again = rig.submit(prompt, max_tokens=30)
    assert rig.step(1 - home) is None
    rig.step(home)
    assert rig.started[again] == 96
    third = rig.submit(rig.prompt(50, 8))
    assert rig.step(home).admits == []
    rig.step(1 - home)
    assert rig.core.replicas[1 - home].decoding[0].uid == third
    for _ in range(2):  # load tells in the end
        rig.submit(prompt, max_tokens=30)
        rig.step(home)
    moved = rig.submit(prompt[:40], max_tokens=30)
    rig.step(home)
    rig.step(1 - home)
    assert moved in {seq.uid for seq in rig.core.replicas[1 - home].decoding}
    rig.run()


def test_the_third_loss_without_progress_fails_the_request_and_only_it() -> None:
    rig = Rig()
    innocent = rig.submit(9, max_tokens=40)
    for _ in range(3):
        rig.step()
    poison = rig.submit(rig.prompt(9, 50), uid=50, max_tokens=9)
    for life in range(3):
        for _ in range(30):
            plan = rig.plan()
            if any(seq.uid == 50 for seq in rig.replica.in_flight[-1].sequences()):
                break
            rig.work()
        alone = {seq.uid for seq in rig.replica.in_flight[-1].sequences()} == {poison}
        assert alone == (life == 2)
        assert plan is not None
        rig.core.end_lease(rig.replica)
        rig.core.check_integrity()
        rig.add(0, 64)
    failed = rig.failed()
    assert (failed.uid, failed.status) == (poison, 500)
    rig.run()
    assert rig.tokens[innocent, 0] == oracle(rig, 9, innocent, 40)


def test_a_long_innocent_stream_survives_any_number_of_kills() -> None:
    rig = Rig()
    uid = rig.submit(9, max_tokens=40)
    for _ in range(10):
        for _ in range(3):
            rig.step()
        rig.plan()
        rig.core.end_lease(rig.replica)
        rig.add(0, 64)
    rig.run()
    assert rig.tokens[uid, 0] == oracle(rig, 9, uid, 40)


def test_losses_counted_by_engine_go_on_here() -> None:
    rig = Rig()
    other = rig.submit(9, max_tokens=30)
    rig.step()
    uid = rig.submit(40, attempt=3, losses=2)
    seen = []
    for _ in range(6):
        rig.step()
        seen.append({seq.uid for step in rig.replica.in_flight for seq in step.sequences()})
        seen.append({seq.uid for seq in rig.replica.quarantined})
    assert {uid} in seen
    rig.run()
    assert rig.tokens[uid, 0] == oracle(rig, 40, uid, 4)
    assert rig.tokens[other, 0] == oracle(rig, 9, other, 30)
    rig.submit(5, attempt=4, losses=3)
    assert rig.failed().status == 500


def test_a_result_that_cannot_be_right_changes_nothing() -> None:
    rig = Rig()
    uid = rig.submit(5)
    plan = rig.plan()
    for tokens, counts, step in ((b"", b"", 1), (i32([VOCAB]), b"", 1), (i32([-1]), b"", 1), (i32([1]), i32([2]), 1),
                                 (i32([1]), b"", 2), (b"123", b"", 1)):  # fmt: skip
        with pytest.raises(BadFrame):
            rig.core.commit(rig.replica, StepResult(plan.lease, step, tokens, counts))
    rig.core.check_integrity()
    rig.run()
    assert rig.tokens[uid, 0] == oracle(rig, 5, uid, 4)


# ---------------------------------------------------------------- what travels beside tokens


def test_logprobs_travel_with_their_tokens() -> None:
    rig = Rig()
    plain, asks = rig.submit(5, max_tokens=9), rig.submit(20, n=2, max_tokens=9, logprobs=3)
    rig.run()
    assert (plain, 0) not in rig.logprobs
    for index in range(2):
        tokens = oracle(rig, 20, asks, 9, index)
        assert rig.tokens[asks, index] == tokens
        expected = expected_logprobs(rig.prompt(20, asks) + tokens, 20, 3, VOCAB)
        assert join(rig.logprobs[asks, index]) == expected
    assert rig.tokens[plain, 0] == oracle(rig, 5, plain, 9)


@pytest.mark.parametrize(
    ("slots", "records"),
    [
        ([0], []), ([], [Logprobs(b"1234", b"1234", b"1234")]), ([1], [Logprobs(b"1234", b"1234", b"1234")]),
        ([-1], [Logprobs(b"1234", b"1234", b"1234")]), ([0], [Logprobs(b"1234", b"1234", b"")]),
        ([0], [Logprobs(b"", b"", b"1234")]), ([0], [Logprobs(b"1234", b"123", b"1234")]),
        ([0], [Logprobs(b"12345678", b"12345678", b"12345678")]),
        ([0], [Logprobs(b"1234", b"1234", b"1234", ["text"])]),
    ],
)  # fmt: skip
def test_logprobs_that_cannot_be_right_change_nothing(slots: list[int], records: list[Logprobs]) -> None:
    rig = Rig()
    uid = rig.submit(5, logprobs=0)
    plan = rig.plan()
    with pytest.raises(BadFrame):
        rig.core.commit(rig.replica, StepResult(plan.lease, 1, i32([1]), b"", i32(slots), records))
    rig.run()
    assert len(rig.logprobs[uid, 0]) == 4


def test_a_failed_slot_fails_its_request_alone() -> None:
    rig = Rig()
    uids = [rig.submit(5, max_tokens=9), rig.submit(9, n=3, max_tokens=9), rig.submit(7, max_tokens=9)]
    rig.step()
    rig.plan()
    rig.stores[0].failing.add(uids[1])
    rig.run()
    failed = rig.failed()
    assert (failed.uid, failed.status, failed.message) == (uids[1], 503, f"request {uids[1]} fails")
    for uid, length in ((uids[0], 5), (uids[2], 7)):
        assert rig.tokens[uid, 0] == oracle(rig, length, uid, 9)


@pytest.mark.parametrize(("status", "told"), [(200, 400), (422, 422), (1000, 599)])
def test_the_status_of_a_failed_slot_is_an_error(status: int, told: int) -> None:
    rig = Rig()
    rig.submit(5)
    plan = rig.plan()
    for slot in (1, -1):
        with pytest.raises(BadFrame):
            rig.core.commit(rig.replica, StepResult(plan.lease, 1, i32([1]), failed=[SlotFailed(slot, 500, "")]))
    rig.core.commit(rig.replica, StepResult(plan.lease, 1, i32([-5]), failed=[SlotFailed(0, status, "why")]))
    assert (rig.failed().status, rig.replica.pool.used) == (told, 0)


def test_stop_tokens_mean_nothing_before_min_tokens() -> None:
    rig = Rig()
    stream = oracle(rig, 5, 1, 8)
    uid = rig.submit(5, max_tokens=8, min_tokens=4, stop_token_ids=[stream[1], stream[5]], eos=(stream[2],))
    rig.run()
    assert (rig.tokens[uid, 0], rig.ends[uid, 0]) == (stream[:6], (Finish.STOP, stream[5]))
    rig.tokens.clear()
    children = [Child(0, i32(stream[:2]))]
    rig.submit(rig.prompt(5, 1), uid=1, attempt=1, children=children, min_tokens=4, stop_token_ids=[stream[1]])
    rig.run()
    assert (rig.tokens[1, 0], rig.ends[1, 0]) == (stream[2:4], (Finish.LENGTH, -1))


def test_suppressed_ids_and_bad_words_reach_the_row() -> None:
    rig = Rig()
    rig.submit(5, min_tokens=2, suppressed=i32([7, 9]), bad_words=[[1], [2, 3]])
    (admit,) = rig.step().admits
    assert (admit.work.suppressed_ids, admit.work.bad_words) == (i32([7, 9]), [[1], [2, 3]])
    assert admit.prompt_logprobs_from == -1
    for fields in ({"suppressed": i32([VOCAB])}, {"bad_words": [[1, VOCAB]]}, {"bad_words": [[]]},
                   {"prompt_from": 6}, {"prompt_from": -1}, {"suppressed": b"123"}):  # fmt: skip
        rig.submit(5, **fields)
        assert rig.failed().status == 400


# ---------------------------------------------------------------- prompt logprobs


def prompt_record(rig: Rig, length: int, uid: int, k: int) -> Logprobs:
    return expected_logprobs(rig.prompt(length, uid), 1, k, VOCAB)


def test_prompt_logprobs_come_in_pieces_before_the_first_token() -> None:
    rig = Rig()
    uid = rig.submit(70, prompt_logprobs=2)
    rig.run()
    pieces = rig.prompts[uid]
    assert [(p.start, p.attempt) for p in pieces] == [(1, 0), (17, 0), (33, 0), (49, 0), (65, 0)]
    assert join([p.logprobs for p in pieces]) == prompt_record(rig, 70, uid, 2)
    assert rig.tokens[uid, 0] == oracle(rig, 70, uid, 4)


def test_a_cached_prefix_is_left_out_as_far_as_its_logprobs_are_wanted() -> None:
    rig = Rig(max_num_batched_tokens=64)
    prompt = rig.prompt(40, 1)
    uid = rig.submit(prompt)
    rig.run()
    again = rig.submit(prompt, prompt_logprobs=0)
    rig.run()
    assert rig.started[again] == 0
    assert join([p.logprobs for p in rig.prompts[again]]) == prompt_record(rig, 40, uid, 0)
    rest = rig.submit(prompt, prompt_logprobs=0, prompt_from=25)  # position 24 must be run: three blocks of eight
    rig.run()
    assert rig.started[rest] == 24
    assert [p.start for p in rig.prompts[rest]] == [25]
    done = rig.submit(prompt, prompt_logprobs=0, prompt_from=40)
    rig.run()
    assert rig.started[done] == 32
    assert done not in rig.prompts


def test_the_prefix_cache_is_not_read_where_that_is_asked_for() -> None:
    rig = Rig()
    for skip in (None, True, False):
        uid = rig.submit(rig.prompt(24, 1), skip_reading_prefix_cache=skip)
        rig.run()
    assert rig.started == {1: 0, 2: 0, uid: 16}


def test_a_preempted_prompt_does_not_ask_again_and_the_first_copy_wins() -> None:
    rig = Rig(max_num_batched_tokens=16)
    uid = rig.submit(60, prompt_logprobs=1)
    rig.step()
    rig.plan()
    rig.plan()
    rig.core.preempt(rig.replica.prefilling[0])
    rig.work()  # what it had computed is as good as ever
    plan = rig.plan()
    assert [a.prompt_logprobs_from for a in plan.admits] == [33]
    rig.run()
    assert rig.started[uid] == 0
    assert [p.start for p in rig.prompts[uid]] == [1, 17, 33, 49]
    assert join([p.logprobs for p in rig.prompts[uid]]) == prompt_record(rig, 60, uid, 1)
    assert rig.tokens[uid, 0] == oracle(rig, 60, uid, 4)


def test_one_child_carries_the_prompts_logprobs_and_the_others_wait_for_it() -> None:
    rig = Rig(max_num_seqs=4)
    uid = rig.submit(40, n=3, prompt_logprobs=0, children=[Child(i, i32([9])) for i in range(3)], attempt=1)
    plan = rig.step()
    assert [(a.index, a.prompt_logprobs_from) for a in plan.admits] == [(0, 1)]
    plan = rig.step()
    plan = rig.step()
    assert [(a.index, a.prompt_logprobs_from) for a in plan.admits] == [(1, -1), (2, -1)]
    rig.run()
    assert join([p.logprobs for p in rig.prompts[uid]]) == prompt_record(rig, 40, uid, 0)
    late = rig.submit(40, n=3, prompt_logprobs=0)
    rig.step()
    rig.core.stopped(Stopped(late, 0, 0, 0))  # the one that carried them is gone: the next does
    plan = rig.step()
    assert [(a.index, a.prompt_logprobs_from) for a in plan.admits] == [(1, 33), (2, -1)]
    rig.run()
    assert join([p.logprobs for p in rig.prompts[late]]) == prompt_record(rig, 40, late, 0)


def test_prompt_logprobs_that_cannot_be_right_change_nothing() -> None:
    rig = Rig()
    uid = rig.submit(20, prompt_logprobs=0, max_tokens=1)
    rig.submit(5, max_tokens=1)
    plan = rig.plan()
    sound = rig.stores[0].run(plan)
    first, last = sound.prompts
    wrong = [
        [last, first], [first, first, last], [last],
        [PromptChunk(1, first.start, first.logprobs), last],
        [PromptChunk(0, 0, first.logprobs), last],
        [first, PromptChunk(0, last.start, first.logprobs)],
        [first, PromptChunk(0, last.start, Logprobs(b"", b"", b""))],
    ]  # fmt: skip
    for prompts in wrong:
        with pytest.raises(BadFrame):
            rig.core.commit(rig.replica, StepResult(plan.lease, 1, sound.tokens, prompts=prompts))
    rig.plans[0].clear()
    rig.core.commit(rig.replica, sound)
    rig.run()
    assert join([p.logprobs for p in rig.prompts[uid]]) == prompt_record(rig, 20, uid, 0)


def test_a_piece_that_is_known_in_part_is_cut() -> None:
    rig = Rig()
    rig.submit(30, prompt_logprobs=1)
    whole = prompt_record(rig, 30, 1, 1)
    assert skip_logprobs(whole, 0) == whole
    assert skip_logprobs(whole, 11) == expected_logprobs(rig.prompt(30, 1), 12, 1, VOCAB)
    assert skip_logprobs(whole, 29) == Logprobs(b"", b"", b"")


@pytest.mark.parametrize("say_why", [True, False])
def test_a_prompt_whose_logprobs_do_not_come_fails_in_the_end(say_why: bool) -> None:
    """A worker that cannot send them says so when the row first draws."""
    rig = Rig()
    uid, plain = rig.submit(70, n=2, prompt_logprobs=0), rig.submit(5)
    for piece in ([0], [0, 1], []):
        result = rig.stores[0].run(rig.plan())
        rig.plans[0].clear()
        result.prompts = result.prompts[: len(piece)]
        if say_why and not piece:
            result.failed = [SlotFailed(0, 400, "too many")]
        rig.core.commit(rig.replica, result)
    failed = rig.failed()
    assert (failed.uid, failed.status) == (uid, 400 if say_why else 500)
    assert (uid, 0) not in rig.tokens
    rig.run()
    assert rig.tokens[plain, 0] == oracle(rig, 5, plain, 4)


def test_stats_count() -> None:
    rig = Rig(max_num_seqs=2)
    for _ in range(3):
        rig.submit(10, max_tokens=6)
    rig.step()
    rig.step()
    stats = rig.core.stats(5, bad_frames=2)
    assert (stats.token, stats.running, stats.waiting, stats.blocks, stats.blocks_used) == (5, 2, 1, 64, 4)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps, stats.bad_frames) == (20, 4, 2, 2)
    assert stats.replicas[0].running == 2
    rig.run()
    assert rig.core.stats().generation_tokens == 18
