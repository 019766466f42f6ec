"""Who may ask, from where, and how much. A test of a class of attack (docs/security.md) has its number in its name."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.http_asks import CHAT, HI, ask, error_of

from quire.cli.main import run
from quire.client.generation import OpenGeneration
from quire.client.results import RequestError
from quire.frontend import auth, key_file, main
from quire.frontend.access import access_of, list_of
from quire.frontend.auth import KeyRing, owner_of
from quire.frontend.batches.local import answer_once
from quire.frontend.fake import FakeServer, Say
from quire.frontend.gate import ADMIN_ROUTES, OPEN_ROUTES, is_file
from quire.frontend.key_file import ApiKey, KeyFile, digest_of, line_of, new_key, parse_keys, parse_line, time_of
from quire.frontend.key_limits import Meter, told_seconds
from quire.frontend.origins import Hosts, Origins, host_of, is_local
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import Finish


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write(path: Path, *lines: str) -> str:
    """A file of keys; it is replaced, as an editor or Kubernetes does it."""
    new = path.with_name("new")
    new.write_text("\n".join(lines) + "\n")
    new.chmod(0o600)
    new.replace(path)
    return str(path)


def line(name: str, key: str, options: str = "") -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()} {options}"


# ---------------------------------------------------------------- the file


def test_a_line_says_what_a_key_may() -> None:
    text = line(
        "a.b@c", "k", "requests_per_minute=5 tokens_per_minute=7 concurrent_requests=2 models=m,n expires=2030-01-31"
    )
    key = parse_line(text, "here")
    assert (key.name, key.digest, key.models) == ("a.b@c", hashlib.sha256(b"k").digest(), ("m", "n"))
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests) == (5, 7, 2)
    assert key.expires == time_of("2030-01-31T01:00:00+01:00", "x") == 1896048000
    assert parse_line(line_of(key), "again") == key
    assert parse_keys("# nobody\n\n" + text + " # a word\n", "f") == [key]
    assert not parse_line(line("plain", "k"), "here").limited


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sk-secret", "line 1 is not `NAME sha256:HASH"),
        ("alice sk-secret", "line 1 is not `NAME sha256:HASH"),
        (line("bad/name", "k"), "is not `NAME"),
        (line("a", "k") + "\n" + line("a", "l"), "line 2: line 1 has the name a too"),
        (line("a", "k") + "\n" + line("b", "k"), "line 2: line 1 has the same key too"),
        (line("a", "k", "rpm=3"), "'rpm=3' is none of requests_per_minute"),
        (line("a", "k", "models=x models=y"), "each once"),
        (line("a", "k", "requests_per_minute=0"), "must be a whole number from 1 to 1000000000, got '0'"),
        (line("a", "k", "tokens_per_minute=1e3"), "got '1e3'"),
        (line("a", "k", "tokens_per_minute=٣"), "got '٣'"),
        (line("a", "k", "expires=tomorrow"), "must be a date or time such as 2027-01-31"),
        (line("a", "k", "expires=0001-01-01T00:00:00+14:00"), "must be a date or time such as 2027-01-31"),
    ],
)
def test_a_line_that_is_wrong_is_told_by_its_number_and_shows_no_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, "keys.txt")
    assert words in str(refused.value) and "keys.txt, line" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for words in ("No such file", "other, who could|written by every user", "is not UTF-8"):
        with pytest.raises(ConfigError, match=words):
            KeyFile(str(path))
        path.write_bytes(b"" if not path.exists() else b"\xff")
        path.chmod(0o602 if words.startswith("No") else 0o600)
    with pytest.raises(ConfigError, match="is no file"):
        KeyFile(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        KeyFile(str(tmp_path / "pipe"))


def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with FakeServer(api_key_file=write(path, line("a", "one")), api_key="flag") as server:

        def status(key: str) -> int:
            return ask(server, "GET", "/v1/models", headers=bearer(key))[0]

        assert [status(key) for key in ("one", "two", "flag", "")] == [200, 401, 200, 401]
        write(path, line("b", "two"))
        assert [status(key) for key in ("one", "two", "flag")] == [401, 200, 200]
        write(path, line("b", "two"), "nonsense")
        assert [status(key) for key in ("one", "two")] == [401, 200]
        path.unlink()
        assert [status(key) for key in ("one", "two")] == [401, 200]
        write(path, line("c", "three", "expires=2001-01-01"))
        assert [status(key) for key in ("two", "three")] == [401, 401]
        error = error_of(ask(server, "GET", "/v1/models", headers=bearer("three")), 401)
        assert "the API key c has expired (2001-01-01T00:00:00Z)" in error["message"]
        write(path, "# nobody")
        assert [status(key) for key in ("three", "flag", "")] == [401, 200, 401]


def test_a_broken_file_is_read_once_and_again_when_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    keys = KeyFile(write(path, line("a", "one")))
    reads: list[str] = []
    monkeypatch.setattr(key_file, "parse_keys", lambda text, path: reads.append(text) or parse_keys(text, path))
    write(path, "nonsense")
    assert [keys.changed() for _ in range(3)] == [False] * 3 and len(reads) == 1
    write(path, line("b", "two"))
    assert keys.changed() and [key.name for key in keys.keys] == ["b"]
    path.unlink()
    assert not keys.changed() and not keys.changed()
    write(path, line("c", "three"))
    assert keys.changed() and len(reads) == 3


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    with FakeServer(api_key_file=write(tmp_path / "keys", "")) as server:
        assert error_of(ask(server, "POST", "/v1/completions", HI), 401)
        assert ask(server, "GET", "/health")[0] == 200


def test_new_keys_are_random_and_long() -> None:
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50 and all(key.startswith("sk-quire-") and len(key) == 52 for key in keys)


# ---------------------------------------------------------------- keys


def test_class_17_no_look_up_tells_by_its_time_what_a_key_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    ring = KeyRing(["one", "two"])
    hashes = {hashlib.sha256(key).digest() for key in (b"one", b"two")}
    assert not hashes & ring._callers.keys(), "what a client can compute must not be a place in the table"
    assert ring._callers.keys() != KeyRing(["one", "two"])._callers.keys()
    for given, known in ((b"one", True), (b"two", True), (b"", False), (b"on", False), (b"three", False)):
        compared.clear()
        found = ring.find(given)
        assert (found is not None) == known
        assert len(compared) == 1 and compared[0][0] == hashlib.sha256(given).digest()
    assert (ring.find(b"one") or pytest.fail()).owner == owner_of("one")


@pytest.fixture(scope="module")
def guarded() -> Iterator[FakeServer]:
    with FakeServer(api_key="user", admin_api_key="admin") as running:
        yield running


def test_class_18_every_route_but_health_asks_for_a_key(guarded: FakeServer) -> None:
    routes = [(route.method, route.resource.canonical) for route in guarded.app.router.routes() if route.resource]
    assert len(routes) > 40
    page = ask(guarded, "GET", "/")[1]
    for method, path in routes:
        for spelling in {path, path + "/", path + "//", "/" + path, "/." + path, path + "/.", path + "/..",
                         path.upper(),
                         path.replace("/", "/%2e/"), path + "%2f", path + ";a", path + "?a=/health", path + "%00",
                         "http://localhost/health/.." + path, path.replace("e", "%65")}:  # fmt: skip
            spelling = spelling.replace("{model:.+}", "fake").replace("{model}", "fake").replace("{id}", "x")
            status, body, _ = ask(guarded, method, spelling, headers={"Host": "localhost/health"})
            if is_file(method, path) or (method == "GET" and body == page):  # or leads to /, as /docs/.. does
                assert status in (200, 400, 401, 404), (method, spelling, body)
                continue
            if path not in OPEN_ROUTES and status != 400:
                assert status == 401, (method, spelling, body)
            assert status in (200, 400, 401), (method, spelling, body)


def test_class_18_an_open_route_s_neighbours_ask_for_a_key(guarded: FakeServer) -> None:
    for path in ("/health", "/health/", "/health/live", "/ping/", "/h%65alth"):
        assert ask(guarded, "GET", path)[0] == 200
    for path in ("/health/nope", "/healthz", "/health/generate", "/health/../v1/models",
                 "/health%2f..%2fv1%2fmodels", "/health/v1/models", "/HEALTH", "//health/live", "/metrics/",
                 "/openapi.json", "/docs", "/page", "/page/"):  # fmt: skip
        assert ask(guarded, "GET", path)[0] == 401, path
    assert ask(guarded, "PUT", "/health")[0] == 401


def test_a_slash_at_the_end_is_no_other_path(guarded: FakeServer) -> None:
    for method, path, body in (("GET", "/v1/models/", None), ("GET", "/v1/models/fake/", None),
                               ("GET", "/v1/models//", None),
                               ("POST", "/v1/chat/completions/", CHAT), ("GET", "/metrics/?x=1/", None)):  # fmt: skip
        assert ask(guarded, method, path, body, bearer("user"))[0] == 200, path
    assert ask(guarded, "GET", "/nowhere/", headers=bearer("user"))[0] == 404
    answer = ask(guarded, "GET", "/v1/chat/completions/", headers=bearer("user"))
    assert error_of(answer, 405) and answer[2]["Allow"] == "POST"


def test_class_23_routes_of_administrators_ask_for_their_own_key(guarded: FakeServer) -> None:
    asked = {r.resource.canonical for r in guarded.app.router.routes() if r.resource} & ADMIN_ROUTES
    assert asked == ADMIN_ROUTES
    for path in sorted(ADMIN_ROUTES):
        for spelling in (path, path + "/"):
            for method in ("GET", "POST"):
                assert ask(guarded, method, spelling)[0] == 401
                assert ask(guarded, method, spelling, headers=bearer("user"))[0] in (403, 405)
    assert ask(guarded, "POST", "/v1/completions", HI, bearer("admin"))[0] == 200
    with FakeServer(api_key="user") as server:
        for path in sorted(ADMIN_ROUTES):
            assert ask(server, "POST", path, b"{}", bearer("user"))[0] == 404, "off by default"
    with FakeServer(admin_api_key="admin") as server:
        assert ask(server, "POST", "/v1/completions", HI)[0] == 200
        assert ask(server, "POST", "/sleep")[0] == 401


def test_metrics_may_have_a_key_of_their_own_or_none() -> None:
    with FakeServer(api_key="user", metrics_key="scraper,other", admin_api_key="admin") as server:
        for path in ("/metrics", "/version", "/metrics/"):
            found = [
                ask(server, "GET", path, headers=bearer(key))[0] for key in ("scraper", "other", "admin", "user", "")
            ]
            assert found == [200, 200, 200, 401, 401]
        error_of(ask(server, "POST", "/v1/completions", HI, bearer("scraper")), 401)
    with FakeServer(metrics_key="scraper") as server:
        assert ask(server, "POST", "/v1/completions", HI)[0] == 200
        assert ask(server, "GET", "/metrics")[0] == 401
    with FakeServer(api_key="user", open_metrics=True) as server:
        assert [ask(server, "GET", path)[0] for path in ("/metrics", "/version", "/v1/models")] == [200, 200, 401]


# ---------------------------------------------------------------- what a key may do


def test_models_of_a_key(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", line("a", "one", "models=alias"), line("b", "two"))
    with FakeServer(api_key_file=path, names=["fake", "alias"]) as server:
        for route, body in (("/v1/completions", HI), ("/v1/chat/completions", CHAT), ("/v1/messages", CHAT),
                            ("/v1/messages/count_tokens", CHAT), ("/v1/responses", {"input": "hi"}),
                            ("/api/chat", {**CHAT, "stream": False}), ("/completion", HI)):  # fmt: skip
            for model in ("fake", "", "secret-model"):
                answer = ask(server, "POST", route, {**body, "model": model}, bearer("one"))
                assert answer[0] == 403, (route, model)
                assert "secret" not in str(answer[1]).replace("secret-model", "") and "for alias" in str(answer[1])
            assert ask(server, "POST", route, body, bearer("one"))[0] == 403, "the first name stands for none"
            assert ask(server, "POST", route, {**body, "model": "alias"}, bearer("one"))[0] == 200
            assert ask(server, "POST", route, {**body, "model": "fake"}, bearer("two"))[0] == 200
        latest = {**CHAT, "model": "alias:latest", "stream": False}
        assert ask(server, "POST", "/api/chat", latest, bearer("one"))[0] == 200
        listed = ask(server, "GET", "/v1/models", headers=bearer("one"))[1]["data"]
        assert [each["id"] for each in listed] == ["alias"]
        listed = ask(server, "GET", "/api/tags", headers=bearer("one"))[1]["models"]
        assert [each["name"] for each in listed] == ["alias:latest"]
        assert (
            error_of(ask(server, "GET", "/v1/models/fake", headers=bearer("one")), 403)["type"]
            == "PermissionDeniedError"
        )


def test_a_model_that_is_not_there_tells_no_names_of_others(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys", line("a", "one", "models=alias,gone"), line("b", "two"), line("c", "x", "models=gone")
    )
    with FakeServer(api_key_file=path, names=["other", "alias"]) as server:
        for key, told in (("one", "alias"), ("two", "other, alias"), ("x", "none")):
            for route, body in (
                ("/v1/completions", HI),
                ("/v1/chat/completions", CHAT),
                ("/tokenize", {"prompt": "a"}),
            ):
                message = error_of(ask(server, "POST", route, {**body, "model": "gone"}, bearer(key)), 404)["message"]
                assert message == f"The model `gone` does not exist. Valid names: {told}."


def test_requests_a_minute_are_counted_and_told(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, line("a", "one", "requests_per_minute=3"), line("b", "two"))
    with FakeServer(api_key_file=str(path)) as server:
        for left in ("2", "1", "0"):
            status, _, headers = ask(server, "POST", "/v1/completions", {**HI, "stream": left == "1"}, bearer("one"))
            assert status == 200 and headers["x-ratelimit-limit-requests"] == "3"
            assert headers["x-ratelimit-remaining-requests"] == left and headers["x-ratelimit-reset-requests"].endswith(
                "s"
            )
            assert headers["x-ratelimit-limit-tokens"] is None
        answer = ask(server, "POST", "/v1/completions", HI, bearer("one"))
        error = error_of(answer, 429)
        assert (
            error["type"] == "RateLimitError"
            and "the API key a is limited to requests_per_minute=3" in error["message"]
        )
        assert 1 <= int(answer[2]["Retry-After"]) <= 20 and answer[2]["x-ratelimit-remaining-requests"] == "0"
        assert ask(server, "GET", "/v1/models", headers=bearer("one"))[0] == 200, "only what costs something counts"
        status, _, headers = ask(server, "POST", "/v1/completions", HI, bearer("two"))
        assert status == 200 and "x-ratelimit-limit-requests" not in headers, "another's limit is another's"
        write(path, line("a", "one", "requests_per_minute=4"), line("b", "two"))
        assert [ask(server, "POST", "/v1/completions", HI, bearer("one"))[0] for _ in range(2)] == [200, 429]


def test_tokens_a_minute_are_those_of_prompts_and_outputs(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", line("a", "one", "tokens_per_minute=100"))
    with FakeServer(api_key_file=path) as server:
        body = {"prompt": "a b c", "max_tokens": 20, "n": 2}
        for left in (100, 57):
            status, _, headers = ask(server, "POST", "/v1/completions", body, bearer("one"))
            assert status == 200 and left <= int(headers["x-ratelimit-remaining-tokens"]) + 43 <= left + 43
        assert (
            ask(server, "POST", "/v1/chat/completions", {**CHAT, "max_tokens": 30, "stream": True}, bearer("one"))[0]
            == 200
        )
        answer = ask(server, "POST", "/v1/completions", body, bearer("one"))
        assert "tokens_per_minute=100" in error_of(answer, 429)["message"]
        assert 1 <= int(answer[2]["Retry-After"]) <= 11 and answer[2]["x-ratelimit-remaining-tokens"] == "0"


def test_requests_open_at_once(tmp_path: Path) -> None:
    def slow(request: OpenGeneration) -> Iterator[Say | float]:
        yield Say(0, "x")
        while not done:
            yield 0.01
        yield Say(0, "y", finish=Finish.LENGTH)

    done: list[int] = []
    path = write(tmp_path / "keys", line("a", "one", "concurrent_requests=1"), line("b", "two"))
    with FakeServer(slow, api_key_file=path) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        body, headers = json.dumps({**HI, "stream": True}), {"Content-Type": "application/json", **bearer("one")}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        error = error_of(ask(server, "POST", "/v1/completions", HI, bearer("one")), 429)
        assert "concurrent_requests=1" in error["message"]
        done.append(1)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert ask(server, "POST", "/v1/completions", HI, bearer("two"))[0] == 200
        assert ask(server, "POST", "/v1/completions", HI, bearer("one"))[0] == 200


class Spent:
    """A request in the engine that has taken so many tokens."""

    def __init__(self, spent: int) -> None:
        self.spent, self.done, self.ended_at = spent, False, 0.0


def test_a_bucket_fills_steadily_and_pays_when_a_request_ends() -> None:
    meter = Meter(ApiKey("a", b"", tokens_per_minute=600), 0.0)
    work = Spent(900)
    meter.enter(0.0)
    meter.watch(work)
    with pytest.raises(Exception, match=r"tokens_per_minute=600 .* try again in 30\.1s"):
        meter.enter(0.0)  # what runs counts as it comes
    work.done, work.ended_at = True, 10.0
    meter.leave(40.0)
    assert meter.headers(40.0)["x-ratelimit-remaining-tokens"] == "0"  # 600 - 900 at 10 s, and 300 since
    meter.enter(50.0)
    assert meter.headers(50.0)["x-ratelimit-remaining-tokens"] == "100"
    assert meter.headers(1000.0) == {
        "x-ratelimit-limit-tokens": "600", "x-ratelimit-remaining-tokens": "600", "x-ratelimit-reset-tokens": "0ms",
    }  # fmt: skip
    assert [told_seconds(each) for each in (0.12, 1.5, 20, 360)] == ["120ms", "1.5s", "20s", "6m0s"]


def test_lines_of_a_batch_are_their_key_s(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, line("a", "one", "tokens_per_minute=20 models=fake"), line("b", "two"))
    with FakeServer(api_key_file=str(path), names=["fake", "alias"]) as server:

        def answered(body: dict[str, Any], key: str = "one") -> tuple[int, bytes]:
            asked = answer_once(server.app, "/v1/completions", json.dumps(body).encode(), owner_of(key), True)
            return asyncio.run_coroutine_threadsafe(asked, server.loop).result(20)

        assert answered({**HI, "model": "alias"})[0] == 403
        assert answered({**HI, "max_tokens": 20})[0] == 200
        with pytest.raises(RequestError, match="tokens_per_minute=20") as refused:  # asked again when there are some
            answered(HI)
        assert refused.value.status == 429 and refused.value.retry_after
        assert answered(HI, "two")[0] == 200
        assert ask(server, "POST", "/v1/completions", HI, bearer("two"))[0] == 200
        first, second, third = (request.message.cache_salt for request in server.engine.requests)
        assert first and first != second == third
        write(path, line("b", "two"))
        status, body = answered(HI)
        assert status == 401 and b"not valid any more" in body
        write(path, line("a", "one", "expires=2001-01-01"), line("b", "two"))
        assert answered(HI)[0] == 401 and answered(HI, "two")[0] == 200


def test_keygen_makes_a_key_and_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["keygen", "--api-key", "a", "--requests-per-minute", "5", "--models", "m", "n", "--expires", "2030-01-31"])
        == 0
    )
    key, said = capsys.readouterr().out.splitlines()
    assert said == line("a", key, "requests_per_minute=5 models=m,n expires=2030-01-31T00:00:00Z")
    path = tmp_path / "keys"
    keys = []
    for name in ("b", "c"):
        assert run(["keygen", str(path), "--api-key", name]) == 0
        keys.append(capsys.readouterr().out.strip())
    assert path.stat().st_mode & 0o777 == 0o600 and keys[0] not in path.read_text()
    with FakeServer(api_key_file=str(path)) as server:
        assert [ask(server, "GET", "/v1/models", headers=bearer(each))[0] for each in (*keys, key)] == [200, 200, 401]
    before = path.read_text()
    for argv, code in ((["--api-key", "b"], 1), (["--api-key", "d", "--tokens-per-minute", "x"], 1),
                       (["--api-key", "d e"], 1), (["--expires", "2030-01-01"], 2),
                       (["--api-key", "d", "--each", "x"], 2)):  # fmt: skip
        try:
            assert run(["keygen", str(path), *argv]) == code
        except SystemExit as ended:
            assert ended.code == code
        assert len(capsys.readouterr().err.splitlines()) in (1, 2)
    assert path.read_text() == before


# ---------------------------------------------------------------- whose cached blocks are whose


def salts(bodies: list[tuple[str, dict[str, Any]]], **settings: Any) -> list[str]:
    with FakeServer(**settings) as server:
        for key, body in bodies:
            assert ask(server, "POST", "/v1/completions", {**HI, **body}, bearer(key))[0] == 200
        return [request.message.cache_salt for request in server.engine.requests]


def test_class_7_cached_prefixes_are_never_shared_among_keys(tmp_path: Path) -> None:
    own = {"cache_salt": "s"}
    one, again, two, salted, theirs = salts(
        [("one", {}), ("one", {}), ("two", {}), ("one", own), ("two", own)], api_key="one two"
    )
    assert one and one == again and len({one, two, salted, theirs}) == 4
    assert salts([("one", {}), ("one", own)], api_key="one") == ["", "s"], "with one key no byte is added"
    assert salts([("", {}), ("", own)]) == ["", "s"]
    assert salts([("one", {}), ("two", own)], api_key="one,two", shared_prefix_cache=True) == ["", "s"]
    assert all(salts([("one", {}), ("admin", {})], api_key="one", admin_api_key="admin"))
    assert one == salts([("one", {})], api_key="two,one")[0], "frontends and restarts agree"
    path = tmp_path / "keys"
    with FakeServer(api_key_file=write(path, line("a", "one"))) as server:
        assert ask(server, "POST", "/v1/completions", HI, bearer("one"))[0] == 200
        write(path, line("b", "two"))  # takes its place, and must not see what it left
        assert ask(server, "POST", "/v1/completions", HI, bearer("two"))[0] == 200
        assert [bool(request.message.cache_salt) for request in server.engine.requests] == [False, True]


def test_class_7_pooling_is_salted_too() -> None:
    with FakeServer(pooler=PoolerConfig("M", "embed", "CLS", True, True, "softmax", 3), api_key="one,two") as server:
        for key in ("one", "two"):
            assert ask(server, "POST", "/v1/embeddings", {"input": "a"}, bearer(key))[0] == 200
        first, second = (request.message.cache_salt for request in server.engine.requests)
        assert first and second and first != second


# ---------------------------------------------------------------- from where


@pytest.mark.parametrize(
    "header", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "a.localhost"]
)
def test_class_22_a_local_server_answers_to_its_own_names(header: str) -> None:
    assert is_local(host_of(header))


STRANGE = (
    "evil.example@localhost", "localhost/evil", "localhost?evil", "evil.example", "evil.example:8000",
    "localhost.evil.example", "localhost@evil.example", "127.0.0.1.evil.example",
           "evil.example/localhost", "0.0.0.0", "10.0.0.1", "[::2]", "", "localhost:x", "evil?localhost",
    "xlocalhost",
)  # fmt: skip


def test_class_22_a_local_server_refuses_names_that_were_made_to_point_at_it() -> None:
    with FakeServer(local_only=True) as server:
        for header in STRANGE:
            for path in ("/v1/models", "/metrics", "/nowhere"):
                error = error_of(ask(server, "GET", path, headers={"Host": header}), 403)
                assert "--allowed-hosts" in error["message"], header
            assert ask(server, "GET", "/health", headers={"Host": header})[0] == 200
        assert ask(server, "GET", "/v1/models")[0] == 200
        assert raw(server, b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 403
    with FakeServer(local_only=True, allowed_hosts=["API.example:443", "*.inner.example"]) as server:
        for header, status in (("API.example:80", 200), ("a.inner.example.", 200), ("localhost", 200),
                               ("inner.example", 403), ("xinner.example", 403), ("evil.example", 403)):  # fmt: skip
            assert ask(server, "GET", "/v1/models", headers={"Host": header})[0] == status, header
    with FakeServer() as server:
        assert ask(server, "GET", "/v1/models", headers={"Host": "any.example"})[0] == 200
    assert Hosts(["*"], local_only=True).open


def test_class_22_pages_of_other_origins_may_not_ask() -> None:
    with FakeServer() as server:
        host = server.url.removeprefix("http://")
        for origin in ("http://evil.example", "null", f"http://evil.{host}", "http://localhost:1", f"{host}"):
            answer = ask(server, "POST", "/v1/completions", HI, {"Origin": origin})
            assert "--allowed-origins" in error_of(answer, 403)["message"]
            assert not [name for name in answer[2] if name.lower().startswith("access-control")]
            preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            assert ask(server, "OPTIONS", "/v1/completions", headers=preflight)[0] == 403
        for headers in ({"Origin": server.url}, {"Origin": "http://chat.example", "Sec-Fetch-Site": "same-origin"}):
            status, _, told = ask(server, "POST", "/v1/completions", HI, headers)
            assert status == 200 and not [name for name in told if name.lower().startswith("access-control")]


def test_pages_of_origins_that_are_named_may_ask() -> None:
    settings: dict[str, Any] = {"allowed_origins": ["https://app.example"], "allowed_methods": ["GET", "POST"],
                                "allowed_headers": ["Authorization"], "allow_credentials": True}  # fmt: skip
    with FakeServer(api_key="k", **settings) as server:
        mine = {"Origin": "https://app.example"}
        asked = {**mine, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization, content-type"}  # fmt: skip
        status, _, headers = ask(server, "OPTIONS", "/v1/chat/completions", headers=asked)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert (
            headers["Access-Control-Allow-Methods"] == "GET, POST"
            and "Authorization" in headers["Access-Control-Allow-Headers"]
        )
        assert headers["Access-Control-Allow-Credentials"] == "true" and headers["Vary"] == "Origin"
        for change in ({"Access-Control-Request-Method": "DELETE"}, {"Access-Control-Request-Headers": "x-strange"}):
            assert ask(server, "OPTIONS", "/v1/chat/completions", headers={**asked, **change})[0] == 400
        assert (
            ask(server, "OPTIONS", "/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"})[0]
            == 403
        )
        for key, stream, status in (("k", False, 200), ("k", True, 200), ("x", False, 401)):
            answer = ask(server, "POST", "/v1/completions", {**HI, "stream": stream}, {**mine, **bearer(key)})
            assert answer[0] == status and answer[2]["Access-Control-Allow-Origin"] == "https://app.example"
        assert "Access-Control-Allow-Origin" not in ask(server, "GET", "/v1/models", headers=bearer("k"))[2]
    with FakeServer(allowed_origins=["*"]) as server:
        answer = ask(server, "POST", "/v1/completions", HI, {"Origin": "null"})
        assert answer[0] == 200 and answer[2]["Access-Control-Allow-Origin"] == "*" and "Vary" not in answer[2]


def test_flags_of_who_may_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY", "QUIRE_ADMIN_API_KEY", "QUIRE_METRICS_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert access_of(EngineArgs())["api_key"] is None
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert access_of(EngineArgs())["api_key"] == "v", "vLLM's variable must not leave a server open"
    monkeypatch.setenv("QUIRE_API_KEY", "q")
    assert access_of(EngineArgs())["api_key"] == "q" and access_of(EngineArgs(api_key="f"))["api_key"] == "f"
    for host, local in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)):
        assert access_of(EngineArgs(host=host))["local_only"] == local
    assert list_of("x", '["a", "b"]') == list_of("x", "a, b") == ["a", "b"]
    assert access_of(EngineArgs(allowed_origins=["*"]).check())["allowed_origins"] == ["*"]  # type: ignore[arg-type]
    for options, words in (
        ({"allowed_origins": "[1]"}, "must be a list of texts"), ({"allowed_hosts": "[x"}, "is not valid JSON"),
        ({"allow_credentials": True}, "name the origins"),
        ({"allow_credentials": True, "allowed_origins": '["*"]'}, "name the origins"),
        ({"open_metrics": True, "metrics_key": "m"}, "exclude each other"),
        ({"api_key_file": str(tmp_path / "none")}, "No such file"), ({"api_key": " "}, "holds no key"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            access_of(EngineArgs(**options))  # type: ignore[arg-type]


# ---------------------------------------------------------------- how much


def raw(server: FakeServer, data: bytes) -> tuple[int, bytes]:
    """Status and body of the first answer to bytes on a connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(data)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer.status, answer.read()


def test_class_16_headers_bodies_and_nesting_have_limits() -> None:
    with FakeServer(max_header_bytes=2000, max_json_depth=8, max_request_bytes=5000, body_s=0.05) as server:
        one = ask(server, "GET", "/v1/models", headers={"X-A": "y" * 2500})
        many = ask(server, "GET", "/v1/models", headers={f"X-{n}": "y" * 300 for n in range(7)})
        for answer in (one, many):
            message = error_of(answer, 431)["message"]
            assert "2000" in message and "--max-header-bytes" in message
        large = error_of(ask(server, "POST", "/v1/completions", {**HI, "user": "y" * 5000}), 413)["message"]
        assert "5000" in large and "--max-request-bytes" in large
        for deep, status in ((7, 200), (8, 400), (40, 400), (900, 400)):
            body = json.dumps({**HI, "metadata": 0}).replace(": 0}", f": {'[' * deep}{']' * deep}}}")
            answer = ask(server, "POST", "/v1/completions", body.encode())
            assert answer[0] == status, (deep, answer)
            told = str(answer[1])
            assert status == 200 or ("over 8 levels" in told and "--max-json-depth" in told)
        wide = {**HI, "stop": ["a", "b"], "logit_bias": {str(n): 1.0 for n in range(50)}, "metadata": {"a": [[]] * 200}}
        assert ask(server, "POST", "/v1/completions", wide)[0] == 200, "many side by side are not deep"
        slow = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        status, body = raw(server, slow + b"Content-Length: 9\r\n\r\n{")
        assert status == 408 and b"within 0.05 s" in body


def test_class_16_headers_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "KEEPALIVE_S", 0.1)
    with FakeServer() as server:
        host, port = server.url.removeprefix("http://").split(":")
        for sent in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "):
            with socket.create_connection((host, int(port)), timeout=20) as sock, suppress(ConnectionError):
                sock.sendall(sent)
                while sock.recv(1):  # b"" where it has been closed; else this takes 20 s and fails
                    pass


def test_class_16_an_answer_that_nobody_reads() -> None:
    """It is kept until it is read, so who reads nothing is cut off; who reads slowly gets all of it."""
    long = "x" * 2**24

    def script(request: OpenGeneration) -> Iterator[Say | float]:
        yield Say(0, long, finish=Finish.STOP)

    with FakeServer(script, stall_s=1.0) as server:
        body = json.dumps(HI).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for reads in (False, True):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                host, port = server.url.removeprefix("http://").split(":")
                client.connect((host, int(port)))
                client.settimeout(20)
                client.sendall(head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
                got = len(client.recv(1000))
                if not reads:
                    deadline = time.monotonic() + 20
                    while server.runner.server.connections and time.monotonic() < deadline:
                        time.sleep(0.05)
                    assert not server.runner.server.connections
                    continue
                for _ in range(60):  # far longer than stall_s in all, and never silent for so long
                    time.sleep(0.05)
                    got += len(client.recv(30_000))
                while data := client.recv(2**20):
                    got += len(data)
                assert got > len(long)


def test_class_16_connections_of_one_address_have_a_limit() -> None:
    with FakeServer(max_connections_per_address=2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        first, second = (socket.create_connection((host, int(port)), timeout=20) for _ in range(2))
        for sock in (first, second):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        third = socket.create_connection((host, int(port)), timeout=20)
        answer = http.client.HTTPResponse(third)
        answer.begin()
        error = error_of((answer.status, json.loads(answer.read())), 429)
        assert "2 connections open" in error["message"] and "--max-connections-per-address" in error["message"]
        third.close()
        second.close()
        deadline = time.monotonic() + 20
        while (status := ask_or_none(server)) != 200:
            assert time.monotonic() < deadline, status
        first.close()


def ask_or_none(server: FakeServer) -> int | None:
    try:
        return ask(server, "GET", "/health")[0]
    except (OSError, http.client.HTTPException):
        return None


def test_a_request_may_take_so_long(tmp_path: Path) -> None:
    def endless(request: OpenGeneration) -> Iterator[Say | float]:
        if "silent" not in (request.message.prompt or ""):
            yield Say(0, "x")
        while True:
            yield 0.005

    with FakeServer(endless, request_s=0.05) as server:
        for prompt in ("silent", "loud"):
            error = error_of(ask(server, "POST", "/v1/completions", {"prompt": prompt}), 408)
            assert "took over 0.05 s" in error["message"] and "--request-timeout" in error["message"]
        status, body, _ = ask(server, "POST", "/v1/completions", {"prompt": "loud", "stream": True})
        events = body.decode().strip().split("\n\n")
        assert status == 200 and events[-1] == "data: [DONE]" and '"code":408' in events[-2]
        assert not server.engine.core.open
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        status, body = raw(server, head + b"Content-Length: 9\r\n\r\n{")
        assert status == 408 and b"took over 0.05 s" in body, "where nothing runs in the engine yet"
        assert ask(server, "GET", "/v1/models")[0] == 200


def test_the_model_s_root_is_where_it_came_from() -> None:
    with FakeServer(names=["alias", "other"], root="org/model") as server:
        data = ask(server, "GET", "/v1/models")[1]["data"]
        assert [(each["id"], each["root"]) for each in data] == [("alias", "org/model"), ("other", "org/model")]


def test_digests_are_of_whole_keys() -> None:
    assert digest_of(b"a") == hashlib.sha256(b"a").digest()
    assert Origins().preflight is not None and not Origins()
