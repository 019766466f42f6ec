"""A storm: many streams at a time while things go wrong; every one of them must end as if nothing had.

First each request runs undisturbed (over Engine and over HTTP); that is what it must come to. Then ``streams`` of them
are open at any time, half of them over HTTP, half through an Engine in this process, while faults happen. Before the
next fault, every stream that was open must have got on: a request is taken for poison when it is lost three times at
one point, and that is what would be provoked otherwise. (So a beam search must have ended: nobody outside the scheduler
knows how far it is.) At times two faults come at once. Streams of a killed frontend end with it, and only those; their
clients ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.asks import Ask, FromHttp, Outcome, against_oracle, difference, from_engine, make_asks
from chaos.cluster import Cluster, until
from chaos.faults import KILLS, Fault, Faults
from chaos.web import Answer, Cut, post
from quire.client.engine import Engine, RequestError
from quire.proto.work import Adapter

SETTLE_S = 60.0
"""A stream that has not moved for so long after a fault is stuck."""
END_S = 120.0
REFUSED_S = 0.3
STARTED_S = 60.0
"""A frontend that was killed listens again within this time."""
ABORT_S = 2.0
"""Clients that leave do so within this time."""
MAX_FAILURES = 20


@dataclass(eq=False)
class Stream:
    """One on its way. ``moved``: when tokens came last."""

    ask: Ask
    way: str
    began: float = field(default_factory=time.monotonic)
    moved: float = 0.0
    task: asyncio.Task[None] | None = None
    answer: Answer = field(default_factory=Answer)

    def move(self) -> None:
        self.moved = time.monotonic()


@dataclass
class Report:
    """What a storm came to."""

    seconds: float = 0.0
    streams: int = 0
    by_way: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    lost_with_frontend: int = 0
    refused: int = 0
    aborted: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    drafted: int = 0  # tokens, since the scheduler started last
    kept: int = 0  # of these
    loaded: int = 0  # prompt tokens from outside of devices' caches, since the scheduler started last
    log_errors: list[str] = field(default_factory=list)
    drain_codes: list[int] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.faults.get(kind, 0) for kind in KILLS)


class Storm:
    """One cluster, one Engine, the requests and their undisturbed outcomes."""

    def __init__(
        self, cluster: Cluster, seed: int, streams: int, longest: int, kinds: int, pause: float, aborts: float = 0.0,
        adapters: Sequence[Adapter] = (),
    ):  # fmt: skip
        self.cluster, self.rng, self.width, self.aborts = cluster, random.Random(seed), streams, aborts
        self.asks = make_asks(kinds, random.Random(seed + 1), longest, adapters)
        self.wanted: dict[str, Outcome] = {}
        self.faults = Faults(cluster, self.rng, pause)
        self.engine = Engine(cluster.address, cluster.keys)
        self.open: set[Stream] = set()
        self.report = Report()
        self._ending = False

    async def __aenter__(self) -> Storm:
        await self.engine.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for stream in list(self.open):
            if stream.task is not None:
                stream.task.cancel()
        await self.engine.close()

    async def ready(self, timeout: float = 90.0) -> None:
        """Until a request runs over every frontend and all workers are there."""
        await self.engine.wait_ready(timeout)
        deadline = time.monotonic() + timeout
        shape = self.cluster.shape
        while True:
            stats = await self.engine.stats(30.0)
            if len(stats.replicas) >= shape.workers and len(self.engine.detokenizers) >= shape.detokenizers:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(stats.replicas)} of {shape.workers} workers are ready")
            await asyncio.sleep(0.1)
        for _ in range(4 * shape.frontends):
            if not await self._answers(deadline):
                raise TimeoutError("no answer over HTTP")
        self.report = Report()

    async def _answers(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            with contextlib.suppress(Cut):
                if (await self._over_http(Stream(self.asks[0], "http")))[1] is not None:
                    return True
            await asyncio.sleep(0.1)
        return False

    async def calm(self) -> None:
        """Run everything once through Engine and once over HTTP, undisturbed."""
        running = [self.engine.submit(params=ask.params(), **ask.prompt_field()) for ask in self.asks]
        for ask, stream in zip(self.asks, running, strict=True):
            outcome = from_engine(await stream.collect(), stream.prompt_logprobs, ask)
            self.wanted[ask.name] = outcome
            if self.cluster.shape.fake and stream.accepted is not None:
                wrong = against_oracle(ask, stream.accepted.prompt_ids, outcome)
                if wrong is not None:
                    raise AssertionError(f"undisturbed {ask.name} is not what a sound worker draws: {wrong}")
        outcomes = await asyncio.gather(*(self._over_http(Stream(ask, "http")) for ask in self.asks))
        for ask, (_, found) in zip(self.asks, outcomes, strict=True):
            if found is None or (wrong := difference(found, self.wanted[ask.name])) is not None:
                raise AssertionError(f"undisturbed {ask.name} over HTTP: {'refused' if found is None else wrong}")

    async def rage(self, seconds: float, gap: float, kinds: Sequence[str], kills: int | None = None) -> Report:
        """Faults of ``kinds`` every ``gap`` seconds in the mean, for so long or until so many kills.

        They are dealt like cards: each of ``kinds`` comes once before any comes again.
        """
        report, began = self.report, time.monotonic()
        deck: list[str] = []
        feeder = asyncio.ensure_future(self._feed())
        try:
            while time.monotonic() - began < seconds and (kills is None or self.faults.kills < kills):
                await asyncio.sleep(min(self.rng.expovariate(1 / gap), 4 * gap))
                happened = []
                for _ in range(2 if self.rng.random() < 0.15 else 1):
                    deck = deck or self.rng.sample(kinds, len(kinds))
                    fault = await self.faults.do(deck.pop())
                    if fault is not None:
                        happened.append(fault)
                if happened:
                    await self._settle(happened)
                if len(report.failures) >= MAX_FAILURES:
                    break
        finally:
            self._ending = True
            await self.faults.heal()
            feeder.cancel()
        await self._finish()
        report.seconds = time.monotonic() - began
        report.faults = dict(self.faults.done)
        report.surprises = self.cluster.surprises[:]
        report.drain_codes = self.faults.drain_codes
        report.log_errors = self.cluster.errors()
        return report

    # ------------------------------------------------------------ streams

    async def _feed(self) -> None:
        """Keep ``width`` streams open."""
        while True:
            while len(self.open) < self.width:
                stream = Stream(self.rng.choice(self.asks), self.rng.choice(("engine", "http")))
                self.open.add(stream)
                stream.task = asyncio.ensure_future(self._run(stream))
            await asyncio.sleep(0.005)

    async def _run(self, stream: Stream) -> None:
        ask, report = stream.ask, self.report
        patience = self.rng.uniform(0.0, ABORT_S) if self.rng.random() < self.aborts else None
        try:
            async with asyncio.timeout(patience):
                outcome = await (self._over_engine(stream) if stream.way == "engine" else self._until_answered(stream))
            wrong = difference(outcome, self.wanted[ask.name])
            if wrong is not None:
                self._fail(stream, wrong)
            report.streams += 1
            report.tokens += outcome.count
            report.by_way[stream.way] += 1
            report.by_kind[ask.kind] += 1
        except TimeoutError:
            report.aborted += 1
        except RequestError as error:
            self._fail(stream, f"{error.status} {error}")
        except Cut as error:
            self._fail(stream, f"cut off: {error}")
        except AssertionError as error:
            self._fail(stream, str(error))
        finally:
            self.open.discard(stream)

    def _fail(self, stream: Stream, why: str) -> None:
        age = time.monotonic() - stream.began
        recent = [f"{f.kind} {f.at - stream.began:+.1f}" for f in self.faults.history if f.at > stream.began - 1]
        self.report.failures.append(f"{stream.way} {stream.ask.name} after {age:.1f} s ({', '.join(recent)}): {why}")

    async def _over_engine(self, stream: Stream) -> Outcome:
        while True:
            running = self.engine.submit(params=stream.ask.params(), **stream.ask.prompt_field())
            try:  # leaving this by a timeout drops the stream, and that is an abort
                seen: dict[int, list[int]] = {}
                async for event in running:
                    seen.setdefault(event.index, []).extend(event.tokens)
                    stream.move()
            except RequestError as error:
                if error.status == 503 and running.accepted is None:  # nobody to take it for 10 s
                    self.report.refused += 1
                    continue
                raise
            outcome = from_engine(running.children, running.prompt_logprobs, stream.ask)
            for index, child in enumerate(outcome.children):
                if seen.get(index, []) != child.tokens:
                    raise AssertionError(f"child {index}: the events' tokens are not the child's")
            return outcome

    async def _until_answered(self, stream: Stream) -> Outcome:
        while True:
            began = time.monotonic()
            try:
                _, outcome = await self._over_http(stream)
            except Cut as cut:
                if not self._went_with_frontend(stream.answer, began):
                    raise Cut(f"{cut}; no frontend that had it was killed") from cut
                self.report.lost_with_frontend += 1
                outcome = None
            if outcome is not None:
                return outcome
            await asyncio.sleep(REFUSED_S)

    async def _over_http(self, stream: Stream) -> tuple[Answer, Outcome | None]:
        """None where it was refused (503), which says that nothing has been begun. Raises Cut, RequestError."""
        answer = stream.answer = Answer()
        taken = FromHttp(stream.ask)
        async for event in post(self.cluster.port, "/v1/completions", stream.ask.body(), answer):
            if taken.take(event):
                stream.move()
        if answer.status == 503:
            if "retry-after" not in answer.headers:
                raise RequestError(503, "a refusal without Retry-After")
            self.report.refused += 1
            return answer, None
        if answer.status != 200 or taken.error is not None:
            raise RequestError(answer.status, str(taken.error))
        return answer, taken.outcome

    def _went_with_frontend(self, answer: Answer, began: float) -> bool:
        """Whether the connection was a killed frontend's, or waited to be taken by one."""
        kills = [fault for fault in self.faults.history if fault.kind == "kill frontend"]
        if not answer.port:  # nobody listens where the other one is just being started
            return any(kill.at > began - STARTED_S for kill in kills)
        return any(kill.over >= began and (answer.port in kill.ports or not answer.begun) for kill in kills)

    # ------------------------------------------------------------ getting on

    async def _settle(self, faults: list[Fault]) -> None:
        """Until every stream that was open has got on, or has ended where nothing shows before."""
        at = faults[-1].at
        hit = set(self.open)
        deadline = time.monotonic() + SETTLE_S + self.faults.longest_pause
        while left := {s for s in hit & self.open if s.moved < at}:
            if time.monotonic() > deadline:
                for stream in left:
                    self._fail(stream, f"stuck since {', '.join(fault.kind for fault in faults)}")
                    if stream.task is not None:
                        stream.task.cancel()
                return
            await asyncio.sleep(0.01)
        if any(fault.kind in KILLS for fault in faults):
            self.report.recovery.append(time.monotonic() - at)

    async def _finish(self) -> None:
        """All streams end; then nothing may be left anywhere."""
        deadline = time.monotonic() + END_S
        await until(lambda: not self.open, END_S)
        for stream in list(self.open):
            self._fail(stream, f"still open {END_S:g} s after the last fault")
            if stream.task is not None:
                stream.task.cancel()
        left: dict[str, Any] = {"open in Engine": self.engine.open_requests}
        while time.monotonic() < deadline:
            try:
                stats = await self.engine.stats(5.0)
            except TimeoutError:
                continue
            left |= {"running": stats.running, "waiting": stats.waiting, "blocks used": stats.blocks_used}
            left |= {"bad frames": stats.bad_frames}
            self.report.drafted, self.report.kept = stats.draft_tokens, sum(stats.accepted)
            if stats.tiers is not None:
                self.report.loaded = stats.tiers.host_hits + stats.tiers.disk_hits
            if not any((stats.running, stats.waiting, stats.blocks_used)):
                break
            await asyncio.sleep(0.2)
        self.report.left = left


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of all lie; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(report: Report) -> dict[str, Any]:
    """A report as JSON holds it."""
    return {
        "seconds": round(report.seconds, 1), "faults": dict(sorted(report.faults.items())), "kills": report.kills,
        "streams": report.streams, "streams by way": dict(report.by_way), "streams by kind": dict(report.by_kind),
        "tokens compared": report.tokens, "mismatches": len(report.failures), "failures": report.failures,
        "lost with their frontend and asked again": report.lost_with_frontend, "refused with 503": report.refused,
        "aborted": report.aborted,
        "seconds to recover": {
            "p50": round(percentile(report.recovery, 0.5), 3), "p99": round(percentile(report.recovery, 0.99), 3),
            "most": round(max(report.recovery, default=0.0), 3),
        },
        "left at the end": report.left, "unexpected ends": report.surprises, "errors in logs": report.log_errors,
        "exit codes of drained workers": report.drain_codes,
    }  # fmt: skip
