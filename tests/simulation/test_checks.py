"""The rules bite: each finds what was tampered with, and nothing where nothing was."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_rig import EngineRig

from quire.client.generation import OpenGeneration
from quire.client.pooled import OpenPooling
from quire.client.results import Pooled, RequestError, StreamEvent
from quire.proto import messages as m
from quire.proto.messages import Finish
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate
from simulation.asks import Ask
from simulation.checks import Rules, check_end
from simulation.consumer import Consumer

WORKER = SimpleNamespace(blocks=20)
SHAPE = SimpleNamespace(
    detokenizers=1,
    workers=[WORKER], block_size=8, rows=4, budget=64, max_model_len=40, chunked=True, prefix_caching=True, pools="",
    whole=False, max_num_queued_reqs=3, max_num_queued_tokens=None, max_requests_per_key=2, queue_timeout=5.0,
)  # fmt: skip
IDS = [*range(4, 24)]


class Play:
    """One request whose answer is told by the oracle itself, in chunks, through an Engine's core."""

    def __init__(self, ask: Ask, shape: Any = SHAPE):
        self.rig, self.lines, self.shape = EngineRig(), [], shape
        self.consumer = Consumer(ask, self.rig.core, lambda: self.rig.now, Rules(shape, self.lines.append))
        self.consumer.start()
        self.rig.carry()
        request = self.consumer.request
        assert request is not None
        self.request, self.answer = request, self.consumer.rules.answer(self.consumer)
        asked = self.rig.detokenizers[0].next(m.Tokenize)
        self.rig.detokenizers[0].accept(asked, self.answer.prompt_ids, self.answer.prompt)
        request.start(self.rig.now, 0)
        if isinstance(request, OpenGeneration) and self.answer.prompt_logprobs is not None:
            request.prompt_logprobs = list(self.answer.prompt_logprobs)

    def tell(self, edit: Callable[[StreamEvent], object] | None = None) -> list[str]:
        """Everything, two tokens at a time; ``edit`` changes the second event and those after it."""
        request, events = self.request, 0
        assert isinstance(request, OpenGeneration)
        for index, child in enumerate(self.answer.children):
            for at in range(0, len(child.tokens), 2):
                last = at + 2 >= len(child.tokens)
                text = child.text[at:] if last else child.text[at : at + 2]
                finish, reason = (child.finish, child.reason) if last else (Finish.NONE, None)
                length = len(child.tokens) if last else -1
                taken = request.take(index, at, child.tokens[at : at + 2], text, finish, reason, length, self.rig.now,
                                     deepcopy(child.logprobs[at : at + 2]))  # fmt: skip
                assert taken
                events += 1
                for event in request.pending.values():
                    if edit is not None and events > 1:
                        edit(event)
                if request.done:
                    self.rig.core.finish(request, None)
                self.consumer.collect()
        return self.rules()

    def rules(self) -> list[str]:
        """The rules that were broken."""
        return [line.split(" | ")[0] for line in self.lines]

    def end(self, **others: Any) -> list[str]:
        """What the checks at the end of a history say."""
        world: dict[str, Any] = {
            "plan": SimpleNamespace(shape=self.shape, faults=[]), "consumers": [self.consumer], "blows": [],
            "poisoned": {},
            "sizes": {20}, "scheduler": None, "detokenizers": [], "frontends": [],
        }  # fmt: skip
        return [line.split(" | ")[0] for line in check_end(SimpleNamespace(**{**world, **others}))]

    def fail(self, status: int, message: str = "", retry_after: float | None = None) -> None:
        """It ends with an error."""
        self.rig.core.finish(self.request, RequestError(status, message, None, retry_after))
        self.consumer.collect()


def ask(**fields: Any) -> Ask:
    """A request of many features."""
    params = {"max_tokens": 9, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1, "n": 2}
    params.update(fields.pop("params", {}))
    return Ask(name="ask0", ids=IDS, seed=5, params=SamplingParams(**params), **fields)


@pytest.mark.parametrize(
    "params",
    [{}, {"n": 1, "stop": ["a", "b"]}, {"use_beam_search": True, "temperature": 0.0, "max_tokens": 4}],
)
def test_what_the_oracle_says_breaks_no_rule(params: dict[str, Any]) -> None:
    play = Play(ask(params=params))
    assert play.tell() == []
    assert play.consumer.over
    assert play.end() == []


def longer_text(event: StreamEvent) -> None:
    event.text += "a"


def less_text(event: StreamEvent) -> None:
    event.text = ""


def other_token(event: StreamEvent) -> None:
    event.tokens[-1] = (event.tokens[-1] + 1) % 40


def other_finish(event: StreamEvent) -> None:
    event.finish = Finish.STOP if event.finish else event.finish


def other_reason(event: StreamEvent) -> None:
    event.stop_reason = "x" if event.finish else None


def wrong_length(event: StreamEvent) -> None:
    event.length += 1


def twice(event: StreamEvent) -> None:
    event.tokens += event.tokens
    event.logprobs += event.logprobs


def fewer(event: StreamEvent) -> None:
    del event.tokens[0], event.logprobs[0]


def other_logprob(event: StreamEvent) -> None:
    event.logprobs[-1].values[-1] += 1e-6


def no_logprobs(event: StreamEvent) -> None:
    event.logprobs.clear()


def other_child(event: StreamEvent) -> None:
    event.index = 2


def ended_child(event: StreamEvent) -> None:
    event.index = 0


EDITS = [
    (longer_text, "text differs"), (less_text, "text missing"), (other_token, "tokens differ"),
    (twice, "tokens differ"), (fewer, "tokens differ"), (other_finish, "finish differs"),
    (other_reason, "finish differs"), (wrong_length, "usage differs"), (other_logprob, "logprobs differ"),
    (no_logprobs, "logprobs differ"), (other_child, "no such child"), (ended_child, "after its end"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "rule"), EDITS)
def test_an_event_that_was_tampered_with_is_found(edit: Callable[[StreamEvent], None], rule: str) -> None:
    assert rule in Play(ask()).tell(edit)


def test_a_prompt_that_is_not_what_was_asked_for_is_found() -> None:
    play = Play(ask())
    assert play.request.accepted is not None
    play.request.accepted.prompt_ids[0] += 1
    assert "prompt differs" in play.tell()
    play = Play(ask())
    assert isinstance(play.request, OpenGeneration) and play.request.prompt_logprobs is not None
    play.request.prompt_logprobs.pop()
    play.request.prompt_logprobs.append(None)
    assert "logprobs differ" in play.tell()


def test_an_end_that_differs_from_what_was_seen_is_found() -> None:
    play = Play(ask())
    play.consumer.rules.event = lambda *_: None  # type: ignore[method-assign]
    assert "events missing" in play.tell()
    play = Play(ask(params={"best_of": 3, "logprobs": None}))
    assert isinstance(play.request, OpenGeneration)
    play.request.work = Generate(play.request.asked, 5)
    play.request.end(play.rig.now)
    play.request.children.pop()
    play.consumer.collect()
    assert "children missing" in play.rules()


def test_a_sum_of_logprobs_that_differs_is_found() -> None:
    play = Play(ask(quiet=True))
    assert isinstance(play.request, OpenGeneration)
    play.request.children[1].cumulative = 1.0
    assert play.tell() == ["sum differs"]


def test_times_that_do_not_rise_are_found() -> None:
    play = Play(ask(quiet=True))
    play.request.metrics.first_scheduled_time = 1e9
    assert play.tell() == ["times differ"]


def test_events_before_the_end_of_a_held_request_are_found() -> None:
    play = Play(ask(params={"use_beam_search": True, "temperature": 0.0, "max_tokens": 4}))
    play.consumer.rules.event(play.consumer, StreamEvent(0, "", [1]))
    assert "shown early" in play.rules()
    play = Play(ask(quiet=True))
    assert isinstance(play.request, OpenGeneration)
    play.consumer.rules.event(play.consumer, StreamEvent(0))
    assert "shown early" in play.tell()


def test_vectors_that_differ_are_found() -> None:
    shape = SimpleNamespace(**{**vars(SHAPE), "pools": "embed"})
    for data, rules in ((None, []), (np.zeros(8, np.float32), ["vectors differ"])):
        play = Play(Ask(name="ask0", ids=IDS, pooling=PoolingParams(task="embed")), shape)
        assert isinstance(play.request, OpenPooling) and play.answer.pooled is not None
        whole = np.frombuffer(play.answer.pooled[1], np.float32)
        play.request.pooled = Pooled(play.answer.prompt_ids, whole if data is None else data)
        play.rig.core.finish(play.request, None)
        play.consumer.collect()
        assert play.rules() == rules


def test_a_request_that_never_ends_is_found() -> None:
    assert Play(ask()).end() == ["never ended"]


def struck(kinds: list[str]) -> list[list[Any]]:
    """Faults whose effects last."""
    return [[float(at), 2000.0, kind, "w0"] for at, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("error", "waits", "blows", "allowed"),
    [
        ((400, "too long"), 0.0, 0, False),
        ((418, "what"), 0.0, 0, False),
        ((500, "failed 3 times"), 0.0, 2, False),
        ((500, "failed 3 times"), 0.0, 3, True),
        ((503, "no detokenizer took the request for 10 s", 10.0), 9.0, 1, False),
        ((503, "no detokenizer took the request for 10 s", 10.0), 11.0, 1, True),
        ((503, "The request waited for 5 s", 10.0), 4.0, 0, False),
        ((503, "No worker is left", 60.0), 100.0, 3, False),
        ((503, "out of ideas"), 100.0, 3, False),
        ((429, "full"), 0.0, 0, False),
        ((429, "full", 2.0), 0.0, 0, False),
    ],
)
def test_an_error_is_allowed_only_where_its_cause_was_there(
    error: tuple[Any, ...], waits: float, blows: int, allowed: bool
) -> None:
    play = Play(ask())
    play.rig.now += waits
    play.fail(*error)
    assert play.end(blows=struck(["kill"] * blows)) == ([] if allowed else ["wrong end"])


def test_a_line_that_is_full_may_refuse_with_a_time() -> None:
    for others, told, allowed in ((3, 2.0, True), (3, None, False), (3, 0.5, False), (3, 61.0, False), (2, 2.0, False)):
        play = Play(ask())
        play.fail(429, "full", told)
        before = [Play(ask()).consumer for _ in range(others)]
        assert ("wrong end" not in play.end(consumers=[*before, play.consumer])) is allowed
    play = Play(ask(key="k"))
    play.fail(429, "full", 1.0)
    before = [Play(ask(key="k")).consumer, Play(ask(key="k")).consumer]
    assert "wrong end" not in play.end(consumers=[*before, play.consumer])


def test_one_that_can_never_be_served_must_be_refused() -> None:
    play = Play(ask())
    assert play.tell() == []
    assert play.end(sizes={2}) == ["wrong end"]
    play = Play(ask())
    play.fail(400, "too few blocks")
    assert play.end(sizes={2, 20}) == []


def test_who_stands_beside_poison_pays_for_two_of_its_deaths_at_most() -> None:
    for kinds, allowed in ((["poison"] * 5, False), (["poison", "poison", "kill"], True)):
        play = Play(ask())
        play.fail(500, "failed 3 times")
        assert ("wrong end" not in play.end(blows=struck(kinds))) is allowed


@pytest.mark.parametrize(
    ("links", "allowed"),
    [
        (["w0", "d0", "d1"], True),
        (["w0", "d0"], False),
        (["w0", "d0", "d0"], False),
    ],
)
def test_each_link_that_breaks_counts_once(links: list[str], allowed: bool) -> None:
    play = Play(ask())
    play.fail(500, "failed 3 times")
    blows = [[1.0, 2000.0, "reset", end] for other in links for end in ("s", other)]
    assert play.end(blows=blows) == ([] if allowed else ["wrong end"])


def test_poison_must_not_be_answered_and_kills_three_at_most() -> None:
    play = Play(ask(poison="worker", params={"n": 1}))
    play.tell()
    assert play.end() == ["wrong end"]
    play = Play(ask(poison="worker", params={"n": 1}))
    play.fail(500, "failed 3 times")
    for deaths, rules in ((3, []), (4, ["poison"])):
        assert play.end(blows=struck(["poison"] * deaths), poisoned={play.request.uid: "worker"}) == rules


def test_cached_tokens_that_nobody_computed_are_found() -> None:
    play = Play(ask(salt="s"))
    assert play.tell() == []
    play.request.cached_tokens = 16
    assert play.end() == ["cached tokens"]
    for salt, rules in (("", ["cached tokens"]), ("s", [])):
        before = Play(ask(salt=salt))
        before.tell()
        assert play.end(consumers=[before.consumer, play.consumer]) == rules
        play.request.cached_tokens = 13
        assert play.end(consumers=[before.consumer, play.consumer]) == ["cached tokens"]
        play.request.cached_tokens = 16


def test_what_is_left_at_an_engine_is_found() -> None:
    play = Play(ask())
    there = [SimpleNamespace(name="f0.1", host=SimpleNamespace(alive=True), core=play.rig.core)]
    assert play.end(frontends=there) == ["never ended", "left over", "left over"]
    play.tell()
    assert play.end(frontends=there) == []
