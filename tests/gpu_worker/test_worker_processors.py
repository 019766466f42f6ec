"""What follows tokens on the host: logits processors, grammars; and that nobody else pays or suffers for them."""

import threading
import types

import numpy as np
import pytest
import torch
from worker_toys import GREEDY, LADDER, VOCAB, Hand, Ladder, ToyModel, oracle, plan, prompts, toy_logits

from quire.gpu_worker.sampling.followers import Follower
from quire.gpu_worker.sampling.processors import load_functions
from quire.gpu_worker.transfer import Arrival
from quire.proto.config import ConfigError
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

torch.set_num_threads(1)
MODEL = ToyModel()


def asks(*names, **params):
    return SamplingParams(temperature=0.0, logits_processors=list(names), **params)


def only(token, logits):
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([token]), 0.0)


# ---------------------------------------------------------------- users' functions


class Mumbled(Exception):
    """Cannot even say what is wrong."""

    def __str__(self):
        raise ZeroDivisionError


class Recorder:
    """Functions of a user; ``calls`` has what they were given."""

    def __init__(self):
        self.calls = []

    def count_up(self, prompt_ids, output_ids, logits):
        self.calls.append((list(prompt_ids), list(output_ids)))
        return only((sum(prompt_ids) + len(output_ids)) % VOCAB, logits)

    def ban_best(self, output_ids, logits):
        logits[logits.argmax()] = -torch.inf
        return logits

    def wished(self, output_ids, logits, *, extra_args=None):
        self.calls.append(extra_args)
        return only((extra_args or {}).get("token", 0), logits)

    def bad_luck(self, output_ids, logits):
        if output_ids:
            raise RuntimeError("out of luck")
        return logits

    def leave(self, output_ids, logits):
        raise SystemExit(3)

    def mumble(self, output_ids, logits):
        raise Mumbled

    def long_story(self, output_ids, logits):
        raise ValueError("first line\nsecond line " + "x" * 1000)

    def narrow(self, output_ids, logits):
        return logits[:-1]

    def nothing(self, output_ids, logits):
        logits.zero_()

    def nan(self, output_ids, logits):
        return logits * torch.nan

    def forbid(self, output_ids, logits):
        return logits - torch.inf


@pytest.fixture
def user(monkeypatch):
    user = Recorder()
    module = types.ModuleType("users_own")
    for name in dir(user):
        if not name.startswith("_"):
            setattr(module, name, getattr(user, name))
    module.number = 7
    module.alone = lambda logits: logits
    module.Kind = type("Kind", (), {"__init__": lambda self, config, device, pinned: None})
    monkeypatch.setitem(__import__("sys").modules, "users_own", module)
    return user


@pytest.fixture
def hand(user):
    names = ("count_up", "ban_best", "bad_luck", "leave", "mumble", "long_story", "narrow", "nothing", "nan", "forbid")
    names = (*names, "wished")
    return Hand(MODEL, functions=load_functions([f"users_own:{name}" for name in names]))


def test_both_forms_are_called_with_what_they_name(user, hand):
    ids = prompts(1)[0]
    wanted = [(sum(ids) + i) % VOCAB for i in range(4)]
    assert hand.generate(0, ids, 4, params=asks("users_own:count_up"), chunk=5) == wanted
    assert user.calls == [(ids, wanted[:i]) for i in range(4)]
    got = hand.generate(1, ids, 1, params=asks("users_own:ban_best"))
    assert got == [int(toy_logits(MODEL, ids)[-1].topk(2).indices[1])]


def test_extra_args_reach_a_function_that_takes_them(user, hand):
    ids = prompts(1)[0]
    params = SamplingParams(temperature=0, logits_processors=["users_own:wished"], extra_args={"token": 7})
    assert hand.generate(0, ids, 2, params=params) == [7, 7]
    assert user.calls == [{"token": 7}] * 2
    assert hand.generate(1, ids, 1, params=asks("users_own:wished")) == [0] and user.calls[-1] is None


def test_several_are_called_in_the_order_given(hand):
    ids = prompts(1)[0]
    third = int(toy_logits(MODEL, ids)[-1].topk(3).indices[2])
    assert hand.generate(0, ids, 1, params=asks("users_own:ban_best", "users_own:ban_best")) == [third]


def test_a_history_is_resumed_and_appended_to(user, hand):
    ids = prompts(1)[0]
    hand.admit(0, [*ids, 3, 4], params=asks("users_own:count_up"), prompt_len=len(ids))
    hand.append(0, 9)
    hand.run((0, len(ids) + 3))
    assert user.calls == [(ids, [3, 4, 9])]


def test_forks_have_histories_of_their_own(user, hand):
    ids = prompts(1, 8, 9)[0]
    hand.admit(0, ids, params=SamplingParams(n=2, logits_processors=["users_own:count_up"]))
    hand.admit(2, ids)
    hand.run((0, 8), (2, 8))
    first = user.calls[-1]
    hand.fork(0, 1)
    hand.fork(2, 3)  # one that nothing follows
    for src, dst in ((0, 1), (2, 3)):
        hand.tables[dst], hand.lengths[dst], hand.done[dst] = list(hand.tables[src]), hand.lengths[src], hand.done[src]
    hand.append(1, 5)  # before either child has run on
    got = hand.run((0, 1), samples=[(0, 0)])
    assert first == (ids, [])
    assert user.calls[-1] == (ids, [(sum(ids)) % VOCAB]) and got == {0: (sum(ids) + 1) % VOCAB}
    assert hand.state.processors.histories._rows[1].outputs == [sum(ids) % VOCAB, 5]
    assert hand.state.processors.rows == {0, 1}
    hand.fork(3, 1)  # over one that is followed
    hand.drop(0)
    hand.send()
    assert not hand.state.processors.rows and not hand.state.processors.histories._rows


FAILURES = {
    "bad_luck": (500, "users_own:bad_luck raised RuntimeError: out of luck"),
    "leave": (500, "users_own:leave raised SystemExit: 3"),
    "mumble": (500, "users_own:mumble raised Mumbled: (whose text raised ZeroDivisionError)"),
    "long_story": (500, "users_own:long_story raised ValueError: first line second line xxx"),
    "narrow": (500, f"users_own:narrow returned shape [{VOCAB - 1}] where logits of shape [{VOCAB}] are due"),
    "nothing": (500, "users_own:nothing returned NoneType"),
    "nan": (500, "NaN"),
    "forbid": (400, "no token is left to draw"),
    "unheard": (400, "'users_own:unheard', which is not registered (registered: users_own:count_up, "),
}


@pytest.mark.parametrize("name", FAILURES)
def test_one_that_fails_fails_its_slot_alone(name, hand):
    """Its mates draw what they draw alone, and the row is whole again for its next owner."""
    status, message = FAILURES[name]
    asked = prompts(3)
    for row, ids in enumerate(asked):
        hand.admit(row, ids, params=asks(f"users_own:{name}", logprobs=1) if row == 1 else GREEDY)
    got, failed = [[], [], []], []
    for step in range(3):
        for row, token in hand.run(*[(row, len(ids) if step == 0 else 1) for row, ids in enumerate(asked)]).items():
            got[row].append(token)
        failed.append([each for each in hand.result.failed if each.slot == 1])
        assert len(hand.result.failed) == len(failed[-1]) <= 1
        assert len(hand.result.logprobs) == (0 if failed[-1] else 1)
    for row in (0, 2):
        assert got[row] == oracle(MODEL, asked[row], 3)
    assert [len(each) for each in failed] == ([0, 1, 1] if name == "bad_luck" else [1, 1, 1])
    assert {each.status for each in failed[-1]} == {status} and message in failed[-1][0].message
    assert "\n" not in failed[-1][0].message and len(failed[-1][0].message) < 400
    assert failed[-1][0].corrupted == (name == "nan")
    assert failed[-1][0].param == (None if name in ("nan", "forbid") else "logits_processors")
    hand.drop(1)
    assert hand.generate(1, asked[1], 3) == oracle(MODEL, asked[1], 3) and not hand.result.failed


def test_the_remedy_names_the_flag(hand):
    hand.admit(0, [1, 2], params=asks("elsewhere:fn"))
    hand.run((0, 2))
    assert "--logits-processor package.module:function" in hand.result.failed[0].message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("users_own", "not of the form package.module:function"),
        (":count_up", "not of the form package.module:function"),
        ("users_own:", "not of the form package.module:function"),
        ("users_own:a b", "not of the form package.module:function"),
        ("no.such_module:fn", "ModuleNotFoundError: No module named 'no'"),
        ("users_own:missing", "has no attribute 'missing'"),
        ("users_own:number", "is of type int, which cannot be called"),
        ("users_own:alone", "takes 1 positional parameters"),
        ("users_own:Kind", "is a class; give a function"),
    ],
)
def test_a_flag_that_cannot_work_is_one_line(user, name, said):
    with pytest.raises(ConfigError) as error:
        load_functions(["users_own:count_up", name])
    assert said in str(error.value) and repr(name) in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- grammars


def test_structured_and_free_rows_share_batches():
    asked = prompts(4, 5, 12)
    hand = Hand(MODEL, grammars=Ladder())
    for row, ids in enumerate(asked):
        hand.admit(row, ids, params=LADDER if row % 2 else GREEDY)
    got = [[] for _ in asked]
    for step in range(6):
        for row, token in hand.run(*[(row, len(ids) if step == 0 else 1) for row, ids in enumerate(asked)]).items():
            got[row].append(token)
    for row, ids in enumerate(asked):
        assert got[row] == (list(range(len(ids), len(ids) + 6)) if row % 2 else oracle(MODEL, ids, 6))


def test_a_structure_is_replayed_forked_and_dropped():
    grammars = Ladder()
    hand = Hand(MODEL, grammars=grammars)
    hand.admit(0, [7, 7, 7, 3, 4], params=LADDER, prompt_len=3)
    assert hand.run((0, 5)) == {0: 5}
    hand.fork(0, 1)
    hand.tables[1], hand.lengths[1], hand.done[1] = list(hand.tables[0]), 6, 5
    hand.copy_block(1, 0)
    assert hand.run((0, 1), (1, 1)) == {0: 6, 1: 6}
    hand.drop(0, free=False)
    hand.admit(0, [1, 2], params=GREEDY)
    assert hand.run((0, 2), (1, 1))[1] == 7
    assert set(grammars.last) == {1}
    hand.state.reset()
    assert not grammars.last


def test_a_grammar_that_fails_fails_its_slot_alone():
    hand = Hand(MODEL, grammars=Ladder())
    ids = prompts(1)[0]
    hand.admit(0, ids)
    hand.admit(1, [7, 40], params=LADDER, prompt_len=1)
    got = hand.run((0, len(ids)), (1, 2))
    assert got[0] == oracle(MODEL, ids, 1)[0]
    assert [(each.slot, each.status, each.message) for each in hand.result.failed] == [(1, 500, "too high a ladder")]


# ---------------------------------------------------------------- when is waited


class Late:
    """An event that is over when ``set``; counts who slept."""

    def __init__(self):
        self.gate, self.sleepers = threading.Event(), 0

    def query(self):
        return self.gate.is_set()

    def synchronize(self):
        self.sleepers += 1
        assert self.gate.wait(30)


def late(tokens):
    event = Late()
    return Arrival(torch.tensor(tokens, dtype=torch.int32), [], event), event


def admit(row, ids=(1, 2)):
    return row, Generate(GREEDY, 0), len(ids), np.array(ids)


def test_what_happens_to_a_row_waits_in_order_until_it_is_needed():
    ladder = Ladder()
    follower = Follower(ladder)
    follower.admit(*admit(3))
    assert ladder.last == {3: 1}  # nothing is before it
    arrival, event = late([9, 2])
    follower.drawn([0, 3], arrival)
    follower.copy([3, 0], [5, 3])  # 5 goes on from what 3 has yet to draw, and 3 is nobody's
    follower.append([5, 1], [3, 8])
    assert follower.rows == {5}
    follower.catch_up(wait=False)
    assert ladder.last == {3: 1} and event.sleepers == 0
    event.gate.set()
    follower.catch_up(wait=True)
    assert ladder.last == {5: 3} and event.sleepers == 1


def test_rows_that_nothing_follows_leave_nothing_behind():
    follower = Follower(Ladder())
    arrival, event = late([1])
    follower.drawn([0], arrival)
    follower.drop([0])
    follower.copy([0], [1])
    follower.append([0], [1])
    follower.catch_up(wait=True)
    assert event.sleepers == 0 and not follower.rows


def test_two_threads_may_wait_for_one_arrival():
    """The first to have them keeps the tokens, so the second needs no buffer that may have come round again."""
    arrival, event = late([4, 5])
    got = []
    threads = [threading.Thread(target=lambda: got.append(arrival.wait())) for _ in range(2)]
    for thread in threads:
        thread.start()
    event.gate.set()
    for thread in threads:
        thread.join(30)
    arrival._tokens.zero_()
    assert got == [np.array([4, 5], np.int32).tobytes()] * 2 and arrival.wait() == got[0] and event.sleepers == 1


def test_a_step_without_followed_rows_does_not_wait():
    """The step before is never asked for its tokens."""
    hand = Hand(MODEL, grammars=Ladder(), functions={})
    ids = prompts(1)[0]
    hand.admit(0, ids)
    hand.admit(1, [4, 4], params=LADDER)
    hand.run((0, len(ids)), (1, 2))
    waiting, event = late([0])
    hand.state.grammars.drawn([1], waiting)
    hand.run((0, 1))
    assert event.sleepers == 0
    waiting._tokens[0] = 3
    event.gate.set()
    assert hand.run((1, 1))[1] == 4


def test_a_plan_for_rows_without_grammars_is_refused():
    hand = Hand(MODEL)
    hand.admit(0, [1], params=LADDER)
    with pytest.raises(ValueError, match="needs grammars"):
        hand.runner.launch(plan(1, **hand.queue))
