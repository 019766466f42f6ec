"""Two frontends of one server: each answers for what the other keeps, and only to whom it belongs."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from responding import ask, client, held, until

from quire.frontend.fake import FakeServer

TEXT = "One two three."
Pair = tuple[FakeServer, FakeServer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        one, other = (stack.enter_context(FakeServer(folder=str(folder), api_key="one two")) for _ in range(2))
        yield one, other


def events(stream: Any) -> list[Any]:
    return [(event.sequence_number, event.type) for event in stream]


def test_a_response_is_found_wherever_the_connection_goes(pair: Pair) -> None:
    one, other = pair
    kept = ask(one)
    with client(other) as typed:
        assert typed.responses.retrieve(kept.id).output == kept.output
        asked = typed.responses.input_items.list(kept.id, order="asc")
        assert [item.content[0].text for item in asked.data] == ["hi there"]
        for refused in (
            lambda: typed.responses.cancel(kept.id), lambda: typed.responses.retrieve(kept.id, stream=True),
            lambda: typed.responses.input_items.list(kept.id, limit=0),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError):
                refused()
        typed.responses.delete(kept.id)
    for each in pair:
        with pytest.raises(openai.NotFoundError, match="may have been forgotten"):
            client(each).responses.retrieve(kept.id)


@pytest.mark.parametrize("stream", [False, True])
def test_one_goes_on_from_what_another_keeps(pair: Pair, stream: bool) -> None:
    one, other = pair
    first = ask(one, input="red")
    other.engine.requests.clear()
    second = ask(other, input="blue", previous_response_id=first.id, stream=stream)
    if stream:
        second = list(second)[-1].response
    (request,) = other.engine.requests
    assert [each["role"] for each in request.message.messages] == ["user", "assistant", "user"]
    third = ask(one, input="green", previous_response_id=second.id)
    said = client(other).responses.input_items.list(third.id, order="asc").data
    assert [item.content[0].text for item in said if item.role == "user"] == ["red", "blue", "green"]
    counted = client(other).responses.input_tokens.count(model="fake", input="x", previous_response_id=third.id)
    assert counted.input_tokens > client(one).responses.input_tokens.count(model="fake", input="x").input_tokens


def test_items_are_referred_to_wherever_they_are(pair: Pair) -> None:
    one, other = pair
    first = ask(one, input="red")
    named = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "on"}]
    other.engine.requests.clear()
    ask(other, input=named)
    (request,) = other.engine.requests
    assert request.message.messages[0]["role"] == "assistant"
    with pytest.raises(openai.BadRequestError, match="not found"):
        client(other, "two").responses.create(model="fake", input=named)


def test_a_response_belongs_to_its_key_in_every_frontend(pair: Pair) -> None:
    one, other = pair
    id = ask(one).id
    with client(other, "two") as stranger, pytest.raises(openai.NotFoundError):
        stranger.responses.create(model="fake", input="x", previous_response_id=id)
    headers = {"X-Quire-Owner": "anybody"}
    for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        url = f"{other.url}/v1/responses/{id}{tail}"
        assert httpx.request(method, url, headers={**headers, "Authorization": "Bearer two"}).status_code == 404
        assert httpx.request(method, url, headers=headers).status_code == 401
    for path in ("/kept/" + id, "/items", "/cancel"):  # what frontends ask each other is not on the port
        found = httpx.post(other.url + path, headers={"Authorization": "Bearer one"}, json=[])
        assert found.status_code in (404, 405)
    assert client(one).responses.retrieve(id).id == id


def test_what_runs_in_the_background_is_followed_and_cancelled_from_anywhere(pair: Pair) -> None:
    one, other = pair
    go_on = threading.Event()
    one.engine.script = held(TEXT, go_on)
    begun = ask(one, background=True)
    until(other, begun.id, "in_progress")
    with client(other) as typed:
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            ask(other, previous_response_id=begun.id)
        stream = typed.responses.retrieve(begun.id, stream=True)
        some = [next(stream) for _ in range(4)]
        stream.close()
        go_on.set()
        rest = list(typed.responses.retrieve(begun.id, stream=True, starting_after=some[-1].sequence_number))
        assert events(some + rest) == events(client(one).responses.retrieve(begun.id, stream=True))
        assert rest[-1].type == "response.completed"
        go_on.clear()
        begun = ask(one, background=True)
        until(other, begun.id, "in_progress")
        assert typed.responses.cancel(begun.id).status == "cancelled"
    assert not one.engine.core.open
    go_on.set()


@pytest.mark.parametrize("several", [False, True])
def test_a_request_is_cancelled_from_any_frontend(pair: Pair, several: bool) -> None:
    one, other = pair
    go_on = threading.Event()
    one.engine.script = held(TEXT, go_on)
    name = f"mine-{several}"

    def cancelled(key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        if several:
            return httpx.post(f"{other.url}/v1/requests/cancel", headers=headers, json={"request_ids": ["x", name]})
        return httpx.post(f"{other.url}/v1/requests/{name}/cancel", headers=headers)

    asked = client(one).completions.create(model="fake", prompt="a", stream=True, extra_headers={"X-Request-Id": name})
    next(iter(asked))
    strange = cancelled("two")
    assert strange.json()["cancelled_request_ids"] == [] if several else strange.status_code == 404
    done = cancelled("one")
    assert done.status_code == 200
    assert not several or done.json()["cancelled_request_ids"] == [name]
    assert [chunk.choices[0].finish_reason for chunk in asked][-1] == "abort"
    go_on.set()


def test_what_a_frontend_kept_goes_with_it(pair: Pair, folder: Path) -> None:
    one, _ = pair
    with FakeServer(folder=str(folder), api_key="one two") as short:
        id = ask(short).id
        name = id.removeprefix("resp_")[:8]
        assert client(one).responses.retrieve(id).id == id
    assert not (folder / "peers" / name).exists()
    with socket.socket(socket.AF_UNIX) as left:  # as of a process that was killed
        left.bind(str(folder / "peers" / name))
    for refused in (lambda: client(one).responses.retrieve(id), lambda: ask(one, previous_response_id=id)):
        with pytest.raises(openai.NotFoundError, match="a frontend process that is gone"):
            refused()
    assert not (folder / "peers" / name).exists()
    with FakeServer() as alone, pytest.raises(openai.NotFoundError, match="a frontend process that is gone"):
        client(alone).responses.retrieve(id)  # of before a restart
    with pytest.raises(openai.NotFoundError, match="may have been forgotten"):
        client(one).responses.retrieve("resp_/../x")


def test_nobody_else_can_reach_a_frontends_socket(folder: Path, tmp_path: Path, pair: Pair) -> None:
    assert stat.S_IMODE((folder / "peers").stat().st_mode) == 0o700
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers").chmod(0o755)
    with FakeServer(folder=str(tmp_path)) as server:  # which serves, alone
        assert ask(server).id
    assert not [*(tmp_path / "peers").iterdir()]


def test_a_frontend_that_does_not_answer_is_told_of(pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    monkeypatch.setattr("quire.frontend.peers.ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(folder / "peers" / "0123abcd"))
        hung.listen()
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            client(one).responses.retrieve("resp_0123abcd" + 24 * "0")
        assert httpx.post(
            f"{one.url}/v1/requests/x/cancel", headers={"Authorization": "Bearer one"}
        ).status_code == 404  # fmt: skip
    (folder / "peers" / "0123abcd").unlink()
