"""Adapters of a worker: read beside the steps by a thread of its own, put into their slots between two steps.

The last ``max_cpu_loras`` that were read are kept in memory, so that one that comes back to a slot is not read again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from ..proto.checkpoint.adapter_files import adapter_digest
from ..proto.config import ConfigError
from ..proto.messages import AdapterReady, DropAdapter, Lease, LoadAdapter
from .link import Link
from .lora.slots import Slots
from .lora.target import Adapter
from .memory import out_of_memory
from .models.adapter_reader import read_adapter
from .models.model import Model
from .parallel.group_link import Leader, Member

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Read:
    """Posted by the thread: ``asked`` is ready to be put into its slot, or why it is not."""

    asked: LoadAdapter
    adapter: Adapter | None
    error: str = ""
    status: int = 400


@dataclass(frozen=True, eq=False)
class Told:
    """Posted by the links of a replica: what another process of it answered."""

    number: int
    answer: AdapterReady


class Adapters:
    """Loads and drops adapters of one process.

    ``link`` takes what the thread has read, for the compute thread, and the answers, for the scheduler or the leader;
    a leader's ``others`` are told all, and answer too. ``most_kept``: adapters in memory.
    """

    def __init__(self, slots: Slots, most_kept: int, link: Link | Member, others: Leader | None = None) -> None:
        self.slots, self._most_kept, self._link, self._others = slots, most_kept, link, others
        self._processes = 1  # that answer this one
        if others is not None:
            self._processes = others.watch_adapters(lambda *told: link.post(Told(*told)))
        self._answers: dict[tuple[int, int], list[AdapterReady]] = {}
        self._asked: queue.Queue[LoadAdapter] = queue.Queue(maxsize=slots.count)
        self._kept: OrderedDict[tuple[str, bytes], Adapter] = OrderedDict()
        self._keeping = threading.Lock()  # of ``_kept``
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    @property
    def to_come(self) -> int:
        """Bytes of the host's memory that adapters may take beside what they take now: as many as are kept and one that
        is read, of the highest rank, with every product."""
        held = sum(each.nbytes for each in list(self._kept.values()))
        return max(0, (self._most_kept + 1) * self.slots.most_bytes - held)

    def put_away(self) -> None:
        """The worker sleeps: slots take no memory of the device."""
        self.slots.put_away()

    def use(self, model: Model) -> int:
        """A lease begins. ``model`` was read anew, perhaps: it is what has the slots now. How many there are."""
        if model.adapters is not None:
            self.slots = model.adapters
        self.slots.bring_back()
        return self.slots.count

    def change(self, message: LoadAdapter | DropAdapter | Read | Told, lease: Lease | None) -> None:
        """Between two steps: an adapter is asked for, or was read, here or in another process of this replica. What
        belongs to another lease than ``lease`` is dropped."""
        if isinstance(message, Read):
            self._install(message, lease)
        elif isinstance(message, Told):
            if message.answer.lease == lease:
                self._told(message.answer)
        elif message.lease != lease:
            log.debug("dropped %s of lease %s", type(message).__name__, message.lease)
        else:
            if self._others is not None:
                self._others.send(message)
            (self._load if isinstance(message, LoadAdapter) else self._drop)(message)  # type: ignore[arg-type]

    def _load(self, asked: LoadAdapter) -> None:
        if not 0 <= asked.slot < self.slots.count:
            self._told(AdapterReady(asked.lease, asked.slot, asked.generation,
                                    f"slot {asked.slot} is not in [0, {self.slots.count}).", 500))  # fmt: skip
            return
        self.slots.begin_load(asked.slot)
        try:
            self._asked.put_nowait(asked)
        except queue.Full:
            self._told(AdapterReady(asked.lease, asked.slot, asked.generation,
                                    f"over {self.slots.count} adapters wait to be loaded.", 500))  # fmt: skip

    def _install(self, read: Read, lease: Lease | None) -> None:
        """Put into its slot what was read, and say so. What another lease asked for is kept in memory, no more."""
        asked = read.asked
        if asked.lease != lease:
            return
        self.slots.install(asked.slot, read.adapter)
        self._told(AdapterReady(asked.lease, asked.slot, asked.generation, read.error, read.status))

    def _drop(self, dropped: DropAdapter) -> None:
        if 0 <= dropped.slot < self.slots.count:
            self.slots.install(dropped.slot, None)
        with self._keeping:
            for key in [key for key in self._kept if key[1] == dropped.digest]:
                del self._kept[key]

    def forget(self) -> None:
        """The lease is over: all slots are empty, and what it asked for and was not begun is not read."""
        self._answers.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()
        self.slots.clear()

    def _told(self, answer: AdapterReady) -> None:
        """Answer once all processes have: the first error, if any."""
        key = answer.slot, answer.generation
        answers = self._answers.setdefault(key, [])
        answers.append(answer)
        if len(answers) == self._processes:
            del self._answers[key]
            self._link.send(next((each for each in answers if each.error), answer))

    # ------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        while True:  # and no variable here keeps an adapter that was dropped
            self._link.post(self._read(self._asked.get()))

    def _read(self, asked: LoadAdapter) -> Read:
        try:
            return Read(asked, self._adapter(asked))
        except ConfigError as error:
            return Read(asked, None, str(error))
        except Exception as error:  # the adapter's fault or the machine's, and nobody else's loss
            log.error("adapter %r of %s was not loaded", asked.name, asked.path, exc_info=error)
            said = "no memory for it" if out_of_memory(error) else f"{type(error).__name__}: {error}"
            return Read(asked, None, f"{asked.path}: {said}; see the worker's log."[:2000], 500)

    def _adapter(self, asked: LoadAdapter) -> Adapter:
        """As it goes into a slot. Raises ConfigError."""
        key, slots = (asked.path, asked.digest), self.slots
        with self._keeping:
            kept = self._kept.get(key)
        if kept is None:
            began = time.monotonic()
            folder = Path(asked.path)
            kept = read_adapter(asked.name, folder, slots.targets, slots.max_rank, slots.dtype, slots.kept_dtype)
            if asked.digest and adapter_digest(folder) != asked.digest:
                raise ConfigError(f"the files of adapter {asked.name!r} at {folder} have changed since it was "
                                  "registered; load it again.")  # fmt: skip
            kept = slots.kept(kept)
            log.info(
                "adapter %r of %s: %.1f MB in %.2f s", asked.name, folder, kept.nbytes / 1e6, time.monotonic() - began
            )
            with self._keeping:
                while len(self._kept) >= self._most_kept:  # one in a slot would take its memory all the same
                    spare = (key for key, each in self._kept.items() if not slots.has(each))
                    del self._kept[next(spare, next(iter(self._kept)))]
        with self._keeping:
            self._kept[key] = kept
            self._kept.move_to_end(key)
        return slots.ready(asked.slot, kept)
