"""Engine with its sockets, against a scheduler and detokenizers that do only what each test says.

What needs no socket is in test_engine_core.py.
"""

import asyncio
import errno
import gc
import tempfile

import pytest
import zmq
from engine_rig import Words

from quire.client import core as core_module
from quire.client import engine as engine_module
from quire.client.engine import Engine, RequestError
from quire.proto import messages as m
from quire.proto.codec import from_i32, i32, i64
from quire.proto.params import SamplingParams
from quire.proto.process import new_incarnation
from quire.proto.wire.sockets import DISCONNECTED, Router, front_endpoint


class FakeScheduler:
    def __init__(self, address, epoch=1000):
        self.epoch, self.detokenizers, self.ready = epoch, [], True
        self.hellos, self.engine, self.sleeps = [], None, []
        self.router = Router(m.ToSchedulerFront, front_endpoint(address))
        self.router.attach(self.on_message)

    def on_message(self, peer, message):
        if isinstance(message, m.Hello):
            self.hellos.append(message)
            self.engine = peer
            self.tell()
        elif isinstance(message, m.Sleep):
            self.sleeps.append(message)
        elif isinstance(message, m.GetStats):
            stats = m.Stats(message.token, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, [])
            self.router.send(peer, stats)

    def tell(self):
        peers = [m.Peer("detokenizer", d.incarnation, d.router.endpoint) for d in self.detokenizers]
        self.router.send(self.engine, m.Peers(self.epoch, peers, 16, self.ready, 128 if self.ready else 0))

    def close(self):
        self.router.close()


class FakeDetokenizer(Words):
    """Keeps what it is sent; a test answers by hand."""

    def __init__(self, address):
        self.incarnation = new_incarnation("detokenizer")
        self.router = Router(m.ToDetokenizer, f"{address}/{self.incarnation[:20]}")
        self.got, self.peer = [], None
        self.router.attach(self.on_message)

    def on_message(self, peer, message):
        self.peer = peer
        if not isinstance(message, m.Heartbeat):
            self.got.append(message)

    async def next(self, kind):
        """The next message of one kind; others before it are passed over."""
        async with asyncio.timeout(60):
            while True:
                while self.got:
                    if isinstance(message := self.got.pop(0), kind):
                        return message
                await asyncio.sleep(0.005)

    def send(self, message):
        assert self.router.send(self.peer, message)

    def close(self):
        self.router.close()


class Net:
    """A scheduler, some detokenizers and an Engine, in this process and loop."""

    def __init__(self, detokenizers=1):
        self.count = detokenizers

    async def __aenter__(self):
        self.dir = tempfile.TemporaryDirectory(prefix="q", dir="/tmp")
        self.address = "ipc://" + self.dir.name
        self.scheduler = FakeScheduler(self.address)
        self.scheduler.detokenizers = [FakeDetokenizer(self.address) for _ in range(self.count)]
        self.engine = Engine(self.address)
        await self.engine.start()
        if self.count:
            await self.engine.wait_ready(60)
            await until(lambda: sum(link.ready for link in self.engine.core.links.values()) == self.count)
        return self

    @property
    def detokenizer(self):
        return self.scheduler.detokenizers[0]

    async def __aexit__(self, *exc):
        await self.engine.close()
        for detokenizer in self.scheduler.detokenizers:
            detokenizer.close()
        self.scheduler.close()
        self.dir.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Many heartbeats, and nobody hung: nobody here sends any back, however long a test takes."""
    monkeypatch.setattr(engine_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(core_module, "SILENCE_S", 1000.0)


def scenario(count=1):
    """Run an async test with a Net of ``count`` detokenizers."""

    def wrap(test):
        def run(monkeypatch):
            async def main():
                async with asyncio.timeout(200), Net(count) as net:
                    await test(net, monkeypatch)

            asyncio.run(main())

        run.__name__ = test.__name__
        return run

    return wrap


async def drain(stream):
    text, tokens, last = "", [], None
    async for event in stream:
        text, last = text + event.text, event
        tokens += event.tokens
    return text, tokens, last


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def has_work(detokenizer):
    return any(isinstance(message, m.Tokenize) for message in detokenizer.got)


@scenario()
async def test_a_request_from_prompt_to_finish(net, _):
    stream = net.engine.submit(prompt="hi", params=SamplingParams(max_tokens=4, seed=-7), api_key="k", priority=3)
    sent = await net.detokenizer.next(m.Tokenize)
    assert (sent.prompt, sent.ids, sent.attempt, sent.resume, sent.key, sent.priority) == ("hi", None, 0, [], "k", 3)
    assert sent.work.seed == 2**64 - 7
    net.detokenizer.accept(sent)
    accepted = await stream.wait_accepted()
    assert (accepted.prompt_ids, accepted.prompt, stream.params.max_tokens) == ([1, 2, 3], "hi", 16)
    net.detokenizer.text(sent, 0, [7], "a")
    net.detokenizer.text(sent, 1, [8, 9], "bc", m.Finish.STOP, reason="X")
    text, tokens, last = await drain(stream)
    assert (text, tokens, last.finish, last.stop_reason, last.length) == ("abc", [7, 8, 9], m.Finish.STOP, "X", 3)
    times = stream.metrics
    assert (
        times.arrival_time
        <= times.first_scheduled_time
        <= times.first_token_time
        <= times.last_token_time
        <= times.finished_time
    )
    assert times.time_in_queue == times.first_scheduled_time - times.arrival_time
    assert stream.cached_tokens == 2
    assert net.engine.open_requests == 0


@scenario()
async def test_events_that_wait_are_joined(net, _):
    stream = net.engine.submit(ids=[4, 5], params=SamplingParams(n=2))
    sent = await net.detokenizer.next(m.Tokenize)
    assert from_i32(sent.ids) == [4, 5]
    net.detokenizer.accept(sent)
    for step in range(3):
        net.detokenizer.text(sent, step, [step], str(step), index=0)
        net.detokenizer.text(sent, step, [step], str(step), index=1)
    await until(lambda: len(stream.children[1].tokens) == 3)
    first, second = await anext(stream), await anext(stream)
    assert [(e.index, e.text, e.tokens) for e in (first, second)] == [(0, "012", [0, 1, 2]), (1, "012", [0, 1, 2])]
    assert stream.get_ready() == []
    net.detokenizer.text(sent, 3, [], "", m.Finish.LENGTH, index=1)
    event = await anext(stream)
    assert (event.index, event.finish) == (1, m.Finish.LENGTH)
    net.detokenizer.text(sent, 3, [3], "3", m.Finish.LENGTH, index=0)
    assert (await anext(stream)).length == 4
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@scenario(count=2)
async def test_a_lost_detokenizer_hands_over_what_it_held(net, _):
    stream = net.engine.submit(prompt="hi", params=SamplingParams(n=2, seed=5))
    await until(lambda: any(map(has_work, net.scheduler.detokenizers)))
    first, second = sorted(net.scheduler.detokenizers, key=lambda d: not has_work(d))
    sent = await first.next(m.Tokenize)
    first.accept(sent)
    first.text(sent, 0, [1, 2], "ab", index=0)
    first.text(sent, 0, [8], "x", m.Finish.STOP, index=1)
    await until(lambda: stream.children[1].finish)
    first.close()
    again = await second.next(m.Tokenize)
    assert (again.uid, again.attempt, again.work.seed, again.prompt) == (sent.uid, 1, 5, None)
    assert from_i32(again.ids) == [1, 2, 3] and again.work.params.max_tokens == 16
    assert [(r.index, from_i32(r.ids), r.text_sent) for r in again.resume] == [(0, [1, 2], 2)]
    second.accept(again, text=None)
    second.text(again, 2, [3], "c", m.Finish.LENGTH, index=0)
    children = await stream.collect()
    assert [("".join(c.parts), c.tokens) for c in children] == [("abc", [1, 2, 3]), ("x", [8])]
    assert stream.accepted.prompt == "hi"


@scenario()
async def test_a_socket_that_cannot_be_made_is_tried_again(net, monkeypatch):
    made, tries = engine_module.Dealer, []

    def dealer(*arguments):
        tries.append(arguments)
        if len(tries) < 3:
            raise zmq.ZMQError(errno.EMFILE)
        return made(*arguments)

    monkeypatch.setattr(engine_module, "Dealer", dealer)
    net.engine._on_event(next(iter(net.engine.core.links)), DISCONNECTED)
    assert not net.engine.ready
    await until(lambda: net.engine.ready)
    assert len(tries) == 3


@scenario()
async def test_a_broken_connection_alone_is_made_again(net, _):
    stream = net.engine.submit(prompt="hi")
    sent = await net.detokenizer.next(m.Tokenize)
    net.detokenizer.accept(sent)
    net.detokenizer.text(sent, 0, [1], "a")
    await until(lambda: stream.children[0].tokens)
    endpoint, net.detokenizer.peer = net.detokenizer.router.endpoint, None
    net.detokenizer.router.close()
    await until(lambda: not net.engine.ready)
    net.detokenizer.router = Router(m.ToDetokenizer, endpoint)
    net.detokenizer.router.attach(net.detokenizer.on_message)
    again = await net.detokenizer.next(m.Tokenize)
    assert (again.attempt, again.resume[0].text_sent) == (1, 1)
    net.detokenizer.text(again, 1, [2], "b", m.Finish.STOP)
    assert (await drain(stream))[0] == "ab"


@scenario()
async def test_a_restarted_scheduler_hits_only_what_it_had(net, _):
    early = net.engine.submit(prompt="not accepted yet")
    early_sent = await net.detokenizer.next(m.Tokenize)
    running = net.engine.submit(prompt="running")
    sent = await net.detokenizer.next(m.Tokenize)
    net.detokenizer.accept(sent)
    net.detokenizer.text(sent, 0, [1], "a")
    await until(lambda: running.children[0].tokens)
    old = net.scheduler
    old.close()
    await until(lambda: not net.engine.ready)
    assert not net.engine.ready
    net.scheduler = FakeScheduler(net.address, epoch=2000)  # its first Peers name no detokenizer yet
    again = await old.detokenizers[0].next(m.Tokenize)
    assert (again.uid, again.attempt, again.losses) == (sent.uid, 1, 1)
    net.scheduler.detokenizers = old.detokenizers
    net.scheduler.tell()
    await net.engine.wait_ready(60)
    assert [h.incarnation for h in net.scheduler.hellos] == [net.engine.incarnation]
    net.detokenizer.text(again, 1, [2], "b", m.Finish.STOP)
    net.detokenizer.accept(early_sent)
    net.detokenizer.text(early_sent, 0, [5], "e", m.Finish.STOP)
    assert (await drain(running))[0] == "ab" and (await drain(early))[0] == "e"


@scenario()
async def test_what_the_wire_would_refuse_is_refused_by_submit(net, _):
    changed = SamplingParams()
    changed.max_tokens = "x"
    deep = []
    for _level in range(5000):
        deep = [deep]
    for arguments, param in [
        ({"prompt": "\ud800"}, "prompt"),
        ({"messages": [{5: "x"}]}, "messages"),
        ({"messages": [{"a": 10**30}]}, "messages"),
        ({"messages": [{"a": object()}]}, "messages"),
        ({"messages": [{"a": deep}]}, "messages"),
        ({"messages": [{}], "template": {"x": 1, "chat_template_kwargs": {"a": 10**30}}}, "chat_template_kwargs"),
        ({"prompt": "a", "params": changed}, "max_tokens"),
        ({"prompt": "a", "params": SamplingParams(stop="\udfff")}, "stop"),
        ({"prompt": "a", "priority": "x"}, "priority"),
        ({"prompt": "a", "priority": 2**31}, "priority"),
    ]:
        with pytest.raises(RequestError, match=param) as caught:
            net.engine.submit(**arguments)
        assert (caught.value.status, caught.value.param) == (400, param)
    assert net.engine.open_requests == 0 and not has_work(net.detokenizer)
    net.engine.submit(prompt="fine")
    assert (await net.detokenizer.next(m.Tokenize)).prompt == "fine"  # and nothing before it


@scenario()
async def test_failed_is_raised_from_the_stream(net, _):
    stream, waiting = net.engine.submit(prompt=""), net.engine.submit(prompt="")
    for _ in range(2):
        sent = await net.detokenizer.next(m.Tokenize)
        net.detokenizer.send(m.Failed(sent.uid, 0, 429, "busy", "prompt", 2.5))
    with pytest.raises(RequestError) as caught:
        await drain(stream)
    error = caught.value
    assert (error.status, error.message, error.param, error.retry_after) == (429, "busy", "prompt", 2.5)
    with pytest.raises(RequestError):
        await waiting.wait_accepted()
    with pytest.raises(RequestError):
        await waiting.collect()


@pytest.mark.slow
@scenario()
async def test_abort_and_abandon_tell_the_detokenizer(net, _):
    stream = net.engine.submit(prompt="a")
    sent = await net.detokenizer.next(m.Tokenize)
    stream.abort()
    stream.abort()
    assert (await net.detokenizer.next(m.Abort)).uid == sent.uid
    assert (await drain(stream))[0] == ""

    async def leave_early():
        async for _event in net.engine.submit(prompt="b"):
            return

    task = asyncio.create_task(leave_early())
    sent = await net.detokenizer.next(m.Tokenize)
    net.detokenizer.accept(sent)
    net.detokenizer.text(sent, 0, [1], "x")
    await task
    gc.collect()
    assert (await net.detokenizer.next(m.Abort)).uid == sent.uid
    assert net.engine.open_requests == 0
    task = asyncio.create_task(leave_early())
    sent = await net.detokenizer.next(m.Tokenize)
    task.cancel()
    await asyncio.wait([task])
    del task  # a task keeps the frames of what it raised
    gc.collect()
    assert (await net.detokenizer.next(m.Abort)).uid == sent.uid


@scenario(count=0)
async def test_no_detokenizer_is_a_503(net, monkeypatch):
    monkeypatch.setattr(core_module, "NO_DETOKENIZER_S", 0.1)
    assert not net.engine.ready
    with pytest.raises(RequestError) as caught:
        await drain(net.engine.submit(prompt="a"))
    assert caught.value.status == 503
    with pytest.raises(TimeoutError):
        await net.engine.wait_ready(0.05)


@scenario(count=2)
async def test_requests_go_to_the_least_busy(net, _):
    streams = [net.engine.submit(prompt=str(i)) for i in range(6)]
    await until(lambda: sum(isinstance(x, m.Tokenize) for d in net.scheduler.detokenizers for x in d.got) == 6)
    counts = [sum(isinstance(x, m.Tokenize) for x in d.got) for d in net.scheduler.detokenizers]
    assert counts == [3, 3]
    net.engine.fail_all(RequestError(503, "over"))
    for stream in streams:
        with pytest.raises(RequestError, match="over"):
            await drain(stream)


@scenario()
async def test_bad_columns_are_counted_and_dropped(net, _):
    stream = net.engine.submit(prompt="a")
    sent = await net.detokenizer.next(m.Tokenize)
    net.detokenizer.accept(sent)
    empty = dict.fromkeys(("uids", "attempts", "indexes", "offsets", "counts", "finishes", "lengths"), b"")
    net.detokenizer.send(m.TextBatch(**{**empty, "uids": i64([sent.uid])}, tokens=b"", texts=[], stop_reasons=[]))
    net.detokenizer.send(m.TextBatch(**{**empty, "counts": i32([2])}, tokens=b"", texts=[], stop_reasons=[]))
    net.detokenizer.send(m.Unknown(b"abc", b""))
    net.detokenizer.router.socket.send_multipart([net.detokenizer.peer.encode(), b"garbage"])
    net.detokenizer.text(sent, 0, [1], "a", m.Finish.STOP)
    assert (await drain(stream))[0] == "a"
    assert net.engine.bad_frames == 4


@scenario()
async def test_stats_and_the_limits_of_submit(net, _):
    assert (await net.engine.stats(60)).waiting == 2
    with pytest.raises(ValueError, match="exactly one"):
        net.engine.submit(prompt="a", ids=[1])
    with pytest.raises(RequestError, match="token ids"):
        net.engine.submit(ids=[2**40])
    assert net.engine.open_requests == 0


@scenario()
async def test_a_refusal_by_the_scheduler_ends_the_wait(net, _):
    net.scheduler.close()
    await until(lambda: not net.engine.ready)
    net.scheduler.router = Router(m.ToSchedulerFront, front_endpoint(net.address))
    net.scheduler.router.attach(
        lambda peer, message: net.scheduler.router.send(peer, m.Bye("protocol 1 is not supported; upgrade."))
    )
    with pytest.raises(RuntimeError, match="protocol 1"):
        await net.engine.wait_ready(60)


@scenario()
async def test_waiting_for_others_in_place_of_those_that_were(net, _):
    old = net.engine.detokenizers
    assert old == {net.detokenizer.incarnation}
    await net.engine.wait_ready(60, without={"another"})
    waiting = asyncio.ensure_future(net.engine.wait_ready(60, without=old))
    net.scheduler.detokenizers.append(FakeDetokenizer(net.address))
    net.scheduler.tell()
    await until(lambda: len(net.engine.detokenizers) == 2)
    assert not waiting.done()
    left = net.scheduler.detokenizers.pop(0)
    net.scheduler.tell()
    left.close()
    await waiting
    assert net.engine.ready and net.engine.detokenizers == {net.detokenizer.incarnation}


@scenario()
async def test_a_sleep_that_waits_is_told_again_to_another_scheduler_alone(net, monkeypatch):
    """Not at each change of the workers, which may come of it."""
    engine, scheduler = net.engine, net.scheduler
    waiting = asyncio.ensure_future(engine.sleep())
    await until(lambda: scheduler.sleeps)
    for ready in (False, True):
        scheduler.ready = ready
        scheduler.tell()
        await until(lambda ready=ready: engine.ready is ready)
    await engine.stats(60)
    assert len(scheduler.sleeps) == 1
    scheduler.epoch += 1
    scheduler.tell()
    await until(lambda: len(scheduler.sleeps) == 2)
    scheduler.router.send(scheduler.engine, m.Sleeping(scheduler.sleeps[0].token, ["weights"]))
    assert await waiting == ["weights"]
