"""A worker, or a detokenizer, as one real process whose scheduler is played by the test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
from chaos.cluster import Cluster, Member, Shape

from fuzz.frames import plain
from fuzz.targets import VOCAB
from quire.proto import messages as m
from quire.proto.codec import from_i32, from_i64, i8, i32, i64, u64
from quire.proto.params import SamplingParams
from quire.proto.process import new_incarnation
from quire.proto.structured import StructuredOutputsParams
from quire.proto.wire.sockets import Dealer, Router, front_endpoint, worker_endpoint
from quire.proto.work import Generate

EPOCH = 2**64 - 1
"""No epoch that is made up is later than this one, so a sound message is never out of date."""
PATIENCE_S = 60.0


class Alone(Cluster):
    """One real process, kept as in any cluster, and in place of all others ``wire``, the scheduler's ROUTER."""

    def __init__(self, rng: random.Random, union: Any, endpoint: Callable[[str], str], **fields: Any):
        super().__init__(Shape(fake=False, **fields), rng)
        (self.folder / "s").mkdir(mode=0o700)
        self._direct = self.address = f"ipc://{self.folder / 's'}"
        self.wire: Router[Any] = Router(union, endpoint(self.address))
        self.peer = ""

    async def _start(self) -> None:
        self.wire.attach(self._received)
        await self._start_process()
        self._keeper = asyncio.ensure_future(self._keep())

    async def _start_process(self) -> None:
        raise NotImplementedError

    def _received(self, peer: str, message: Any) -> None:
        raise NotImplementedError

    async def __aexit__(self, *exc: object) -> None:
        if exc[0] is not None:
            print(self.logs())
        await self.close()

    async def close(self) -> None:
        self.wire.close()
        await super().close()


class LoneWorker(Alone):
    """``python -m quire.gpu_worker``, under one lease after another."""

    SIZES = 16, 4, 64  # block_size, max_num_seqs, max_num_batched_tokens
    BLOCKS = 150
    IDS = (7, 3, 99, 4, 5)

    def __init__(self, rng: random.Random):
        flags = ["--device=cpu", "--cpu-threads=1", f"--num-gpu-blocks-override={self.BLOCKS}"]
        super().__init__(rng, m.ToSchedulerWorkers, worker_endpoint, worker_flags=flags)
        self.lease = m.Lease(EPOCH, 0, 0)
        self.leases_lost = 0
        self._step = 0
        self._known: list[int] = []
        self._inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._decoder = msgspec.msgpack.Decoder(m.FromSchedulerWorkers)

    async def _start_process(self) -> None:
        self.member: Member = self.add_worker()

    def _received(self, peer: str, message: Any) -> None:
        if not isinstance(message, m.Heartbeat):
            self._inbox.put_nowait((peer, message))

    async def open(self) -> None:
        """A fresh lease, up to Ready. The worker may have lost the one before, and say Hello at any point of it."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self._assigned():
                pass

    async def _assigned(self) -> bool:
        self.lease, self._step = m.Lease(EPOCH, 0, self.lease.counter + 1), 0
        self.wire.send(self.peer, m.Assign(self.lease, *self.SIZES))
        loaded = await self._answer(m.Loaded)
        if loaded is None:
            return False
        if loaded.num_blocks != self.BLOCKS or loaded.vocab_size <= max(self.IDS):
            raise AssertionError(f"loaded as {loaded}")
        self.wire.send(self.peer, m.Configure(self.lease, self.BLOCKS))
        return await self._answer(m.Ready) is not None

    async def _answer(self, kind: type) -> Any:
        """The next message of ``kind`` under the lease; None after a Hello, whose sender is the peer from then on."""
        while True:
            peer, message = await self._inbox.get()
            if isinstance(message, m.Hello):
                if message.pid != self.member.pid:
                    raise AssertionError(f"process {self.member.pid} says that it is {message.pid}")
                self.leases_lost += bool(self.peer)
                self.peer = peer
                return None
            if peer == self.peer and isinstance(message, kind) and message.lease == self.lease:
                return message

    async def check(self) -> None:
        """Under a fresh lease a known prompt comes to the tokens that it came to at first."""
        await self.open()
        tokens: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            for step in range(1, 4):
                self.wire.send(self.peer, self._plan(step, SamplingParams(temperature=0.0), [0]))
                result = await self._answer(m.StepResult)
                if result is None or result.step != step or result.failed:
                    raise AssertionError(f"step {step} of a sound prompt came to {result}")
                tokens += from_i32(result.tokens)
        self._known = self._known or tokens
        if tokens != self._known:
            raise AssertionError(f"a sound prompt came to {tokens}, and to {self._known} at first")

    def _plan(self, step: int, params: SamplingParams, rows: list[int], **more: Any) -> m.StepPlan:
        """The prompt in each of ``rows``, then a token more of each in every step."""
        count, length = len(rows), len(self.IDS)
        if step == 1:
            work, told = Generate(params, 3, [], i32([2]), [[8, 9]]), 0 if params.prompt_logprobs else -1
            more["admits"] = [m.Admit(row, 10 + row, 0, i32(self.IDS), length, work, told) for row in rows]
            more |= {"delta_rows": i32(rows), "delta_slots": i32([0] * count), "delta_blocks": i32(r + 1 for r in rows)}
        start, tokens = (0, length) if step == 1 else (length + step - 2, 1)
        return m.StepPlan(
            self.lease, step, rows=i32(rows), starts=i32([start] * count), counts=i32([tokens] * count),
            sample_src=i32(range(count)), sample_rows=i32(rows), **more,
        )  # fmt: skip

    def sound(self, rng: random.Random) -> list[Any]:
        """The next thing that a scheduler could send under this lease: a plan, as a rule."""
        if rng.random() < 0.15:
            other = m.Lease(EPOCH, 0, self.lease.counter)
            return [plain(rng.choice((m.Assign(other, *self.SIZES), m.Configure(other, self.BLOCKS))))]
        self._step += 1
        if self._step == 1:
            return [plain(self._plan(1, self._params(rng), [0, 1]))]
        more = rng.choice((
            {}, {"drops": i32([3])},
            {"fork_src": i32([0]), "fork_dst": i32([2]), "fork_seeds": u64([5]), "copy_src": i32([1]),
             "copy_dst": i32([5]), "delta_rows": i32([2]), "delta_slots": i32([0]), "delta_blocks": i32([5])},
            {"admits": [m.Admit(3, 9, 0, i32([4, 5, 6]), 2, Generate(self._params(rng), 1))]},
        ))  # fmt: skip
        return [plain(self._plan(self._step, SamplingParams(), [0, 1], **more))]

    @staticmethod
    def _params(rng: random.Random) -> SamplingParams:
        return rng.choice((
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, logprobs=3, prompt_logprobs=2),
            SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2,
                           logit_bias={5: 1.0}, allowed_token_ids=[5, 6, 7, 8], min_tokens=2),
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]+")),
            SamplingParams(temperature=0.0, n=2, best_of=2, use_beam_search=True, logprobs=0),
        ))  # fmt: skip

    def order(self, frame: bytes) -> bool:
        """Whether it is an Assign that a scheduler with other flags could send, which is to be obeyed."""
        try:
            message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        if not isinstance(message, m.Assign):
            return False
        size, rows, tokens = sizes = message.block_size, message.max_num_seqs, message.max_num_batched_tokens
        return sizes != self.SIZES and size in (8, 16, 32) and 1 <= rows <= tokens < 2**31


class LoneDetokenizer(Alone):
    """``python -m quire.detokenizer``, between the scheduler and an Engine's socket that are both ours."""

    PROMPT = "once upon a time"

    def __init__(self, rng: random.Random):
        super().__init__(rng, m.ToSchedulerFront, front_endpoint)
        self.engine: Dealer[Any] | None = None
        self._pinged = 0
        self._uid = 10**12
        self._submits: dict[int, m.Submit] = {}
        self._accepted: dict[int, m.Accepted] = {}
        self._rows: dict[int, list[tuple[list[int], str, int]]] = {}
        self._news = asyncio.Event()
        self._known: Any = None
        self._ping = self._victim = self._other = 0  # uids: a beam search that answers pings, and two to lie about

    async def _start_process(self) -> None:
        await self._add_detokenizer()
        await self._until(lambda: self.engine is not None)
        self.restore()
        self._ping = await self.submit(self._beams())

    async def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        await super().close()

    def _received(self, peer: str, message: Any) -> None:
        if isinstance(message, m.Hello):
            self.peer = peer
            if self.engine is None:
                self.engine = Dealer(m.FromDetokenizer, message.endpoint, new_incarnation("frontend"))
                self.engine.attach(self._told)
        elif isinstance(message, m.Submit):
            self._submits[message.uid] = message
        elif isinstance(message, m.BeamStopped) and message.uid == self._ping:
            self._pinged += 1
        self._news.set()

    def _told(self, message: Any) -> None:
        if isinstance(message, m.Accepted):
            self._accepted[message.uid] = message
        elif isinstance(message, m.TextBatch):
            tokens = from_i32(message.tokens)
            columns = (from_i64(message.uids), from_i32(message.counts), message.texts, message.finishes)
            for uid, count, text, finish in zip(*columns, strict=True):
                self._rows.setdefault(uid, []).append((tokens[:count], text, finish))
                tokens = tokens[count:]
        self._news.set()

    async def _until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not happened():
                await self._news.wait()
                self._news.clear()

    def restore(self) -> None:
        """What the detokenizer may have been told falsely of the scheduler, told right."""
        self.wire.send(self.peer, m.Peers(EPOCH, [], 16, True, 2048))

    async def ping(self) -> None:
        """Wait until it has read all that was sent so far."""
        seen = self._pinged
        self.wire.send(self.peer, m.BeamTokens(self._ping, 0, 1, i32([0]), i32([7])))
        await self._until(lambda: self._pinged > seen)

    @staticmethod
    def _beams() -> SamplingParams:
        return SamplingParams(temperature=0.0, n=2, best_of=2, use_beam_search=True, stop=["zz"], max_tokens=9)

    async def submit(self, params: SamplingParams) -> int:
        """A sound request, until its Submit is there: its uid, which is far from any other."""
        assert self.engine is not None
        uid = self._uid = self._uid + 1000
        self.engine.send(m.Tokenize(uid, 0, Generate(params, 7), 1.0, prompt=self.PROMPT))
        await self._until(lambda: uid in self._submits and uid in self._accepted)
        return uid

    async def check(self) -> None:
        """A sound request comes to its Submit, and its tokens to their text, as at first."""
        assert self.engine is not None
        self.engine.send(m.Heartbeat())
        self.restore()
        await self.ping()
        uid = await self.submit(SamplingParams(temperature=0.0, max_tokens=40))
        submitted, accepted = self._submits[uid], self._accepted[uid]
        tokens = from_i32(submitted.ids)
        for offset, part, finish in ((0, tokens[:2], m.Finish.NONE), (2, tokens[2:], m.Finish.LENGTH)):
            self.wire.send(self.peer, token_batch(uid, 0, offset, part, finish))
        await self._until(lambda: any(finish for _, _, finish in self._rows.get(uid, ())))
        rows = self._rows[uid]
        got = [token for part, _, _ in rows for token in part], "".join(text for _, text, _ in rows), rows[-1][2]
        if got[0] != tokens or got[1].strip() != self.PROMPT or got[2] != m.Finish.LENGTH:
            raise AssertionError(f"{tokens} came to {got}")
        submitted.uid = accepted.uid = 0
        self._known = self._known or (submitted, accepted, got)
        if (submitted, accepted, got) != self._known:
            raise AssertionError(f"came to {submitted}, {accepted} and {got}, and at first to {self._known}")
        self._forget()

    def _forget(self) -> None:
        """All requests but the one that answers pings; Reconcile makes the detokenizer do so too."""
        assert self.engine is not None
        for kept in (self._submits, self._accepted, self._rows):
            kept.clear()
        self.engine.send(m.Reconcile(i64([self._ping]), i32([0])))

    async def victims(self) -> None:
        """Fresh requests to lie about."""
        self.restore()
        await self.ping()
        self._victim = await self.submit(SamplingParams(temperature=1.0, n=2, logprobs=1, stop=["ab"], max_tokens=30))
        self._other = await self.submit(self._beams())

    def sound(self, rng: random.Random) -> list[Any]:
        """What a scheduler sends about the victims."""
        uid, one = self._victim, m.Logprobs(i32([5, 6]), i32([0, 0]), i32([1]))
        batch = token_batch(uid, 0, 0, [rng.randrange(VOCAB)], m.Finish.NONE, rng.randrange(2))
        told = token_batch(uid, 0, 0, [5], m.Finish.NONE)
        told.logprob_rows, told.logprobs = i32([0]), [one]
        beams = m.BeamTokens(self._other, 0, 1, i32([0, 0]), i32([rng.randrange(VOCAB), 4]))
        return [plain(x) for x in (
            batch, batch, told, token_batch(uid, 0, 0, [5, 6], m.Finish.STOP, 1), beams, beams,
            m.PromptLogprobs(uid, 0, 1, one), m.Unknown(i64([uid]), i32([0])), m.Failed(uid, 0, 500, "no"),
            m.Pooled(uid, 0, 0, bytes(8)), m.Peers(5, [m.Peer("frontend", "f", "ipc:///x")], 16, True, 2048),
            m.Stats(1, *[0] * 11, []), m.Managed(1, []), m.Heartbeat(),
        )]  # fmt: skip


def token_batch(uid: int, attempt: int, offset: int, tokens: list[int], finish: m.Finish, index: int = 0) -> Any:
    """One row."""
    return m.TokenBatch(i64([uid]), i32([attempt]), i32([index]), i32([offset]), i32([len(tokens)]), i32(tokens),
                        i8([finish]), i32([-1]))  # fmt: skip
