"""The supervisor's decisions, and a place's states, as tables."""

from __future__ import annotations

import signal

import pytest

from quire.client.supervisor.decision import (
    FIRST_PAUSE_S,
    HOPELESS_PAUSE_S,
    MAX_PAUSE_S,
    QUICK_EXITS,
    UNSERVED_EXITS,
    Decision,
    Exit,
    GiveUp,
    Leave,
    Restart,
    decide,
)
from quire.client.supervisor.place import TRANSITIONS, Place, State
from quire.proto.process import EXIT_CONFIG

QUICK_S = 10.0
KILLED, CRASHED = -signal.SIGKILL, 1
LATER = 3600.0
LOADS = Exit(KILLED, 3.0, served=False)
LOADS_LONG = Exit(KILLED, 600.0, served=False)
SERVES = Exit(KILLED, 3.0, served=True)
SERVES_LONG = Exit(KILLED, LATER, served=True)
REFUSED = Exit(EXIT_CONFIG, 3.0, served=False)
STARTING = Exit(KILLED, 600.0, served=True, starting=True)
SOON = "within 10 s of its start"
NEVER = "before it had begun to serve"


@pytest.mark.parametrize(
    ("history", "decision"),
    [
        # What has worked for long is started again at once; what dies soon waits longer each time.
        ([SERVES_LONG], Restart(0.0)),
        ([SERVES_LONG] * 100, Restart(0.0)),
        ([SERVES], Restart(FIRST_PAUSE_S)),
        ([SERVES] * 3, Restart(4 * FIRST_PAUSE_S)),
        ([SERVES] * 8, Restart(MAX_PAUSE_S)),
        ([LOADS, SERVES, LOADS_LONG], Restart(4 * FIRST_PAUSE_S)),
        ([SERVES, SERVES, SERVES_LONG, SERVES], Restart(FIRST_PAUSE_S)),
        ([Exit(KILLED, QUICK_S, served=True)] * 40, Restart(0.0)),
        # Five in a row that had not served, at whatever pace.
        ([LOADS] * 4, Restart(8 * FIRST_PAUSE_S)),
        ([LOADS] * 5, GiveUp(f"ended 5 times {SOON}")),
        ([LOADS_LONG] * 4, Restart(8 * FIRST_PAUSE_S)),
        ([LOADS_LONG] * 5, GiveUp(f"ended 5 times {NEVER}")),
        ([LOADS, LOADS_LONG] * 2 + [LOADS], GiveUp(f"ended 5 times {NEVER}")),
        ([LOADS] * 4 + [Exit(KILLED, QUICK_S, served=False)], GiveUp(f"ended 5 times {NEVER}")),
        ([SERVES_LONG] + [LOADS] * 5, GiveUp(f"ended 5 times {SOON}")),
        # Thirty in a row that ended soon; those that had not served are among them, and do not lower the limit.
        ([SERVES] * 29, Restart(MAX_PAUSE_S)),
        ([SERVES] * 30, GiveUp(f"ended 30 times {SOON} or {NEVER}")),
        ([SERVES] * 5 + [LOADS], Restart(32 * FIRST_PAUSE_S)),
        ([SERVES] * 20 + [LOADS] * 4, Restart(MAX_PAUSE_S)),
        (([SERVES] + [LOADS] * 4) * 5 + [SERVES] * 4, Restart(MAX_PAUSE_S)),
        (([SERVES] + [LOADS] * 4) * 5 + [SERVES] * 5, GiveUp(f"ended 30 times {SOON} or {NEVER}")),
        ([SERVES] * 20 + [SERVES_LONG] + [SERVES] * 20, Restart(MAX_PAUSE_S)),
        # What can never work as configured is not tried again, unless it has worked.
        ([REFUSED], GiveUp()),
        ([LOADS, REFUSED], GiveUp()),
        ([SERVES_LONG, REFUSED], Restart(FIRST_PAUSE_S)),
        ([SERVES_LONG] + [REFUSED] * 5, GiveUp(f"ended 5 times {SOON}")),
        ([Exit(EXIT_CONFIG, 3.0, served=True)] * 4, Restart(8 * FIRST_PAUSE_S)),
        ([Exit(EXIT_CONFIG, 3.0, served=True)] * 5, GiveUp(f"ended 5 times {SOON}")),
        ([Exit(EXIT_CONFIG, QUICK_S, served=True)] * 40, Restart(0.0)),
        # While the server starts, what fails ends the start, and what is killed is tried as often as what loads.
        ([Exit(CRASHED, 3.0, served=False, starting=True)], GiveUp()),
        ([Exit(CRASHED, 3.0, served=True, starting=True)], GiveUp()),
        ([Exit(-signal.SIGSEGV, 3.0, served=False, starting=True)], GiveUp()),
        ([STARTING] * 4, Restart(8 * FIRST_PAUSE_S)),
        ([STARTING] * 5, GiveUp(f"ended 5 times {NEVER}")),
        ([STARTING] * 4 + [SERVES], Restart(16 * FIRST_PAUSE_S)),
        # A worker that was drained stays away.
        ([Exit(0, LATER, served=True)], Leave()),
        ([SERVES] * 3 + [Exit(0, 1.0, served=True)], Leave()),
    ],
)
def test_a_workers_exits(history: list[Exit], decision: Decision) -> None:
    assert decide("gpu_worker", history) == decision
    assert decide("gpu_worker", history[-QUICK_EXITS:]) == decision


@pytest.mark.parametrize(
    ("history", "pause"),
    [
        ([LOADS] * 4, 8 * FIRST_PAUSE_S),
        ([LOADS] * 5, 16 * FIRST_PAUSE_S),
        ([LOADS] * 8, 128 * FIRST_PAUSE_S),
        ([LOADS] * 9, HOPELESS_PAUSE_S),
        ([LOADS] * 30, HOPELESS_PAUSE_S),
        ([LOADS_LONG] * 30, HOPELESS_PAUSE_S),
        ([SERVES] * 29, MAX_PAUSE_S),
        ([SERVES] * 30, HOPELESS_PAUSE_S),
        ([REFUSED], FIRST_PAUSE_S),
        ([REFUSED] * 30, HOPELESS_PAUSE_S),
        ([LOADS] * 9 + [SERVES_LONG], 0.0),
        ([STARTING] * 5 + [LOADS], 32 * FIRST_PAUSE_S),
    ],
)
def test_a_server_that_is_of_use_goes_on_and_tries_more_slowly(history: list[Exit], pause: float) -> None:
    assert decide("gpu_worker", history, of_use=True) == Restart(pause)


def test_while_the_server_starts_nothing_is_of_use_yet() -> None:
    for history in ([Exit(CRASHED, 3.0, served=False, starting=True)], [STARTING] * 5):
        assert isinstance(decide("gpu_worker", history, of_use=True), GiveUp)
    assert decide("gpu_worker", [Exit(0, LATER, served=True)], of_use=True) == Leave()


def test_no_other_service_leaves_on_purpose() -> None:
    assert decide("detokenizer", [Exit(0, LATER, served=True)]) == Restart(0.0)
    assert decide("detokenizer", [Exit(0, 1.0, served=False)] * UNSERVED_EXITS) == GiveUp(f"ended 5 times {SOON}")


def test_a_place_changes_its_state_only_as_the_table_says() -> None:
    for before in State:
        for after in State:
            place = Place("gpu_worker")
            place.state = before
            if (before, after) in TRANSITIONS:
                place.become(after)
                assert place.state is after
            else:
                with pytest.raises(RuntimeError, match=f"is {before.value} and cannot become {after.value}"):
                    place.become(after)
                assert place.state is before


def test_every_state_but_the_last_has_a_way_out_and_every_one_is_reached() -> None:
    assert {before for before, _ in TRANSITIONS} == set(State) - {State.LEFT}
    assert {State.NEW} | {after for _, after in TRANSITIONS} == set(State)
