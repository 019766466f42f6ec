"""What fuzzing and storms have found, each by itself."""

from __future__ import annotations

import asyncio
import json

import pytest

from fuzz.targets import FakePeers
from quire.client.stream import RequestError
from quire.frontend.errors import error_body
from quire.proto.config import EngineArgs
from quire.proto.messages import Submit
from quire.proto.params import SamplingParams
from quire.scheduler.core import Scheduler
from quire.scheduler.membership import Membership


@pytest.mark.parametrize(("uid", "attempt"), [(1, 2**31), (2**63, 0), (-(2**63) - 1 + 2**64, -(2**40))])
def test_a_stranger_with_numbers_that_fit_no_column(uid: int, attempt: int) -> None:
    membership = Membership(Scheduler(EngineArgs()), epoch=1)
    membership.on_front("stranger", Submit(uid, attempt, b"", b"", SamplingParams(max_tokens=1), [], 0, 0.0))
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
        (link,) = peers.engine._links.values()
        closing = asyncio.ensure_future(peers.engine.close())
        await asyncio.sleep(0)
        peers.engine._lose(link)
        await closing
        await peers.close()
        assert set(watched()) == before

    asyncio.run(run())
