"""Batches: the journal under any cut, lines that are no requests, /v1/files and /v1/batches by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from http_asks import ask, error_of
from stack import wait_until

from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend.auth import owner_of
from quire.frontend.batches import journal as journal_module
from quire.frontend.batches.journal import Journal, Record
from quire.frontend.batches.lines import Line, LineError, Lines, parse_line
from quire.frontend.batches.run import Run
from quire.frontend.batches.service import Service
from quire.frontend.batches.store import Store
from quire.frontend.fake import FakeServer, count_words
from quire.frontend.front import FRONT
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.config import ConfigError
from quire.proto.work import BACKGROUND

HEAD = {"input": "abc", "model": "demo"}
RECORDS: list[Record] = [(2, True, b'{"a":"x y"}'), (0, False, b"{}"), (1, True, b'{"b":"1 2\\n"}'), (4, True, b"[]")]

# ---------------------------------------------------------------- the journal


def begun(path: Path, records: list[Record] = RECORDS) -> None:
    journal = Journal(path, HEAD)
    journal.append(records)
    journal.close()


def test_a_journal_cut_anywhere_has_every_record_that_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    begun(path)
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        journal = Journal(path, HEAD)
        there = sum(end <= cut for end in ends[1:])
        assert path.stat().st_size == journal.size
        assert list(journal.in_order()) == sorted(RECORDS[:there])
        journal.append(RECORDS)  # those that are there are not written again
        assert path.read_bytes() == whole and journal.counts == {True: 3, False: 1}
        journal.close()


def test_a_damaged_record_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "j"
    begun(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"x y")] ^= 1
    path.write_bytes(data)
    journal = Journal(path, HEAD)
    assert 2 not in journal and len(journal) == 3
    journal.append(RECORDS[:1])
    journal.close()
    again = Journal(path, HEAD)
    assert list(again.in_order()) == sorted(RECORDS)
    again.close()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    begun(path, RECORDS[:2])
    journal, before, write = Journal(path, HEAD), path.read_bytes(), os.write

    def full(fd: int, data: Any) -> int:
        if len(data) > 10:
            return write(fd, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "write", full)
        with pytest.raises(OSError, match="No space"):
            journal.append([(7, True, b"x" * 5)])
    assert path.read_bytes() == before and 7 not in journal
    journal.append(RECORDS)
    assert list(journal.in_order()) == sorted(RECORDS)
    journal.close()


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    begun(path)
    with pytest.raises(ConfigError, match=r"answers of another batch \(another model\): delete it"):
        Journal(path, {**HEAD, "model": "other"})
    held = Journal(path, HEAD)
    with pytest.raises(ConfigError, match="written by another process"):
        Journal(path, HEAD)
    held.close()
    path.write_text("dear diary\n")
    with pytest.raises(ConfigError, match="no journal"):
        Journal(path, HEAD)


# ---------------------------------------------------------------- lines

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        ("\xff", "invalid_json_line", None),
        ("[" * 100_000, "invalid_json_line", None),
        (json.dumps({**GOOD, "custom_id": 5}), "invalid_type", "custom_id"),
        (json.dumps(GOOD).replace('"a"', '"\xff"'), "invalid_json_line", "custom_id"),
        (json.dumps(GOOD).replace('"POST"', "1e999"), "invalid_json_line", "method"),
        (json.dumps({**GOOD, "custom_id": ""}), "invalid_value", "custom_id"),
        (json.dumps({**GOOD, "custom_id": "x" * 513}), "invalid_value", "custom_id"),
        (json.dumps({**GOOD, "method": "GET"}), "invalid_method", "method"),
        (json.dumps({**GOOD, "url": "/v1/files"}), "invalid_url", "url"),
        (json.dumps({**GOOD, "body": []}), "invalid_type", "body"),
        *[
            (
                json.dumps({name: each for name, each in GOOD.items() if name != gone}),
                "missing_required_parameter",
                gone,
            )
            for gone in GOOD
        ],
    ],
)
def test_what_is_no_request_is_told_by_its_field(line: str, code: str, param: str | None) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(line.encode("latin-1"))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_lines_are_found_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "in"
    long = json.dumps({**GOOD, "body": {"prompt": "x" * 200}})
    path.write_bytes("\n".join(["\ufeff" + json.dumps(GOOD), "", "  ", json.dumps(GOOD), long]).encode())
    lines = Lines(path, 150)
    assert len(lines) == 3 and list(lines.numbers) == [1, 4, 5]
    assert lines.read(0) == lines.read(1) and json.loads(lines.read(1).body) == GOOD["body"]
    assert [(number, error.code) for number, error in lines.check()] == [
        (4, "duplicate_custom_id"), (5, "line_too_long"),
    ]  # fmt: skip
    lines.close()


# ---------------------------------------------------------------- a run


def line(number: int, **body: Any) -> str:
    body = {"prompt": f"hi {number}", "max_tokens": 2, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


@pytest.fixture
def twelve(tmp_path: Path) -> Iterator[tuple[Lines, Journal]]:
    """Twelve requests and their journal, with four answers in it."""
    (tmp_path / "in").write_text("".join(map(line, range(12))))
    lines, journal = Lines(tmp_path / "in", 1000), Journal(tmp_path / "j", HEAD)
    journal.append(RECORDS)
    yield lines, journal
    lines.close()
    journal.close()


def test_a_run_answers_what_is_left_and_no_more_at_a_time_than_it_may(twelve: tuple[Lines, Journal]) -> None:
    asked: list[str] = []
    under_way, most = 0, 0

    async def answer(given: Line) -> tuple[int, bytes]:
        nonlocal under_way, most
        asked.append(given.custom_id)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return (500, b'{"error": 1}') if given.custom_id == "r9" else (200, b'{\n"a": 1}')

    asyncio.run(Run(*twelve, answer, 3).go())
    assert sorted(asked) == sorted(f"r{n}" for n in range(12) if n not in (0, 1, 2, 4)) and most == 3
    assert [number for number, _, _ in twelve[1].in_order()] == list(range(12))
    assert twelve[1].counts == {True: 3 + 7, False: 1 + 1}


def test_a_run_that_is_ended_keeps_what_it_has(twelve: tuple[Lines, Journal]) -> None:
    async def answer(given: Line) -> tuple[int, bytes]:
        if given.custom_id not in ("r3", "r5"):
            await asyncio.Event().wait()
        return 200, b"{}"

    async def main() -> None:
        kept = asyncio.Event()
        loop = asyncio.get_running_loop()
        run = Run(*twelve, answer, 12, on_kept=lambda: loop.call_soon_threadsafe(kept.set))
        task = asyncio.create_task(run.go())
        await kept.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert {number for number, _, _ in twelve[1].in_order()} == {0, 1, 2, 3, 4, 5}


def test_a_run_whose_answers_cannot_be_kept_ends(
    twelve: tuple[Lines, Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(given: Line) -> tuple[int, bytes]:
        return 200, b"{}"

    def full(records: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(twelve[1], "append", full)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(Run(*twelve, answer, 2).go())


# ---------------------------------------------------------------- files and batches


HTTP = openai.DefaultHttpxClient()  # to make one takes longer than to ask


def client(server: FakeServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, http_client=HTTP)


def put(server: FakeServer, lines: list[str]) -> Any:
    return client(server).files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch")


def batch(server: FakeServer, lines: list[str], **more: Any) -> Any:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", **more}
    return client(server).batches.create(input_file_id=put(server, lines).id, **asked)


def state(server: FakeServer, id: str) -> Any:
    return client(server).batches.retrieve(id)


def ended(server: FakeServer, id: str, status: str = "completed") -> Any:
    wait_until(lambda: state(server, id).status == status, f"{status} and not {state(server, id)}")
    return state(server, id)


def rows(server: FakeServer, id: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in client(server).files.content(id).text.splitlines()]


def number_of(request: OpenGeneration) -> int:
    return int((request.message.prompt or "").split()[1])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    root = tmp_path_factory.mktemp("shared") / "files"
    with FakeServer(api_key="one two", files_path=str(root), files_max_bytes=20_000, max_request_bytes=2000) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> Iterator[FakeServer]:
    shared.engine.requests.clear()
    yield shared
    for each in [*client(shared).files.list(), *client(shared, "two").files.list()]:
        for key in ("one", "two"):
            ask(shared, "DELETE", f"/v1/files/{each.id}", None, {"Authorization": f"Bearer {key}"})


def test_a_batch_is_answered_line_by_line(server: FakeServer) -> None:
    made = batch(server, [line(n, **({"temperature": -1} if n == 3 else {})) for n in range(6)], metadata={"a": "b"})
    assert made.status == "validating" and made.metadata == {"a": "b"} and made.errors is None
    done = ended(server, made.id)
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (6, 5, 1)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    assert done.expires_at == done.created_at + 24 * 3600
    assert done.model == "fake"
    assert done.usage.to_dict() == {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 20,
    }  # fmt: skip
    good, (bad,) = rows(server, done.output_file_id), rows(server, done.error_file_id)
    assert [row["custom_id"] for row in good] == ["r0", "r1", "r2", "r4", "r5"]
    assert all(row["error"] is None and row["response"]["status_code"] == 200 for row in good)
    assert {row["response"]["body"]["choices"][0]["text"] for row in good} == {" 0.0 0.1"}
    assert len({row["id"] for row in good}) == len({row["response"]["request_id"] for row in good}) == 5
    assert bad["custom_id"] == "r3" and bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    messages = [request.message for request in server.engine.requests]
    assert {message.priority for message in messages} == {BACKGROUND}  # behind all else, and not at its key's expense
    assert {message.key for message in messages} == {owner_of("one") + "-batch"}
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'completed'"):
        client(server).batches.cancel(made.id)
    assert not len(server.app[FRONT].calls)  # nothing of it can be ended by its id any more


def test_every_endpoint_that_a_batch_may_have_is_a_route(server: FakeServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    bodies = {"/v1/chat/completions": chat, "/v1/responses": {"input": "hi", "max_output_tokens": 1}}
    for url, body in bodies.items():
        text = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
        done = ended(server, batch(server, [text], endpoint=url).id)
        assert rows(server, done.output_file_id)[0]["response"]["body"]["object"] in ("chat.completion", "response")
    text = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "hi"}})
    done = ended(server, batch(server, [text], endpoint="/v1/embeddings").id)  # of a model that generates
    assert done.output_file_id is None
    assert "Embeddings" in rows(server, done.error_file_id)[0]["response"]["body"]["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        batch(server, [line(1)], endpoint="/v1/files")


def test_what_cannot_be_one_line_is_refused(server: FakeServer) -> None:
    done = ended(server, batch(server, [line(0, stream=True), line(1, background=True), line(2)]).id)
    refused = [row["response"]["body"]["error"]["param"] for row in rows(server, done.error_file_id)]
    assert refused == ["stream", "background"] and done.request_counts.completed == 1


def test_an_answer_that_is_no_json_is_refused(tmp_path: Path) -> None:
    pooler = PoolerConfig("TinyModel", "embed", "CLS", True, True, "softmax", 3)
    with FakeServer(files_path=str(tmp_path), pooler=pooler) as server:
        bodies: list[dict[str, Any]] = [{"input": "hi"}, {"input": "hi", "encoding_format": "bytes"}]
        asked = {"method": "POST", "url": "/v1/embeddings"}
        lines = [json.dumps({"custom_id": str(n), **asked, "body": body}) + "\n" for n, body in enumerate(bodies)]
        done = ended(server, batch(server, lines, endpoint="/v1/embeddings").id)
        (good,), (bad,) = rows(server, done.output_file_id), rows(server, done.error_file_id)
        assert len(good["response"]["body"]["data"][0]["embedding"]) == 3
        assert "a line of JSON" in bad["response"]["body"]["error"]["message"]


def test_an_input_with_mistakes_is_told_by_lines_and_not_run(server: FakeServer) -> None:
    other = line(3).replace("/v1/completions", "/v1/chat/completions")
    failed = ended(server, batch(server, [line(0), "{\n", "\n", line(0), other]).id, "failed")
    told = [(each.line, each.code) for each in failed.errors.data]
    assert told == [(2, "invalid_json_line"), (4, "duplicate_custom_id"), (5, "invalid_url")]
    assert failed.output_file_id is None and not server.engine.requests
    failed = ended(server, batch(server, ["\n"]).id, "failed")
    assert failed.errors.data[0].code == "empty_file"


def test_who_has_another_key_sees_nothing(server: FakeServer) -> None:
    made = batch(server, [line(0)])
    ended(server, made.id)
    other = client(server, "two")
    for call in (
        lambda: other.batches.retrieve(made.id), lambda: other.batches.cancel(made.id),
        lambda: other.files.retrieve(made.input_file_id), lambda: other.files.content(made.input_file_id),
        lambda: other.files.delete(made.input_file_id), lambda: other.files.retrieve("../../etc/passwd"),
        lambda: other.batches.create(input_file_id=made.input_file_id, endpoint="/score", completion_window="24h"),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call()
    assert not list(other.files.list()) and not list(other.batches.list())
    assert ask(server, "GET", f"/v1/files/{made.input_file_id}/content")[0] == 401


def test_files_are_listed_by_pages(server: FakeServer) -> None:
    made = [put(server, [line(n)]) for n in range(5)]
    assert {each.id for each in client(server).files.list(limit=2)} == {each.id for each in made}  # over all pages
    first = client(server).files.list(limit=2, order="asc")
    assert len(first.data) == 2 and first.has_more
    last = client(server).files.list(after=first.data[-1].id, order="asc")
    assert len(last.data) == 3 and not last.has_more
    assert not list(client(server).files.list(purpose="assistants"))
    auth = {"Authorization": "Bearer one"}
    for query in ("limit=0", "limit=x", "limit=99999", "after=file-00000000", "order=up"):
        error_of(ask(server, "GET", f"/v1/files?{query}", None, auth), 400)
    assert client(server).files.retrieve(made[0].id).filename == "in.jsonl"
    assert client(server).files.content(made[0].id).read().decode() == line(0)
    assert client(server).files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client(server).files.retrieve(made[0].id)


def test_files_are_bounded_and_checked(server: FakeServer) -> None:
    files = client(server).files
    put(server, ["x" * 3000 + "\n"])  # over what a body may have, and yet a file
    with pytest.raises(openai.APIStatusError, match="over the limit of 20000 bytes in all") as caught:
        put(server, ["x" * 20_001])
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        files.create(file=("a", b"{}"), purpose="assistants")
    kept = files.create(file=("a", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert kept.expires_at == kept.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="from 3600 to"):
        files.create(file=("a", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        batch(server, [line(0)], completion_window="soon")
    root = Path(server._settings.files_path or "")
    assert not list((root / "tmp").iterdir()) and (root / "files").stat().st_mode & 0o77 == 0


@pytest.mark.filterwarnings("ignore:.*")  # of aiohttp: the product filters them, and pytest takes its filters away
def test_a_damaged_upload_is_a_400(server: FakeServer) -> None:
    part = b'--XX\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    sound = part % (b"purpose", b"", b"batch") + part % (b"file", b'; filename="../a\n"', b"{}") + b"--XX--\r\n"
    headers = {"Authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=XX"}
    rng = random.Random(3)
    for _ in range(40):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(6)] = rng.randbytes(rng.randrange(3))
        answer = ask(server, "POST", "/v1/files", bytes(data), headers)
        assert answer[0] in (200, 400), data
    for kind in ("multipart/form-data", "application/json"):
        error_of(ask(server, "POST", "/v1/files", sound, {**headers, "Content-Type": kind}), 400)


def test_what_is_refused_for_load_is_asked_again(server: FakeServer) -> None:
    refused = []

    def refuse(request: Any) -> RequestError | None:
        if len(refused) < 4:
            refused.append(number_of(request))
            return RequestError(429 if len(refused) % 2 else 503, "later", retry_after=0.01)
        return None

    server.engine.refuse = refuse
    try:
        done = ended(server, batch(server, [line(n) for n in range(3)]).id)
    finally:
        server.engine.refuse = lambda request: None
    assert len(refused) == 4 and done.request_counts.completed == 3


# ---------------------------------------------------------------- ends before the end


def first_only(count: int) -> Any:
    """A script that answers the lines before ``count``, and never the others."""

    def script(request: OpenGeneration) -> Iterator[Any]:
        while number_of(request) >= count:
            yield 0.01
        yield from count_words(request)

    return script


def test_a_batch_that_is_cancelled_keeps_what_it_has(tmp_path: Path) -> None:
    with FakeServer(first_only(2), files_path=str(tmp_path), files_max_bytes=10**6) as server:
        made = batch(server, [line(n) for n in range(5)])
        wait_until(lambda: len(server.engine.requests) == 5, "all are under way")
        wait_until(lambda: server.engine.open_requests == 3, "two are answered")
        wait_until(lambda: state(server, made.id).request_counts.completed == 2, "the counts are told")
        assert client(server).batches.cancel(made.id).status in ("cancelling", "cancelled")
        done = ended(server, made.id, "cancelled")
        assert not server.engine.open_requests
        assert done.cancelling_at <= done.cancelled_at and done.completed_at is None
        assert [row["custom_id"] for row in rows(server, done.output_file_id)] == ["r0", "r1"]
        lost = rows(server, done.error_file_id)
        assert [(row["custom_id"], row["error"]["code"]) for row in lost] == [
            (f"r{n}", "batch_cancelled") for n in (2, 3, 4)
        ]


def test_another_server_goes_on_where_one_ended(tmp_path: Path) -> None:
    folder = {"files_path": str(tmp_path), "files_max_bytes": 10**6, "batch_window": 2}
    with FakeServer(first_only(4), **folder) as server:
        made = batch(server, [line(n) for n in range(9)])
        journal = tmp_path / "batches" / f"{made.id}.journal"
        wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 5, "four are on the disk")
        late, unwanted = batch(server, [line(50)]), batch(server, [line(60)])
        ended(server, late.id, "in_progress"), ended(server, unwanted.id, "in_progress")
        assert {number_of(request) for request in server.engine.requests} == set(
            range(6)
        )  # two at a time, of all batches
        put(server, [line(0)])
        client(server).files.delete(made.input_file_id)  # which the batch reads all the same
    path = tmp_path / "batches" / f"{late.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires_at": 5}))
    (tmp_path / "batches" / f"{unwanted.id}.cancel").touch()
    with FakeServer(**folder) as server:
        done = ended(server, made.id)
        assert [row["custom_id"] for row in rows(server, done.output_file_id)] == [f"r{n}" for n in range(9)]
        for each, end in ((late, "expired"), (unwanted, "cancelled")):
            over = ended(server, each.id, end)
            assert [row["error"]["code"] for row in rows(server, over.error_file_id)] == [f"batch_{end}"]
        assert sorted(number_of(request) for request in server.engine.requests) == [4, 5, 6, 7, 8]
    left = {path.suffix for path in (tmp_path / "batches").iterdir()}
    assert left == {".json"}


def test_what_is_told_to_be_answered_never_becomes_less(tmp_path: Path) -> None:
    """Counts are written once a second, and the journal has more when a server was killed meanwhile."""
    folder = {"files_path": str(tmp_path), "files_max_bytes": 10**6}
    with FakeServer(first_only(4), **folder) as server:
        made = batch(server, [line(n, **({"temperature": -1} if n == 2 else {})) for n in range(9)])
        wait_until(lambda: state(server, made.id).request_counts.completed == 3, "three are answered")
    path = tmp_path / "batches" / f"{made.id}.json"
    counts = {"total": 9, "completed": 1, "failed": 0}
    path.write_text(json.dumps({**json.loads(path.read_text()), "request_counts": counts}))
    with FakeServer(first_only(0), **folder) as server:  # which answers no more
        wait_until(lambda: len(server.engine.requests) == 5, "the others are under way")
        found = state(server, made.id).request_counts
        assert (found.total, found.completed, found.failed) == (9, 3, 1)


def test_a_batch_whose_files_were_being_made_is_completed(tmp_path: Path) -> None:
    folder = {"files_path": str(tmp_path), "files_max_bytes": 10**6}
    with FakeServer(first_only(0), **folder) as server:
        made = batch(server, [line(0), line(1)])
        wait_until(lambda: len(server.engine.requests) == 2, "both are under way")
    path = tmp_path / "batches" / made.id
    lines = Lines(path.with_suffix(".input"), 1000)
    journal = Journal(path.with_suffix(".journal"), {"batch": made.id, "input": lines.digest})
    journal.append([(1, True, b'{"n": 1}'), (0, True, b'{"n": 0}')])
    for each in (lines, journal):
        each.close()
    kept = journal.path.read_bytes(), path.with_suffix(".input").read_bytes()
    state_then = {**json.loads(path.with_suffix(".json").read_text()), "status": "finalizing"}
    outputs = set()
    for _ in range(2):  # killed before its state was written, and then again
        for suffix, data in zip((".journal", ".input"), kept, strict=True):
            path.with_suffix(suffix).write_bytes(data)
        path.with_suffix(".json").write_text(json.dumps(state_then))
        with FakeServer(**folder) as server:
            done = ended(server, made.id)
            outputs.add(done.output_file_id)
            assert rows(server, done.output_file_id) == [{"n": 0}, {"n": 1}] and not server.engine.requests
    assert len(outputs) == 1  # the second files took the place of the first


def test_two_frontends_run_a_batch_once_and_one_takes_over(tmp_path: Path) -> None:
    folder = {"files_path": str(tmp_path), "files_max_bytes": 10**6}
    with FakeServer(**folder) as second:
        with FakeServer(**folder) as first:
            ended(first, batch(first, [line(0)]).id)
            assert len(first.engine.requests) == 1
            put(second, [line(0)])  # from now on both would
            made = [batch(server, [line(1), line(2)]) for server in (second, first, second)]
            assert all(ended(second, each.id).request_counts.completed == 2 for each in made)
            assert len(first.engine.requests) == 7 and not second.engine.requests
        ended(second, batch(second, [line(3)]).id)
        assert len(second.engine.requests) == 1


def test_answers_over_the_limit_of_the_folder_end_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.batches.service.SAVE_S", 0.0)
    with FakeServer(first_only(50), files_path=str(tmp_path), files_max_bytes=4000) as server:
        made = batch(server, [line(n) for n in [*range(8), 50]])
        failed = ended(server, made.id, "failed")
        assert failed.errors.data[0].code == "storage_limit" and "--files-max-bytes" in failed.errors.data[0].message
        assert len(rows(server, failed.output_file_id)) == failed.request_counts.completed > 0
        assert failed.request_counts.failed == 0  # for what is said of the others there is no room either
        (tmp_path / "files" / "more").write_text("y" * 4000)
        assert batch_of(server, made.input_file_id) == 413


def batch_of(server: FakeServer, file: str) -> int:
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return ask(server, "POST", "/v1/batches", asked)[0]


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_said_of_cancelled_lines_keeps_to_the_limit_too(tmp_path: Path, cut: bool) -> None:
    with FakeServer(first_only(0), files_path=str(tmp_path), files_max_bytes=20_000 if cut else 10**6) as server:
        made = batch(server, [line(n) for n in range(100)])
        wait_until(lambda: state(server, made.id).status == "in_progress", "it runs")
        client(server).batches.cancel(made.id)
        done = ended(server, made.id, "cancelled")
        assert done.request_counts.failed == (0 if cut else 100) and (done.errors is not None) == cut
        assert Store(tmp_path, 20_000).used() < 20_000 or not cut


def test_a_file_of_lines_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    for count, text in ((5, "x\n"), (8, "x\n\n"), (1, "\n")):
        (tmp_path / "in").write_text(text * 1000)
        lines = Lines(tmp_path / "in", 100, most_lines=count)
        assert lines.over and len(lines) <= count + 1
        lines.close()


def test_a_key_that_waits_for_its_limit_keeps_no_other_key_waiting(tmp_path: Path) -> None:
    with FakeServer(api_key="one two", files_path=str(tmp_path), files_max_bytes=10**6, batch_window=2) as server:
        server.engine.refuse = lambda request: (
            RequestError(429, "later", retry_after=3600) if number_of(request) < 50 else None
        )
        waiting = [batch(server, [line(n) for n in range(4)]) for _ in range(9)]
        ended(server, waiting[7].id, "in_progress")
        file = client(server, "two").files.create(file=("in.jsonl", line(50).encode()), purpose="batch")
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        made = client(server, "two").batches.create(input_file_id=file.id, **asked)
        wait_until(lambda: client(server, "two").batches.retrieve(made.id).status == "completed", "the other's is done")
        assert state(server, waiting[8].id).status == "validating"


def test_uploads_that_fill_the_folder_together_are_refused(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = iter([10_000, -1])  # when it began, and when it was there
    monkeypatch.setattr(Store, "room", lambda store: next(rooms))
    with pytest.raises(openai.APIStatusError, match="over the limit of 20000 bytes in all"):
        put(server, [line(0)])
    assert not list((Path(server._settings.files_path or "") / "tmp").iterdir())


def test_what_is_being_written_when_a_server_ends_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, append = threading.Event(), Journal.append

    def slowly(journal: Journal, records: Any) -> None:
        if records[0][0] >= 0:
            writing.set()
            time.sleep(0.1)
        append(journal, records)

    monkeypatch.setattr(Journal, "append", slowly)
    with FakeServer(first_only(1), files_path=str(tmp_path), files_max_bytes=10**6) as server:
        made = batch(server, [line(0), line(1)])
        assert writing.wait(30)
    lines = (tmp_path / "batches" / f"{made.id}.journal").read_bytes().splitlines()
    assert len(lines) == 2


def test_requests_that_come_first_and_together_make_one_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    led = []

    async def lead(service: Service) -> None:
        led.append(service)

    monkeypatch.setattr(Service, "_lead", lead)

    async def main() -> None:
        app: Any = {FRONT: SimpleNamespace(settings=SimpleNamespace(batch_window=1))}
        service = Service(app, Store(tmp_path, 1000))
        await asyncio.gather(service.begin(), service.begin())
        await service.close()

    asyncio.run(main())
    assert len(led) == 1


def test_what_the_disk_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.batches.service.AGAIN_S", 0.02)
    refused: list[str] = []

    def once(name: str, whole: Any) -> Any:
        def some(*args: Any) -> Any:
            if refused.count(name) < 2:
                refused.append(name)
                raise OSError(28, "No space left on device")
            return whole(*args)

        return some

    monkeypatch.setattr(Store, "sweep", once("sweep", Store.sweep))
    monkeypatch.setattr(Journal, "append", once("append", Journal.append))
    with FakeServer(files_path=str(tmp_path), files_max_bytes=10**6) as server:
        assert ended(server, batch(server, [line(0), line(1)]).id).request_counts.completed == 2
    assert refused.count("sweep") == refused.count("append") == 2


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a file")
    with FakeServer(files_path=str(tmp_path / "x" / "files")) as server:
        with pytest.raises(openai.InternalServerError, match="Not a directory") as caught:
            put(server, [line(0)])
        assert caught.value.status_code == 507


def test_without_a_folder_there_are_no_files() -> None:
    with FakeServer() as server:
        assert "--files-path" in error_of(ask(server, "GET", "/v1/files"), 404)["message"]
        assert error_of(ask(server, "POST", "/v1/batches", {}), 404)
