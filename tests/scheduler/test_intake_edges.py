"""What a submission may hold: the last value that is taken, and the first that is not."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from adapter_rig import AdapterRig, adapter
from scheduler_rig import VOCAB, Rig

from quire.proto.codec import i32, i64
from quire.proto.hashing import hash_blocks, root_of
from quire.proto.messages import Child, Failed, Lease, Reconcile, Submit, Unknown
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.thinking import Thinking
from quire.proto.work import Generate, Pool, ThinkingGenerate
from quire.scheduler.redact import is_sound
from quire.scheduler.replica import Replica

PROMPT = i32(range(20))


def submission(**fields: Any) -> Submit:
    """A sound one of 20 prompt tokens, with some fields changed; ``params`` and the rest of Generate's go there."""
    sampling = {"max_tokens": 4, **fields.pop("params", {})}
    work = Generate(SamplingParams(**sampling), 7, **{name: fields.pop(name) for name in WORK if name in fields})
    sound: dict[str, Any] = {
        "uid": 1, "attempt": 0, "ids": PROMPT, "hashes": b"", "work": work, "arrival": 1.0, "root": root_of(""),
    }  # fmt: skip
    return Submit(**{**sound, **fields})


WORK = ("eos", "suppressed_ids", "bad_words")


def answer(rig: Rig, message: Submit) -> Failed | None:
    """None where it is taken in."""
    before = rig.core.bad_messages
    rig.core.submit("detok", message)
    failed = [told for _, told in rig.core.outbox.take() if isinstance(told, Failed)]
    assert bool(failed) == (message.uid not in rig.core.requests)
    if not failed:
        return None
    assert (failed[0].uid, failed[0].attempt) == (message.uid, message.attempt)
    senseless = failed[0].message.startswith("The request does not make sense: ")
    assert rig.core.bad_messages - before == senseless
    return failed[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"uid": 0}, {"uid": -(2**63)}, {"uid": 2**63 - 1}, {"attempt": 2**31 - 1}, {"arrival": -1e300},
        {"ids": i32([0])}, {"ids": i32([VOCAB - 1])}, {"prompt_logprobs_from": 20}, {"prompt_logprobs_from": 0},
        {"suppressed_ids": i32([0, VOCAB - 1])}, {"bad_words": [[0], [VOCAB - 1, 5]]}, {"losses": 2},
        {"children": [Child(0, b"")]}, {"children": [Child(1, i32([VOCAB - 1])), Child(0, b"")], "params": {"n": 2}},
        {"hashes": b"".join(hash_blocks(PROMPT, 8, root_of("")))}, {"ids": i32(range(7)), "hashes": b""},
    ],
)  # fmt: skip
def test_the_last_that_is_taken(fields: dict[str, Any]) -> None:
    rig = Rig()
    assert answer(rig, submission(**fields)) is None
    rig.core.check_integrity()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"uid": 2**63}, "out of range"), ({"uid": -(2**63) - 1}, "out of range"), ({"attempt": -1}, "out of range"),
        ({"attempt": 2**31}, "out of range"), ({"arrival": math.inf}, "arrival is inf"),
        ({"arrival": math.nan}, "arrival is nan"), ({"root": bytes(15)}, "15 bytes"), ({"root": bytes(17)}, "17 bytes"),
        ({"prompt_logprobs_from": 21}, "21 of 20"), ({"prompt_logprobs_from": -1}, "-1 of 20"),
        ({"hashes": bytes(16)}, "16 bytes of hashes"), ({"hashes": bytes(48)}, "48 bytes of hashes"),
        ({"params": {"max_tokens": None}}, "max_tokens is not resolved"), ({"bad_words": [[1], []]}, "without tokens"),
        ({"children": [Child(1, b"")]}, "child 1 of n=1"), ({"children": [Child(-1, b"")]}, "child -1 of n=1"),
        ({"children": [Child(0, b""), Child(0, b"")]}, "named twice"), ({"ids": b"12345"}, ""),
        ({"children": [Child(0, b"123")]}, ""),
    ],
)  # fmt: skip
def test_what_makes_no_sense(fields: dict[str, Any], why: str) -> None:
    failed = answer(Rig(), submission(**fields))
    assert failed is not None and failed.status == 400
    assert failed.message.startswith("The request does not make sense: ") and why in failed.message


@pytest.mark.parametrize(
    ("fields", "param", "token"),
    [
        ({"ids": i32([1, VOCAB])}, "prompt", VOCAB), ({"ids": i32([-1, VOCAB])}, "prompt", -1),
        ({"suppressed_ids": i32([VOCAB])}, "min_tokens", VOCAB), ({"bad_words": [[1], [2, VOCAB]]}, "bad_words", VOCAB),
        ({"bad_words": [[-1]]}, "bad_words", -1), ({"children": [Child(0, i32([VOCAB]))]}, "resume", VOCAB),
    ],
)  # fmt: skip
def test_a_token_that_the_model_has_not_is_named(fields: dict[str, Any], param: str, token: int) -> None:
    failed = answer(Rig(), submission(**fields))
    assert failed is not None and (failed.status, failed.param) == (400, param)
    assert failed.message == f"Token id {token} is out of vocabulary, which has {VOCAB} tokens."


def budgeted(end: list[int], starts: list[str], ends: list[str]) -> Submit:
    thinking = Thinking(5, end, starts, ends, False)
    return submission(work=ThinkingGenerate(SamplingParams(max_tokens=4), 7, thinking=thinking))


def test_a_budget_of_thoughts_has_marks_that_the_model_can_write() -> None:
    """What a worker would stumble over is refused here, and not kept by the flight recorder as sound."""
    sound = budgeted([VOCAB - 1], ["<"], [">"])
    assert answer(Rig(), sound) is None and is_sound(sound, VOCAB)
    for bad in (budgeted([], ["<"], [">"]), budgeted([1], [], [">"]), budgeted([1], ["<"], [""])):
        failed = answer(Rig(), bad)
        assert failed is not None and "without marks" in failed.message and not is_sound(bad, VOCAB)
    unknown = budgeted([VOCAB], ["<"], [">"])
    failed = answer(Rig(), unknown)
    assert failed is not None and failed.param == "thinking_token_budget" and not is_sound(unknown, VOCAB)


def test_before_any_worker_has_told_every_token_may_be_one() -> None:
    rig = Rig(blocks=[])
    assert answer(rig, submission(ids=i32([2**31 - 1]))) is None
    failed = answer(rig, submission(uid=2, ids=i32([-1])))
    assert failed is not None and failed.message == "Token id -1 is out of vocabulary."


def test_an_empty_prompt_and_one_that_was_lost_too_often() -> None:
    failed = answer(Rig(), submission(ids=b""))
    assert failed is not None and (failed.status, failed.param) == (400, "prompt")
    failed = answer(Rig(), submission(losses=3))
    assert failed is not None and (failed.status, failed.param) == (500, None)
    assert "3" in failed.message


@pytest.mark.parametrize(("start", "sound"), [(-2, False), (-1, True), (0, True), (20, True), (21, False)])
def test_where_the_second_text_of_a_pair_may_begin(start: int, sound: bool) -> None:
    rig = Rig(blocks=[])
    message = submission()
    message.work = Pool(PoolingParams(pooling="CLS"), token_type_start=start)
    assert (answer(rig, message) is None) == sound


@pytest.mark.parametrize("fields", [{"pooling": None}, {"children": [Child(0, b"")]}])
def test_a_pooling_request_is_resolved_and_has_no_children(fields: dict[str, Any]) -> None:
    message = submission(children=fields.get("children", []))
    message.work = Pool(PoolingParams(pooling=fields.get("pooling", "CLS")))
    failed = answer(Rig(blocks=[]), message)
    assert failed is not None and "a pooling request is not resolved, or has children" in failed.message


def test_an_attempt_replaces_a_lower_one_and_no_other() -> None:
    rig = Rig()
    assert answer(rig, submission(attempt=3)) is None
    for attempt in (2, 3):
        rig.core.submit("another", submission(attempt=attempt))
        assert (rig.core.requests[1].owner, rig.core.requests[1].attempt) == ("detok", 3)
    rig.core.submit("another", submission(attempt=4))
    assert (rig.core.requests[1].owner, rig.core.requests[1].attempt) == ("another", 4)
    assert len(rig.core.queue) == 1


def test_children_are_put_in_their_order_and_each_goes_on_from_what_it_has() -> None:
    rig = Rig()
    children = [Child(2, i32([5, 6])), Child(0, b""), Child(1, i32([9]))]
    assert answer(rig, submission(attempt=1, children=children, params={"n": 3, "max_tokens": 9})) is None
    live = rig.core.requests[1].live
    assert [(seq.index, seq.outputs.tolist()) for seq in live] == [(0, []), (1, [9]), (2, [5, 6])]
    assert len(rig.core.queue) == 3  # those with outputs need a prefill of their own: they wait for nobody's
    rig.run()


def test_children_that_had_ended_end_as_they_had() -> None:
    """By a stop id where it is the last token that it may have too, and not before ``min_tokens``."""
    rig = Rig()
    children = [Child(0, i32([1, 2, 3, 8])), Child(1, i32([8, 1, 2, 3])), Child(2, i32([8])), Child(3, i32([1, 9]))]
    params = {"n": 4, "max_tokens": 4, "min_tokens": 2, "stop_token_ids": [8]}
    assert answer(rig, submission(attempt=1, children=children, params=params, eos=[9])) is None
    assert [(seq.index, seq.generation) for seq in rig.core.requests[1].live] == [(2, 0)]


def test_before_any_worker_is_there_a_child_has_ended_where_it_may_have_no_more() -> None:
    rig = Rig(blocks=[])
    children = [Child(0, i32([1, 2, 3])), Child(1, i32([1, 2, 3, 4]))]
    assert answer(rig, submission(attempt=1, children=children, params={"n": 2, "max_tokens": 4})) is None
    assert [seq.index for seq in rig.core.requests[1].live] == [0]


# ---------------------------------------------------------------- what the workers can hold


@pytest.mark.parametrize(("width", "sound"), [(8, True), (9, False)])
def test_a_search_as_wide_as_a_step(width: int, sound: bool) -> None:
    rig = Rig()
    params = {"n": 1, "best_of": width, "use_beam_search": True, "temperature": 0.0}
    failed = answer(rig, submission(params=params))
    assert (failed is None) == sound
    if failed is not None:
        assert (failed.status, failed.param) == (400, "best_of")
        assert "width 9" in failed.message and "max_num_seqs is 8" in failed.message


@pytest.mark.parametrize(("length", "sound"), [(63, True), (64, False)])
def test_a_prompt_leaves_room_for_one_token(length: int, sound: bool) -> None:
    failed = answer(Rig(max_model_len=64), submission(ids=i32(range(length))))
    assert (failed is None) == sound
    if failed is not None:
        assert (failed.status, failed.param) == (400, "prompt")
        assert "which leaves no room for output" in failed.message


@pytest.mark.parametrize(("length", "chunked", "sound"), [(32, False, True), (33, False, False), (33, True, True)])
def test_a_prompt_that_may_not_be_split_is_no_longer_than_a_step(length: int, chunked: bool, sound: bool) -> None:
    failed = answer(Rig(enable_chunked_prefill=chunked), submission(ids=i32(range(length))))
    assert (failed is None) == sound
    if failed is not None:
        assert (failed.status, failed.param) == (400, "prompt") and "with chunked prefill off" in failed.message


@pytest.mark.parametrize(("max_tokens", "sound"), [(13, True), (14, False)])
def test_the_largest_worker_holds_all_but_the_last_token(max_tokens: int, sound: bool) -> None:
    """The last is drawn and never computed: 20 of the prompt and 12 more fill 4 blocks of 8."""
    rig = Rig(blocks=[3, 4])
    failed = answer(rig, submission(params={"max_tokens": max_tokens}))
    assert (failed is None) == sound
    if failed is not None:
        assert (failed.status, failed.param) == (400, "max_tokens")
        assert "20 prompt tokens and up to 14 output tokens need 5 KV blocks of 8 tokens" in failed.message
        assert "the largest replica has 4" in failed.message


def test_what_the_shortest_worker_takes_is_what_any_may_get() -> None:
    rig = Rig(blocks=[])
    for number, (length, vocab) in enumerate([(100, 90), (64, 500), (80, 50)]):
        rig.core.add_replica(Replica(number, Lease(1, number, number), f"w{number}", 8, 64, 8, length, vocab))
    assert (rig.core.max_model_len, rig.core.vocab_size) == (64, 50)
    assert answer(rig, submission(ids=i32([49] * 63))) is None
    for ids in ([49] * 64, [50]):
        assert answer(rig, submission(uid=2, ids=i32(ids))) is not None
    rig.core.end_lease(rig.core.replicas[1], blame=False)
    rig.core.end_lease(rig.core.replicas[2], blame=False)
    assert (rig.core.max_model_len, rig.core.vocab_size) == (100, 90)


def test_requests_of_a_kind_that_no_worker_has_wait_while_one_is_on_its_way() -> None:
    rig = Rig()
    message = submission()
    message.work = Pool(PoolingParams(pooling="CLS"))
    rig.core.expect_replica(1)
    assert answer(rig, message) is None
    rig.core.give_up_replica(1)
    failed = answer(rig, msgspec.structs.replace(message, uid=2))
    assert failed is not None
    assert failed.message.startswith("The workers here generate and do not pool: they were started with another")


def test_a_prompt_to_pool_has_no_output_to_hold() -> None:
    rig = Rig(blocks=[])
    rig.core.add_replica(Replica(0, Lease(1, 0, 1), "w0", 8, 2, 8, 64, VOCAB, pools=True))
    for length, sound in ((16, True), (17, False)):
        message = submission(uid=length, ids=i32(range(length)))
        message.work = Pool(PoolingParams(pooling="CLS"))
        failed = answer(rig, message)
        assert (failed is None) == sound
    assert failed is not None and "17 prompt tokens and up to 0 output tokens need 3 KV blocks" in failed.message


# ---------------------------------------------------------------- how many may wait


def test_the_last_place_in_line() -> None:
    rig = Rig(max_num_queued_reqs=2)
    for uid in (1, 2):
        assert answer(rig, submission(uid=uid)) is None
    failed = answer(rig, submission(uid=3))
    assert failed is not None and failed.status == 429
    assert failed.message.startswith("The server is full: 2 requests are waiting already, the limit is 2.")
    assert answer(rig, submission(uid=4, attempt=1)) is None  # sent again: never refused for load


def test_the_last_token_in_line() -> None:
    rig = Rig(max_num_queued_tokens=40)
    for uid in (1, 2):
        assert answer(rig, submission(uid=uid)) is None
    failed = answer(rig, submission(uid=3, ids=i32([1])))
    assert failed is not None and failed.status == 429
    assert "40 prompt tokens are waiting already, and 1 more would pass the limit of 40" in failed.message
    rig = Rig(max_num_queued_tokens=10)
    assert answer(rig, submission()) is None  # alone it may always wait


def test_what_an_owner_believes_in_and_what_is_here() -> None:
    """i64 and i32 columns that do not fit together are no answer."""
    rig = Rig()
    for uid in (1, 2):
        assert answer(rig, submission(uid=uid, attempt=uid)) is None
    rig.core.submit("another", submission(uid=3))
    rig.core.open("detok", Reconcile(i64([1, 2, 3]), i32([1, 3, 0])))
    assert set(rig.core.requests) == {1, 3}  # the second is believed to be another attempt
    assert [told for _, told in rig.core.outbox.take()] == [Unknown(i64([2, 3]), i32([3, 0]))]
    rig.core.open("detok", Reconcile(i64([1]), i32([1])))
    assert rig.core.outbox.take() == []


def test_of_two_limits_the_keys_own_is_told_first() -> None:
    rig = Rig(max_num_queued_reqs=1, max_requests_per_key=1)
    assert answer(rig, submission(uid=1, key="k")) is None
    failed = answer(rig, submission(uid=2, key="k"))
    assert failed is not None and failed.status == 429 and not failed.message.startswith("The server is full")


# ---------------------------------------------------------------- workers that differ


def test_one_worker_with_slots_is_enough_for_adapters() -> None:
    rig = AdapterRig(adapter_slots=0)
    rig.adapter_slots = 2
    rig.add(1, 64)
    rig.ask(adapter("A"))
    assert not rig.failures()


def test_one_worker_that_runs_prompts_whole_is_enough_to_bound_them() -> None:
    rig = Rig()
    config = rig.core.config
    rig.core.add_replica(Replica(1, Lease(1, 1, 9), "w1", config.max_num_seqs, 64, 8, 256, VOCAB, whole=True))
    assert answer(rig, submission(ids=i32(range(32)))) is None
    failed = answer(rig, submission(uid=2, ids=i32(range(33))))
    assert failed is not None and "33 tokens and a step runs at most max_num_batched_tokens=32" in failed.message


def test_the_token_that_is_none_is_named() -> None:
    failed = answer(Rig(), submission(ids=i32([0, VOCAB])))
    assert failed is not None and failed.message.startswith(f"Token id {VOCAB} is out of vocabulary")


def test_what_has_ended_needs_no_block() -> None:
    """Of 17 tokens the last is not computed: two blocks are enough for who goes on."""
    rig = Rig(blocks=2)
    children = [Child(0, i32(range(9))), Child(1, b"")]
    message = submission(ids=i32(range(8)), attempt=1, children=children, params={"n": 2, "max_tokens": 9})
    assert answer(rig, message) is None
