"""A Rig whose workers load adapters when told to."""

from __future__ import annotations

from hashlib import blake2b

from scheduler_rig import Rig

from quire.proto.messages import AdapterReady, Failed
from quire.proto.work import Adapter
from quire.scheduler.adapters import Answer
from quire.scheduler.fake.fake_model import expected_tokens, tag


def adapter(name: str, path: str = "") -> Adapter:
    """One whose files are told by its name and path."""
    path = path or f"/adapters/{name}"
    return Adapter(name, path, blake2b(f"{name} {path}".encode(), digest_size=16).digest())


class AdapterRig(Rig):
    """With ``adapter_slots`` on each worker. ``used`` has the adapter of every request by uid."""

    def __init__(self, adapter_slots: int = 2, **options: object):
        self.used: dict[int, tuple[Adapter | None, list[int]]] = {}
        super().__init__(adapter_slots=adapter_slots, **options)

    def ask(self, chosen: Adapter | None, prompt: list[int] | int = 12, **options: object) -> int:
        """Submit one request; its uid."""
        prompt = self.prompt(prompt, self.last_uid + 1) if isinstance(prompt, int) else prompt
        uid = self.submit(prompt, adapter=chosen, **options)
        self.used[uid] = chosen, prompt
        return uid

    def load(self, number: int = 0, error: str = "", status: int = 400) -> list[Answer]:
        """The worker has loaded the first adapter that it was told to, or could not."""
        told = self.loads[number].pop(0)
        if not error:
            self.stores[number].adapters[told.slot] = tag(told.digest)
        ready = AdapterReady(told.lease, told.slot, told.generation, error, status)
        answers = self.core.adapter_ready(self.core.replicas[number], ready)
        self.core.check_integrity()
        return answers

    def loading(self, number: int = 0) -> list[str]:
        """Names of what the worker was told to load, and has not."""
        return [told.name for told in self.loads[number]]

    def beside(self, number: int) -> None:
        """What is to be loaded is loaded a turn later."""
        if self.loads[number]:
            self.load(number)

    def check(self, uid: int, index: int = 0, count: int = 4) -> None:
        """The stream is that of its own adapter."""
        chosen, prompt = self.used[uid]
        seed = uid + index
        expected = expected_tokens(prompt, seed, count, self.vocab, tag(chosen.digest) if chosen is not None else 0)
        assert self.tokens[uid, index] == expected, (uid, index, chosen and chosen.name)

    def failures(self) -> dict[int, Failed]:
        """Requests that failed so far, by uid."""
        self.receive()
        return {message.uid: message for message in self.other if isinstance(message, Failed)}
