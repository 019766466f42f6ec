"""``quire chat`` as one talks: its commands, what it shows and how it fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spoken import says

from quire.cli.api import Api
from quire.cli.chat_screen import Markdown, Plain, Wrapped, block_end
from quire.cli.chat_session import COMMANDS, Session
from quire.cli.errors import CommandError
from quire.cli.main import run
from quire.client.results import RequestError
from quire.detokenizer.template import ChatTemplate
from quire.frontend.fake import FakeServer
from quire.proto.errors import Refused


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def session(server: FakeServer) -> Session:
    return Session(Api(server.url, None), "fake", lambda: Plain(io.StringIO()), {"max_tokens": 2})


def roles(session: Session) -> list[str]:
    return [message["role"] for message in session.messages]


# ---------------------------------------------------------------- what is shown


def test_no_word_is_broken_at_the_edge() -> None:
    out = io.StringIO()
    wrapped = Wrapped(out, columns=10)
    for piece in ("one tw", "o three fo", "ur\nexactly te", "n abcdefghijklmno 日本語日本語日本語"):
        wrapped.add("text", piece)
    wrapped.end()
    lines = out.getvalue().split("\n")
    assert lines[:4] == ["one two ", "three four", "exactly ", "ten "]
    assert lines[4:] == ["abcdefghij", "klmno 日本", "語日本語日", "本語", ""]


def test_blocks_of_markdown_end_at_empty_lines_out_of_fences() -> None:
    assert block_end("one\n\n") == 0  # what follows may belong to a list
    assert block_end("one\n\nt") == len("one\n\n")
    assert block_end("* one\n\n  more") == 0
    fenced = "```\na\n\nb\n"
    assert block_end(fenced) == 0
    assert block_end(fenced + "```\n\nend") == len(fenced + "```\n\n")


def test_markdown_is_drawn_once() -> None:
    rich = pytest.importorskip("rich.console")
    out = io.StringIO()
    console = rich.Console(file=out, force_terminal=True, width=40, height=8, legacy_windows=False)
    shown = Markdown(console)
    for piece in ("# Tit", "le\n\nsome **bo", "ld** text\n\n```python\nx", " = 1\n", *["y = 2\n"] * 20, "```\n\nend"):
        shown.add("text", piece)
    shown.end()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    last = plain.split("\r")[-1]  # one before it may be of half a text: it is drawn by time, too
    assert "**" not in last and "```" not in last
    assert "end" in last and out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("kind", ["text", "thought", "call 1"])
def test_no_answer_commands_the_terminal(kind: str) -> None:
    """Title, clipboard and overwritten lines: in both ways of drawing, in pieces or whole."""
    rich = pytest.importorskip("rich.console")
    drawn, folded = io.StringIO(), io.StringIO()
    for out in (Markdown(rich.Console(file=drawn, force_terminal=True, width=60)), Wrapped(folded, columns=60)):
        for piece in ("a\x1b", "]0;title\x07 b\x9b2J\r", "\n\n&#27;]52;c;eA==&#7; c\x7f\x08\n"):
            out.add(kind, piece)
        out.end()
    for said in (drawn.getvalue(), folded.getvalue()):
        assert "a␛]0;title␇" in said and "c\ufffd␈" in said
        assert "\x1b]" not in said and "\x07" not in said and "\x9b" not in said


# ---------------------------------------------------------------- commands


def test_commands_change_the_conversation(session: Session, server: FakeServer) -> None:
    assert "no system prompt" in str(session.obey("/system"))
    session.obey("/system be kind")
    assert session.obey("/system") == "be kind"
    session.answer("one")
    assert roles(session) == ["system", "user", "assistant"]
    session.obey("/set temperature=0.25")
    session.obey("/set seed 7")
    session.obey("/retry")
    assert roles(session) == ["system", "user", "assistant"]
    request = server.engine.requests[-1].message
    assert (request.work.params.temperature, request.work.params.seed, request.work.params.max_tokens) == (0.25, 7, 2)
    assert "default" in str(session.obey("/set temperature="))
    assert session.settings == {"max_tokens": 2, "seed": 7}
    assert "temperature         default" in str(session.obey("/set"))
    assert "2 of answer" in str(session.obey("/stats")) and "all 2: " in str(session.obey("/stats"))
    assert session.obey("/model") == "* fake"
    assert all(name in str(session.obey("/help")) for name in COMMANDS)
    session.obey("/clear")
    assert roles(session) == ["system"]
    for end in ("/exit", "/quit"):
        with pytest.raises(EOFError):
            session.obey(end)


def test_a_conversation_is_saved_and_loaded(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    session.answer("one")
    kept = list(session.messages)
    session.obey(f"/save {path}")
    session.obey("/clear")
    session.obey("/set max_tokens=")
    assert "2 messages" in str(session.obey(f"/load {path}"))
    assert session.messages == kept and session.settings == {"max_tokens": 2}
    session.obey(f"/save {path}")  # its own file it writes anew
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(CommandError, match="is no saved conversation"):
        session.obey(f"/save {other}")
    assert other.read_text() == "mine"


def test_a_file_goes_with_the_next_message(session: Session, server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "a b.md"
    path.write_text("```\ncode\n```\n")
    session.obey(f"/file {path}")
    session.answer("what is it?")
    (told,) = server.engine.requests[-1].message.messages
    assert told["content"] == "a b.md:\n````\n```\ncode\n```\n````\n\nwhat is it?"
    session.answer("and now?")
    assert server.engine.requests[-1].message.messages[-1]["content"] == "and now?"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/hlep", "did you mean /help?"),
        ("/zzz", "there is no command '/zzz'. `/help` lists them"),
        ("/set temprature=1", "did you mean temperature?"),
        ("/set seed=soon", "seed takes a whole number, such as 64, got 'soon'"),
        ("/model fak", "did you mean fake?"),
        ("/file", "write `/file PATH`"),
        ("/file /nowhere", "/nowhere cannot be read: No such file"),
        ("/load /nowhere", "/nowhere cannot be read: No such file"),
        ("/retry", "no question"),
    ],
)
def test_mistakes_in_commands_are_one_line(session: Session, line: str, words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)) as refused:
        session.obey(line)
    assert "\n" not in str(refused.value) and session.messages == []


# ---------------------------------------------------------------- the command


def test_the_url_needs_no_v1(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (server.url, server.url + "/", server.url + "/v1/", server.url.removeprefix("http://")):
        assert run(["chat", "--url", url, "-q", "x", "--max-tokens", "1", "--stats"]) == 0
        told = capsys.readouterr()
        assert told.out == " 0.0\n" and "1 of answer, time to first token" in told.err


def test_failures_say_the_remedy(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*argv: str) -> str:
        assert run(["chat", "-q", "x", *argv]) == 1
        return capsys.readouterr().err

    nobody = "http://127.0.0.1:1"
    assert f"nothing answers at {nobody}: is `quire serve` running?" in fails("--url", nobody)
    said = fails("--url", server.url, "--model-name", "fakes")
    assert "The model `fakes` does not exist." in said and said.endswith(" Did you mean fake?\n")
    with FakeServer(api_key="k") as guarded:
        assert "--api-key" in fails("--url", guarded.url, "--api-key", "wrong")
        assert run(["chat", "-q", "x", "--url", guarded.url, "--api-key", "k\n"]) == 0  # as a file's text ends
        capsys.readouterr()
        for key in ("sec\nret", "secrét"):
            said = fails("--url", guarded.url, "--api-key", key)
            assert "the API key has a character" in said and "sec" not in said


def test_a_base_model_is_continued_by_another_command(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused) as refused:
        ChatTemplate({}, {}).render([{"role": "user", "content": "x"}], None)
    server.engine.refuse = lambda request: RequestError(400, str(refused.value))
    assert run(["chat", "-q", "x", "--url", server.url]) == 1
    said = capsys.readouterr().err
    assert "the model has no chat template" in said and "`quire complete`" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "foo://x"], "'foo://x' is no URL"),
        (["--tools", "/nowhere"], "--tools '/nowhere' cannot be read"),
        (["--tools", "{}"], "must hold a JSON list of tools"),
    ],
)
def test_a_value_that_cannot_work_ends_with_78(
    server: FakeServer, flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "object").write_text("{}")
    flags = [str(tmp_path / "object") if each == "{}" else each for each in flags]
    assert run(["chat", "-q", "x", "--url", server.url, *flags]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_talking_at_a_terminal(server: FakeServer, tmp_path: Path) -> None:
    """Several lines, a command, an answer of two lines, and a history that others cannot read."""
    server.engine.script = says("a **bold** word")
    master, slave = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "60", "LINES": "20"}
    command = [sys.executable, "-P", "-m", "quire.cli", "chat", "--url", server.url, "--no-markdown"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True)
    os.close(slave)
    shown = ""

    def comes(words: str, seconds: float) -> bool:
        nonlocal shown
        deadline = time.monotonic() + seconds
        while words not in shown:
            if not select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            shown += os.read(master, 4096).decode()
        shown = shown.partition(words)[2]
        return True

    def until(words: str) -> None:
        assert comes(words, 60), shown

    def interrupted_until(words: str) -> None:
        for _ in range(6):  # Ctrl-C, which Python overlooks in the moment before it waits for a key
            process.send_signal(signal.SIGINT)
            if comes(words, 10):
                return
        raise AssertionError(shown)

    try:
        until("or /help")
        until("> ")
        os.write(master, b'"""taken back\n')
        until(". ")
        interrupted_until("> ")
        os.write(master, b'"""one\n')
        until(". ")
        os.write(master, b'two"""\n')
        until("a **bold** word")
        until("> ")
        os.write(master, b"/nope\n")
        until("error: there is no command '/nope'.")
        until("> ")
        interrupted_until("Ctrl-C again, or Ctrl-D, ends it.")
        until("> ")
        os.write(master, b"three\n")  # the conversation goes on
        until("a **bold** word")
        until("> ")
        for _ in range(12):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
                break
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    first, second = (request.message.messages for request in server.engine.requests)
    assert first == [{"role": "user", "content": "one\ntwo"}]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    history = tmp_path / "quire" / "chat_history"
    assert "/nope" in history.read_text() and stat.S_IMODE(history.stat().st_mode) == 0o600


def test_what_ctrl_c_cuts_short_is_kept(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(path: str, body: dict) -> Iterator[dict]:
        yield {"choices": [{"delta": {"content": "half"}}]}
        raise KeyboardInterrupt

    monkeypatch.setattr(session.api, "stream", cut)
    with pytest.raises(KeyboardInterrupt):
        session.answer("one")
    assert json.dumps(session.messages[-1]) == '{"role": "assistant", "content": "half"}'
