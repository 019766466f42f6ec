"""The simulated network behaves as ZeroMQ does: the same scripts on both, and what real sockets do is among what the
simulation can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.proto.config import ConfigError

from .zeromq_rig import Cluster, Real, Simulated, in_order

UP, DOWN = "connected", "disconnected"
Script = Callable[[Cluster], Any]


def queued_before_anyone_listens(c: Cluster) -> Any:
    d = c.dealer("a")
    sent = d.send(1, 2, 3)
    r = c.router("a")
    c.until(lambda: len(r.got) == 3)
    answered = r.send(7, 8, to="d") + r.send(9, to="stranger")
    c.until(lambda: len(d.got) == 2 and d.heard(UP))
    return sent, answered, r.got, d.got, d.events


def router_killed_and_another_begun(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: r.numbers == [1])
    r.kill()
    c.until(lambda: d.heard(DOWN))
    d.send(2, 3)
    again = c.router("a")
    c.until(lambda: again.numbers[-1:] == [3])
    c.until(lambda: d.heard(UP, 2))
    return again.got, d.events


def router_killed_amid_messages(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(0)
    c.until(lambda: bool(r.got) and d.heard(UP))
    d.send(*range(1, 300))
    r.kill()
    d.send(*range(300, 400))
    c.until(lambda: d.heard(DOWN))
    again = c.router("a")
    d.send(999)
    c.until(lambda: again.numbers[-1:] == [999])
    early, late = r.numbers, again.numbers
    # Whatever arrived is in order, and each once: a prefix at the first; at the second what the pipe kept, to the end.
    return early == list(range(len(early))), in_order(early + late), late[:-1] == list(range(1000))[late[0] : 400]


def dealer_killed_amid_messages(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(0)
    c.until(lambda: bool(r.got))
    d.send(*range(1, 300))
    d.kill()
    c.until(lambda: r.heard(DOWN))
    c.pause(0.1)
    return r.numbers == list(range(len(r.numbers))), r.events, r.send(1, to="d")


def identity_taken_over(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got))
    other = c.dealer("a")
    other.send(2)
    c.until(lambda: len(r.got) == 2)
    r.send(5, to="d")
    c.until(lambda: bool(other.got))
    c.pause(1.5)  # the older connection holds: nobody has sent anything on it
    return r.numbers, d.got, other.got, d.events


def older_connection_sends_after_handover(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got))
    other = c.dealer("a")
    other.send(2)
    c.until(lambda: len(r.got) == 2)
    d.send(3)  # is never read; then heartbeats are not either, and it comes back, and takes over in turn
    c.until(lambda: d.heard(UP, 2))
    d.send(4)
    c.until(lambda: r.numbers[-1:] == [4])
    r.send(6, to="d")
    c.until(lambda: bool(d.got))
    return r.numbers, d.events, other.got


def router_stopped_for_a_moment(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got) and d.heard(UP))
    r.stop()
    d.send(*range(2, 20))
    c.pause(0.3)
    r.go_on()
    c.until(lambda: len(r.got) == 19)
    return r.numbers, d.events, r.events


def router_stopped_for_long(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got) and d.heard(UP))
    r.stop()
    d.send(2, 3)
    c.until(lambda: d.heard(DOWN))
    d.send(4, 5)
    r.go_on()
    c.until(lambda: r.numbers[-1:] == [5])
    # The old connection's may be read, lost in the handover, or come from nobody.
    return [number for peer, number in r.got if peer == "d"] in ([1, 4, 5], [1, 2, 4, 5], [1, 2, 3, 4, 5]), d.events[:2]


def dealer_stopped_for_long(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got) and d.heard(UP))
    d.stop()
    sent = r.send(5, 6, to="d")
    c.until(lambda: r.heard(DOWN))
    c.pause(0.2)
    sent += r.send(7, to="d")
    d.go_on()
    c.until(lambda: d.heard(DOWN))
    d.send(2)
    c.until(lambda: r.numbers[-1:] == [2])
    sent += r.send(8, to="d")
    c.until(lambda: d.numbers[-1:] == [8] and d.heard(UP, 2))
    return sent, d.numbers, d.events, r.numbers


def messages_are_read_after_their_sender_is_gone(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got))
    r.hang()
    d.send(2, 3)
    c.pause(0.2)
    d.kill()
    c.pause(0.2)
    r.go_on()
    c.until(lambda: r.heard(DOWN))
    return r.got, r.events, r.send(1, to="d")


def successor_of_a_name_while_the_router_hangs(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got))
    r.hang()
    d.send(2, 3)
    c.pause(0.2)
    d.kill()
    c.pause(0.2)
    again = c.dealer("a")
    again.send(4)
    c.until(lambda: again.heard(UP))
    c.pause(0.2)
    r.go_on()
    c.until(lambda: 4 in r.numbers and r.heard(DOWN))
    return sorted(r.got)


def too_long_a_frame(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.send(1)
    c.until(lambda: bool(r.got) and d.heard(UP))
    sent = d.send(2, size=2**20) + r.send(5, to="d", size=2**20)
    c.until(lambda: d.heard(UP, 2))  # it was given up, and made another
    d.send(3)
    c.until(lambda: r.numbers[-1:] == [3])
    sent += r.send(7, to="d")
    c.until(lambda: d.numbers == [7])
    return sent, r.numbers, [event for event in d.events if event == UP], d.heard(DOWN)


def bytes_that_are_no_message(c: Cluster) -> Any:
    r, d = c.router("a"), c.dealer("a")
    d.raw(b"\xc1\xc1")
    d.raw(b"")
    d.send(1)
    c.until(lambda: bool(r.got))
    return r.got, r.bad_frames()


def link_stalled_for_a_moment(c: Cluster) -> Any:
    r = c.router("a")
    d = c.dealer("a", via=True)
    d.send(1)
    c.until(lambda: bool(r.got) and d.heard(UP))
    c.stall()
    d.send(*range(2, 20))
    r.send(5, 6, to="d")
    c.pause(0.2)
    held = list(r.numbers), list(d.numbers)
    c.heal()
    c.until(lambda: len(r.got) == 19 and len(d.got) == 2)
    return held, r.numbers, d.numbers, r.events, d.events


def link_stalled_for_long(c: Cluster) -> Any:
    r = c.router("a")
    d = c.dealer("a", via=True)
    d.send(1)
    c.until(lambda: bool(r.got) and d.heard(UP))
    c.stall()
    sent = d.send(2) + r.send(5, to="d")
    c.until(lambda: d.heard(DOWN) and r.heard(DOWN))
    c.pause(0.1)
    sent += d.send(3) + r.send(6, to="d")
    c.heal()
    c.until(lambda: r.numbers[-1:] == [3])
    sent += r.send(7, to="d")
    c.until(lambda: d.numbers[-1:] == [7])
    return sent, r.got, d.numbers


def link_reset_amid_messages(c: Cluster) -> Any:
    r = c.router("a")
    d = c.dealer("a", via=True)
    d.send(0)
    c.until(lambda: bool(r.got) and d.heard(UP))
    d.send(*range(1, 200))
    r.send(*range(200), to="d")
    c.reset()
    c.until(lambda: d.heard(DOWN) and r.heard(DOWN))
    d.send(999)
    c.until(lambda: r.numbers[-1:] == [999])
    r.send(999, to="d")
    c.until(lambda: d.numbers[-1:] == [999])
    back = d.numbers[:-1]
    return in_order(r.numbers), back == list(range(len(back))), d.events


SCRIPTS: list[Script] = [
    queued_before_anyone_listens,
    router_killed_and_another_begun,
    router_killed_amid_messages,
    dealer_killed_amid_messages,
    identity_taken_over,
    older_connection_sends_after_handover,
    router_stopped_for_a_moment,
    router_stopped_for_long,
    dealer_stopped_for_long,
    messages_are_read_after_their_sender_is_gone,
    successor_of_a_name_while_the_router_hangs,
    too_long_a_frame,
    bytes_that_are_no_message,
    link_stalled_for_a_moment,
    link_stalled_for_long,
    link_reset_amid_messages,
]


def simulated(script: Script, seeds: int = 60) -> set[str]:
    """Everything that came of it."""
    return {repr(script(Simulated(seed))) for seed in range(seeds)}


@pytest.fixture(autouse=True)
def _short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.proto.wire.sockets.MAX_FRAME", 2**20)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    cluster = Real(tmp_path_factory.mktemp("z"))
    yield cluster
    cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_real_sockets_do_what_simulated_ones_may(script: Script, real: Real) -> None:
    possible = simulated(script)
    try:
        happened = repr(script(real))
    finally:
        real.forget()
    assert happened in possible, sorted(possible)


def test_an_endpoint_is_taken_while_its_process_lives() -> None:
    c = Simulated(1)
    r = c.router("a")
    with pytest.raises(ConfigError, match="cannot listen"):
        c.router("a")
    r.kill()
    c.router("a")
