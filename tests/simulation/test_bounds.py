"""The bounds bite: each rule finds what is past it, and nothing at it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from simulation.bounds import counted_too_often, late_to_leave, over_limits, overlooked, without_cause

SHAPE = SimpleNamespace(
    detokenizers=1,
    max_num_queued_reqs=2,
    max_num_queued_tokens=10,
    max_requests_per_key=2,
    queue_timeout=5.0,
    drain_timeout=2.0,
    moves=False,
)


def core(*requests: dict[str, Any]) -> Any:
    plain = {"attempt": 0, "started": False, "prompt_len": 3, "account": ""}
    return SimpleNamespace(requests={n: SimpleNamespace(**(plain | one)) for n, one in enumerate(requests)})


def world(**fields: Any) -> Any:
    registry = SimpleNamespace(lost=fields.pop("lost", {}))
    plan = SimpleNamespace(shape=SHAPE, faults=fields.pop("faults", []))
    plain = {"blows": [], "consumers": [], "plan": plan, "timeline": SimpleNamespace(now=fields.pop("now", 0.0))}
    plain["scheduler"] = SimpleNamespace(membership=SimpleNamespace(registry=registry))
    return SimpleNamespace(**(plain | fields))


@pytest.mark.parametrize(
    ("requests", "rules"),
    [
        ([{}, {}], []),
        ([{}, {}, {}], ["line too long"]),
        ([{}, {}, {"attempt": 1}, {"started": True}], []),
        ([{"prompt_len": 11}], []),
        ([{"prompt_len": 11}, {}], ["line too long"]),
        ([{"account": "a", "started": True}] * 2, []),
        ([{"account": "a", "started": True}] * 3, ["key over its limit"]),
        ([{"started": True}] * 3, []),
    ],
)
def test_lines_and_keys_are_no_fuller_than_they_may_be(requests: list[dict[str, Any]], rules: list[str]) -> None:
    assert [line.partition(" | ")[0] for line in over_limits(core(*requests), SHAPE)] == rules


@pytest.mark.parametrize(
    ("attempt", "waited", "blows", "rules"),
    [
        (0, 6.9, [], []),
        (0, None, [], []),
        (1, 0.1, [], ["sent again"]),
        (0, 7.1, [], ["waited too long"]),
        (0, 7.1, [[0.0, 1.0, "kill", "w0"]], []),
        (1, 7.1, [[0.0, 1.0, "drain", "w0"]], ["sent again"]),
        (1, 0.1, [[0.0, 1.0, "kill", "d0"]], []),
        (1, 0.1, [[0.0, 1.0, "cut", "w0"]], []),
    ],
)
def test_what_comes_without_a_cause_is_found(attempt: int, waited: Any, blows: list[Any], rules: list[str]) -> None:
    request = SimpleNamespace(attempt=attempt, metrics=SimpleNamespace(time_in_queue=waited))
    consumers = [
        SimpleNamespace(request=each, ask=SimpleNamespace(name="ask0", frontend=0)) for each in (request, None)
    ]
    found = without_cause(world(consumers=consumers, blows=blows))
    assert [line.partition(" | ")[0] for line in found] == rules


@pytest.mark.parametrize(
    ("attempt", "losses", "blows", "rules"),
    [
        (0, 0, [], []),
        (3, 1, [[1.0, 2.0, "kill", "d0"]], []),
        (4, 1, [[1.0, 2.0, "kill", "d0"]], ["sent too often"]),
        (1, 2, [[1.0, 2.0, "kill", "d0"]], ["losses miscounted"]),
        (1, 0, [[9.0, 9.0, "kill", "d0"]], ["sent too often"]),
        (1, 1, [[1.0, 2.0, "drain", "w0"]], ["losses miscounted"]),
    ],
)
def test_what_is_counted_has_as_many_causes(attempt: int, losses: int, blows: list[Any], rules: list[str]) -> None:
    request = SimpleNamespace(attempt=attempt, losses=SimpleNamespace(count=losses))
    ask = SimpleNamespace(name="ask0", poison="", frontend=0)
    consumers = [SimpleNamespace(request=each, ask=ask, begun=0.5, ended=5.0) for each in (request, None)]
    found = counted_too_often(world(consumers=consumers, blows=blows))
    assert [line.partition(" | ")[0] for line in found] == rules


def test_a_lease_that_ends_without_a_cause_is_found() -> None:
    assert without_cause(world(lost={"w0.1": "failed"})) == ["lease ended | w0.1: expected nothing, and it failed"]


@pytest.mark.parametrize(
    ("blows", "now", "late"),
    [
        ([[1.0, 9e9, "drain", "w0"]], 8.0, 0),
        ([[1.0, 9e9, "drain", "w0"]], 8.1, 1),
        ([[1.0, 9e9, "remove", "w0"]], 6.1, 1),
        ([[1.0, 9e9, "drain", "w0"], [2.0, 3.0, "stop", "s"]], 8.1, 0),
        ([], 8.1, 0),
    ],
)
def test_a_worker_that_leaves_too_late_is_found(blows: list[Any], now: float, late: int) -> None:
    assert len(late_to_leave(world(blows=blows, now=now), "w0")) == late


@pytest.mark.parametrize(
    ("targets", "seconds", "found"),
    [(["d0"], 70.0, 1), (["d0"], 25.0, 0), (["d0", "d0"], 70.0, 0), (["d0", "v"], 70.0, 0)],
)
def test_one_that_stood_still_and_was_not_killed_is_found(targets: list[str], seconds: float, found: int) -> None:
    faults = [SimpleNamespace(target=target) for target in targets]
    assert len(overlooked(world(faults=faults), "d0", seconds)) == found
