"""The check of a request's grammar: verdicts, limits, and a child process that may be lost at any time."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.detokenizer import grammar_check
from quire.detokenizer.errors import Refused
from quire.detokenizer.grammar_check import GrammarChecker
from quire.detokenizer.grammar_helper import Check, frame
from quire.proto.model_config import demo_model_path, load_model_config
from quire.proto.structured import StructuredOutputsParams

MODEL = load_model_config(demo_model_path())
ENDLESS = {"type": "integer", "multipleOf": 10**7 + 19}
"""Takes minutes and gigabytes to compile."""


def spec(**form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**form)


def run(test: Callable[[GrammarChecker], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        checker = GrammarChecker(MODEL.path, MODEL, **limits)
        try:
            await test(checker)
        finally:
            checker.close()
            await asyncio.sleep(0.05)  # the child's end is noticed

    asyncio.run(main())


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def verdict(checker: GrammarChecker, **form: Any) -> Refused | None:
    try:
        await checker.check(spec(**form))
    except Refused as refused:
        assert refused.param == "structured_outputs"
        assert "\n" not in refused.message and len(refused.message) <= 300
        return refused
    return None


def test_every_form_passes_and_the_invalid_are_refused() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert checker.pid is None  # nothing runs before it is needed
        good: list[dict[str, Any]] = [
            {"json": {"type": "object"}}, {"json_object": True}, {"regex": "a+"}, {"choice": ["a", "b"]},
            {"grammar": 'start: "a"'}, {"grammar": 'root ::= "a"'}, {"json": '{"enum": [1]}'},
        ]  # fmt: skip
        assert [form for form in good if await verdict(checker, **form)] == []
        bad: list[dict[str, Any]] = [
            {"json": "{"}, {"json": {"not": {}}}, {"regex": "("}, {"grammar": "start: x"}, {"grammar": "root ::= x"},
            {"json": {"$ref": "#"}}, {"json": {"type": "string", "enum": ["\x01"]}}, {"regex": r"a\bb"},
        ]  # fmt: skip
        for form in bad:
            refused = await verdict(checker, **form)
            assert refused is not None and refused.status == 400, form
            assert refused.message.startswith("structured_outputs cannot be honoured: ")

    run(test)


def test_a_first_grammar_may_be_invalid() -> None:
    async def test(checker: GrammarChecker) -> None:
        refused = await verdict(checker, regex="(")
        assert refused is not None and "unclosed" in refused.message
        assert await verdict(checker, regex="a") is None

    run(test)


EXPLOSIVE: list[dict[str, Any]] = [
    {"json": ENDLESS},
    {"regex": "(a|a)*{100000}"},
    {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    {"regex": "(.*a.{900}|.*b.{900}|.*c.{900})*"},
    {"json": {"type": "array", "minItems": 10**6, "maxItems": 10**9, "items": {"type": "string", "minLength": 10**6}}},
    {"json": {"enum": [f"value {i}" for i in range(10**5)]}},
    {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
    {"json": {"patternProperties": {f"^{'a' * i}.*b{{{i}}}$": {} for i in range(1, 60)}}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}},
    {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": {"$defs": {"x": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/x"}}] * 500}}, "items":
              {"$ref": "#/$defs/x"}}},
    {"grammar": "start: ((x{1,1000}){1,1000}){1,1000}\nx: s\ns: s s | \"a\" | \"aa\" | s s s"},
    {"grammar": "root ::= " + '"a" | ' * 100000 + '"b"'},
    {"choice": [f"choice {i}" for i in range(70000)]},
    {"regex": "(" * 20000 + "a" + ")" * 20000},
    {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20000)) + '\nr20000: "a"'},
    {"json": {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)} | {"d5000": {}},
              "$ref": "#/$defs/d0"}},
]  # fmt: skip


@pytest.mark.parametrize("forms", [EXPLOSIVE[:4], EXPLOSIVE[4:8], EXPLOSIVE[8:12], EXPLOSIVE[12:15], EXPLOSIVE[15:]])
def test_explosive_grammars_are_answered_and_the_next_one_passes(forms: list[dict[str, Any]]) -> None:
    """Each is answered in time, whatever the verdict is; a child that was lost is replaced."""

    async def test(checker: GrammarChecker) -> None:
        for form in forms:
            async with asyncio.timeout(20):  # 2 s on a machine that is not busy
                refused = await verdict(checker, **form)
            assert refused is None or refused.status == 400
            assert await verdict(checker, choice=[str(time.monotonic())]) is None

    run(test)


def test_the_time_limit_ends_the_child_and_is_remembered() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await verdict(checker, json_object=True) is None
        pid = checker.pid
        refused = await verdict(checker, json=ENDLESS)
        assert refused is not None and "within 0.5 s and 512 MiB" in refused.message
        assert checker.pid is None and pid is not None and not alive(pid)
        assert await verdict(checker, json=ENDLESS) is not None
        assert checker.pid is None  # known: no other child was spent on it

    run(test)


def test_the_memory_limit() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await verdict(checker, json_object=True) is None
        refused = await verdict(checker, json=ENDLESS)
        assert refused is not None and refused.status == 400 and "32 MiB" in refused.message
        assert await verdict(checker, regex="a") is None

    run(test, memory=32 * 2**20, seconds=60.0)


def test_verdicts_are_remembered_and_equal_grammars_share_one() -> None:
    async def test(checker: GrammarChecker) -> None:
        same = [verdict(checker, regex="(a") for _ in range(5)] + [verdict(checker, regex="a") for _ in range(5)]
        answers = await asyncio.gather(*same)
        assert [answer is None for answer in answers] == [False] * 5 + [True] * 5
        pid = checker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it can answer nothing any more
        assert await verdict(checker, regex="a") is None
        assert await verdict(checker, regex="(a") is not None

    run(test)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_killed_in_the_middle_is_replaced(kind: signal.Signals) -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await verdict(checker, json_object=True) is None
        first = checker.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # holds the check in the middle
        waiting = asyncio.create_task(verdict(checker, regex="ab"))
        await asyncio.sleep(0.1)
        os.kill(first, kind)
        os.kill(first, signal.SIGCONT)
        assert await waiting is None
        assert checker.pid not in (None, first)
        os.kill(checker.pid or 0, signal.SIGKILL)
        assert await verdict(checker, regex="cd") is None

    run(test, seconds=30.0)


def test_a_grammar_that_kills_every_child_is_refused() -> None:
    async def test(checker: GrammarChecker) -> None:
        async def kill() -> None:
            for _ in range(2):
                while checker.pid is None or checker._fresh:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                os.kill(checker.pid, signal.SIGKILL)
                while checker.pid is not None and not checker._fresh:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

        killing = asyncio.create_task(kill())
        refused = await verdict(checker, json=ENDLESS)
        await killing
        assert refused is not None and refused.status == 400
        assert await verdict(checker, regex="a") is None

    run(test, seconds=30.0)


def test_too_many_waiting_grammars_are_told_to_come_back() -> None:
    async def test(checker: GrammarChecker) -> None:
        answers = await asyncio.gather(*(verdict(checker, regex=f"a{{{i}}}") for i in range(8)))
        statuses = [answer.status if answer else 200 for answer in answers]
        assert statuses == [200] * 3 + [429] * 5
        assert await verdict(checker, regex="a{7}") is None

    run(test, queued=3)


def test_who_gives_up_harms_nobody() -> None:
    async def test(checker: GrammarChecker) -> None:
        waiting = [asyncio.create_task(checker.check(spec(regex=f"b{{{i}}}"))) for i in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting)
        assert waiting[0].cancelled() and waiting[2].exception() is None
        late = asyncio.create_task(verdict(checker, json=ENDLESS))
        await asyncio.sleep(0)
        checker.close()
        refused = await late
        assert refused is not None and refused.status == 503

    run(test)


def test_a_child_that_cannot_start_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check.sys, "executable", "/bin/false")

    async def test(checker: GrammarChecker) -> None:
        refused = await verdict(checker, regex="a")
        assert refused is not None and refused.status == 500

    run(test)


@pytest.mark.parametrize("answer", [b"", b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"abc", b"\x01"])
def test_a_child_that_talks_nonsense_is_replaced(answer: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    fake = tmp_path / "python"
    (tmp_path / "answer").write_bytes(answer)
    fake.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    fake.chmod(0o755)
    real = sys.executable
    monkeypatch.setattr(grammar_check.sys, "executable", str(fake))

    async def test(checker: GrammarChecker) -> None:
        refused = await verdict(checker, regex="a")
        assert refused is not None and refused.status == 500
        monkeypatch.setattr(grammar_check.sys, "executable", real)
        assert await verdict(checker, regex="a") is None

    run(test)


def _helper() -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "quire.detokenizer.grammar_helper", MODEL.path, str(MODEL.vocab_size), "2,0"]
    return subprocess.Popen([*argv, str(2**29)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", struct.pack("<I", 5) + b"hello", b"\x07\x00", b""]
)
def test_the_helper_ends_at_hostile_bytes_and_with_its_parent(data: bytes) -> None:
    helper = _helper()
    assert helper.stdin is not None
    helper.stdin.write(data)
    helper.stdin.close()
    assert helper.wait(30) in (0, 1)


def test_the_helper_ends_with_its_parent_in_the_middle_of_a_check() -> None:
    helper = _helper()
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(frame(Check(1, spec(json=ENDLESS))))
    helper.stdin.flush()
    assert helper.stdout.read(4)  # it has begun
    helper.stdin.close()
    assert helper.wait(30) == 0
