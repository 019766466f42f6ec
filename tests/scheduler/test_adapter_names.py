"""Names of adapters at the scheduler and at frontends: who tells whom, and what outlives what."""

from __future__ import annotations

import inspect
import random

import pytest
from adapter_rig import adapter
from scheduler_house import House

from quire.client import adapters
from quire.client.adapters import AdapterBook
from quire.client.core import SCHEDULER, EngineCore
from quire.client.engine import Engine
from quire.proto.messages import (
    PROTOCOL,
    AdapterEntry,
    AdapterReady,
    Adapters,
    DropAdapter,
    Hello,
    LoadAdapter,
    Peers,
    Register,
    Registered,
    Unregister,
)
from quire.scheduler import adapter_names
from quire.scheduler.adapters import WISH_LIMIT_S

A, B, NEW_A = adapter("A"), adapter("B"), adapter("A", "/adapters/A2")


@pytest.fixture
def house() -> House:
    house = House()
    for name in ("f1", "f2"):
        house.hello(name, "frontend")
    house.hello("d1")
    house.told("f1", Adapters)
    return house


def register(house: House, asked: Register, error: str = "") -> Registered:
    """Ask as f1, and have the worker load what it is told to; the answer."""
    house.members.on_front("f1", asked)
    house.registry.plans()
    for told in house.sent("w1", LoadAdapter):
        house.registry.on_worker("w1", AdapterReady(told.lease, told.slot, told.generation, error))
    (answer,) = house.told("f1", Registered)
    return answer


def names(house: House) -> dict[str, str]:
    """What each name means at the scheduler: a path."""
    entries = house.core.names.entries.values()
    return {entry.name: entry.adapter.path for entry in entries if entry.adapter is not None}


def test_a_name_is_known_to_all_frontends_once_a_worker_has_loaded_it(house: House) -> None:
    house.members.on_front("f1", Register(5, A))
    house.worker("w1", slots=2)
    house.core.outbox.take()
    house.registry.plans()
    (told,) = house.sent("w1", LoadAdapter)
    assert (told.name, told.path, told.digest) == (A.name, A.path, A.digest)
    assert not house.core.outbox.take() and not names(house)
    house.registry.on_worker("w1", AdapterReady(told.lease, told.slot, told.generation))
    told_all = house.core.outbox.take()
    assert [(peer, type(message)) for peer, message in told_all] == [
        ("f1", Adapters), ("f2", Adapters), ("f1", Registered)
    ]  # fmt: skip
    (entry,) = told_all[0][1].entries
    assert entry.adapter == A and entry.generation > 42
    assert told_all[2][1] == Registered(5)
    house.hello("f3", "frontend")
    assert house.told("f3", Adapters) == [Adapters([entry])]


def test_a_load_that_fails_gives_no_name(house: House) -> None:
    house.worker("w1", slots=2)
    assert register(house, Register(1, A), "x.safetensors: no such tensor") == Registered(
        1, 400, "x.safetensors: no such tensor"
    )
    assert not names(house)
    assert register(house, Register(2, A)).status == 200 and names(house) == {"A": A.path}


def test_a_name_is_given_once_unless_it_is_to_be_replaced(house: House) -> None:
    house.worker("w1", slots=4)
    assert register(house, Register(1, A)).status == 200
    refused = register(house, Register(2, NEW_A))
    assert refused.status == 400 and "has already been loaded" in refused.error and "load_inplace" in refused.error
    assert register(house, Register(3, NEW_A, replace=True)).status == 200
    assert names(house) == {"A": NEW_A.path}
    house.members.on_front("f1", Unregister(4, "A"))
    assert house.told("f1", Registered) == [Registered(4)] and not names(house)
    house.members.on_front("f1", Unregister(5, "A"))
    (answer,) = house.told("f1", Registered)
    assert (answer.status, answer.error) == (404, "The lora adapter 'A' cannot be found.")
    assert register(house, Register(6, A)).status == 200


def test_what_is_asked_again_is_done_once(house: House) -> None:
    house.worker("w1", slots=4)
    register(house, Register(1, A))
    assert register(house, Register(1, A, again=True)) == Registered(1)  # the answer had been lost
    house.members.on_front("f1", Unregister(2, "A"))
    house.members.on_front("f1", Unregister(2, "A", again=True))
    assert house.told("f1", Registered) == [Registered(2)] * 2
    house.members.on_front("f1", Register(3, B))
    house.members.on_front("f1", Register(3, B, again=True))  # while it is being loaded
    assert len(house.core.names.wishes) == 1


def test_a_wish_goes_before_those_who_wait_and_outlives_a_worker(house: House) -> None:
    house.worker("w1", slots=1)
    house.members.on_front("f1", Register(1, A))
    house.registry.plans()
    house.registry.gone("w1", "is gone")
    house.worker("w1", slots=1)
    assert register(house, Register(2, B)).token == 1
    house.registry.plans()
    assert [told.name for told in house.sent("w1", LoadAdapter)] == ["B"]
    house.later(6)
    house.members.front_gone("f1")
    house.later(6)
    assert not house.core.names.wishes


def test_a_wish_that_nobody_grants_is_answered(house: House) -> None:
    """Before the client stops to wait, so that a name does not appear behind its back; at once where nobody could."""
    house.members.on_front("f1", Register(1, A))
    house.later(WISH_LIMIT_S)
    assert not house.told("f1", Registered)
    house.later(1)
    (answer,) = house.told("f1", Registered)
    assert (answer.token, answer.status) == (1, 503) and "within 290 s" in answer.error
    assert not house.core.names.wishes
    assert inspect.signature(Engine.register).parameters["timeout"].default > WISH_LIMIT_S
    house.worker("w1")
    house.members.on_front("f1", Register(2, A))
    (answer,) = house.told("f1", Registered)
    assert answer.status == 400 and "--enable-lora" in answer.error


def test_only_frontends_change_names_and_only_after_hello(house: House) -> None:
    for message in (Register(1, A), Unregister(1, "A"), Adapters([AdapterEntry("A", 9, A)])):
        bad = house.core.bad_messages
        house.members.on_front("d1", message)
        assert house.core.bad_messages == bad + 1
        house.members.on_front("stranger", message)  # of a connection to the scheduler before this one
        assert house.core.bad_messages == bad + 1
    assert not house.core.names.entries and not house.core.names.wishes


def test_names_have_bounds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_NAMES", 2)
    monkeypatch.setattr(adapter_names, "MAX_REMOVED", 1)
    monkeypatch.setattr(adapter_names, "MAX_WISHES", 1)
    house.worker("w1", slots=4)
    assert [register(house, Register(n, adapter(f"n{n}"))).status for n in range(3)] == [200, 200, 400]
    for name in ("n0", "n1"):
        house.members.on_front("f1", Unregister(9, name))
    assert list(house.core.names.entries) == ["n1"]
    house.core.outbox.take()
    house.members.on_front("f1", Register(5, A))
    house.members.on_front("f1", Register(6, B))
    (refused,) = house.told("f1", Registered)
    assert refused.status == 429


def test_a_client_forgets_removed_names_as_the_scheduler_does() -> None:
    book = AdapterBook()
    book.merge([AdapterEntry("kept", 1, A)])
    book.merge([AdapterEntry(f"n{n}", n, None) for n in range(2, adapters.MAX_REMOVED + 3)])
    (told,) = book.introduction()
    names = [entry.name for entry in told.entries]
    assert len(names) == adapters.MAX_REMOVED + 1 and "kept" in names and "n2" not in names
    book.merge([AdapterEntry("kept", 5000, None)])
    (told,) = book.introduction()  # of what was removed that is the last
    assert [entry.name for entry in told.entries[-2:]] == [f"n{adapters.MAX_REMOVED + 2}", "kept"]
    assert adapters.MAX_REMOVED == adapter_names.MAX_REMOVED


def test_a_client_remembers_that_a_name_was_removed() -> None:
    book = AdapterBook()
    book.merge([AdapterEntry("n", 3, None)])
    book.merge([AdapterEntry("n", 2, A)])
    assert book.get("n") is None and not list(book)


class Exchange:
    """Frontends' cores and a scheduler that is killed now and then, with messages in order on each link."""

    def __init__(self, seed: int):
        self.rng, self.epoch = random.Random(seed), 100
        self.house = House()
        self.fronts = {f"f{n}": self.core(f"f{n}") for n in range(3)}
        self.restart()

    def core(self, name: str) -> EngineCore:
        hello = Hello("frontend", name, PROTOCOL, 1)
        return EngineCore(hello, lambda: 1.0, lambda: 1e9, random.Random(1))

    def restart(self) -> None:
        self.epoch += 50
        self.house = House()
        self.house.members.epoch = self.epoch
        self.house.core.names.begin(self.epoch)
        for front in self.fronts.values():
            front.disconnected(SCHEDULER)
            front.take()
        for front in self.fronts.values():
            front.connected(SCHEDULER)

    def settle(self) -> None:
        """Everything that is on its way arrives."""
        while True:
            moved = False
            for name, front in self.fronts.items():
                for peer, message in front.take():
                    if peer == SCHEDULER and not isinstance(message, Peers):
                        self.house.members.on_front(name, message)
                        moved = True
            for peer, message in self.house.core.outbox.take():
                self.fronts[peer].received(SCHEDULER, message)
                moved = True
            if not moved:
                return


@pytest.mark.parametrize("seed", range(5))
def test_names_outlive_every_process_but_the_last(seed: int) -> None:
    world = Exchange(seed)
    expected: dict[str, str] = {}
    for turn in range(60):
        name, kind = f"n{world.rng.randrange(4)}", world.rng.randrange(4)
        if kind == 0:
            world.restart()
        elif kind == 1:
            lost = world.rng.choice(sorted(world.fronts))
            world.house.members.front_gone(lost)
            world.fronts[lost] = world.core(lost)
            world.fronts[lost].connected(SCHEDULER)
        elif kind == 2:
            made = adapter(name, f"/{turn}")
            world.house.members.tell_names([world.house.core.names.set(name, made)])
            expected[name] = made.path
        else:
            world.house.members.tell_names([world.house.core.names.set(name, None)])
            expected.pop(name, None)
        world.settle()
        assert names(world.house) == expected
        for front in world.fronts.values():
            assert {entry.name: entry.adapter.path for entry in front.adapters if entry.adapter} == expected


def test_modules_named_by_flags_are_there_until_somebody_unloads_them() -> None:
    world = Exchange(0)
    for front in world.fronts.values():
        front.adapters.merge([AdapterEntry("m", 0, A)])
    world.restart()
    world.settle()
    assert names(world.house) == {"m": A.path}
    world.house.members.on_front("f0", Unregister(1, "m"))
    world.settle()
    world.fronts["f1"] = world.core("f1")
    world.fronts["f1"].adapters.merge([AdapterEntry("m", 0, A)])  # it begins anew, with the same flags
    world.fronts["f1"].connected(SCHEDULER)
    world.settle()
    assert not names(world.house) and all(front.adapters.get("m") is None for front in world.fronts.values())


def test_frontends_with_different_modules_agree(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """On what the scheduler was told first, whichever frontend or scheduler is started again."""
    first, second = AdapterBook(), AdapterBook()
    first.merge([AdapterEntry("A", 0, A, "m")])
    second.merge([AdapterEntry("A", 0, NEW_A)])
    for name, book in (("f1", first), ("f2", second)):
        for message in book.introduction():
            house.members.on_front(name, message)
        for told in house.told(name, Adapters):
            book.merge(told.entries)
    assert first.get("A") == second.get("A") == A and names(house) == {"A": A.path}
    assert f"frontend f2 has lora adapter 'A' from {NEW_A.path}, and the server has it from {A.path}" in caplog.text
    third, anew = AdapterBook(), House()  # a frontend and the scheduler are started again
    third.merge([AdapterEntry("A", 0, NEW_A)])
    for name, book in (("f3", third), ("f1", first)):
        anew.hello(name, "frontend")
        told = anew.told(name, Adapters)
        for message in book.introduction():
            anew.members.on_front(name, message)
        for message in told + anew.told(name, Adapters):
            book.merge(message.entries)
    assert third.get("A") == first.get("A") == NEW_A and names(anew) == {"A": NEW_A.path}


def test_a_name_that_is_unloaded_frees_its_slot_in_all_workers(house: House) -> None:
    house.worker("w1", slots=4)
    house.worker("w2", slots=4)
    house.registry.to_workers.clear()
    house.members.on_front("f1", Register(1, A))
    house.registry.plans()
    loads = dict(house.registry.to_workers)
    assert loads.keys() == {"w1", "w2"}

    def loaded(peer: str) -> list[tuple[str, int]]:
        told = loads[peer]
        assert isinstance(told, LoadAdapter)
        house.registry.to_workers.clear()
        house.registry.on_worker(peer, AdapterReady(told.lease, told.slot, told.generation))
        house.members.on_front("f1", Unregister(2, "A"))
        house.registry.plans()
        return [(peer, each.slot) for peer, each in house.registry.to_workers if isinstance(each, DropAdapter)]

    assert loaded("w1") == [("w1", 0)] and not names(house), "the other one still reads it"
    assert loaded("w2") == [("w2", 0)]
