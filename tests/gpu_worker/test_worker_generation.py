"""The runner beyond plain draws: tokens the scheduler chose, logprobs, prompts' logprobs, slots that fail."""

import random

import numpy as np
import pytest
import torch
from worker_toys import GREEDY, LEASE, VOCAB, Hand, ToyModel, oracle, plan, prompts, told, toy_logits, unpack

from quire.gpu_worker import outcome, runner
from quire.gpu_worker.state import PlanError
from quire.proto.codec import from_i32, i32
from quire.proto.messages import Admit, StepPlan
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

torch.set_num_threads(1)
MODEL = ToyModel()
BEAM = SamplingParams(temperature=0.0, use_beam_search=True, n=2, logprobs=0)


def same(got, wanted):
    """Ids and ranks are equal, values to 1e-5."""
    for (ids, values, rank), (ids_2, values_2, rank_2) in zip(got, wanted, strict=True):
        assert (ids, rank) == (ids_2, rank_2)
        assert values == pytest.approx(values_2, abs=1e-5)


# ---------------------------------------------------------------- appended tokens


def test_a_beam_draws_nothing_and_goes_on_with_what_is_appended():
    ids = prompts(1)[0]
    hand = Hand(MODEL)
    hand.admit(2, ids, params=BEAM)
    for token in (5, 9, 5):
        best = hand.run((2, hand.lengths[2] - hand.done[2]))[2]
        assert best == oracle(MODEL, ids, 1)[0]
        assert hand.state.known[2] == len(ids)
        assert from_i32(hand.result.logprob_slots) == [0]
        hand.append(2, token)
        ids = [*ids, token]
    with pytest.raises(PlanError, match="tokens"):
        hand.done[2] += 1
        hand.run((2, 1))


def test_an_appended_token_replaces_none_that_was_drawn():
    """A row of no beam search may be given a token too: it comes after those it drew."""
    ids = prompts(1)[0]
    hand = Hand(MODEL)
    first = hand.generate(0, ids, 2)
    hand.append(0, 11)
    assert list(hand.run((0, 2)).values()) == oracle(MODEL, [*ids, *first, 11], 1)


def test_beams_permuted_at_every_step_read_their_own_history():
    """Forks permute and multiply rows, partial blocks are copied, every row gets a token: all in one plan."""
    rng = random.Random(3)
    hand = Hand(MODEL, rows=4, blocks=400)
    history = [prompts(1, 5, 6)[0]] * 4
    hand.admit(0, history[0], params=BEAM)
    best = hand.run((0, 5))
    for step in range(12):
        parents = [0] * 4 if step == 0 else [rng.randrange(4) for _ in range(4)]
        for row, parent in enumerate(parents):
            if row != parent:
                hand.fork(parent, row)
        tables = [list(hand.tables[parent]) for parent in parents]
        length = hand.lengths[0]
        for row in range(4):
            hand.tables[row], hand.lengths[row], hand.done[row] = tables[row], length, length
        for row in range(4):
            if length % hand.block_size:
                hand.copy_block(row, length // hand.block_size)
            hand.append(row, rng.randrange(VOCAB))
        history = [[*history[parent], hand.queue["append_tokens"][row]] for row, parent in enumerate(parents)]
        best = hand.run(*[(row, 1) for row in range(4)])
        for row in range(4):
            assert hand.state.tokens[row, : length + 1].tolist() == history[row]
            assert best[row] == oracle(MODEL, history[row], 1)[0], (step, row)


def test_the_last_place_of_a_row_can_be_appended_to_and_no_more():
    hand = Hand(MODEL, length=32)
    hand.admit(0, list(range(32)), params=BEAM)
    hand.append(0, 1)
    hand.send()
    hand.append(0, 1)
    with pytest.raises(PlanError, match="row 0, which is full with 33 tokens"):
        hand.send()


# ---------------------------------------------------------------- logprobs


def test_logprobs_of_a_mixed_batch_equal_the_reference():
    """Slots that ask for none, for the token alone, for some and for all others; those that ask share the answer."""
    wanted = [None, 0, 3, -1, 3, None]
    asked = prompts(6)
    hand = Hand(MODEL, max_tokens=256)
    for row, (ids, k) in enumerate(zip(asked, wanted, strict=True)):
        hand.admit(row, ids, params=SamplingParams(temperature=float(row % 2), logprobs=k), seed=row)
    history = [list(ids) for ids in asked]
    for step in range(3):
        drawn = hand.run(*[(row, len(ids) if step == 0 else 1) for row, ids in enumerate(asked)])
        slots = from_i32(hand.result.logprob_slots)
        by_row = dict(zip((list(drawn)[slot] for slot in slots), hand.result.logprobs, strict=True))
        assert list(by_row) == [row for row in drawn if wanted[row] is not None]
        for row, token in drawn.items():
            if row in by_row:
                k = VOCAB if wanted[row] == -1 else wanted[row]
                same(unpack(by_row[row], k), [told(toy_logits(MODEL, history[row])[-1], token, k)])
            history[row].append(token)
    assert not hand.result.prompts and not hand.result.failed


def test_a_beams_record_has_twice_the_width_best():
    hand, ids = Hand(MODEL), prompts(1)[0]
    hand.admit(0, ids, params=SamplingParams(temperature=0.0, use_beam_search=True, n=1, best_of=4, logprobs=3))
    token = hand.run((0, len(ids)))[0]
    logits = toy_logits(MODEL, ids)[-1]
    same(unpack(hand.result.logprobs[0], 8), [told(logits, token, 8)])
    assert token == int(logits.argmax())


def test_logprobs_that_no_frame_holds_fail_their_slots(monkeypatch):
    monkeypatch.setattr(outcome, "ROOM", 2000)
    hand = Hand(MODEL)
    for row in range(4):
        hand.admit(row, [1, 2, 3], params=SamplingParams(temperature=0.0, logprobs=-1))
    hand.run(*[(row, 3) for row in range(4)])
    assert from_i32(hand.result.logprob_slots) == [0, 1]
    assert [(each.slot, each.status) for each in hand.result.failed] == [(2, 503), (3, 503)]


# ---------------------------------------------------------------- prompts' logprobs


def described(hand, got, ks):
    """Add the last result's prompt chunks to ``got``: {row: {position: (ids, values, rank)}}."""
    for chunk in hand.result.prompts:
        row = hand.rows[chunk.at]
        for offset, entry in enumerate(unpack(chunk.logprobs, ks[row])):
            assert chunk.start + offset not in got[row]
            got[row][chunk.start + offset] = entry


def run(hand, *chunks, **kwargs):
    """As ``hand.run``; ``hand.rows`` are the compute rows in the plan's order."""
    hand.rows = [row for row, _ in sorted(chunks, key=lambda chunk: chunk[1] != 1)]
    return hand.run(*chunks, **kwargs)


@pytest.mark.parametrize(("chunk", "cut"), [(1, 128), (5, 128), (8, 3), (64, 4)])
def test_prompt_logprobs_in_chunks_equal_one_whole_pass(chunk, cut, monkeypatch):
    monkeypatch.setattr(runner, "PROMPT_SLICE", cut)
    asked = prompts(5, 2, 25)
    ks, begin = [2, 0, VOCAB, None, 2], [0, 1, 4, -1, 0]
    hand = Hand(MODEL, max_tokens=400)
    for row, ids in enumerate(asked):
        k = -1 if ks[row] == VOCAB else ks[row]
        params = SamplingParams(temperature=0.0, prompt_logprobs=k)
        hand.admit(row, ids, params=params, prompt_logprobs_from=begin[row])
    got, drawn = [{} for _ in asked], {}
    while len(drawn) < len(asked):
        left = {row: min(chunk, len(ids) - hand.done[row]) for row, ids in enumerate(asked) if row not in drawn}
        drawn |= run(hand, *left.items())
        described(hand, got, ks)
    for row, ids in enumerate(asked):
        assert drawn[row] == oracle(MODEL, ids, 1)[0]
        wanted = [] if begin[row] < 0 else list(range(max(1, begin[row]), len(ids)))
        assert sorted(got[row]) == wanted
        logits = toy_logits(MODEL, ids)
        same([got[row][at] for at in wanted], [told(logits[at - 1], ids[at], ks[row]) for at in wanted])
    run(hand, *[(row, 1) for row in range(5)])
    assert not hand.result.prompts and not hand.state.asking


def test_outputs_that_a_row_resumes_from_are_no_prompt():
    ids = prompts(1, 12, 13)[0]
    hand = Hand(MODEL)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    hand.admit(0, ids, params=params, prompt_len=9, prompt_logprobs_from=3)
    got = [{}]
    run(hand, (0, 12))
    described(hand, got, [1])
    assert sorted(got[0]) == list(range(3, 9))


def test_a_fork_does_not_tell_the_prompt_again():
    ids = prompts(1, 12, 13)[0]
    hand = Hand(MODEL)
    hand.admit(0, ids, params=SamplingParams(n=2, prompt_logprobs=1), prompt_logprobs_from=1)
    run(hand, (0, 6))
    hand.fork(0, 1)
    hand.lengths[1] = 12
    assert hand.queue["fork_dst"] == [1]
    run(hand, (0, 6), samples=[(0, 0), (0, 1)])
    assert [(chunk.at, chunk.start) for chunk in hand.result.prompts] == [(0, 7)]
    assert not hand.state.asking


def test_raw_logits_where_the_mode_says_so():
    ids = prompts(1)[0]
    hand = Hand(MODEL, mode="processed_logits")
    params = SamplingParams(temperature=0.5, prompt_logprobs=0)
    hand.admit(0, ids, params=params, prompt_logprobs_from=0)
    hand.run((0, len(ids)))
    values = [values[0] for _, values, _ in unpack(hand.result.prompts[0].logprobs, 0)]
    logits = toy_logits(MODEL, ids)
    assert values == pytest.approx([float(logits[at, token]) for at, token in enumerate(ids[1:])], abs=1e-5)


def test_a_prompt_that_no_frame_holds_fails_when_it_draws(monkeypatch):
    monkeypatch.setattr(runner, "ROOM", 3000)
    hand = Hand(MODEL)
    for row, k in ((0, -1), (1, 1)):
        params = SamplingParams(temperature=0.0, prompt_logprobs=k)
        hand.admit(row, list(range(9)), params=params, prompt_logprobs_from=0)
    run(hand, (0, 5), (1, 5))
    assert [chunk.at for chunk in hand.result.prompts] == [1]
    drawn = run(hand, (0, 4), (1, 4))
    assert drawn[1] == oracle(MODEL, list(range(9)), 1)[0]
    (failed,) = hand.result.failed
    assert (failed.slot, failed.status) == (0, 400) and "smaller prompt_logprobs" in failed.message


def test_memory_for_prompts_does_not_grow_with_them():
    seen = []

    class Watched(ToyModel):
        def logits(self, hidden):
            seen.append(len(hidden))
            return super().logits(hidden)

    hand = Hand(Watched(), length=512, blocks=70, max_tokens=512)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    hand.admit(0, [1] * 300, params=params, prompt_logprobs_from=0)
    hand.run((0, 300))
    assert sorted(seen) == [1, 299 - 2 * runner.PROMPT_SLICE, runner.PROMPT_SLICE, runner.PROMPT_SLICE]


# ---------------------------------------------------------------- slots that fail


class Poisoned(ToyModel):
    """Rows of logits numbered ``bad`` are NaN."""

    bad = ()

    def logits(self, hidden):
        logits = super().logits(hidden)
        logits[list(self.bad)] = float("nan")
        return logits


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9, top_k=9), SamplingParams(logprobs=2)])
def test_nan_fails_its_slot_alone(params):
    model = Poisoned()
    asked = prompts(3)
    hand = Hand(model)
    for row, ids in enumerate(asked):
        hand.admit(row, ids, params=params if row == 1 else GREEDY, seed=4)
    model.bad = [1]
    first = hand.run(*[(row, len(ids)) for row, ids in enumerate(asked)])
    (failed,) = hand.result.failed
    assert (failed.slot, failed.status) == (1, 500) and "NaN" in failed.message
    assert not hand.result.logprobs
    model.bad = []
    second = hand.run((0, 1), (1, 1), (2, 1))
    assert [each.slot for each in hand.result.failed] == [1]  # its history is spoiled
    for row in (0, 2):
        assert [first[row], second[row]] == oracle(model, asked[row], 2)
    hand.drop(1)
    assert hand.generate(1, asked[1], 2) == oracle(model, asked[1], 2)


# ---------------------------------------------------------------- bad plans


def _hand():
    hand = Hand(MODEL, rows=4, length=32, blocks=8)
    hand.admit(0, list(range(10)))
    hand.admit(1, list(range(6)))
    hand.run((0, 10), (1, 6))
    return hand


def _admit(**fields):
    told = fields.pop("prompt_logprobs_from", -1)
    return plan(2, admits=[Admit(2, 1, 0, i32([1]), 1, Generate(**{"params": GREEDY, "seed": 0, **fields}), told)])


BAD = {
    "an append to nobody": plan(2, append_rows=[3], append_tokens=[1]),
    "an append out of range": plan(2, append_rows=[4], append_tokens=[1]),
    "an append before the first row": plan(2, append_rows=[-1], append_tokens=[1]),
    "an append of no token": plan(2, append_rows=[0]),
    "a token for no row": plan(2, append_tokens=[1]),
    "a token out of the vocabulary": plan(2, append_rows=[0], append_tokens=[VOCAB]),
    "a negative token": plan(2, append_rows=[0], append_tokens=[-1]),
    "two appends to one row": plan(2, append_rows=[0, 0], append_tokens=[1, 2]),
    "an append to a dropped row": plan(2, drops=[0], append_rows=[0], append_tokens=[1]),
    "half a token": StepPlan(LEASE, 2, append_rows=i32([0]), append_tokens=b"\0\0"),
    "a suppressed id out of the vocabulary": _admit(suppressed_ids=i32([VOCAB])),
    "a bad word out of the vocabulary": _admit(bad_words=[[1], [2, VOCAB]]),
    "a negative bad word": _admit(bad_words=[[-1]]),
    "a bad word of nothing": _admit(bad_words=[[]]),
    "logprobs from before the prompt": _admit(prompt_logprobs_from=-2),
    "an allowed id out of the vocabulary": _admit(params=SamplingParams(allowed_token_ids=[VOCAB])),
    "a bias out of the vocabulary": _admit(params=SamplingParams(logit_bias={VOCAB: 1.0})),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_plan_is_refused(bad):
    with pytest.raises(PlanError):
        _hand().runner.launch(bad)


def test_the_good_plans_beside_the_bad_ones():
    _hand().runner.launch(plan(2, append_rows=[0, 1], append_tokens=[VOCAB - 1, 0]))
    _hand().runner.launch(plan(2, drops=[0], admits=[Admit(0, 1, 0, i32([1]), 1, Generate(GREEDY, 0))], append_rows=[0],
                               append_tokens=[1]))  # fmt: skip
    _hand().runner.launch(_admit(suppressed_ids=i32([0]), bad_words=[[1], [2, 3]], prompt_logprobs_from=9))


def test_no_more_is_sent_than_is_asked_for():
    hand = Hand(MODEL)
    hand.generate(0, [1, 2, 3], 2)
    result = hand.result
    assert np.frombuffer(result.tokens, np.int32).shape == (1,)
    assert not (result.counts or result.logprob_slots or result.logprobs or result.prompts or result.failed)
