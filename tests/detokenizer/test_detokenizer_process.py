"""The real process between a fake scheduler and a fake Engine."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.detokenizer.core import HEARTBEAT_S
from quire.detokenizer.tokenizer import load_tokenizer
from quire.proto import messages as m
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.codec import f32, from_i8, from_i32, from_i64, i8, i32, i64
from quire.proto.hashing import ROOT, root_of
from quire.proto.params import SamplingParams
from quire.proto.wire.sockets import Dealer, Router, front_endpoint
from quire.proto.work import Generate

MODEL = str(Path(__file__).resolve().parents[2] / "demo_model")
TOKENIZER = load_tokenizer(MODEL)
EOS = TOKENIZER.eos_id or 0
WAIT_S = 60.0


class Stack:
    """A detokenizer process, a scheduler's front socket and Engines, all spoken to by hand."""

    def __init__(self, folder: str, *flags: str):
        self.folder = folder
        self.context = zmq.Context()
        self.address = f"ipc://{folder}"
        self.front: Router[Any] = Router(m.ToSchedulerFront, front_endpoint(self.address), context=self.context)
        self.engines: list[Dealer[Any]] = []
        self.heard: list[Any] = []
        self.beaten = 0.0
        self.peer = self.endpoint = ""
        self.log = open(f"{folder}/log", "w+")  # noqa: SIM115
        command = [sys.executable, "-P", "-m", "quire.detokenizer", "--scheduler", self.address, "--model", MODEL]
        self.process = subprocess.Popen([*command, "--max-model-len", "128", *flags], stderr=self.log)
        self.hello()

    def hello(self, epoch: int = 1) -> None:
        """Answer the process's Hello with Peers."""
        message = self.scheduler(m.Hello)
        assert (message.kind, message.protocol, message.pid) == ("detokenizer", m.PROTOCOL, self.process.pid)
        self.peer, self.endpoint = message.incarnation, message.endpoint
        self.peers(epoch)

    def peers(self, epoch: int = 1) -> None:
        self.front.send(self.peer, m.Peers(epoch, [], 16, True, 0))

    def engine(self) -> Dealer[Any]:
        name = f"frontend-{len(self.engines)}"
        self.engines.append(Dealer(m.FromDetokenizer, self.endpoint, name, context=self.context))
        return self.engines[-1]

    def scheduler(self, kind: Any, where: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of this kind the scheduler is sent; Heartbeats and empty Reconciles are passed over."""
        return self._next(lambda: (got := self.front.recv()) and got[1], self.front.socket, kind, where)

    def got(self, engine: Dealer[Any], kind: Any) -> Any:
        """The next message of this kind an Engine is sent."""
        return self._next(engine.recv, engine.socket, kind, lambda message: True)

    def _next(self, recv: Callable[[], Any], socket: zmq.Socket, kind: Any, where: Callable[[Any], bool]) -> Any:
        limit = time.monotonic() + WAIT_S
        while time.monotonic() < limit:
            message = recv()
            if message is None:
                self.beat()
                socket.poll(200)
            elif isinstance(message, kind) and where(message):
                return message
            elif not isinstance(message, (m.Heartbeat, m.Reconcile)):
                self.heard.append(message)
        self.log.seek(0)
        raise AssertionError(f"no {kind} came, but {self.heard}; the process said: {self.log.read()}")

    def beat(self) -> None:
        """Engines that wait long are not silent."""
        if time.monotonic() > self.beaten + HEARTBEAT_S:
            self.beaten = time.monotonic()
            for engine in self.engines:
                if not engine.socket.closed:
                    engine.send(m.Heartbeat())

    def ask(self, engine: Dealer[Any], uid: int, attempt: int = 1, **fields: Any) -> None:
        params = fields.pop("params", None) or SamplingParams(max_tokens=50)
        engine.send(m.Tokenize(uid=uid, attempt=attempt, work=Generate(params, uid), arrival=1.0, **fields))

    def tokens(self, *rows: tuple[int, int, int, int, list[int], int, int], started: tuple[int, ...] = ()) -> None:
        """One TokenBatch; a row is (uid, attempt, index, offset, tokens, finish, stop id)."""
        uids, attempts, indexes, offsets, tokens, finishes, stops = zip(*rows, strict=True)
        self.front.send(self.peer, m.TokenBatch(
            i64(uids), i32(attempts), i32(indexes), i32(offsets), i32(map(len, tokens)),
            i32([t for row in tokens for t in row]), i8(finishes), i32(stops), i64(started), i32([7] * len(started)),
        ))  # fmt: skip

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for wire in (self.front, *self.engines):
            wire.close()
        self.context.term()
        self.log.close()


@pytest.fixture
def stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="qd-") as folder:
        stack = Stack(folder)
        try:
            yield stack
        finally:
            stack.close()


def rows(batch: m.TextBatch) -> list[tuple[Any, ...]]:
    """(uid, attempt, index, offset, tokens, text, finish, reason, length) of each row."""
    tokens, counts, at, out = from_i32(batch.tokens), from_i32(batch.counts), 0, []
    columns = (from_i64(batch.uids), from_i32(batch.attempts), from_i32(batch.indexes), from_i32(batch.offsets), counts,
               batch.texts, from_i8(batch.finishes), batch.stop_reasons, from_i32(batch.lengths))  # fmt: skip
    for uid, attempt, index, offset, count, text, finish, reason, length in zip(*columns, strict=True):
        out.append((uid, attempt, index, offset, tokens[at : at + count], text, finish, reason, length))
        at += count
    return out


def test_a_request_from_prompt_to_text(stack: Stack) -> None:
    engine, other = stack.engine(), stack.engine()
    ids = TOKENIZER.encode("The capital", True)
    stack.ask(engine, 5, prompt="The capital", priority=2, key="k", cache_salt="s",
              params=SamplingParams(n=2, max_tokens=None))  # fmt: skip
    accepted = stack.got(engine, m.Accepted)
    assert (accepted.ids, accepted.prompt) == (i32(ids), "The capital")
    assert accepted.work.params.max_tokens == 128 - len(ids)
    submit = stack.scheduler(m.Submit)
    assert (submit.uid, submit.attempt, submit.ids, submit.work.seed, submit.key, submit.priority) == (
        5, 1, i32(ids), 5, "k", 2,
    )  # fmt: skip
    assert submit.work == accepted.work and EOS in submit.work.eos and submit.children == []
    stack.ask(other, 6, messages=[{"role": "user", "content": "Hi 😀"}], params=SamplingParams(ignore_eos=True))
    chat = stack.got(other, m.Accepted)
    assert "Hi 😀" in chat.prompt and TOKENIZER.decode(from_i32(chat.ids), False) == chat.prompt
    assert submit.root == root_of("s") != ROOT
    submit = stack.scheduler(m.Submit)
    assert (submit.work.eos, submit.root) == ([], ROOT)
    out = TOKENIZER.encode(" is Paris, zqx", False)
    assert len(out) > 3
    stack.tokens(
        (5, 1, 0, 0, out[:1], 0, -1), (5, 1, 1, 0, out[:2], 0, -1), (6, 1, 0, 0, out[:1], 0, -1), started=(5, 6, 9)
    )
    batch = stack.got(engine, m.TextBatch)
    text = TOKENIZER.decode
    assert rows(batch) == [
        (5, 1, 0, 0, out[:1], text(out[:1], True), 0, None, -1),
        (5, 1, 1, 0, out[:2], text(out[:2], True), 0, None, -1),
    ]
    assert (from_i64(batch.started_uids), from_i32(batch.started_cached)) == ([5], [7])
    assert from_i64(stack.got(other, m.TextBatch).started_uids) == [6]
    stack.tokens((5, 1, 0, 1, [*out[1:], EOS], m.Finish.STOP, -1), (5, 1, 1, 2, [out[2], 40], m.Finish.STOP, 40))
    ended = rows(stack.got(engine, m.TextBatch))
    assert ended[0][4:] == ([*out[1:], EOS], text(out[1:], True), m.Finish.STOP, None, len(out) + 1)
    assert ended[1][5:] == (text(out[2:3], True), m.Finish.STOP, 40, 4) and len(ended) == 2


def test_stop_strings_end_a_child_and_tell_the_scheduler(stack: Stack) -> None:
    engine = stack.engine()
    stack.ask(engine, 1, prompt="x", params=SamplingParams(n=2, stop=["END", "zz"], max_tokens=50))
    stack.scheduler(m.Submit)
    out = TOKENIZER.encode("one EN", False)
    stack.tokens((1, 1, 0, 0, out, 0, -1), (1, 1, 1, 0, out, m.Finish.LENGTH, -1))
    first, second = rows(stack.got(engine, m.TextBatch))
    assert (first[5], first[8], second[5], second[8]) == ("one ", -1, "one EN", len(out))
    more = TOKENIZER.encode("D of it", False)
    stack.tokens((1, 1, 0, len(out), more, 0, -1))
    (row,) = rows(stack.got(engine, m.TextBatch))
    assert row[5:8] == ("", m.Finish.STOP, "END") and row[8] == len(out) + len(row[4])
    stopped = stack.scheduler(m.Stopped)
    assert (stopped.uid, stopped.attempt, stopped.index, stopped.length) == (1, 1, 0, row[8])
    stack.tokens((1, 1, 0, len(out) + len(more), [40], 0, -1))  # the scheduler went on meanwhile
    stack.scheduler(m.Reconcile, lambda listed: not listed.uids)


def test_refusals_and_garbage_end_nothing_else(stack: Stack) -> None:
    engine = stack.engine()
    stack.ask(engine, 1, prompt="")
    stack.ask(engine, 2, prompt="x" * 10**7)
    stack.ask(engine, 3, ids=i32([10**6]))
    stack.ask(engine, 4, messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    failed = {f.uid: f for f in (stack.got(engine, m.Failed) for _ in range(4))}
    assert {uid: (f.status, f.param) for uid, f in failed.items()} == {
        1: (400, "prompt"), 2: (400, "input_text"), 3: (400, "prompt"), 4: (400, "messages"),
    }  # fmt: skip
    stack.ask(engine, 5, prompt="Hello")
    stack.scheduler(m.Submit)
    for junk in (b"", b"junk", pickle.dumps({"a": 1}), b"\xc1" * 50, b"\x92\xa4Open"):
        engine.socket.send(junk)
        stack.front.send_frame(stack.peer, junk)
    engine.socket.send_multipart([b"a", b"b"])
    engine.send(m.Reconcile(b"123", b""))
    engine.send(m.Reconcile(i64([1, 2]), i32([1])))
    stack.ask(engine, 2**63, prompt="Hello")
    stack.ask(engine, 6, attempt=2**31, prompt="Hello")
    for resume in ([m.Resume(1, b"", 0)], [m.Resume(0, b"", 0)] * 2, [m.Resume(0, b"", -1)]):
        stack.ask(engine, 7, attempt=1, prompt="Hello", resume=resume)
    batch = m.TokenBatch(i64([5]), i32([1]), i32([0]), i32([0]), i32([2]), i32([40]), i8([0]), i32([-1]))
    for field, value in (
        ("uids", i64([5])), ("counts", i32([-1])), ("uids", b"1"), ("finishes", i8([77])), ("finishes", b""),
        ("attempts", b""), ("started_uids", i64([5])),
    ):  # fmt: skip
        bad = m.TokenBatch(*(getattr(batch, f) for f in batch.__struct_fields__))
        if field != "counts":
            bad.counts = i32([1])
        if field == "uids" and value == i64([5]):
            bad.counts = i32([2])
        setattr(bad, field, value)
        stack.front.send(stack.peer, bad)
    stack.tokens((5, 1, 0, 0, TOKENIZER.encode("ok", False), m.Finish.LENGTH, -1))
    assert rows(stack.got(engine, m.TextBatch))[0][5] == "ok"
    stack.ask(engine, 8, prompt="")
    assert stack.got(engine, m.Failed).uid == 8  # all that both sent has been read
    count = 5 + 5 + 1 + 2 + 5 + 7
    assert stack.scheduler(m.Heartbeat, lambda beat: beat.bad_frames >= count).bad_frames == count


def test_aborts_and_lost_engines_reach_the_scheduler(stack: Stack) -> None:
    engine, other = stack.engine(), stack.engine()
    for uid in (1, 2):
        stack.ask(engine, uid, prompt="Hello")
        stack.scheduler(m.Submit)
    stack.ask(other, 3, prompt="Hello")
    stack.scheduler(m.Submit)
    engine.send(m.Abort(1, 1))
    engine.send(m.Abort(3, 1))  # another's
    engine.send(m.Abort(77, 1))
    assert stack.scheduler(m.Abort).uid == 1
    engine.send(m.Reconcile(i64([9]), i32([1])))  # it no longer wants 2, and has 9, which is unknown here
    assert from_i64(stack.got(engine, m.Unknown).uids) == [9]
    assert stack.scheduler(m.Abort).uid == 2
    other.close()
    assert stack.scheduler(m.Abort).uid == 3
    stack.ask(engine, 4, ids=i32([40, 41]))
    assert stack.scheduler(m.Submit).uid == 4


def test_an_abort_while_the_prompt_is_encoded_is_remembered(stack: Stack) -> None:
    engine = stack.engine()
    long = "word " * 120  # of 128 tokens at most
    for uid in range(200):
        stack.ask(engine, uid, prompt=long[: 5 * (uid % 20)] + "x")
        if uid % 2:
            engine.send(m.Abort(uid, 1))
    stack.ask(engine, 1000, prompt="last")
    live: set[int] = set()
    while 1000 not in live or len(live) < 101:
        message = stack.scheduler((m.Submit, m.Abort))
        live.add(message.uid) if isinstance(message, m.Submit) else live.discard(message.uid)
    listed = stack.scheduler(m.Reconcile, lambda message: len(from_i64(message.uids)) == 101)
    assert set(from_i64(listed.uids)) == {*range(0, 200, 2), 1000}


def test_attempts(stack: Stack) -> None:
    engine = stack.engine()
    out = TOKENIZER.encode("one two three", False)
    params = SamplingParams(n=3, max_tokens=50, stop="three")
    stack.ask(engine, 1, attempt=2, ids=i32([40]), params=params)
    assert stack.scheduler(m.Submit).attempt == 2
    stack.ask(engine, 1, attempt=1, ids=i32([40]), params=params)  # late
    sent = TOKENIZER.decode(out[:2], True)
    resume = [m.Resume(0, i32(out[:2]), 3), m.Resume(2, i32(out), len(sent))]
    stack.ask(engine, 1, attempt=3, ids=i32([40]), params=params, resume=resume, losses=1)
    assert stack.scheduler(m.Abort).attempt == 2
    submit = stack.scheduler(m.Submit)
    assert (submit.attempt, submit.losses) == (3, 1)
    assert [(c.index, c.ids) for c in submit.children] == [(0, i32(out[:2]))]
    replayed = {row[2]: row for row in rows(stack.got(engine, m.TextBatch))}
    assert replayed[0][3:] == (2, [], sent[3:], 0, None, -1) if sent[3:] else 0 not in replayed
    assert replayed[2][5:8] == ("one two "[len(sent) :], m.Finish.STOP, "three")
    stack.tokens((1, 2, 0, 0, [50], 0, -1), (1, 3, 0, 2, [50], 0, -1))
    (row,) = rows(stack.got(engine, m.TextBatch))
    assert row[:5] == (1, 3, 0, 2, [50])
    stack.tokens((1, 3, 0, 2, [50], 0, -1), (1, 3, 0, 2, [50, 51], 0, -1))  # here already, and partly so
    (row,) = rows(stack.got(engine, m.TextBatch))
    assert row[3:5] == (3, [51])
    stack.tokens((1, 3, 0, 9, [50], 0, -1))  # tokens are missing
    assert from_i32(stack.got(engine, m.Unknown).attempts) == [3]


def test_a_restarted_scheduler_is_greeted_and_engines_ask_for_what_it_does_not_know(stack: Stack) -> None:
    engine = stack.engine()
    stack.ask(engine, 1, prompt="Hello")
    stack.scheduler(m.Submit)
    stack.front.close()
    stack.front = Router(m.ToSchedulerFront, front_endpoint(stack.address), context=stack.context)
    stack.hello(epoch=2)
    listed = stack.scheduler(m.Reconcile, lambda message: bool(message.uids))
    stack.front.send(stack.peer, m.Unknown(listed.uids, listed.attempts))
    stack.ask(engine, 2, prompt="Hello")
    assert stack.got(engine, m.Accepted).uid == 1 and stack.got(engine, m.Accepted).uid == 2
    engine.send(m.Reconcile(i64([1, 2]), i32([1, 1])))
    gone = stack.got(engine, m.Unknown)  # it was dropped, without a word
    assert (from_i64(gone.uids), from_i32(gone.attempts)) == ([1], [1])
    stack.ask(engine, 1, attempt=2, prompt="Hello")
    assert stack.scheduler(m.Submit, lambda message: message.uid == 1).attempt == 2
    stack.front.send(stack.peer, m.Failed(1, 2, 429, "full", retry_after=3.0))
    failed = stack.got(engine, m.Failed)
    assert (failed.status, failed.retry_after) == (429, 3.0)


def record(tokens: list[int]) -> m.Logprobs:
    """Each token itself, then token 40."""
    pairs = [t for token in tokens for t in (token, 40)]
    return m.Logprobs(i32(pairs), f32([-0.5] * len(pairs)), i32([1] * len(tokens)))


def test_logprobs_come_with_texts(stack: Stack) -> None:
    engine = stack.engine()
    params = SamplingParams(logprobs=1, prompt_logprobs=1, min_tokens=2, stop="END", bad_words=["x"], max_tokens=50)
    stack.ask(engine, 1, prompt="The capital", params=params, prompt_logprobs_from=1)
    submit = stack.scheduler(m.Submit)
    assert submit.prompt_logprobs_from == 1 and EOS in from_i32(submit.work.suppressed_ids) and submit.work.bad_words
    prompt = from_i32(submit.ids)
    stack.front.send(stack.peer, m.PromptLogprobs(1, 0, 1, record(prompt[1:])))  # of another attempt
    stack.front.send(stack.peer, m.PromptLogprobs(1, 1, 1, m.Logprobs(b"123", b"", i32([1]))))
    stack.front.send(stack.peer, m.PromptLogprobs(1, 1, 1, record(prompt[1:])))
    got = stack.got(engine, m.PromptLogprobs)
    assert "".join(got.logprobs.texts[::2]) == TOKENIZER.decode(prompt, True)[len(TOKENIZER.decode(prompt[:1], True)) :]
    out = TOKENIZER.encode(" é END it", False)
    batch = m.TokenBatch(i64([1]), i32([1]), i32([0]), i32([0]), i32([len(out)]), i32(out), i8([0]), i32([-1]))
    batch.logprob_rows, batch.logprobs = i32([0]), [record(out)]
    stack.front.send(stack.peer, batch)
    text = stack.got(engine, m.TextBatch)
    (row,) = rows(text)
    assert row[5:8] == (" é ", m.Finish.STOP, "END") and from_i32(text.logprob_rows) == [0]
    assert len(text.logprobs[0].texts) == 2 * len(row[4]) and text.logprobs[0].texts[1] == TOKENIZER.decode([40], False)
    assert stack.scheduler(m.Heartbeat, lambda beat: beat.bad_frames > 0).bad_frames == 1


def test_a_beam_search_asks_about_its_candidates(stack: Stack) -> None:
    engine = stack.engine()
    params = SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0.0, stop="ab", logprobs=0, max_tokens=9)
    stack.ask(engine, 1, prompt="x", params=params)
    submit = stack.scheduler(m.Submit)
    assert (submit.work.params.width, submit.work.params.n) == (3, 2)
    a, b, c = (TOKENIZER.encode(letter, False)[0] for letter in "abc")
    for step, parents, tokens, stopped in ((1, [0] * 3, [a, b, c], []), (2, [0, 1, 0], [b, b, c], [0])):
        stack.front.send(stack.peer, m.BeamTokens(1, 1, step, i32(parents), i32(tokens)))
        answer = stack.scheduler(m.BeamStopped)
        assert (answer.uid, answer.attempt, answer.step, from_i32(answer.stopped)) == (1, 1, step, stopped)
    stack.tokens((1, 1, 0, 0, [a, b], m.Finish.STOP, -1), (1, 1, 1, 0, [a, c], m.Finish.LENGTH, -1))
    ended = rows(stack.got(engine, m.TextBatch))
    assert [row[5:] for row in ended] == [("", m.Finish.STOP, "ab", 2), ("ac", m.Finish.LENGTH, None, 2)]
    assert not any(isinstance(message, m.Stopped) for message in stack.heard)
    stack.scheduler(m.Reconcile, lambda listed: not listed.uids)
    stack.ask(engine, 2, prompt="x", params=params.clone())
    stack.scheduler(m.Submit)
    stack.front.send(stack.peer, m.BeamTokens(2, 1, 5, i32([0]), i32([a])))  # steps are missing
    assert from_i64(stack.got(engine, m.Unknown).uids) == [2] and stack.scheduler(m.Abort).uid == 2


def test_without_a_tokenizer(tmp_path: Path) -> None:
    stack = Stack(str(tmp_path), "--skip-tokenizer-init")
    try:
        engine = stack.engine()
        stack.ask(engine, 1, prompt="Hello")
        failed = stack.got(engine, m.Failed)
        assert (failed.status, failed.param) == (400, "prompt") and "--skip-tokenizer-init" in failed.message
        stack.ask(engine, 2, ids=i32([40, 41]), params=SamplingParams(logprobs=1), echo=True)
        assert stack.got(engine, m.Accepted).prompt is None
        assert stack.scheduler(m.Submit).work.eos == load_model_config(MODEL).eos_token_ids[:1]
        batch = m.TokenBatch(i64([2]), i32([1]), i32([0]), i32([0]), i32([1]), i32([50]), i8([0]), i32([-1]))
        batch.logprob_rows, batch.logprobs = i32([0]), [record([50])]
        stack.front.send(stack.peer, batch)
        text = stack.got(engine, m.TextBatch)
        assert rows(text) == [(2, 1, 0, 0, [50], "", 0, None, -1)]
        assert text.logprobs == batch.logprobs and text.logprobs[0].texts == []
        stack.tokens((2, 1, 0, 1, [51], m.Finish.LENGTH, -1))
        assert rows(stack.got(engine, m.TextBatch)) == [(2, 1, 0, 1, [51], "", m.Finish.LENGTH, None, 2)]
    finally:
        stack.close()


def test_it_ends_cleanly(stack: Stack) -> None:
    assert os.path.exists(stack.endpoint.removeprefix("ipc://"))
    stack.process.send_signal(signal.SIGTERM)
    assert stack.process.wait(WAIT_S) == 0
    assert not os.path.exists(stack.endpoint.removeprefix("ipc://"))


def test_a_reason_to_leave_is_its_last_word(stack: Stack) -> None:
    stack.front.send(stack.peer, m.Bye("protocol 9 is not spoken here"))
    assert stack.process.wait(WAIT_S) == 78
    stack.log.seek(0)
    assert "quire.detokenizer: error: protocol 9 is not spoken here" in stack.log.read()


def test_requests_before_the_first_peers_wait() -> None:
    with tempfile.TemporaryDirectory(prefix="qd-") as folder:
        peers, Stack.peers = Stack.peers, lambda self, epoch=1: None  # type: ignore[method-assign]
        try:
            stack = Stack(folder)
        finally:
            Stack.peers = peers  # type: ignore[method-assign]
        try:
            engine = stack.engine()
            stack.ask(engine, 1, prompt="Hello")
            stack.ask(engine, 2, prompt="Hello")
            engine.send(m.Abort(1, 1))
            engine.send(m.Reconcile(i64([2, 9]), i32([1, 1])))
            assert from_i64(stack.got(engine, m.Unknown).uids) == [9]  # all of these have been read
            stack.got(engine, m.Heartbeat)
            stack.peers()
            assert stack.scheduler(m.Submit).uid == 2
        finally:
            stack.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--model", "/nowhere"], "model folder '/nowhere' does not exist"),
        (["--model", MODEL, "--tokenizer", str(Path(__file__).parent)], "holds no tokenizer"),
        (["--model", MODEL, "--chat-template", "missing.jinja"], "neither a readable file nor a template"),
        (["--model", MODEL, "--chat-template", "{% if %}"], "cannot be compiled"),
        (["--model", MODEL, "--bind", "udp://1.2.3.4:5"], "must look like"),
        (["--model", MODEL, "--bind", "tcp://0.0.0.0:0"], "needs --keys"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], line: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "quire.detokenizer", "--scheduler", f"ipc://{tmp_path}/s", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78 and line in done.stderr.strip().splitlines()[-1]


def test_only_what_it_uses_is_imported() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'jinja2', 'aiohttp'}"
    code = f"import sys, quire.detokenizer.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
