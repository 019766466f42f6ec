"""Adapters in the scheduler: slots, turns, failed loads, and blocks that never cross."""

from __future__ import annotations

import random

import pytest
from adapter_rig import AdapterRig, adapter

from quire.proto import hashing
from quire.proto.codec import BadFrame
from quire.proto.messages import AdapterReady
from quire.scheduler.adapters import LOAD_LIMIT_S, loads_lost, loads_overdue

A, B, C, D = (adapter(name) for name in "ABCD")


def test_rows_begin_when_their_adapter_is_there_and_nobody_waits_for_it_but_they() -> None:
    rig = AdapterRig()
    a, base = rig.ask(A), rig.ask(None)
    plan = rig.step()
    assert plan is not None and [each.uid for each in plan.admits] == [base]
    assert rig.loading() == ["A"]
    rig.step()
    rig.load()
    plan = rig.step()
    assert plan is not None and [(each.uid, each.adapter_slot) for each in plan.admits] == [(a, 0)]
    rig.run()
    rig.check(a)
    rig.check(base)


def test_a_slot_is_loaded_once_for_all_and_stays_until_another_needs_it() -> None:
    rig = AdapterRig()
    uids = [rig.ask(A), rig.ask(A), rig.ask(B)]
    rig.step()
    assert rig.loading() == ["A", "B"]
    rig.run()
    uids += [rig.ask(B), rig.ask(A)]
    rig.step()
    assert not rig.loading()
    rig.run()
    for uid in uids:
        rig.check(uid)
    rig.ask(C)  # B began before A did last
    rig.step()
    (told,) = rig.loads[0]
    assert (told.name, told.slot) == ("C", 1)
    rig.run()


def test_the_first_in_line_gets_the_next_slot_whoever_else_keeps_coming() -> None:
    rig = AdapterRig(adapter_slots=2, max_num_seqs=4)
    for name in (A, B):
        rig.ask(name, max_tokens=6)
    rig.step()
    rig.load(), rig.load()
    rig.step()
    late = rig.ask(C, max_tokens=2)
    for _ in range(20):  # those of A and B come without end
        rig.ask(A, max_tokens=6), rig.ask(B, max_tokens=6)
        rig.step()
        if rig.loads[0]:
            rig.load()
        if (late, 0) in rig.ends:
            break
    rig.check(late, count=2)


def test_nobody_starves_where_many_adapters_share_few_slots() -> None:
    rng = random.Random(5)
    rig = AdapterRig(adapter_slots=8, blocks=400, max_num_seqs=16, max_num_batched_tokens=128)
    names = [adapter(f"n{number}") for number in range(200)]
    order = [rng.choice([*names, None]) for _ in range(200)] + names
    uids = [rig.ask(chosen, rng.randint(1, 20)) for chosen in order]
    began: list[int] = []
    for _ in range(5000):
        plan = rig.plan()
        began += [each.uid for each in plan.admits] if plan else []
        if rig.plans[0]:
            rig.work()
        if rig.loads[0]:
            rig.load()
        if not rig.core.requests:
            break
    for uid in uids:
        rig.check(uid)
    late = [began.index(uid) - at for at, uid in enumerate(uids)]
    assert max(late) <= 160  # behind those that asked for what was there, and no further


def test_cached_blocks_never_cross_adapters_nor_versions_of_one() -> None:
    rig = AdapterRig(adapter_slots=4)
    again = adapter("A", "/adapters/A-trained-on")
    prompt = rig.prompt(33, 1)
    uids = []
    for chosen in (A, None, B, again, A):
        uids.append(rig.ask(chosen, prompt))
        rig.run()
    for uid in uids:
        rig.check(uid)
    assert [rig.started[uid] for uid in uids] == [0, 0, 0, 0, 32]


def test_blocks_that_fill_while_decoding_do_not_cross_either() -> None:
    rig = AdapterRig(adapter_slots=4)
    first = rig.ask(A, [5, 6, 7], max_tokens=20)  # shorter than a block
    rig.run()
    prompt = [5, 6, 7, *rig.tokens[first, 0]]
    uids = [rig.ask(chosen, prompt) for chosen in (B, None, A)]
    rig.run()
    for uid in uids:
        rig.check(uid)
    assert [rig.started[uid] for uid in uids] == [0, 0, 16]


def test_the_root_of_hashes_is_what_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import scheduler_rig

    monkeypatch.setattr(scheduler_rig, "root_of", lambda salt, adapter=b"": hashing.root_of(salt))
    rig = AdapterRig(adapter_slots=4)
    for chosen in (A, B):
        uid = rig.ask(chosen, rig.prompt(33, 1))
        rig.run()
    assert rig.started[uid] == 32
    with pytest.raises(AssertionError):
        rig.check(uid)


def test_children_share_the_slot_and_a_preempted_one_takes_it_again() -> None:
    rig = AdapterRig(adapter_slots=1, blocks=9, max_num_seqs=4)
    forked = rig.ask(A, 10, n=3, max_tokens=12)
    base = rig.ask(None, 10, max_tokens=12)
    rig.run()
    assert rig.core.preemptions
    for index in range(3):
        rig.check(forked, index, 12)
    rig.check(base, count=12)


def test_a_failed_load_fails_those_who_asked_for_it_alone() -> None:
    rig = AdapterRig()
    bad, good = [rig.ask(A), rig.ask(A)], rig.ask(B)
    rig.step()
    rig.load(error="/adapters/A/adapter_model.safetensors: tensor x.lora_A.weight is of rank 99.")
    failed = rig.failures()
    assert sorted(failed) == bad
    assert {(each.status, each.param) for each in failed.values()} == {(400, "model")}
    assert "x.lora_A.weight" in failed[bad[0]].message
    rig.run()
    rig.check(good)
    uid = rig.ask(A)  # it was mended
    rig.run()
    rig.check(uid)


def test_a_load_that_fails_on_one_worker_is_left_to_the_other() -> None:
    rig = AdapterRig(blocks=[64, 64])
    first = rig.ask(A)
    while not rig.plans[0]:
        rig.plan(0)
        if rig.loads[0]:
            rig.load(0)
    rig.core.replicas[0].adapters.begin_turn(None)
    # The other one is told to load it too, while the first has it.
    slots = rig.core.replicas[1].adapters
    slots.begin_turn(None), slots.admits(A), slots.end_turn(rig.now)
    rig.plan(1)
    rig.load(1, error="no such folder")
    second = rig.ask(A)
    assert not rig.failures()
    slots.begin_turn(None), slots.admits(A), slots.end_turn(rig.now)
    assert not slots.loading  # it is not tried again at once
    rig.run()
    rig.check(first)
    rig.check(second)


def test_a_worker_that_is_lost_takes_its_slots_with_it() -> None:
    rig = AdapterRig()
    uid = rig.ask(A, max_tokens=10)
    while (uid, 0) not in rig.tokens:
        rig.step()
        if rig.loads[0]:
            rig.load()
    rig.core.end_lease(rig.replica)
    rig.core.check_integrity()
    rig.add(0, 64)
    rig.step()
    assert rig.loading() == ["A"]
    rig.run()
    rig.check(uid, count=10)


def test_an_adapter_that_ends_workers_is_given_up() -> None:
    rig = AdapterRig()
    bad, base = rig.ask(A), rig.ask(None, max_tokens=40)
    for _ in range(3):
        assert not rig.failures()
        rig.step()
        assert rig.loading() == ["A"]
        loading = rig.replica.adapters.loading
        rig.core.end_lease(rig.replica)
        loads_lost(rig.core, loading)
        rig.add(0, 64)
    assert rig.failures()[bad].status == 500
    rig.run()
    rig.check(base, count=40)


def test_nobody_waits_for_ever_for_a_load_that_hangs() -> None:
    rig = AdapterRig()
    uid, base = rig.ask(A), rig.ask(None)
    rig.step()
    rig.now = LOAD_LIMIT_S
    assert not loads_overdue(rig.core, rig.replica) and not rig.failures()
    rig.now += 1
    loads_overdue(rig.core, rig.replica)
    assert rig.failures()[uid].status == 503
    for _ in range(5):
        rig.step()
    rig.check(base)


def test_those_behind_a_load_that_hangs_are_told_too() -> None:
    """The worker loads one after another: whoever needs another adapter there waits for the first."""
    rig = AdapterRig(adapter_slots=2)
    hung, behind = rig.ask(A), rig.ask(B)
    rig.step()
    assert rig.loading() == ["A", "B"]
    rig.now = 200.0
    rig.load()
    while (hung, 0) not in rig.tokens or hung in rig.core.requests:
        rig.step()
        rig.receive()
    rig.now = LOAD_LIMIT_S + 1
    assert not loads_overdue(rig.core, rig.replica), "the worker has been at this one for 101 s"
    third = rig.ask(C)
    rig.step()
    assert rig.loading() == ["B", "C"]
    rig.now = 200.0 + LOAD_LIMIT_S + 1
    loads_overdue(rig.core, rig.replica)
    assert {uid: each.status for uid, each in rig.failures().items()} == {behind: 503, third: 503}
    late, base = rig.ask(A), rig.ask(None)
    rig.step()
    loads_overdue(rig.core, rig.replica)
    assert rig.failures()[late].status == 503 and "waits for 'B'" in rig.failures()[late].message
    rig.load()  # it ends after all
    rig.load()
    again = rig.ask(A)
    rig.run()
    rig.check(base)
    rig.check(again)


def test_a_load_that_fails_is_tried_by_the_other_worker_before_anybody_fails() -> None:
    rig = AdapterRig(blocks=[64, 64])
    uid = rig.ask(A)
    for number in (0, 1):
        rig.plan(number)
    first = next(number for number in (0, 1) if rig.loads[number])
    rig.load(first, error="no such folder")
    assert not rig.failures()
    rig.plan(1 - first)
    assert rig.loading(1 - first) == ["A"]
    rig.load(1 - first, error="no such folder there either", status=404)
    assert rig.failures()[uid].status == 404 and "there either" in rig.failures()[uid].message
    mended = rig.ask(A)
    rig.run()
    rig.check(mended)


def test_a_worker_that_is_too_small_for_a_request_does_not_have_it_wait() -> None:
    rig = AdapterRig(blocks=[8, 64])
    small = rig.ask(A, 8, max_tokens=2)
    rig.core.replicas[1].draining = True
    while not rig.loads[0]:
        rig.plan(0)
    rig.load(0)
    rig.core.replicas[1].draining = False
    large = rig.ask(A, 60, max_tokens=20)
    while not rig.loads[1]:
        rig.plan(1)
    rig.load(1, error="no such folder")
    assert list(rig.failures()) == [large]
    rig.run()
    rig.check(small, count=2)


def test_of_several_loads_the_first_is_taken_for_the_cause() -> None:
    rig = AdapterRig()
    bad, good = rig.ask(A), rig.ask(B)
    for _ in range(3):
        rig.step()
        assert rig.loading() == ["A", "B"]
        loading = rig.replica.adapters.loading
        rig.core.end_lease(rig.replica)
        loads_lost(rig.core, loading)
        rig.add(0, 64)
    assert list(rig.failures()) == [bad]
    rig.run()
    rig.check(good)


def test_without_slots_an_adapter_is_refused_and_without_adapters_nothing_is_different() -> None:
    rig = AdapterRig(adapter_slots=0)
    uid = rig.ask(A)
    assert rig.failures()[uid].status == 400 and "LoRA is not enabled" in rig.failures()[uid].message
    plain, able = AdapterRig(adapter_slots=0), AdapterRig(adapter_slots=4)
    for each in (plain, able):
        for length in (3, 20, 9):
            each.ask(None, length)
    from quire.proto.codec import encode

    for _ in range(8):
        plans = plain.step(), able.step()
        assert encode(plans[0]) == encode(plans[1])


def test_what_cannot_be_said_of_a_slot_ends_the_lease() -> None:
    rig = AdapterRig()
    rig.ask(A)
    rig.step()
    told = rig.loads[0][0]
    for slot, generation in ((told.slot, told.generation + 1), (told.slot + 1, 1), (9, 1), (-1, 1)):
        with pytest.raises(BadFrame):
            rig.core.adapter_ready(rig.replica, AdapterReady(told.lease, slot, generation))
    rig.load()
    with pytest.raises(BadFrame):
        rig.core.adapter_ready(rig.replica, AdapterReady(told.lease, told.slot, told.generation))
    bare = AdapterRig(adapter_slots=0)
    with pytest.raises(BadFrame):
        bare.core.adapter_ready(bare.replica, AdapterReady(told.lease, 0, 1))


def test_a_beam_search_runs_with_its_adapter() -> None:
    rig = AdapterRig(max_num_seqs=8)
    uid = rig.ask(A, 9, use_beam_search=True, n=3, temperature=0.0, max_tokens=5)
    other = rig.ask(None, 9)
    rig.run()
    rig.check(other)
    assert len({tuple(rig.tokens[uid, index]) for index in range(3)}) == 3


def test_two_workers_keep_an_adapter_where_it_is() -> None:
    rig = AdapterRig(blocks=[64, 64])
    for _ in range(4):
        rig.ask(A, 10)
        rig.run()
    loaded = [replica.adapters.has(A) for replica in rig.core.replicas.values()]
    assert sorted(loaded) == [False, True]


def test_what_no_name_means_any_more_is_dropped_when_its_last_request_has_ended() -> None:
    rig = AdapterRig(adapter_slots=3, blocks=[64, 64])
    names, (first, second) = rig.core.names, rig.core.replicas.values()
    names.set("A", A)
    runs, waits = rig.ask(A, max_tokens=6), rig.ask(A, 240, max_tokens=6)
    while (runs, 0) not in rig.tokens:
        for number in (0, 1):
            rig.step(number), rig.beside(number)
    names.set("A", None)
    rig.core.drop_adapters()
    assert not rig.dropped, "somebody runs with it, and somebody waits"
    rig.run(), rig.plan(0), rig.plan(1)
    rig.check(runs, count=6), rig.check(waits, count=6)
    assert {order.lease for order in rig.dropped} == {first.lease, second.lease} and len(rig.dropped) == 2
    assert {order.digest for order in rig.dropped} == {A.digest} and max(order.slot for order in rig.dropped) == 0
    again = rig.ask(A)  # of a frontend that had not heard
    rig.run(), rig.plan(0), rig.plan(1)
    rig.check(again)
    assert len(rig.dropped) == 4 and not any(replica.adapters.holds(A) for replica in (first, second))
    names.set("A", A)
    rig.ask(A)
    rig.run(), rig.plan(0), rig.plan(1)
    assert len(rig.dropped) == 4 and any(replica.adapters.has(A) for replica in (first, second))


def test_what_is_replaced_is_dropped_unless_another_name_means_it() -> None:
    rig = AdapterRig(adapter_slots=2)
    names = rig.core.names
    for name, meant in (("A", A), ("also A", A), ("B", B)):
        names.set(name, meant)
    rig.ask(A), rig.ask(B)
    rig.run()
    for name, gone in (("A", []), ("also A", [A.digest]), ("B", [A.digest, B.digest])):
        names.set(name, C)
        rig.core.drop_adapters()
        rig.plan()
        assert [order.digest for order in rig.dropped] == gone
    uid = rig.ask(C)
    rig.step()
    names.set("B", None), names.set("A", None), names.set("also A", None)
    rig.core.drop_adapters()
    rig.core.abort(uid, 0)
    rig.plan()
    assert rig.replica.adapters.holds(C), "it is on its way"
    rig.load()
    rig.plan()
    assert [order.digest for order in rig.dropped][2:] == [C.digest] and not rig.replica.adapters.holds(C)


def test_nobody_waits_behind_those_whose_adapter_is_not_there() -> None:
    """However many they are, and of however many adapters: not who needs none, nor whose adapter is ready."""
    rig = AdapterRig(adapter_slots=2, max_num_seqs=4, max_num_queued_reqs=5000)
    rig.ask(A)
    rig.run()
    for _ in range(1500):
        rig.ask(B)
    for number in range(600):
        rig.ask(adapter(f"other{number}"))
    base, ready = rig.ask(None), rig.ask(A)
    plan = rig.step()
    assert plan is not None and [each.uid for each in plan.admits] == [base]  # B and the first of the others come first
    assert rig.loading() == ["B", "other0"]
    rig = AdapterRig(adapter_slots=2, max_num_seqs=4, max_num_queued_reqs=5000)
    rig.ask(A)
    rig.run()
    for _ in range(1500):
        rig.ask(B)
    base, ready = rig.ask(None), rig.ask(A)
    plan = rig.step()
    assert plan is not None and [each.uid for each in plan.admits] == [base, ready]


def test_nobody_waits_behind_those_who_are_left_to_another_worker() -> None:
    rig = AdapterRig(adapter_slots=1, blocks=[64, 64], max_num_seqs=4)
    held = rig.ask(A, max_tokens=60)
    while (held, 0) not in rig.tokens:
        for number in (0, 1):
            rig.step(number), rig.beside(number)
    (there,) = (number for number, each in rig.core.replicas.items() if each.running)
    for _ in range(100):
        rig.ask(A, max_tokens=60)
    base = rig.ask(None)
    plan = rig.plan(1 - there)
    assert plan is not None and [each.uid for each in plan.admits] == [base]


def test_lanes_of_adapters_are_one_line() -> None:
    """Merged they stand as they would without adapters, but for the prompts of one call, which take turns with the
    others for each adapter apart."""
    rng = random.Random(3)
    rig, plain = (AdapterRig(adapter_slots=slots, max_num_queued_reqs=5000) for slots in (4, 0))
    for _ in range(200):
        n = rng.choice([1, 1, 3])
        rig.ask(rng.choice([A, B, C, None]), n=n)
        plain.ask(None, n=n)
    lines = [[(seq.uid, seq.index) for seq in each.core.queue.in_turn(each.core.running_by_account)]
             for each in (rig, plain)]  # fmt: skip
    assert lines[0] == lines[1] and len(rig.core.queue) == len(plain.core.queue) == len(lines[0])
    left = list(rig.core.queue.in_turn(rig.core.running_by_account, absent={A.digest, B.digest}))
    assert {seq.request.adapter for seq in left} == {None, C}
