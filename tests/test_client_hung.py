"""A detokenizer that hangs, with the real stack: every stream goes on exactly, whatever it had asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

from quire.client import engine as engine_module
from quire.client.engine import Engine
from quire.client.launch import Stack
from quire.proto.config import EngineArgs
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams

NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 30, "maxItems": 30}
PROMPT = "Tell me a long story about a river."
MANY = 150
CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MANY, ignore_eos=True),
    "seeded": SamplingParams(seed=1, max_tokens=MANY, ignore_eos=True, n=2),
    "penalties": SamplingParams(
        seed=2, max_tokens=MANY, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, min_tokens=MANY
    ),
    "schema": SamplingParams(seed=3, max_tokens=400, structured_outputs=StructuredOutputsParams(json=NUMBERS)),
    "logprobs": SamplingParams(seed=4, max_tokens=MANY, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    "best of": SamplingParams(seed=5, max_tokens=MANY, best_of=3, ignore_eos=True),
    "beams": SamplingParams(temperature=0.0, max_tokens=40, n=2, best_of=3, use_beam_search=True, ignore_eos=True),
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
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def with_stop(cases: dict[str, SamplingParams], text: str) -> dict[str, SamplingParams]:
    """One more, that ends by a string which is first complete towards its end."""
    at = next(i for i in range(len(text) // 2, len(text) - 6) if text.find(text[i : i + 6]) == i)
    stop = SamplingParams(seed=4, max_tokens=MANY, ignore_eos=True, stop=[text[at : at + 6]])
    return {**cases, "stop": stop}


def test_streams_go_on_when_the_only_detokenizer_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SILENCE_S", 1.5)
    with Stack(EngineArgs()) as stack:
        stack.start()
        stack.wait_ready(60)
        detokenizer = psutil.Process(next(pid for pid, service in stack.pids.items() if service == "detokenizer"))

        async def hang(streams: dict[str, Any]) -> None:
            await until(lambda: all(stream.accepted for stream in streams.values()))
            await until(lambda: len(streams["seeded"].children[0].tokens) >= 10)
            detokenizer.suspend()
            assert not streams["seeded"].done
            await until(lambda: not engine_of[0].ready)
            await asyncio.sleep(0.2)
            detokenizer.resume()

        engine_of: list[Engine] = []

        async def main() -> None:
            engine = Engine(stack.address)
            engine_of.append(engine)
            await engine.start()
            await engine.wait_ready(30)
            ((text, *_),) = (await run_all(engine, {"logprobs": CASES["logprobs"]}))["logprobs"][0]
            cases = with_stop(CASES, text)
            alone = await run_all(engine, cases)
            assert alone["stop"][0][0][0] == text[: len(alone["stop"][0][0][0])] and alone["stop"][0][0][3]
            moved: list[int] = []

            async def during(streams: dict[str, Any]) -> None:
                await hang(streams)
                moved.extend(stream._request.attempt for stream in streams.values())

            again = await run_all(engine, cases, during)
            assert sum(moved) > 0
            for name in cases:
                assert again[name] == alone[name], name
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
            await engine.close()

        asyncio.run(main())
