"""A process that hangs, with the real stack: every stream goes on exactly, whatever it asked for."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from quire.client import core as core_module
from quire.client.engine import Engine
from quire.client.supervisor.launch import Supervisor
from quire.proto.config import EngineArgs
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams

NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 15, "maxItems": 15}
PROMPT = "Tell me a long story about a river."
MANY = 90
CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MANY, ignore_eos=True),
    "seeded": SamplingParams(seed=1, max_tokens=MANY, ignore_eos=True, n=2),
    "penalties": SamplingParams(
        seed=2, max_tokens=MANY, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, min_tokens=MANY
    ),
    "schema": SamplingParams(seed=3, max_tokens=200, structured_outputs=StructuredOutputsParams(json=NUMBERS)),
    "logprobs": SamplingParams(seed=4, max_tokens=MANY, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    "best of": SamplingParams(seed=5, max_tokens=MANY, best_of=3, ignore_eos=True),
    "beams": SamplingParams(temperature=0.0, max_tokens=24, n=2, best_of=3, use_beam_search=True, ignore_eos=True),
}


async def run_all(engine: Engine, cases: dict[str, SamplingParams], during: Any = None) -> dict[str, Any]:
    streams = {name: engine.submit(prompt=PROMPT, params=params) for name, params in cases.items()}
    if during is not None:
        await during(streams)
    found = {}
    for name, stream in streams.items():
        children = await stream.collect()
        found[name] = (
            [("".join(child.parts), child.tokens, child.finish, child.stop_reason) for child in children],
            [[(each.ids, each.rank, each.texts) for each in child.logprobs] for child in children],
            [each and (each.ids, each.rank) for each in stream.prompt_logprobs or []],
        )
    return found


async def until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def nothing_is_left(engine: Engine) -> None:
    """What a detokenizer ended, and attempts given up, the scheduler hears of on another connection."""
    async with asyncio.timeout(120):
        while ((stats := await engine.stats(60)).running, stats.waiting, stats.blocks_used) != (0, 0, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def with_stop(cases: dict[str, SamplingParams], text: str) -> dict[str, SamplingParams]:
    """One more, that ends by a string which is first complete towards its end."""
    at = next(i for i in range(len(text) // 2, len(text) - 6) if text.find(text[i : i + 6]) == i)
    stop = SamplingParams(seed=4, max_tokens=MANY, ignore_eos=True, stop=[text[at : at + 6]])
    return {**cases, "stop": stop}


@pytest.fixture(scope="module")
def stack() -> Iterator[Supervisor]:
    with Supervisor(EngineArgs(host="127.0.0.1", port=0), http=True) as running:
        running.start()
        running.wait_ready(120)
        yield running


def process_of(stack: Supervisor, service: str) -> psutil.Process:
    return psutil.Process(next(pid for pid, name in stack.pids.items() if name == service))


def compare(stack: Supervisor, cases: dict[str, SamplingParams], disturb: Any, sent_again: bool = True) -> None:
    """The same requests undisturbed and disturbed end alike, and the second were in the middle, or were sent again."""

    async def main() -> None:
        engine = Engine(stack.address)
        await engine.start()
        await engine.wait_ready(120)
        ((text, *_),) = (await run_all(engine, {"logprobs": CASES["logprobs"]}))["logprobs"][0]
        all_cases = with_stop(cases, text)
        alone = await run_all(engine, all_cases)
        assert alone["stop"][0][0][0] == text[: len(alone["stop"][0][0][0])] and alone["stop"][0][0][3]
        hit: list[bool] = []

        async def during(streams: dict[str, Any]) -> None:
            await until(lambda: all(stream.accepted for stream in streams.values()))
            await until(lambda: len(streams["seeded"].children[0].tokens) >= 10)
            await disturb(engine)
            hit.extend(stream._request.attempt > 0 if sent_again else not stream.done for stream in streams.values())

        for _ in range(10):  # all may be over before a slow machine comes to disturb them
            again = await run_all(engine, all_cases, during)
            for name in all_cases:
                assert again[name] == alone[name], name
            await nothing_is_left(engine)
            if any(hit):
                break
        assert any(hit)
        await engine.close()

    asyncio.run(main())


def test_streams_go_on_when_the_only_detokenizer_returns(stack: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def disturb(engine: Engine) -> None:
        detokenizer = process_of(stack, "detokenizer")
        detokenizer.suspend()
        try:
            with monkeypatch.context() as patch:  # only now: on a slow machine one that lives may be as silent
                patch.setattr(core_module, "SILENCE_S", 0.5)
                await until(lambda: not any(link.ready for link in engine.core.links.values()))
            await asyncio.sleep(0.2)
        finally:
            detokenizer.resume()
        await until(lambda: engine.ready)

    compare(stack, CASES, disturb)


@contextlib.contextmanager
def supervised(stack: Supervisor) -> Iterator[None]:
    stop = threading.Event()
    watcher = threading.Thread(target=stack.supervise, args=(stop,))
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


async def stand_still_for_good(stack: Supervisor, service: str) -> None:
    """Stop a process, and have its supervisor believe that it has long been silent, until another is in its place."""
    place = next(place for place in stack._places if place.service == service)
    old = process_of(stack, service)
    old.suspend()

    def is_replaced() -> bool:
        with stack.lock:
            if place.process is None or place.process.pid != old.pid:
                return True
            place.heard = -math.inf  # again and again: what it had said before it was stopped may be read only now
        return False

    await until(is_replaced)
    assert not old.is_running()


@pytest.mark.parametrize(
    ("service", "cases"), [("gpu_worker", ["seeded"]), ("detokenizer", ["seeded"]), ("scheduler", ["seeded", "schema"])]
)
def test_streams_go_on_when_the_only_process_of_a_kind_stands_still_for_good(
    stack: Supervisor, service: str, cases: list[str]
) -> None:
    async def disturb(engine: Engine) -> None:
        await stand_still_for_good(stack, service)
        await until(lambda: engine.ready)

    with supervised(stack):
        compare(stack, {name: CASES[name] for name in cases}, disturb, sent_again=service != "gpu_worker")


def test_a_frontend_that_stands_still_for_good_is_replaced(stack: Supervisor) -> None:
    with supervised(stack):
        asyncio.run(stand_still_for_good(stack, "frontend"))
        asyncio.run(until(stack._healthy))


def test_what_serves_shows_again_and_again_that_it_lives(stack: Supervisor) -> None:
    for place in stack._places:
        asyncio.run(until(lambda place=place: stack.watch.silence(place) and place.served))
    before = {place: place.heard for place in stack._places}

    def all_heard() -> bool:
        return all(stack.watch.silence(place) < math.inf and place.heard > heard for place, heard in before.items())

    asyncio.run(until(all_heard))
