"""A process that stood still gives others that time again, and no more than it."""

import math

import pytest

from quire.proto.standstill import Standstill


def after(*gaps: float, limit: float = 2.0) -> tuple[Standstill, list[bool]]:
    """One that began at 100, and what it noticed at turns so far apart."""
    now = 100.0
    standstill, noticed = Standstill(limit, now), []
    for gap in gaps:
        now += gap
        noticed.append(standstill.notice(now))
    return standstill, noticed


@pytest.mark.parametrize(
    ("gaps", "noticed", "seconds", "at"),
    [
        ([], [], 0.0, -math.inf),
        ([0.0, 1.0, 2.0], [False] * 3, 0.0, -math.inf),
        ([2.5], [True], 2.5, 102.5),
        ([1.0, 300.0, 1.0], [False, True, False], 300.0, 401.0),
        ([1.9, 1.9, 1.9], [False] * 3, 0.0, -math.inf),  # slow, but awake: each turn counts by itself
        ([5.0, 7.0], [True, True], 7.0, 112.0),  # the last one
    ],
)
def test_turns(gaps: list[float], noticed: list[bool], seconds: float, at: float) -> None:
    standstill, found = after(*gaps)
    assert (found, standstill.seconds, standstill.noticed_at) == (noticed, seconds, at)


@pytest.mark.parametrize(
    ("at", "counts_from"),
    [
        (101.0, 401.0),  # heard when the standstill began: just heard
        (95.0, 395.0),  # 6 s before it: 6 s ago
        (300.0, 401.0),  # in its midst, by whoever does not stand still: just heard, and never in the future
        (401.0, 401.0),
        (450.0, 450.0),  # begins later, and still does
        (math.inf, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_what_has_lasted(at: float, counts_from: float) -> None:
    standstill, _ = after(1.0, 300.0)
    assert standstill.since(at) == counts_from


@pytest.mark.parametrize(("deadline", "moved"), [(90.0, 390.0), (120.0, 420.0), (math.inf, math.inf)])
def test_deadlines(deadline: float, moved: float) -> None:
    standstill, _ = after(1.0, 300.0)
    assert standstill.until(deadline) == moved


def test_two_standstills_one_after_the_other_add_up() -> None:
    now = 0.0
    standstill, heard = Standstill(2.0, now), -3.0
    for gap in (10.0, 1.0, 20.0):
        now += gap
        if standstill.notice(now):
            heard = standstill.since(heard)
    assert now - heard == 3.0 + 1.0


def test_it_says_how_long(caplog: pytest.LogCaptureFixture) -> None:
    after(1.0, 12.34, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "this process stood still for 12.3 s; nobody is held to that time"
    ]
