"""Adapters: loads that end, and their names: what holds at the edge of each rule."""

from __future__ import annotations

import pytest
from adapter_rig import AdapterRig, adapter
from scheduler_house import House

from quire.proto.messages import (
    AdapterEntry,
    AdapterReady,
    Adapters,
    AdapterStats,
    Child,
    Failed,
    LoadAdapter,
    Register,
    Registered,
    Stats,
)
from quire.scheduler import adapter_names
from quire.scheduler.adapter_names import AdapterNames
from quire.scheduler.adapters import LOAD_LIMIT_S, loads_lost, loads_overdue

A, B, C, D = (adapter(name) for name in "ABCD")


# ---------------------------------------------------------------- loads that end


@pytest.mark.parametrize(("status", "told"), [(399, 500), (400, 400), (599, 599), (600, 500)])
def test_the_status_of_a_load_that_failed(status: int, told: int) -> None:
    rig = AdapterRig()
    uid = rig.ask(A)
    rig.step()
    rig.load(error="why", status=status)
    assert rig.failures() == {uid: Failed(uid, 0, told, "why", "model")}


def lose_while_loading(rig: AdapterRig) -> None:
    rig.step()
    loading = rig.replica.adapters.loading
    rig.core.end_lease(rig.replica)
    assert loading and not loads_lost(rig.core, loading)
    rig.add(0, 64)


def test_workers_lost_before_a_load_that_succeeded_do_not_count() -> None:
    rig = AdapterRig()
    assert loads_lost(rig.core, []) == []
    first = rig.ask(A)
    for _ in range(2):
        lose_while_loading(rig)
    rig.run()
    rig.check(first)
    rig.core.end_lease(rig.replica)
    rig.add(0, 64)
    again = rig.ask(A)
    for _ in range(2):
        lose_while_loading(rig)
    assert not rig.failures()
    lose_while_loading(rig)
    (failed,) = rig.failures().values()
    assert (failed.uid, failed.status, failed.param) == (again, 500, "model")
    assert failed.message == "A worker died 3 times while it loaded lora adapter 'A'; it is taken for the cause."
    rig.ask(A)
    lose_while_loading(rig)  # who asks for it again has it tried three times more
    assert len(rig.failures()) == 1


def test_a_worker_that_drains_is_no_other_that_may_load_it() -> None:
    rig = AdapterRig(blocks=[64, 64])
    uid = rig.ask(A)
    for number in (0, 1):
        rig.plan(number)
    first = next(number for number in (0, 1) if rig.loads[number])
    rig.core.replicas[1 - first].drain()
    rig.load(first, error="no such folder")
    assert list(rig.failures()) == [uid]


def test_what_runs_with_an_adapter_goes_on_though_it_cannot_be_loaded_elsewhere() -> None:
    rig = AdapterRig(blocks=[64, 64])
    runs = rig.ask(A, max_tokens=20)
    while (runs, 0) not in rig.tokens:
        for number in (0, 1):
            rig.step(number)
            rig.beside(number)
    at = rig.core.requests[runs].live[0].replica
    rig.core.replicas[at].drain()
    waits = rig.ask(A)
    rig.plan(1 - at)
    rig.load(1 - at, error="no such folder")
    assert list(rig.failures()) == [waits]
    rig.run()
    rig.check(runs, count=20)


def test_a_request_one_of_whose_children_runs_does_not_fail_for_the_others() -> None:
    rig = AdapterRig(blocks=[64, 64], max_num_seqs=1)
    uid = rig.ask(A, n=2, max_tokens=20, attempt=1, children=[Child(0, b""), Child(1, b"")])
    rig.plan(0)
    rig.load(0)
    rig.step(0)
    assert sorted(seq.replica for seq in rig.core.requests[uid].live) == [-1, 0]
    rig.core.replicas[0].drain()
    rig.plan(1)
    rig.load(1, error="no such folder")
    assert not rig.failures()


def test_a_load_is_overdue_for_a_replica_that_is_there() -> None:
    rig = AdapterRig()
    uid = rig.ask(A)
    rig.step()
    gone = rig.replica
    rig.core.end_lease(gone)
    rig.add(0, 64)
    rig.now = LOAD_LIMIT_S + 1
    assert loads_overdue(rig.core, gone) == [] and not rig.failures() and not gone.adapters.stuck
    bare = AdapterRig(adapter_slots=0)
    assert loads_overdue(bare.core, bare.replica) == []
    rig.step()
    rig.now += LOAD_LIMIT_S + 1
    assert loads_overdue(rig.core, rig.replica) == []
    (failed,) = rig.failures().values()
    text = "lora adapter 'A' was not loaded within 300 s from /adapters/A; try again."
    assert (failed.uid, failed.status, failed.message, failed.param) == (uid, 503, text, "model")


def test_one_that_hangs_on_one_worker_is_waited_for_where_another_may_load_it() -> None:
    rig = AdapterRig(blocks=[64, 64])
    uid = rig.ask(A)
    for number in (0, 1):
        rig.plan(number)
    first = next(number for number in (0, 1) if rig.loads[number])
    rig.now = LOAD_LIMIT_S + 1
    assert loads_overdue(rig.core, rig.core.replicas[first]) == [] and not rig.failures()
    rig.plan(1 - first)
    assert rig.loading(1 - first) == ["A"] and uid in rig.core.requests


def test_who_waits_behind_a_load_that_hangs_is_told_for_which() -> None:
    rig = AdapterRig(adapter_slots=1)
    rig.ask(A)
    rig.step()
    late = rig.ask(B)
    rig.now = LOAD_LIMIT_S + 1
    loads_overdue(rig.core, rig.replica)
    text = "lora adapter 'B' waits for 'A', which was not loaded within 300 s from /adapters/A; try again."
    assert rig.failures()[late].message == text


@pytest.mark.parametrize(("roles", "fails"), [(("both", "decode"), True), (("decode", "decode"), False)])
def test_only_those_that_take_prompts_may_load_it_where_there_are_any(roles: tuple[str, str], fails: bool) -> None:
    rig = AdapterRig(blocks=[64, 64])
    rig.ask(A)
    rig.core.replicas[1].draining = True
    rig.plan(0)
    rig.core.replicas[1].draining = False
    for number, role in enumerate(roles):
        rig.core.replicas[number].set_place(role, "", "", 0)
    assert rig.load(0, error="no such folder") == [] and bool(rig.failures()) == fails


def test_a_worker_without_slots_is_none_that_may_load_it() -> None:
    rig = AdapterRig()
    uid = rig.ask(A)
    rig.step()
    rig.adapter_slots = 0
    rig.add(1, 64)
    rig.load(error="no such folder")
    assert list(rig.failures()) == [uid]


# ---------------------------------------------------------------- names


def entry(name: str, generation: int, there: bool = True) -> AdapterEntry:
    return AdapterEntry(name, generation, adapter(name, f"/{generation}") if there else None)


def test_of_two_entries_the_higher_generation_counts() -> None:
    names = AdapterNames()
    assert names.merge([entry("a", 5), entry("b", 5, there=False)]) == [entry("a", 5), entry("b", 5, there=False)]
    assert names.merge([entry("a", 4), entry("a", 5), entry("b", 6)]) == [entry("b", 6)]
    assert names.get("a") == adapter("a", "/5") and names.get("b") == adapter("b", "/6") and names.get("c") is None
    names.begin(3), names.begin(2)
    assert [names.set("c", A).generation, names.set("c", None).generation] == [7, 8]
    names.begin(100), names.begin(50)
    assert names.set("d", A, "base") == AdapterEntry("d", 101, A, "base")


def test_names_that_are_known_are_taken_from_frontends_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_NAMES", 2)
    monkeypatch.setattr(adapter_names, "MAX_REMOVED", 1)
    names = AdapterNames()
    assert len(names.merge([entry(name, 1) for name in "abcd"])) == 3
    assert names.merge([entry("c", 2)]) == [entry("c", 2)]  # it is there
    names.merge([entry("a", 3, there=False)])
    names.set("b", None)
    names.set("c", None)
    assert list(names.entries) == ["c"]  # the last that was removed
    names.set("c", A), names.set("d", A)
    assert names.refusal(Register(1, adapter("c"), replace=True)) is None
    told = names.refusal(Register(1, adapter("e")))
    assert told == (400, "2 lora adapters are known, which is the limit; unload one.")


def test_the_name_that_was_removed_first_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_REMOVED", 1)
    names = AdapterNames()
    for name in "ab":
        names.set(name, A)
    for name in "ba":
        names.set(name, None)
    assert list(names.entries) == ["a"]


def test_what_names_meant_once_is_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_REMOVED", 2)
    names = AdapterNames()
    for each in (A, B, C):
        names.set("a", each)
        assert not names.is_unused(each)
    names.set("a", None)
    assert [names.is_unused(each) for each in (A, B, C, D)] == [False, True, True, False]


def test_an_adapter_that_no_name_ever_meant_stays_where_it_was_loaded() -> None:
    rig = AdapterRig()
    uid = rig.ask(A)
    rig.plan()
    rig.core.abort(uid, 0)
    rig.load()
    assert rig.replica.adapters is not None and rig.replica.adapters.has(A)


def test_a_name_that_somebody_waits_for_is_taken() -> None:
    names = AdapterNames()
    names.wish("f1", Register(1, A), 5.0)
    names.wish("f1", Register(2, B), 6.0)
    names.wish("f2", Register(1, C), 7.0)
    names.wish("f1", Register(1, A, again=True), 8.0)
    assert [(wish.peer, wish.asked.token, wish.since) for wish in names.wishes] == [
        ("f1", 2, 6.0), ("f2", 1, 7.0), ("f1", 1, 8.0)
    ]  # fmt: skip
    told = names.refusal(Register(3, A))
    assert told is not None and told[0] == 400
    assert names.refusal(Register(3, A, replace=True)) is names.refusal(Register(3, A, again=True)) is None
    assert names.refusal(Register(3, D)) is None
    assert [wish.adapter for wish in names.withdrawn(7.0)] == [B] and len(names.wishes) == 2
    names.forget("f2")
    assert [wish.adapter for wish in names.granted(A.digest)] == [A] and names.wishes == []


# ---------------------------------------------------------------- what is told of them


def test_stats_name_adapters_that_run_and_that_wait_once_and_in_order() -> None:
    rig = AdapterRig(adapter_slots=2)
    stats = rig.core.stats()
    assert isinstance(stats, AdapterStats) and stats.running_adapters == stats.waiting_adapters == []
    for chosen in (B, A, A, D, C, None, C):
        rig.ask(chosen, max_tokens=30)
    for _ in range(2):
        rig.step()
        rig.load()
    rig.step()
    stats = rig.core.stats()
    assert isinstance(stats, AdapterStats)
    assert (stats.max_loras, stats.running_adapters, stats.waiting_adapters) == (2, ["A", "B"], ["C", "D"])
    assert (stats.running, stats.waiting) == (4, 3)
    rig.run()
    stats = rig.core.stats()
    assert isinstance(stats, AdapterStats) and stats.running_adapters == stats.waiting_adapters == []
    rig.adapter_slots = 5
    rig.add(1, 64)
    stats = rig.core.stats()
    assert isinstance(stats, AdapterStats) and stats.max_loras == 5
    assert type(AdapterRig(adapter_slots=0).core.stats()) is Stats


def test_a_worker_without_slots_that_says_an_adapter_is_ready_is_expelled() -> None:
    house = House()
    lease = house.worker("w1")
    house.registry.on_worker("w1", AdapterReady(lease, 0, 1))
    assert "w1" not in house.registry.workers and house.core.bad_messages == 1


# ---------------------------------------------------------------- who is told of names


@pytest.fixture
def house() -> House:
    """With two frontends and a detokenizer, and A known to all."""
    house = House()
    for front in ("f1", "f2"):
        house.hello(front, "frontend")
    house.hello("d1")
    assert not [message for _, message in house.core.outbox.take() if isinstance(message, Adapters)]
    house.worker("w1", slots=2)
    register(house, Register(1, A))
    return house


def register(house: House, asked: Register) -> list[tuple[str, type]]:
    """Ask as f1, and have the worker load what it is told to; who is told what of names."""
    house.members.on_front("f1", asked)
    house.registry.plans()
    for told in house.sent("w1", LoadAdapter):
        house.registry.on_worker("w1", AdapterReady(told.lease, told.slot, told.generation))
    told = house.core.outbox.take()
    return [(peer, type(message)) for peer, message in told if isinstance(message, Adapters | Registered)]


def test_what_was_done_is_not_told_again_and_what_was_not_is_done(house: House) -> None:
    everybody = [("f1", Adapters), ("f2", Adapters), ("f1", Registered)]
    assert register(house, Register(1, A, again=True)) == [("f1", Registered)]
    assert register(house, Register(2, A, replace=True)) == everybody
    assert register(house, Register(3, adapter("A", "/2"), replace=True, again=True)) == everybody
    assert house.core.names.get("A") == adapter("A", "/2")
    assert register(house, Register(4, B)) == everybody


def test_only_news_are_told_and_only_to_frontends_that_are_there(house: House) -> None:
    house.members.on_front("f2", Adapters(list(house.core.names.entries.values())))
    assert house.core.outbox.take() == []
    house.hello("d2")
    assert not house.told("d2", Adapters)
    house.members.front_gone("f2")
    house.core.outbox.take()
    assert register(house, Register(2, B)) == [("f1", Adapters), ("f1", Registered)]


def test_one_worker_with_slots_is_enough_to_register(house: House) -> None:
    house.worker("w2")
    assert register(house, Register(2, B)) == [("f1", Adapters), ("f2", Adapters), ("f1", Registered)]
    assert house.core.names.get("B") == B


def test_a_frontend_is_told_where_it_means_something_else_by_the_same_entry(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    (known,) = house.core.names.entries.values()
    monkeypatch.setattr(adapter_names, "MAX_NAMES", 0)
    monkeypatch.setattr(adapter_names, "MAX_REMOVED", 1)
    other = adapter("A", "/2")
    house.members.on_front("f2", Adapters([AdapterEntry("B", 9, B), AdapterEntry("A", known.generation - 1, other)]))
    assert house.core.outbox.take() == []  # one too many, and one of before
    house.members.on_front("f2", Adapters([AdapterEntry("A", known.generation, other)]))
    assert house.told("f2", Adapters) == [Adapters([known])] and house.core.names.get("A") == A
