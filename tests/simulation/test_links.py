"""Faults of simulated links: what breaks when, what arrives, and that a seed always gives the same history."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.proto.wire.unread import MAX_UNREAD

from .host import Host
from .network import Network
from .timeline import Timeline
from .zeromq_child import Note

WHERE = "ipc:///sim/a"


class Pair:
    """A Router and a Dealer, connected; ``log`` has what each was told, with the time."""

    def __init__(self, seed: int = 1):
        self.timeline = Timeline()
        self.network = Network(self.timeline, seed)
        self.log: list[tuple[float, str, Any]] = []
        self.r, self.d = Host(self.timeline, "r", "r"), Host(self.timeline, "d", "d")
        self.router = self.listen(self.r)
        self.dealer = self.dial(self.d)
        self.run(1.0)

    def listen(self, host: Host) -> Any:
        name = host.name
        return self.network.listen(
            host, WHERE, Note, lambda _, note: self.told(name, note.number), lambda event: self.told(name, event)
        )

    def dial(self, host: Host, identity: str = "d") -> Any:
        name = host.name
        return self.network.dial(
            host, WHERE, Note, identity, lambda note: self.told(name, note.number), lambda event: self.told(name, event)
        )

    def told(self, who: str, what: Any) -> None:
        self.log.append((self.timeline.now, who, what))

    def run(self, seconds: float) -> None:
        until = self.timeline.now + seconds
        while self.timeline.step(until):
            pass

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.dealer.send(Note(number))
            self.router.send("d", Note(-number))

    def at(self, who: str) -> list[Any]:
        return [what for _, name, what in self.log if name == who]

    def when(self, who: str, what: Any) -> float:
        return next(when for when, name, told in self.log if (name, told) == (who, what))


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_found_by_heartbeats_and_both_come_back(seed: int) -> None:
    pair = Pair(seed)
    pair.network.cut(pair.r, "d")
    pair.send(1)
    pair.run(9.5)
    assert pair.at("r") == pair.at("d") == ["connected"]
    pair.run(20.0)
    assert pair.at("r") == pair.at("d") == ["connected", "disconnected"]
    assert 11.0 <= pair.when("r", "disconnected") <= 13.1  # the cut was at 1 s
    assert not pair.router.send("d", Note(2))
    pair.network.heal("r", "d")
    pair.dealer.send(Note(3))
    pair.run(5.0)
    assert pair.at("r")[2:] in (["connected", 3], [3, "connected"])
    assert pair.router.send("d", Note(4))


def test_what_a_short_cut_held_up_arrives_in_order() -> None:
    pair = Pair()
    pair.network.cut("r", "d")
    pair.send(*range(1, 30))
    pair.run(4.0)
    pair.network.heal("r", "d")
    pair.send(*range(30, 40))
    pair.run(10.0)
    assert pair.at("r") == ["connected", *range(1, 40)]
    assert pair.at("d") == ["connected", *(-n for n in range(1, 40))]


def test_one_way() -> None:
    pair = Pair()
    pair.network.cut_one_way("d", "r")
    pair.send(1)
    pair.run(1.0)
    assert pair.at("r") == ["connected"]
    assert pair.at("d") == ["connected", -1]
    pair.run(15.0)  # the router hears nothing and closes, which the dealer is told
    assert pair.at("r") == ["connected", "disconnected"]
    assert pair.at("d") == ["connected", -1, "disconnected"]


def test_slow() -> None:
    pair = Pair()
    pair.network.slow("d", "r", 2.0)
    pair.send(1)
    pair.run(1.9)
    assert pair.at("r") == ["connected"]
    pair.run(1.0)
    assert pair.at("r") == ["connected", 1]
    pair.network.slow("d", "r", 0.0)
    pair.send(2)
    pair.run(0.1)
    assert pair.at("r") == ["connected", 1, 2]


def test_a_machine_that_is_off_is_found_by_heartbeats_and_one_that_ends_at_once() -> None:
    for off in (True, False):
        pair = Pair()
        (pair.network.vanish if off else Host.end)(pair.r)
        pair.run(9.0)
        assert pair.at("d") == ["connected"] if off else ["connected", "disconnected"]
        pair.run(4.0)
        assert pair.at("d") == ["connected", "disconnected"]
        successor = Host(pair.timeline, "r", "r2", machine="r")
        pair.listen(successor)
        pair.run(4.0)
        assert pair.at("r2") == ["connected"]


def test_half_open_connections_break_when_their_machine_is_on_again() -> None:
    pair = Pair()
    pair.network.vanish(pair.r)
    pair.run(1.0)
    pair.listen(Host(pair.timeline, "r", "r2", machine="r"))
    pair.run(3.5)
    assert pair.at("d") == ["connected", "disconnected", "connected"]


def test_who_does_not_read_is_given_up() -> None:
    pair = Pair()
    pair.d.hang()
    piece = bytes(2**20)
    sent = [pair.router.send("d", Note(n, piece)) for n in range(MAX_UNREAD // 2**20 + 5)]
    assert all(sent)
    for _ in range(15):
        pair.run(1.0)
        sent.append(pair.router.send("d", Note(1)))
    assert not sent[-1]
    pair.d.go_on()
    pair.run(1.0)
    assert pair.at("d")[-2:] == ["disconnected", "connected"]
    assert pair.router.send("d", Note(7))
    pair.run(1.0)
    assert pair.at("d")[-1] == 7


def history(seed: int) -> list[tuple[float, str, Any]]:
    """Faults by chance, messages all the while."""
    rng, pair = random.Random(seed), Pair(seed)
    dealers = {"d": pair.d}
    for step in range(60):
        pair.send(*range(10 * step + 1, 10 * step + 11))
        net = pair.network
        fault = rng.choice([net.cut, net.cut_one_way, net.stall, net.reset, net.heal, net.heal, net.heal, None, None])
        if fault is not None:
            fault(*rng.sample(["d", "r"], 2))
        if rng.random() < 0.1:
            rng.choice([pair.r, pair.d]).stop()
        if rng.random() < 0.2:
            pair.r.go_on()
            pair.d.go_on()
        if rng.random() < 0.05:
            name = f"d{step}"
            rng.choice([net.vanish, Host.end])(dealers.popitem()[1])
            pair.d = dealers["d"] = Host(pair.timeline, "d", name, machine="d")
            pair.dealer = pair.dial(pair.d)
        pair.run(rng.choice([0.0005, 0.01, 1.0, 13.0]))
    return pair.log


@pytest.mark.parametrize("seed", range(30))
def test_order_is_kept_whatever_happens_and_a_seed_says_all(seed: int) -> None:
    log = history(seed)
    assert log == history(seed)
    for who in {name for _, name, _ in log}:
        numbers = [abs(what) for _, name, what in log if name == who and isinstance(what, int)]
        assert len(set(numbers)) == len(numbers)
        assert who == "r" or numbers == sorted(numbers)


def test_each_thing_that_timing_decides_happens_in_some_history() -> None:
    seen = set()
    for seed in range(200):
        pair, sent = Pair(seed), []
        pair.network.signals[pair.router.monitor().signal.number].reader = lambda p=pair, s=sent: (
            s.append(p.router.send("d", Note(1))),
            p.told("r", p.router.next_event()),
        )
        pair.dealer.send(Note(1))
        pair.dealer.send(Note(2))
        pair.run(0.0003)
        pair.d.end()
        pair.run(1.0)
        told = pair.at("r")[1:]
        seen |= {
            ("reachable when told", sent[-1]),
            ("told before the last message", told.index("disconnected") < len(told) - 1),
        }
        seen |= {("arrived", sum(isinstance(what, int) for what in told))}
    assert seen == {
        *(("reachable when told", b) for b in (True, False)),
        *(("told before the last message", b) for b in (True, False)),
        *(("arrived", n) for n in (0, 1, 2)),
    }  # fmt: skip
