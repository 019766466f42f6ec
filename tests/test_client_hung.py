"""A detokenizer or scheduler that hangs, with the real stack: every stream goes on exactly, whatever it asked for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from quire.client import engine as engine_module
from quire.client import launch as launch_module
from quire.client.engine import Engine
from quire.client.launch import Stack
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
def stack() -> Iterator[Stack]:
    with Stack(EngineArgs()) as running:
        running.start()
        running.wait_ready(120)
        yield running


def process_of(stack: Stack, service: str) -> psutil.Process:
    return psutil.Process(next(pid for pid, name in stack.pids.items() if name == service))


def compare(stack: Stack, cases: dict[str, SamplingParams], disturb: Any) -> None:
    """The same requests undisturbed and disturbed end alike, and the second were sent again."""

    async def main() -> None:
        engine = Engine(stack.address)
        await engine.start()
        await engine.wait_ready(120)
        ((text, *_),) = (await run_all(engine, {"logprobs": CASES["logprobs"]}))["logprobs"][0]
        all_cases = with_stop(cases, text)
        alone = await run_all(engine, all_cases)
        assert alone["stop"][0][0][0] == text[: len(alone["stop"][0][0][0])] and alone["stop"][0][0][3]
        attempts: list[int] = []

        async def during(streams: dict[str, Any]) -> None:
            await until(lambda: all(stream.accepted for stream in streams.values()))
            await until(lambda: len(streams["seeded"].children[0].tokens) >= 10)
            await disturb(engine)
            attempts.extend(stream._request.attempt for stream in streams.values())

        for _ in range(10):  # all may be over before a slow machine comes to disturb them
            again = await run_all(engine, all_cases, during)
            for name in all_cases:
                assert again[name] == alone[name], name
            await nothing_is_left(engine)
            if sum(attempts) > 0:
                break
        assert sum(attempts) > 0
        await engine.close()

    asyncio.run(main())


def test_streams_go_on_when_the_only_detokenizer_returns(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    async def disturb(engine: Engine) -> None:
        detokenizer = process_of(stack, "detokenizer")
        detokenizer.suspend()
        try:
            with monkeypatch.context() as patch:  # only now: on a slow machine one that lives may be as silent
                patch.setattr(engine_module, "SILENCE_S", 0.5)
                await until(lambda: not any(link.ready for link in engine._links.values()))
            await asyncio.sleep(0.2)
        finally:
            detokenizer.resume()
        await until(lambda: engine.ready)

    compare(stack, CASES, disturb)


def test_streams_go_on_when_a_scheduler_that_hangs_for_good_is_replaced(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    watcher = threading.Thread(target=stack.supervise, args=(stop,))
    watcher.start()

    async def disturb(engine: Engine) -> None:
        epoch, old = engine._epoch, process_of(stack, "scheduler")
        await until(lambda: stack._watch is not None and stack._watch._heard <= time.monotonic())
        old.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(launch_module, "SILENCE_S", 1.5)
            await until(lambda: old.pid not in stack.pids and "scheduler" in stack.pids.values())
        await until(lambda: engine._epoch > epoch and engine.ready)

    try:
        compare(stack, {"seeded": CASES["seeded"], "schema": CASES["schema"]}, disturb)
    finally:
        stop.set()
        watcher.join()
