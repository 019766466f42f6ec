"""Adapters are read beside the steps and put into slots between them: what is answered, kept, dropped and refused."""

from __future__ import annotations

import json
import queue
import shutil
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lora_toys
import pytest
import tiny_models

from quire.gpu_worker.adapters import Adapters, Read
from quire.gpu_worker.models.adapter_reader import read_adapter
from quire.proto.checkpoint.adapter_files import adapter_digest
from quire.proto.checkpoint.lora_config import CONFIG
from quire.proto.messages import AdapterReady, DropAdapter, Lease, LoadAdapter

pytestmark = pytest.mark.slow
LEASE = Lease(1, 0, 1)


class Rig:
    """An ``Adapters`` with two slots, of a process that is alone or leads ``others``."""

    def __init__(self, model: Any, most_kept: int = 2, others: Any = None) -> None:
        self.posted: queue.Queue[Any] = queue.Queue()
        self.sent: list[AdapterReady] = []
        link: Any = SimpleNamespace(post=self.posted.put, send=self.sent.append)
        self.slots = model.adapters
        self.slots.clear()
        self.adapters = Adapters(self.slots, most_kept, link, others)

    def load(self, folder: Path, slot: int = 0, generation: int = 1, digest: bytes = b"") -> Read:
        """Ask, and wait for the thread."""
        self.adapters.change(LoadAdapter(LEASE, slot, folder.name, str(folder), generation, digest), LEASE)
        return self.posted.get(timeout=120)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    to = tmp_path_factory.mktemp("loading")
    folder = tiny_models.make("llama", to / "llama", 3)
    oracle = lora_toys.Oracle(folder, [{"r": 8, "target_modules": ["q_proj"]}], to / "adapters")
    return lora_toys.load(folder, 2), oracle.folders[0]


def test_a_slot_is_filled_between_steps_and_answered(made: Any) -> None:
    model, folder = made
    rig = Rig(model)
    read = rig.load(folder, digest=adapter_digest(folder))
    assert not rig.slots.holds(0) and rig.sent == [], "it was read, and the step that runs sees nothing of it"
    rig.adapters.change(read, LEASE)
    assert rig.slots.holds(0) and rig.sent == [AdapterReady(LEASE, 0, 1)]
    rig.adapters.change(DropAdapter(LEASE, 0, adapter_digest(folder)), LEASE)
    assert not rig.slots.holds(0)


def test_one_that_is_dropped_is_kept_nowhere(made: Any, tmp_path: Path) -> None:
    """Be it in a slot or in memory alone, its tensors are gone; another one stays."""
    model, folder = made
    rig, digests, tensors = Rig(model, most_kept=3), [], []
    for number, name in enumerate("abc"):  # each in place of the one before
        copy = Path(shutil.copytree(folder, tmp_path / name))
        told = json.loads((copy / CONFIG).read_text())
        (copy / CONFIG).write_text(json.dumps({**told, "lora_alpha": number + 2}))
        digests.append(adapter_digest(copy))
        rig.adapters.change(rig.load(copy, 0, number + 1, digests[-1]), LEASE)
        (pieces, *_) = rig.slots._held[0].matrices.values()
        tensors += [weakref.ref(each.a) for each in pieces if each is not None]
        del pieces
    rig.adapters.change(rig.load(tmp_path / "b", 1, 4, digests[1]), LEASE)  # the thread has let go of what was before
    rig.adapters.change(DropAdapter(LEASE, 0, digests[2]), LEASE)
    rig.adapters.change(DropAdapter(LEASE, -1, digests[0]), LEASE)
    assert [tensor() is None for tensor in tensors] == [True, False, True] and rig.slots.holds(1)


def test_what_another_lease_asked_for_is_dropped(made: Any) -> None:
    model, folder = made
    rig, later = Rig(model), Lease(1, 0, 2)
    rig.adapters.change(rig.load(folder), later)
    rig.adapters.change(LoadAdapter(LEASE, 1, "a", str(folder), 1), later)
    assert not rig.slots.holds(0) and rig.sent == [] and rig.posted.empty()
    rig.adapters.change(rig.load(folder, 1), LEASE)
    rig.adapters.forget()
    assert not rig.slots.holds(1)


def test_loads_of_a_lease_that_ended_make_room_for_those_of_the_next(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler was killed while one was read and another waited: the next may ask for all slots."""
    model, folder = made
    rig, later, begun, go = Rig(model), Lease(2, 0, 1), threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        begun.set()
        go.wait(120)
        return read_adapter(*given)

    monkeypatch.setattr("quire.gpu_worker.adapters.read_adapter", slowly)
    rig.adapters.change(LoadAdapter(LEASE, 0, "a", str(folder), 1), LEASE)
    assert begun.wait(120)
    rig.adapters.change(LoadAdapter(LEASE, 1, "a", str(folder), 2), LEASE)
    rig.adapters.forget()
    for slot in (0, 1):
        rig.adapters.change(LoadAdapter(later, slot, "a", str(folder), slot + 1), later)
    assert rig.sent == []
    go.set()
    for _ in range(3):
        rig.adapters.change(rig.posted.get(timeout=120), later)
    assert rig.sent == [AdapterReady(later, slot, slot + 1) for slot in (0, 1)] and rig.posted.empty()


def test_one_that_is_kept_is_not_read_again(made: Any, tmp_path: Path) -> None:
    """The least recently used goes first."""
    model, folder = made
    rig, copies = Rig(model), [Path(shutil.copytree(folder, tmp_path / name)) for name in "abc"]
    for copy in (*copies[:2], copies[0], copies[2]):
        assert rig.load(copy).adapter is not None
    for copy in copies:
        shutil.rmtree(copy)
    assert [rig.load(copy).error == "" for copy in copies] == [True, False, True]


def test_files_that_have_changed_are_refused(made: Any) -> None:
    model, folder = made
    rig = Rig(model)
    read = rig.load(folder, digest=b"x" * 16)
    rig.adapters.change(read, LEASE)
    assert "have changed since it was registered" in rig.sent[0].error and rig.sent[0].status == 400
    assert not rig.slots.holds(0)


def test_a_leader_answers_when_all_processes_have(made: Any) -> None:
    model, folder = made
    told: list[Any] = []
    others: Any = SimpleNamespace(watch_adapters=lambda call: told.append(call) or 2, send=told.append)
    rig = Rig(model, others=others)
    rig.adapters.change(rig.load(folder), LEASE)
    assert isinstance(told[1], LoadAdapter) and rig.sent == []
    told[0](1, AdapterReady(LEASE, 0, 1, "no room", 500))
    rig.adapters.change(rig.posted.get(timeout=120), LEASE)
    assert rig.sent == [AdapterReady(LEASE, 0, 1, "no room", 500)]


def test_a_slot_that_is_not_there(made: Any) -> None:
    model, folder = made
    rig = Rig(model)
    rig.adapters.change(LoadAdapter(LEASE, 2, "a", str(folder), 1), LEASE)
    assert rig.sent == [AdapterReady(LEASE, 2, 1, "slot 2 is not in [0, 2).", 500)]
