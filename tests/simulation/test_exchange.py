"""The rules of what processes say to one another bite, and what is sound passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.proto import messages as m
from quire.proto.codec import i32, i64
from quire.proto.config import EngineArgs
from quire.scheduler.core import Scheduler
from quire.scheduler.membership import Membership
from quire.scheduler.worker_registry import STOPPED_S
from simulation.exchange import Exchange, watch_scheduler


@pytest.fixture
def failed() -> list[str]:
    return []


@pytest.fixture
def exchange(failed: list[str]) -> Exchange:
    return Exchange(lambda line: failed.append(line.partition(" | ")[0]), lambda kind: False)


def asked(attempt: int) -> Any:
    return SimpleNamespace(uid=7, attempt=attempt, priority=0, arrival=5.0 + attempt)


def test_an_engine_sends_higher_attempts_only(exchange: Exchange, failed: list[str]) -> None:
    for attempt in (0, 1, 3):
        exchange.asked(asked(attempt))
    assert failed == []
    exchange.asked(asked(3))
    assert failed == ["attempt not raised"]
    assert exchange.places == {7: (0, 5.0)}


@pytest.mark.parametrize(
    ("attempts", "aborted", "rules"),
    [
        ([0, 1], {}, []),
        ([0, 0], {}, ["submitted twice"]),
        ([1], {7: 0, 8: 1}, []),
        ([0], {7: 0}, ["submitted though aborted"]),
    ],
)
def test_a_detokenizer_submits_once_and_what_is_wanted(
    exchange: Exchange, failed: list[str], attempts: list[int], aborted: dict[int, int], rules: list[str]
) -> None:
    for attempt in attempts:
        exchange.submitted(asked(attempt), aborted)
    assert failed == rules


@pytest.mark.parametrize(
    ("attempt", "offset", "rules"),
    [(1, 2, []), (0, 1, []), (1, 1, ["tokens sent twice"]), (1, 3, ["tokens lost"])],
)
def test_tokens_follow_those_of_a_detokenizer(
    exchange: Exchange, failed: list[str], attempt: int, offset: int, rules: list[str]
) -> None:
    core: Any = SimpleNamespace(requests={7: SimpleNamespace(attempt=1, sequences={0: SimpleNamespace(count=2)})})
    batch = m.TokenBatch(
        uids=i64([7]), attempts=i32([attempt]), indexes=i32([0]), offsets=i32([offset]), counts=i32([1]),
        tokens=i32([5]), finishes=bytes(1), stop_ids=i32([-1]),
    )  # fmt: skip
    exchange.tokens(core, batch)
    assert failed == rules
    exchange.tokens(core, batch, {(7, 1)})  # the connection broke: a gap may be, and nothing may come again
    assert failed[len(rules) :] == [rule for rule in rules if rule != "tokens lost"]


@pytest.fixture
def members() -> Membership:
    return Membership(Scheduler(EngineArgs(), lambda: 100.0), 1)


def test_who_has_requests_is_known_and_messages_make_sense(
    exchange: Exchange, failed: list[str], members: Membership
) -> None:
    exchange.turned(members)
    assert failed == []
    exchange.listens(members)
    members.core.bad("\0\0\0\0\1", "Hello of another name")
    exchange.turned(members)
    assert failed == []
    members.core.requests[7] = SimpleNamespace(uid=7, owner="d0")  # type: ignore[assignment]
    members.core.bad("w0", "nonsense")
    exchange.turned(members)
    assert failed == ["owner unknown", "protocol broken"]


@pytest.mark.parametrize(("heard", "waited", "rules"), [
    (83.1, 31.9, []), (82.9, 0.0, ["silence ignored"]), (100.0, 32.1, ["hung step"]),
])  # fmt: skip
def test_a_worker_that_is_silent_or_hangs_has_no_lease(
    exchange: Exchange, failed: list[str], members: Membership, heard: float, waited: float, rules: list[str]
) -> None:
    members.config.worker_timeout, members.config.step_timeout = 15.0, 30.0
    replica = SimpleNamespace(waited=lambda now: waited)
    members.registry.workers["w0"] = SimpleNamespace(replica=replica, heartbeat_at=heard)  # type: ignore[assignment]
    exchange.turned(members)
    assert failed == rules


@pytest.mark.parametrize(("attempt", "found"), [(0, True), (1, False)])
def test_a_later_attempt_lost_to_an_earlier_one_is_found(members: Membership, attempt: int, found: bool) -> None:
    failed: list[str] = []
    core = members.core
    core.abort = lambda uid, attempt: core.requests.clear()  # type: ignore[method-assign]
    watch_scheduler(members, failed.append, lambda: 0.0)
    core.requests[7] = SimpleNamespace(attempt=1)  # type: ignore[assignment]
    core.abort(7, attempt)
    assert bool(failed) is found


@pytest.mark.parametrize(("ago", "blame", "found"), [(5.0, True, True), (5.0, False, False), (STOPPED_S, True, False)])
def test_blame_for_a_standstill_is_found(members: Membership, ago: float, blame: bool, found: bool) -> None:
    failed: list[str] = []
    members.core.end_lease = lambda replica, blame: None  # type: ignore[method-assign]
    watch_scheduler(members, failed.append, lambda: 100.0 - ago)
    members.core.end_lease(SimpleNamespace(peer="w0"), blame)  # type: ignore[arg-type]
    assert bool(failed) is found
