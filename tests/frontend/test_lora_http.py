"""Adapters over HTTP: a request's model, the list of models, and the routes that change them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import adapter_folder
from http_asks import CHAT, HI, ask, error_of, post

from quire.client.adapter_folders import AdapterFolders
from quire.frontend.fake import FakeServer
from quire.frontend.main import settings_of
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import AdapterEntry
from quire.proto.process import STARTED_AGAIN
from quire.proto.work import Adapter, adapter_of

KEY = {"Authorization": "Bearer admin"}
EMBED = PoolerConfig("TinyModel", "embed", "CLS", True, True, "softmax", 3)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("sql", "chat", "new"):
        adapter_folder(tmp_path / name, name.encode())
    return tmp_path


def modules(folders: Path) -> dict[str, Any]:
    made = AdapterFolders(16)
    entries = [
        AdapterEntry("sql", 0, made.adapter("sql", str(folders / "sql"))),
        AdapterEntry("chat", 0, made.adapter("chat", str(folders / "chat")), "some-base"),
    ]
    return {"adapters": made, "modules": entries, "lora_root": str(folders), "admin_api_key": "admin"}


@pytest.fixture
def server(folders: Path) -> Iterator[FakeServer]:
    with FakeServer(names=["fake"], **modules(folders)) as running:
        yield running


def used(server: FakeServer) -> list[str | None]:
    """The adapters of the requests so far."""
    found = [adapter_of(request.work) for request in server.engine.requests]
    return [adapter and adapter.name for adapter in found]


def change(server: FakeServer, what: str, body: Any, **headers: str) -> tuple[int, Any]:
    return ask(server, "POST", f"/v1/{what}_lora_adapter", body, {**KEY, **headers})[:2]


def test_an_unknown_name_is_told_a_few_that_are_known(folders: Path) -> None:
    entries = [AdapterEntry(f"n{n}", 0, Adapter(f"n{n}", str(folders / "sql"), b"d" * 16)) for n in range(30)]
    with FakeServer(names=["fake"], adapters=AdapterFolders(16), modules=entries) as running:
        message = error_of(post(running, {**HI, "model": "x"}), 404)["message"]
    assert message.endswith("Valid names: fake, n0, n1, n2, n3, n4, n5, n6, n7, n8 and 21 more.")


def test_a_requests_model_names_the_adapter(server: FakeServer) -> None:
    for model in ("sql", "fake", None, "chat"):
        status, answer = post(server, {**HI, "model": model})
        assert (status, answer["model"]) == (200, model or "fake")
    assert post(server, {**CHAT, "model": "sql"}, "/v1/chat/completions")[1]["model"] == "sql"
    assert used(server) == ["sql", None, None, "chat", "sql"]
    error = error_of(post(server, {**HI, "model": "other"}), 404)
    assert error["param"] == "model" and error["message"].endswith("Valid names: fake, sql, chat.")


def test_adapters_are_listed_with_their_parent(server: FakeServer, folders: Path) -> None:
    listed = ask(server, "GET", "/v1/models")[1]["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
        ("fake", "fake", None),
        ("sql", str(folders / "sql"), "fake"),
        ("chat", str(folders / "chat"), "some-base"),
    ]
    assert ask(server, "GET", "/v1/models/chat")[1] == listed[2]
    error_of(ask(server, "GET", "/v1/models/other"), 404)


def test_one_is_loaded_and_unloaded(server: FakeServer) -> None:
    assert change(server, "load", {"lora_name": "mine", "lora_path": "new"}) == (
        200, b"Success: LoRA adapter 'mine' added successfully.",
    )  # fmt: skip
    assert post(server, {**HI, "model": "mine"})[0] == 200 and used(server) == ["mine"]
    again = {"lora_name": "mine", "lora_path": "chat"}
    said = error_of(change(server, "load", again), 400)["message"]
    assert said.startswith("The lora adapter 'mine' has already been loaded.")
    assert change(server, "load", {**again, "load_inplace": True})[0] == 200
    post(server, {**HI, "model": "mine"})
    first, second = (adapter_of(request.work) for request in server.engine.requests)
    assert first is not None and second is not None and first.digest != second.digest
    assert change(server, "unload", {"lora_name": "mine"}) == (
        200, b"Success: LoRA adapter 'mine' removed successfully.",
    )  # fmt: skip
    error_of(post(server, {**HI, "model": "mine"}), 404)
    assert error_of(change(server, "unload", {"lora_name": "mine"}), 404)["message"] == (
        "The lora adapter 'mine' cannot be found."
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x", "lora_path": "../other"}, "is not a folder below --lora-root"),
        ({"lora_name": "x", "lora_path": "nothing"}, "is no folder"),
        ({"lora_name": "fake", "lora_path": "new"}, "is the model's own name"),
        ({"lora_name": "bad", "lora_path": "new"}, "adapter_model.safetensors: tensor x is of another shape"),
        ({"lora_name": "x", "lora_path": 5}, "lora_path must be a string"),
    ],
)
def test_what_cannot_be_loaded_is_refused(server: FakeServer, body: dict[str, Any], said: str) -> None:
    assert said in error_of(change(server, "load", body), 400)["message"]


def test_the_routes_ask_for_the_admin_key(folders: Path) -> None:
    body = {"lora_name": "x", "lora_path": "new"}
    settings = modules(folders)
    with FakeServer(api_key="user", **settings) as server:
        for key in ("", "Bearer user", "Bearer nobody"):
            for what in ("load", "unload"):
                error_of(change(server, what, body, Authorization=key), 403 if key == "Bearer user" else 401)
        assert change(server, "load", body)[0] == 200
    with FakeServer(**{**settings, "admin_api_key": None}) as server:
        error_of(change(server, "load", body), 404)
    with FakeServer(**{**settings, "lora_root": None}) as server:
        assert "--lora-root" in error_of(change(server, "load", body), 403)["message"]
    with FakeServer(**{**settings, "adapters": None, "modules": []}) as server:
        assert "--enable-lora" in error_of(change(server, "load", body), 400)["message"]


def test_what_is_pooled_has_an_adapter_too(folders: Path) -> None:
    with FakeServer(pooler=EMBED, **modules(folders)) as server:
        body = {"model": "sql", "input": ["a b", "c"]}
        status, answer = post(server, body, "/v1/embeddings")
        assert (status, answer["model"]) == (200, "sql")
        assert used(server) == ["sql", "sql"]
        error_of(post(server, {**body, "model": "x"}, "/v1/embeddings"), 404)


def test_modules_are_read_when_the_frontend_starts(folders: Path) -> None:
    args = EngineArgs(enable_lora=True, lora_modules=[f"sql={folders}/sql"], lora_root=str(folders))
    settings = settings_of(args)
    (entry,) = settings.modules
    assert (entry.name, entry.generation, entry.adapter and entry.adapter.path) == ("sql", 0, str(folders / "sql"))
    adapter_folder(folders / "sql", r=64)
    with pytest.raises(ConfigError, match="LoRA rank 64 is greater than max_lora_rank 16"):
        settings_of(args)


def test_a_frontend_that_is_started_again_goes_on_without_a_folder_that_is_gone(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = EngineArgs(enable_lora=True, lora_modules=[f"sql={folders}/sql", f"gone={folders}/gone"])
    with pytest.raises(ConfigError, match="gone"):
        settings_of(args)
    monkeypatch.setenv(STARTED_AGAIN, "1")
    assert [entry.name for entry in settings_of(args).modules] == ["sql"]
