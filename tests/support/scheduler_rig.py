"""A scheduler, fake workers that run when told to, and a client that collects: for tests of single rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quire.proto.codec import from_i8, from_i32, from_i64, i32
from quire.proto.config import EngineArgs
from quire.proto.hashing import hash_blocks, root_of
from quire.proto.messages import (
    BeamStopped,
    BeamTokens,
    Child,
    DropAdapter,
    Failed,
    Finish,
    Lease,
    LoadAdapter,
    Logprobs,
    PromptLogprobs,
    StepPlan,
    Submit,
    TokenBatch,
)
from quire.proto.params import SamplingParams
from quire.proto.work import Adapter, Generate, with_adapter
from quire.scheduler.core import Scheduler
from quire.scheduler.fake.page_store import PageStore
from quire.scheduler.replica import Replica

VOCAB = 1000


class Rig:
    """A scheduler, workers that run when told to, and a client that collects tokens."""

    def __init__(
        self, blocks: int | list[int] = 64, max_model_len: int = 256, vocab: int = VOCAB, device: str = "",
        adapter_slots: int = 0, **flags: object,
    ):  # fmt: skip
        defaults = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 32}
        self.now = 0.0
        self.core = Scheduler(EngineArgs(**{**defaults, **flags}), clock=lambda: self.now)
        self.max_model_len, self.vocab, self.device = max_model_len, vocab, device
        self.adapter_slots = adapter_slots
        self.loads: dict[int, list[LoadAdapter]] = {}  # of adapters, not answered yet
        self.dropped: list[DropAdapter] = []
        self.stores: dict[int, PageStore] = {}
        self.plans: dict[int, deque[StepPlan]] = {}
        self.leases = 0
        for number, count in enumerate([blocks] if isinstance(blocks, int) else blocks):
            self.add(number, count)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], tuple[Finish, int]] = {}
        self.started: dict[int, int] = {}
        self.logprobs: dict[tuple[int, int], list[Logprobs]] = {}
        self.prompts: dict[int, list[PromptLogprobs]] = {}
        self.other: list = []
        self.stop: Callable[[list[int]], bool] = lambda outputs: False  # a stop string ends these output tokens
        self.candidates: dict[int, list[list[int]]] = {}  # of each beam search with stop strings
        self.questions: list[BeamTokens] = []
        self.last_uid = 0

    def add(self, number: int, blocks: int) -> Replica:
        config = self.core.config
        self.leases += 1
        self.stores[number] = PageStore(config.max_num_seqs, blocks, config.block_size, self.vocab)
        self.plans[number] = deque()
        self.loads[number] = []
        replica = Replica(
            number, Lease(1, number, self.leases), f"w{number}", config.max_num_seqs, blocks, config.block_size,
            self.max_model_len, self.vocab, config.enable_prefix_caching, self.device,
            adapter_slots=self.adapter_slots, lives=self.core.lives,
        )  # fmt: skip
        self.core.add_replica(replica)
        return replica

    def submit(
        self, prompt: list[int] | int, *, uid: int = 0, attempt: int = 0, eos: tuple[int, ...] = (), priority: int = 0,
        children: list[Child] | None = None, losses: int = 0, arrival: float | None = None, suppressed: bytes = b"",
        bad_words: list[list[int]] | None = None, prompt_from: int = 0, key: str = "",
        cache_salt: str = "", adapter: Adapter | None = None,
        **params: object,
    ) -> int:  # fmt: skip
        self.last_uid += 1
        uid = uid or self.last_uid
        prompt = self.prompt(prompt, uid) if isinstance(prompt, int) else prompt
        ids = i32(prompt)
        root = root_of(cache_salt, adapter.digest if adapter is not None else b"")
        hashes = b"".join(hash_blocks(ids, self.core.config.block_size, root))
        sampling = SamplingParams(**{"max_tokens": 4, **params})
        message = Submit(
            uid, attempt, ids, hashes,
            with_adapter(Generate(sampling, uid, list(eos), suppressed, bad_words or []), adapter),
            float(self.last_uid) if arrival is None else arrival, children or [], priority=priority, losses=losses,
            prompt_logprobs_from=prompt_from, key=key, root=root,
        )  # fmt: skip
        self.core.submit("detok", message)
        return uid

    def prompt(self, length: int, salt: int) -> list[int]:
        return [(salt * 131 + i * 7) % self.vocab for i in range(length)]

    def plan(self, number: int = 0) -> StepPlan | None:
        plan = self.core.plan(self.core.replicas[number])
        if plan is not None:
            self.plans[number].append(plan)
        adapters = self.core.replicas[number].adapters
        if adapters is not None:
            for order in adapters.take_orders():
                (self.loads[number] if isinstance(order, LoadAdapter) else self.dropped).append(order)  # type: ignore
        self.core.check_integrity()
        return plan

    def work(self, number: int = 0) -> None:
        plan = self.plans[number].popleft()
        self.core.commit(self.core.replicas[number], self.stores[number].run(plan))
        self.core.check_integrity()
        self.receive()

    def step(self, number: int = 0) -> StepPlan | None:
        """One plan, run and committed."""
        plan = self.plan(number)
        if plan is not None:
            self.work(number)
        return plan

    def step_until_preempted(self) -> StepPlan:
        """The plan that preempted somebody."""
        for _ in range(100):
            plan = self.step()
            if self.core.preemptions:
                assert plan is not None
                return plan
        raise AssertionError("nobody was preempted")

    def run(self, turns: int = 500) -> None:
        """Until nothing is left, with two plans in flight."""
        for _ in range(turns):
            for number in list(self.core.replicas):
                while self.plan(number) is not None:
                    pass
                if self.plans[number]:
                    self.work(number)
                    self.answer_all()
                self.beside(number)
            if not self.core.requests and not any(self.plans.values()):
                break
        self.receive()
        assert not self.core.requests
        assert all(r.pool.used == 0 for r in self.core.replicas.values())

    def beside(self, number: int) -> None:
        """What a worker does beside its steps; nothing here."""

    def receive(self) -> None:
        for _, message in self.core.outbox.take():
            if isinstance(message, PromptLogprobs):
                assert (message.uid, 0) not in self.tokens, "prompt logprobs came after a token"
                self.prompts.setdefault(message.uid, []).append(message)
                continue
            if isinstance(message, BeamTokens):
                self.questions.append(message)
                continue
            if not isinstance(message, TokenBatch):
                self.other.append(message)
                continue
            self.started.update(zip(from_i64(message.started_uids), from_i32(message.started_cached), strict=True))
            flat, at = from_i32(message.tokens), 0
            uids, indexes = from_i64(message.uids), from_i32(message.indexes)
            for row, record in zip(from_i32(message.logprob_rows), message.logprobs, strict=True):
                self.logprobs.setdefault((uids[row], indexes[row]), []).append(record)
            for uid, index, offset, count, finish, stop in zip(
                uids, indexes, from_i32(message.offsets),
                from_i32(message.counts), from_i8(message.finishes), from_i32(message.stop_ids), strict=True,
            ):  # fmt: skip
                tokens = self.tokens.setdefault((uid, index), [])
                assert offset >= len(tokens), "a token came twice"
                tokens += flat[at : at + count]
                at += count
                if finish:
                    self.ends[uid, index] = (Finish(finish), stop)

    def answer(self, message: BeamTokens) -> BeamStopped:
        """What the detokenizer would say."""
        before = [[]] if message.step == 1 else self.candidates[message.uid]
        pairs = zip(from_i32(message.parents), from_i32(message.tokens), strict=True)
        now = self.candidates[message.uid] = [[*before[parent], token] for parent, token in pairs]
        assert all(len(tokens) == message.step for tokens in now)
        stopped = [at for at, tokens in enumerate(now) if self.stop(tokens)]
        return BeamStopped(message.uid, message.attempt, message.step, i32(stopped))

    def answer_all(self) -> None:
        self.receive()
        questions, self.questions = self.questions, []
        for question in questions:
            self.core.beam_stopped(self.answer(question))
            self.core.check_integrity()

    def failed(self) -> Failed:
        self.receive()
        (message,) = [m for m in self.other if isinstance(m, Failed)]
        self.other.clear()
        return message

    @property
    def replica(self) -> Replica:
        return self.core.replicas[0]
