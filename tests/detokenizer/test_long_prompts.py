"""Long prompts: nobody else waits while one is encoded (class 21 of docs/security.md)."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from detokenizer_rig import PREPARER

from quire.detokenizer import loop, pooling
from quire.detokenizer.pool import Pool
from quire.detokenizer.specials import Plain, specials_of
from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto import messages as m
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.codec import i32
from quire.proto.errors import Refused
from quire.proto.params import SamplingParams
from quire.proto.work import Generate, Text

TOKENIZER = load_tokenizer(str(Path(__file__).parents[2] / "demo_model"))
LONG = "A wolf said it. " * 20_000


def lets_go(work: Callable[[], Any]) -> bool:
    """Whether another thread can run while ``work`` does. Nothing but ``work`` itself gives up the interpreter."""
    go, ran = threading.Lock(), threading.Event()
    go.acquire()
    other = threading.Thread(target=lambda: (go.acquire(), ran.set()), daemon=True)
    other.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        go.release()
        work()
        return ran.is_set()
    finally:
        sys.setswitchinterval(before)
        other.join()


@pytest.mark.parametrize("special", [False, True])
def test_class_21_encoding_lets_go_of_the_interpreter(special: bool) -> None:
    marks, _ = specials_of(TOKENIZER)
    plain = Plain(TOKENIZER, marks)
    ids = TOKENIZER.encode(LONG, special)
    assert TOKENIZER.backend is not None and ids == TOKENIZER.backend.encode(LONG, add_special_tokens=special).ids
    assert lets_go(lambda: TOKENIZER.encode(LONG, special))
    assert lets_go(lambda: plain.encode(LONG, special))
    assert lets_go(lambda: pooling.encode(TOKENIZER, [LONG], special, None))
    assert lets_go(lambda: TOKENIZER.decode(ids * 5, special))
    assert TOKENIZER.decode(ids, special) == TOKENIZER.backend.decode(ids, skip_special_tokens=special)
    assert not lets_go(lambda: TOKENIZER.backend.encode(LONG)), "the test sees what holds the interpreter"


def test_class_21_a_long_chat_with_marks_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    preparer = Preparer(TOKENIZER, ModelConfig("", {}, 64, 2048))
    chat = [{"role": "user", "content": "<|im_start|>" * 10_000}]
    monkeypatch.setattr(Plain, "_encode", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(Refused, match=r"contains [0-9]+ characters .more than"):
        preparer.prepare(m.Tokenize(1, 0, Generate(SamplingParams(), 1), 0.0, messages=chat), 16, 64)


def test_a_chat_with_marks_that_fits_is_not_refused() -> None:
    """The bound counts what marks are spelled with: a prompt of marks alone is the longest there is."""
    marks, _ = specials_of(TOKENIZER)
    assert max(len(marks.spelled(mark)) for mark in marks.texts) <= (Plain(TOKENIZER, marks).longest or 0)
    preparer = Preparer(TOKENIZER, ModelConfig("", {}, 64, 2048))
    chat = [{"role": role, "content": "<|im_start|>" if role == "user" else ""} for role in ("user", "assistant")]
    message = m.Tokenize(1, 0, Generate(SamplingParams(), 1), 0.0, messages=chat)
    count = len(preparer.prepare(message, 16, 2048).ids) // 4
    assert len(preparer.prepare(message, 16, count + 1).ids) // 4 == count


def test_class_21_no_job_waits_behind_long_ones() -> None:
    async def run() -> None:
        pool, end = Pool(2), threading.Event()
        short, long = asyncio.Event(), asyncio.Event()
        for _ in range(4):
            pool.submit(end.wait, lambda _: long.set(), True)
        pool.submit(lambda: 1, lambda _: short.set())
        try:
            await asyncio.wait_for(short.wait(), 20)
            assert not long.is_set()
        finally:
            end.set()
        await asyncio.wait_for(long.wait(), 20)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "long"),
    [
        ({"prompt": "a" * (loop.LONG - 512)}, False),
        ({"prompt": "a" * (loop.LONG - 511)}, True),
        ({"ids": i32([1] * loop.LONG)}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * loop.LONG}]}]}, True),
        ({"messages": [{"role": "user"}], "template": {"tools": [{"a": "b" * loop.LONG}]}}, True),
        ({"messages": [{"role": "user", "content": "a"}]}, False),
        ({"work": Text(["a" * loop.LONG])}, True),
    ],
)
def test_class_21_a_long_prompt_has_a_thread_with_its_like(
    fields: dict[str, Any], long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Recorder(Pool):
        def submit(self, job: Any, done: Any, long: bool = False) -> None:
            seen.append(long)

    async def run() -> None:
        monkeypatch.setattr(loop, "Pool", Recorder)
        (tmp_path / "s").mkdir(mode=0o700)
        found = loop.Detokenizer(PREPARER, f"ipc://{tmp_path}/s", "detokenizer-1", f"ipc://{tmp_path}/d")
        found.core.received("", m.Peers(1, [], 16, True, 0))
        found.core.received(
            "frontend-0", m.Tokenize(1, 0, fields.pop("work", Generate(SamplingParams(), 1)), 0.0, **fields)
        )
        found.router.close()
        found.dealer.close()

    asyncio.run(run())
    assert seen == [long]
