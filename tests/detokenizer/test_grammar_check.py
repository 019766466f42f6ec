"""The check of a request's grammar: verdicts, limits, whose turn it is, and processes that may be lost at any time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.detokenizer import grammar_check
from quire.detokenizer.grammar_check import GrammarChecker
from quire.detokenizer.grammar_helper import READY, Check, Verdict, frame
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config
from quire.proto.errors import Refused
from quire.proto.structured import StructuredOutputsParams

MODEL = load_model_config(demo_model_path())
ENDLESS = {"type": "integer", "multipleOf": 10**7 + 19}
"""Takes minutes and gigabytes to compile."""
AMPLE_S = 30.0
"""For grammars that are to pass, on a machine that is as busy as can be."""


def endless(i: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": 10**7 + 1001 + 2 * i}


def spec(**form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**form)


def run(test: Callable[[GrammarChecker], Awaitable[None]], folder: str = MODEL.path, **limits: Any) -> None:
    async def main() -> None:
        checker = GrammarChecker(folder, MODEL, **limits)
        try:
            await test(checker)
        finally:
            checker.close()
            while checker.pid is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)  # its pipes are closed

    asyncio.run(main())


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Those that have ended and were not waited for among them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listed:
            return [int(child) for child in listed.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


async def checking(checker: GrammarChecker, count: int = 1) -> list[int]:
    """The processes that compile grammars, once there are so many."""
    while True:
        await asyncio.sleep(0.002)
        found = [] if checker.pid is None else [child for child in children(checker.pid) if alive(child)]
        if len(found) >= count:
            return found


@pytest.fixture
def ample(monkeypatch: pytest.MonkeyPatch) -> None:
    """First seconds that are never too short."""
    monkeypatch.setattr(grammar_check, "FIRST_S", AMPLE_S)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """``idle("pause")``, ``idle("stop")``: what compiles a schema does that instead, and uses none of its time."""

    def make(what: str) -> None:
        code = (
            "import os, signal; from quire.detokenizer import grammar_helper as helper; real = helper.compiled\n"
            "wait = {'pause': signal.pause, 'stop': lambda: os.kill(os.getpid(), signal.SIGSTOP)}\n"
            f"helper.compiled = lambda table, spec: real(table, spec) if spec.json is None else wait['{what}']()\n"
            "helper.main()"
        )
        fake = tmp_path / "python"
        fake.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -P -c "{code}" "$@"\n')
        fake.chmod(0o755)
        monkeypatch.setattr(grammar_check.sys, "executable", str(fake))

    return make


async def verdict(checker: GrammarChecker, **form: Any) -> Refused | None:
    try:
        await checker.check(spec(**form))
    except Refused as refused:
        assert refused.param == "structured_outputs"
        assert "\n" not in refused.message and len(refused.message) <= 300
        return refused
    return None


def test_every_form_passes_and_the_invalid_are_refused(ample: None) -> None:
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

    run(test, seconds=AMPLE_S)


def test_a_first_grammar_may_be_invalid(ample: None) -> None:
    async def test(checker: GrammarChecker) -> None:
        refused = await verdict(checker, regex="(")
        assert refused is not None and "unclosed" in refused.message
        assert await verdict(checker, regex="a") is None

    run(test, seconds=AMPLE_S)


EXPLOSIVE: list[dict[str, Any]] = [
    {"json": ENDLESS},
    {"regex": "(a|a)*{100000}"},
    {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    {"regex": "(.*a.{900}|.*b.{900}|.*c.{900})*"},
    {"json": {"type": "array", "minItems": 10**6, "maxItems": 10**9, "items": {"type": "string", "minLength": 10**6}}},
    {"json": {"enum": [f"value {i}" for i in range(15000)]}},
    {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
    {"json": {"patternProperties": {f"^{'a' * i}.*b{{{i}}}$": {} for i in range(1, 60)}}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}},
    {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": {"$defs": {"x": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/x"}}] * 500}}, "items":
              {"$ref": "#/$defs/x"}}},
    {"grammar": "start: ((x{1,1000}){1,1000}){1,1000}\nx: s\ns: s s | \"a\" | \"aa\" | s s s"},
    {"grammar": "root ::= " + '"a" | ' * 40000 + '"b"'},
    {"choice": [f"choice {i}" for i in range(20000)]},
    {"regex": "(" * 20000 + "a" + ")" * 20000},
    {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(18000)) + '\nr18000: "a"'},
    {"json": {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)} | {"d5000": {}},
              "$ref": "#/$defs/d0"}},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("forms", [EXPLOSIVE[:4], EXPLOSIVE[4:8], EXPLOSIVE[8:12], EXPLOSIVE[12:15], EXPLOSIVE[15:]])
def test_explosive_grammars_are_answered_and_the_next_one_passes(forms: list[dict[str, Any]]) -> None:
    """Each is answered in time, whatever the verdict is; a child that was lost is replaced."""

    async def test(checker: GrammarChecker) -> None:
        for form in forms:
            async with asyncio.timeout(60):  # 2 s on a machine that is not busy
                refused = await verdict(checker, **form)
            assert refused is None or refused.status == 400
            assert await verdict(checker, choice=[str(time.monotonic())]) is None

    run(test)


def test_the_time_limit_ends_the_child_and_is_remembered() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await verdict(checker, json_object=True) is None
        pid, number = checker.pid, checker._number
        refused = await asyncio.gather(*(verdict(checker, json=ENDLESS) for _ in range(5)))
        assert all(one is not None and "within 0.5 s and 512 MiB" in one.message for one in refused)
        assert checker._number == number + 2  # the first seconds and the whole time, once for all five
        assert pid is not None and checker.pid == pid and children(pid) == []  # the helper is the same
        assert await verdict(checker, json=ENDLESS) is not None
        assert checker._number == number + 2

    run(test)


@pytest.mark.slow
def test_a_child_that_hardly_runs_is_ended_by_the_clock_and_says_nothing_of_its_grammar(
    idle: Callable[[str], None],
) -> None:
    idle("stop")

    async def test(checker: GrammarChecker) -> None:
        for checks in (2, 4):  # the first seconds and the whole time; nothing is remembered
            refused = await verdict(checker, json=ENDLESS)
            assert refused is not None and refused.status == 429 and "too busy" in refused.message
            assert checker._number == checks and checker.pid is not None and children(checker.pid) == []

    run(test, seconds=0.2)


@pytest.mark.slow
def test_many_explosive_grammars_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All get their first seconds in turn; a harmless one that comes last passes before the slow have had theirs."""
    monkeypatch.setattr(grammar_check, "PATIENCE_S", 600.0)
    monkeypatch.setattr(grammar_check, "SLOW_KEPT_S", 600.0)

    def patient(check: Check) -> bytes:
        check.seconds = AMPLE_S if b"properties" in bytes(check.spec) else check.seconds  # the harmless one's turn is
        return frame(check)  # what this is about, and on no machine that its time is too short

    monkeypatch.setattr(grammar_check, "frame", patient)

    async def test(checker: GrammarChecker) -> None:
        order: list[tuple[bool, Refused | None]] = []

        async def ask(harmless: bool, schema: dict[str, Any]) -> None:
            order.append((harmless, await verdict(checker, json=schema)))

        waiting = [asyncio.create_task(ask(False, endless(i))) for i in range(50)]
        await checking(checker)
        await ask(True, {"properties": {"a": {"type": "integer"}}})
        assert order[-1] == (True, None)
        assert len(order) <= 50 - grammar_check.MAX_SLOW + 1
        await asyncio.wait(waiting)
        statuses = [refused.status if refused else 200 for harmless, refused in order if not harmless]
        assert len(statuses) == 50 and set(statuses) == {400, 429}
        told = next(one for _, one in order if one is not None and one.status == 429)
        assert "takes long to compile" in told.message
        known = [error for error, _ in checker._verdicts.values()]
        assert known.count(None) == statuses.count(429)  # to be slow is no verdict
        number = checker._number
        final = [await verdict(checker, json=endless(i)) for i in (48, 49)]
        assert [one and one.status for one in final] == [400, 400]
        assert checker._number <= number + 2  # known to be slow: no first seconds are spent on it

    run(test)


@pytest.mark.slow
def test_the_slow_do_not_wait_for_ever_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "PATIENCE_S", 0.0)
    monkeypatch.setattr(grammar_check, "PLACES", 2)

    async def test(checker: GrammarChecker) -> None:
        answers = await asyncio.gather(*(verdict(checker, json=endless(i)) for i in range(12)))
        statuses = [one.status for one in answers if one is not None]
        assert len(statuses) == 12 and set(statuses) == {400, 429} and statuses[-1] == 400
        assert statuses.count(400) <= 2  # those that ran last, when there was no newcomer any more

    run(test)


def test_a_newcomer_passes_beside_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "PATIENCE_S", 600.0)

    async def test(checker: GrammarChecker) -> None:
        slow = [asyncio.create_task(verdict(checker, json=endless(i))) for i in range(3)]
        while not any(pending.slow for pending in checker._running.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        monkeypatch.setattr(grammar_check, "FIRST_S", AMPLE_S)
        assert [await verdict(checker, regex=f"a{{{i}}}") for i in range(5)] == [None] * 5
        assert not any(task.done() for task in slow[:1])
        checker.close()
        assert [one.status for one in await asyncio.gather(*slow) if one] == [503] * 3

    run(test, seconds=60.0)


@pytest.mark.slow
def test_the_memory_limit() -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await verdict(checker, json_object=True) is None
        refused = await verdict(checker, json=ENDLESS)
        assert refused is not None and refused.status == 400 and "32 MiB" in refused.message
        assert await verdict(checker, regex="a") is None

    run(test, memory=32 * 2**20, seconds=60.0)


def test_verdicts_are_remembered_and_equal_grammars_share_one(ample: None) -> None:
    async def test(checker: GrammarChecker) -> None:
        same = [verdict(checker, regex="(a") for _ in range(5)] + [verdict(checker, regex="a") for _ in range(5)]
        answers = await asyncio.gather(*same)
        assert [answer is None for answer in answers] == [False] * 5 + [True] * 5
        pid = checker.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it can answer nothing any more
        assert await verdict(checker, regex="a") is None
        assert await verdict(checker, regex="(a") is not None

    run(test, seconds=AMPLE_S)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_killed_in_the_middle_is_replaced(kind: signal.Signals, ample: None) -> None:
    async def test(checker: GrammarChecker) -> None:
        assert await verdict(checker, json_object=True) is None
        first = checker.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # holds the check in the middle
        waiting = asyncio.create_task(verdict(checker, regex="ab"))
        await asyncio.sleep(0.1)
        os.kill(first, kind)
        with contextlib.suppress(ProcessLookupError):  # it may be gone already
            os.kill(first, signal.SIGCONT)
        assert await waiting is None
        assert checker.pid not in (None, first)
        os.kill(checker.pid or 0, signal.SIGKILL)
        assert await verdict(checker, regex="cd") is None

    run(test, seconds=AMPLE_S)


def test_a_child_killed_in_the_middle_is_tried_again_once(idle: Callable[[str], None], ample: None) -> None:
    idle("pause")

    async def test(checker: GrammarChecker) -> None:
        assert await verdict(checker, json_object=True) is None
        pid = checker.pid
        assert pid is not None
        while children(pid):  # noqa: ASYNC110 - a verdict is there before its child has gone
            await asyncio.sleep(0.002)
        waiting = asyncio.create_task(verdict(checker, json=ENDLESS))
        for _ in range(2):
            (child,) = await checking(checker)
            os.kill(child, signal.SIGKILL)
            while alive(child):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        refused = await waiting
        assert refused is not None and refused.status == 400
        assert await verdict(checker, regex="a") is None and checker.pid == pid

    run(test, seconds=AMPLE_S)


def test_a_helper_killed_again_and_again_is_the_servers_fault(idle: Callable[[str], None], ample: None) -> None:
    idle("pause")

    async def test(checker: GrammarChecker) -> None:
        waiting = [asyncio.create_task(verdict(checker, json=endless(i))) for i in range(2)]
        for _ in range(2):
            both, helper = await checking(checker, 2), checker.pid
            assert helper is not None
            os.kill(helper, signal.SIGKILL)
            while checker.pid == helper or any(map(alive, both)):  # noqa: ASYNC110 - they end with the helper
                await asyncio.sleep(0.002)
        assert [one and one.status for one in await asyncio.gather(*waiting)] == [500, 500]
        assert await verdict(checker, regex="a") is None

    run(test, seconds=AMPLE_S)


def test_too_many_waiting_grammars_are_told_to_come_back(ample: None) -> None:
    async def test(checker: GrammarChecker) -> None:
        answers = await asyncio.gather(*(verdict(checker, regex=f"a{{{i}}}") for i in range(8)))
        statuses = [answer.status if answer else 200 for answer in answers]
        assert statuses == [200] * 3 + [429] * 5
        assert await verdict(checker, regex="a{7}") is None

    run(test, queued=3, seconds=AMPLE_S)


def test_who_gives_up_harms_nobody(ample: None) -> None:
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

    run(test, seconds=AMPLE_S)


def test_a_child_that_cannot_start_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check.sys, "executable", "/bin/false")

    async def test(checker: GrammarChecker) -> None:
        refused = await verdict(checker, regex="a")
        assert refused is not None and refused.status == 500

    run(test)


@pytest.mark.slow
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

    run(test, seconds=AMPLE_S)


def _helper() -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "quire.detokenizer.grammar_helper", MODEL.path, str(MODEL.vocab_size), "2,0"]
    return subprocess.Popen([*argv, str(2**29)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", struct.pack("<I", 5) + b"hello", b"\x07\x00", b""]
)
def test_the_helper_ends_at_hostile_bytes_and_with_its_parent(data: bytes) -> None:
    helper = _helper()
    assert helper.stdin is not None
    helper.stdin.write(data)
    helper.stdin.close()
    assert helper.wait(60) in (0, 1)


def read(helper: subprocess.Popen[bytes]) -> Verdict:
    assert helper.stdout is not None
    (size,) = struct.unpack("<I", helper.stdout.read(4))
    return msgspec.msgpack.decode(helper.stdout.read(size), type=Verdict)


def asked(number: int, seconds: float, **form: Any) -> bytes:
    return frame(Check(number, seconds, msgspec.Raw(msgspec.msgpack.encode(spec(**form)))))


def test_the_helper_ends_with_its_parent_in_the_middle_of_a_check() -> None:
    helper = _helper()
    assert helper.stdin is not None and helper.stdout is not None
    assert read(helper) == Verdict(READY, "")
    helper.stdin.write(asked(1, 30.0, json=ENDLESS))
    helper.stdin.flush()
    while not (found := children(helper.pid)):
        time.sleep(0.002)
    helper.stdin.close()
    assert helper.wait(60) == 0
    while alive(found[0]):
        time.sleep(0.002)


def test_the_helper_has_one_thread_and_answers_as_its_children_end() -> None:
    """A fork of several threads would leave the child with locks that nobody opens."""
    helper = _helper()
    assert helper.stdin is not None
    assert read(helper) == Verdict(READY, "")
    assert len(os.listdir(f"/proc/{helper.pid}/task")) == 1
    sent = asked(1, 30.0, json=ENDLESS) + asked(2, 30.0, regex="a") + asked(3, 30.0, regex="(")
    for i in range(0, len(sent), 7):  # frames may come in pieces
        helper.stdin.write(sent[i : i + 7])
        helper.stdin.flush()
    answers = {answer.number: answer for answer in (read(helper), read(helper))}
    assert answers[2] == Verdict(2, "") and "unclosed" in (answers[3].error or "")
    helper.stdin.close()
    assert helper.wait(60) == 0


def test_without_a_table_every_check_says_why(tmp_path: Any) -> None:
    async def test(checker: GrammarChecker) -> None:
        for regex in ("a", "b"):
            refused = await verdict(checker, regex=regex)
            assert refused is not None and "need a tokenizer.json" in refused.message

    run(test, str(tmp_path))
