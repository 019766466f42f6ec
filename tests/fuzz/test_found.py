"""What fuzzing and storms have found, each by itself."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from chaos.cluster import until
from worker_toys import CPU, VOCAB, ToyModel

from fuzz.targets import FakePeers
from quire.client.results import RequestError
from quire.frontend.errors import error_body
from quire.gpu_worker.worker import Worker
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import EngineArgs
from quire.proto.messages import Assign, Configure, Drain, FromDetokenizer, Heartbeat, Lease, Submit, ToDetokenizer
from quire.proto.params import SamplingParams
from quire.proto.wire.sockets import DISCONNECTED, Dealer, Router
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.membership import Membership


@pytest.mark.parametrize(("uid", "attempt"), [(1, 2**31), (2**63, 0), (-(2**63) - 1 + 2**64, -(2**40))])
def test_a_stranger_with_numbers_that_fit_no_column(uid: int, attempt: int) -> None:
    membership = Membership(Scheduler(EngineArgs(), time.monotonic), epoch=1)
    membership.on_front("stranger", Submit(uid, attempt, b"", b"", Generate(SamplingParams(max_tokens=1), 0), 0.0))
    assert membership.core.outbox.take() == []
    assert membership.core.bad_messages == 1


def test_an_error_that_quotes_a_header_of_no_text() -> None:
    body = json.loads(error_body(RequestError(400, "Content-Type must be application/json, got a\udcbb/json.")))
    assert body["error"]["message"] == "Content-Type must be application/json, got a?/json."


def test_a_detokenizer_lost_while_its_engine_closes() -> None:
    """Its connection is made again, and must be closed too, not only its descriptor under the event loop's feet."""

    async def run() -> None:
        watched = asyncio.get_running_loop()._selector.get_map  # type: ignore[attr-defined]
        before = set(watched())
        peers = FakePeers()
        await peers.start()
        (link,) = peers.engine.core.links
        closing = asyncio.ensure_future(peers.engine.close())
        await asyncio.sleep(0)
        peers.engine._on_event(link, DISCONNECTED)
        await closing
        await peers.close()
        assert set(watched()) == before

    asyncio.run(run())


def test_a_send_to_nobody_while_another_peer_sends(tmp_path: Path) -> None:
    """The try takes ZeroMQ's news of what has come; without a second look it would not be read, nor what follows."""

    async def run() -> None:
        got: list[Any] = []
        router: Router[Any] = Router(ToDetokenizer, f"ipc://{tmp_path}/r")
        peer: Dealer[Any] = Dealer(FromDetokenizer, router.endpoint, "engine")
        router.attach(lambda _, message: got.append(message))
        peer.send(Heartbeat(1))
        assert await until(lambda: len(got) == 1, 60)
        peer.send(Heartbeat(2))
        time.sleep(0.1)  # noqa: ASYNC251  # it is there, and the event loop has not had its turn
        assert not router.send("nobody", Heartbeat())
        assert await until(lambda: len(got) == 2, 60)
        peer.close()
        router.close()

    asyncio.run(run())


def test_a_bad_frame_whose_tag_is_for_a_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    router: Router[Any] = Router(ToDetokenizer, f"ipc://{tmp_path}/r")
    peer: Dealer[Any] = Dealer(FromDetokenizer, router.endpoint, "engine")
    peer.send_frame(msgspec.msgpack.encode(["\x1b[2J\n12:00:00 I all is well"]))
    assert router.socket.poll(60_000)
    assert router.recv() is None and router.bad_frames == 1
    peer.close()
    router.close()
    (record,) = [each for each in caplog.records if "bad frame" in each.getMessage()]
    assert record.getMessage().isprintable() and "all is well" in record.getMessage()


def lone_worker(messages: list[Any]) -> list[Any]:
    """What a worker answers to these, all of them there at once."""
    said: list[Any] = []
    link = SimpleNamespace(get=lambda _: messages.pop(0), send=said.append, renew=lambda: None, last_step=0)
    config = ModelConfig(path="", hf={"intermediate_size": 32}, max_model_len=64, vocab_size=VOCAB)
    worker = Worker(EngineArgs(num_gpu_blocks_override=32), config, ToyModel(), torch.float32, CPU)
    worker.serve(link)
    return [type(each).__name__ for each in said]


@pytest.mark.parametrize("sizes", [(0, 8, 64), (-1, 8, 64), (8, 0, 64), (8, 2**62, 2**63), (8, 65, 64), (8, 8, 2**31)])
def test_an_assign_of_sizes_that_cannot_be(sizes: tuple[int, int, int]) -> None:
    assign = [Assign(Lease(1, 0, 1), *sizes), Assign(Lease(1, 0, 2), 8, 8, 64)]
    assert lone_worker([*assign, Configure(Lease(1, 0, 2), 32), Drain()]) == ["StepFailed", "Loaded", "Ready"]


def test_a_second_configure_under_one_lease() -> None:
    """Rows may hold blocks that the smaller cache would not have: a GPU would write beyond it."""
    lease = Lease(1, 0, 1)
    messages = [Assign(lease, 8, 8, 64), Configure(lease, 32), Configure(lease, 9), Drain()]
    assert lone_worker(messages) == ["Loaded", "Ready", "StepFailed"]
