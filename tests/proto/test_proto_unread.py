"""A peer that does not read: bounded, never waited for, given up in the open, and back when it reads again."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import zmq

from quire.proto import messages as m
from quire.proto.process import new_incarnation
from quire.proto.wire import sockets, unread, wire
from quire.proto.wire.unread import Unread

MIB = 2**20


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def pair(context, tmp_path, monkeypatch):
    """A Router and one Dealer that have met, with small limits."""
    for name, value in (("MAX_UNREAD", MIB), ("ASK_EVERY", 64 * 1024), ("STALL_S", 0.2)):
        monkeypatch.setattr(unread, name, value)
    router = sockets.Router(m.ToSchedulerFront, f"ipc://{tmp_path}/x", None, context)
    dealer = new_dealer(router, context)
    assert until(router.recv)[0] == dealer.name
    yield router, dealer
    router.close()
    dealer.close()


def new_dealer(router, context, name=None):
    name = name or new_incarnation("detokenizer")
    dealer = sockets.Dealer(m.FromSchedulerFront, router.endpoint, name, None, context)
    dealer.name = name
    dealer.send(m.Heartbeat())
    return dealer


def until(what, *others, wait=60.0):
    """The first true value of ``what()``; ``others`` are called in between."""
    deadline = time.monotonic() + wait
    while not (value := what()):
        assert time.monotonic() < deadline, "it never happened"
        for other in others:
            other()
        time.sleep(0.002)
    return value


BIG = m.Bye("x" * 20_000)


def send_until_refused(send):
    """How many bytes were taken before a send was refused."""
    taken, deadline = 0, time.monotonic() + 60
    while send(BIG):
        taken += 20_000
        assert time.monotonic() < deadline, f"{taken} bytes and no end"
        time.sleep(0.002)
    return taken


def test_a_router_gives_up_who_does_not_read_and_nobody_else(pair, context):
    router, hung = pair
    other = new_dealer(router, context)
    assert until(router.recv)[0] == other.name
    while hung.next_event() is not None:
        pass
    taken = send_until_refused(lambda message: router.send(hung.name, message))
    assert MIB <= taken < 20 * MIB
    assert not router.send(hung.name, BIG)  # and stays so
    assert router.send(other.name, m.Heartbeat(last_step=5))
    assert until(other.recv) == m.Heartbeat(last_step=5)
    # It wakes: what was sent before is there, then it learns that it was given up, and comes back as a new connection.
    got = 0
    while (message := hung.recv()) is not None or got * 20_000 < taken:
        got += message is not None
    assert got * 20_000 == taken
    assert until(hung.next_event) == sockets.DISCONNECTED
    assert until(hung.next_event, router.recv, hung.recv) == sockets.CONNECTED
    hung.send(m.Heartbeat(last_step=9))
    assert until(router.recv, hung.recv) == (hung.name, m.Heartbeat(last_step=9))
    assert router.send(hung.name, m.Heartbeat(last_step=10))
    assert until(hung.recv) == m.Heartbeat(last_step=10)
    other.close()


def test_a_dealer_gives_up_who_does_not_read(pair):
    router, dealer = pair
    while dealer.next_event() is not None:
        pass
    taken = send_until_refused(dealer.send)
    assert MIB <= taken < 20 * MIB
    assert until(dealer.next_event) == sockets.DISCONNECTED
    until(lambda: dealer.next_event() == sockets.CONNECTED, router.recv)
    dealer.send(m.Heartbeat(last_step=3))
    until(lambda: router.recv() == (dealer.name, m.Heartbeat(last_step=3)), dealer.recv)
    assert router.send(dealer.name, m.Heartbeat())
    assert until(dealer.recv) == m.Heartbeat()


def test_a_dealer_whose_peer_never_comes_keeps_little(context, tmp_path, monkeypatch):
    for name, value in (("MAX_UNREAD", MIB), ("ASK_EVERY", 64 * 1024), ("STALL_S", 0.2)):
        monkeypatch.setattr(unread, name, value)
    dealer = sockets.Dealer(m.FromSchedulerFront, f"ipc://{tmp_path}/nobody", "d", None, context)
    for _ in range(3):
        assert MIB <= send_until_refused(dealer.send) < 20 * MIB
        assert dealer.next_event() == sockets.DISCONNECTED
    dealer.close()


def test_who_reads_late_but_reads_is_kept(pair, monkeypatch):
    router, dealer = pair
    now = [time.monotonic()]
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(8):  # at times far behind
        for _ in range(60):
            assert router.send(dealer.name, BIG)
            now[0] += unread.STALL_S / 80
        assert router._unread[dealer.name].owed > unread.MAX_UNREAD
        for _ in range(60):
            assert until(dealer.recv) == BIG
        until(lambda: router._unread[dealer.name].owed < MIB // 2, router.recv, dealer.recv)
    assert dealer.next_event() in (None, sockets.CONNECTED)


def test_a_burst_is_no_stall_and_a_senders_own_sleep_neither():
    peer = Unread(now=0.0)
    for _ in range(100):
        assert not peer.hopeless(1000.0)
        peer.add(2 * MIB)
        peer.question(1000.0)
    assert peer.owed > unread.MAX_UNREAD and not peer.hopeless(1000.5)
    assert not peer.hopeless(5000.0)  # stopped for an hour: its answers are waiting to be read
    seconds = iter(range(5001, 5100))
    assert next(s for s in seconds if peer.hopeless(float(s))) <= 5001 + unread.STALL_S
    peer.answered(peer.asked)
    assert not peer.hopeless(next(seconds)) and peer.owed == 0


def test_a_lost_question_is_asked_again():
    peer = Unread(now=0.0)
    peer.add(5 * MIB)
    first = peer.question(0.0)
    assert first and peer.question(0.5) is None
    peer.add(10)
    second = peer.question(1.5)
    assert second and second != first
    peer.answered(int.from_bytes(second[2:], "little"))
    assert peer.owed == 0 and peer.question(9.0) is None
    peer.answered(2**62)  # nonsense
    assert peer.owed == 0


def test_a_stopped_process_is_disconnected_though_its_connection_is_full(context, tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(wire, "HEARTBEAT_TIMEOUT_MS", 1000)
    router = sockets.Router(m.ToSchedulerFront, f"ipc://{tmp_path}/x", None, context)
    code = (
        "import sys, time\nfrom quire.proto import messages as m\n"
        "from quire.proto.wire import sockets\n"
        "wire = sockets.Dealer(m.FromSchedulerFront, sys.argv[1], 'stopped')\nwire.send(m.Heartbeat())\n"
        "while True: wire.recv(); time.sleep(0.01)"
    )
    child = subprocess.Popen([sys.executable, "-P", "-c", code, router.endpoint])
    try:
        assert until(router.recv)[0] == "stopped"
        child.send_signal(signal.SIGSTOP)
        sent = 0
        while sent < 100 and router.send("stopped", BIG):  # 2 MB: more than the connection takes
            sent += 1
        until(lambda: not router.send("stopped", m.Heartbeat()))
        child.send_signal(signal.SIGCONT)  # it connects again by itself, under its identity
        until(lambda: router.send("stopped", m.Heartbeat()))
    finally:
        child.kill()
        child.wait()
        router.close()


def test_control_frames_that_make_no_sense_are_bad_frames(pair):
    router, dealer = pair
    for junk in (b"\xc1", b"\xc1?", b"\xc1!12", b"\xc1~x", b"\xc1x" + bytes(8)):
        dealer.socket.send(junk)
        router.socket.send_multipart([dealer.name.encode(), junk])
    dealer.socket.send(b"\xc1!" + b"\xff" * 8)  # an answer to nothing
    dealer.send(m.GetStats(token=1))
    router.send(dealer.name, m.Heartbeat(last_step=2))
    assert until(router.recv)[1] == m.GetStats(token=1) and until(dealer.recv) == m.Heartbeat(last_step=2)
    assert router.bad_frames == dealer.bad_frames == 5


def test_a_frame_over_the_limit_ends_its_senders_connection_only(context, tmp_path, monkeypatch):
    for module in (sockets, wire):
        monkeypatch.setattr(module, "MAX_FRAME", 100_000)
    router = sockets.Router(m.ToSchedulerFront, f"ipc://{tmp_path}/x", None, context)
    friend, big = new_dealer(router, context), new_dealer(router, context)
    assert {until(router.recv)[0], until(router.recv)[0]} == {friend.name, big.name}
    while big.next_event() is not None:
        pass
    assert not big.send(m.Bye("x" * 100_001)) and not router.send(friend.name, m.Bye("x" * 100_001))  # not sent at all
    until(lambda: friend.next_event() == sockets.DISCONNECTED, friend.recv)  # as of one that is gone: it comes back
    until(lambda: friend.next_event() == sockets.CONNECTED, friend.recv, router.recv)
    big.socket.send(bytes(100_001))
    assert until(big.next_event) == sockets.DISCONNECTED
    friend.send(m.GetStats(token=2))
    assert until(router.recv) == (friend.name, m.GetStats(token=2))
    assert router.send(friend.name, m.Heartbeat()) and until(friend.recv) == m.Heartbeat()
    assert until(big.next_event) == sockets.CONNECTED
    big.send(m.GetStats(token=3))
    assert until(router.recv) == (big.name, m.GetStats(token=3))
    for each in (router, friend, big):
        each.close()


def test_who_comes_back_takes_its_identity_over(pair, context):
    """After a cut its old connection may stand at the other end for seconds."""
    router, old = pair
    new = new_dealer(router, context, old.name)
    assert until(router.recv) == (old.name, m.Heartbeat())
    assert router.send(old.name, m.Heartbeat(last_step=4))
    assert until(new.recv) == m.Heartbeat(last_step=4)
    assert old.recv() is None
    for token in range(3):
        new.send(m.GetStats(token=token))
        assert until(router.recv) == (old.name, m.GetStats(token=token))
    new.close()


def test_those_who_left_are_forgotten(pair, context):
    router, first = pair
    router.monitor()
    router.send(first.name, BIG)
    for _ in range(5):
        guest = new_dealer(router, context)
        assert until(router.recv)[0] == guest.name
        router.send(guest.name, m.Heartbeat())
        guest.close()
    until(lambda: set(router._unread) == {first.name}, router.next_event)


def test_no_bytes_get_through_as_an_error(context, tmp_path):
    """Frames of any bytes, in any number, from peers of any name: counted, and the next good one is heard."""
    rng = random.Random(0)
    router = sockets.Router(m.ToSchedulerFront, f"ipc://{tmp_path}/x", None, context)
    friend = new_dealer(router, context)
    assert until(router.recv)[0] == friend.name
    strangers = []
    for name in (b"\xff\xfe", b"\x01", b"?" * 255):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, name)
        stranger.connect(router.endpoint)
        strangers.append(stranger)
    good = [sockets.encode(m.Heartbeat()), sockets.encode(m.Hello("frontend", "x", m.PROTOCOL, 1)), b"\xc1?" + bytes(8)]
    for _ in range(1000):
        frames = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            frame = bytearray(rng.choice(good) if rng.random() < 0.5 else rng.randbytes(rng.randrange(40)))
            if frame and rng.random() < 0.7:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            frames.append(bytes(frame))
        rng.choice(strangers).send_multipart(frames)
        router.socket.send_multipart([friend.name.encode(), *frames])
    for stranger in strangers:
        stranger.send(sockets.encode(m.GetStats(token=4)))
    ends = 0
    while ends < len(strangers):
        peer, message = until(router.recv, friend.recv)
        router.send(peer, m.Heartbeat())  # to names that cannot be written as text too
        ends += message == m.GetStats(token=4)
    router.send(friend.name, m.Heartbeat(last_step=6))
    until(lambda: friend.recv() == m.Heartbeat(last_step=6))
    assert router.bad_frames > 100 and friend.bad_frames > 100
    for each in (*strangers, router, friend):
        each.close()


def test_one_who_sends_only_nonsense_keeps_nobody_from_work(context, tmp_path):
    async def run():
        router = sockets.Router(m.ToSchedulerFront, f"ipc://{tmp_path}/x", None, context)
        noisy, friend = new_dealer(router, context), new_dealer(router, context)
        for _ in range(5 * sockets.DRAIN_LIMIT):
            noisy.socket.send(b"junk")
        await asyncio.sleep(0.2)  # all is there before the first is read
        assert any(router.recv() is None for _ in range(3)) and router.bad_frames < 3 * sockets.DRAIN_LIMIT
        heard = asyncio.Queue()
        router.attach(lambda peer, message: heard.put_nowait(message))
        friend.send(m.GetStats(token=8))
        while await heard.get() != m.GetStats(token=8):
            pass
        while router.bad_frames < 5 * sockets.DRAIN_LIMIT:  # noqa: ASYNC110  # no other message wakes it
            await asyncio.sleep(0.01)
        for each in (router, noisy, friend):
            each.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_message_that_cannot_be_handled_keeps_none_after_it_waiting(context, tmp_path):
    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, failure: failures.append(failure["exception"]))
        router = sockets.Router(m.ToSchedulerFront, f"ipc://{tmp_path}/x", None, context)
        friend = new_dealer(router, context)
        for token in range(4):
            friend.send(m.GetStats(token=token))
        await asyncio.sleep(0.2)  # all is there before the first is read
        heard = asyncio.Queue()

        def handle(peer, message):
            if message == m.GetStats(token=1):
                raise LookupError("one fault of ours")
            heard.put_nowait(message)

        router.attach(handle)
        assert [await heard.get() for _ in range(4)] == [m.Heartbeat(), *(m.GetStats(token=n) for n in (0, 2, 3))]
        for each in (router, friend):
            each.close()

    failures = []
    asyncio.run(asyncio.wait_for(run(), 60))
    assert [type(failure) for failure in failures] == [LookupError]


def test_what_comes_of_messages_is_done_before_more_are_read_than_fit_a_turn(context, tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "TURN_S", 0.0)  # one message, then

    async def run():
        router = sockets.Router(m.ToSchedulerFront, f"ipc://{tmp_path}/x", None, context)
        friend = new_dealer(router, context)
        for token in range(3):
            friend.send(m.GetStats(token=token))
        await asyncio.sleep(0.2)  # all is there before the first is read
        order, ended = [], asyncio.Event()

        def handle(peer, message):
            order.append("read")
            asyncio.get_running_loop().call_soon(order.append, "done")
            if message == m.GetStats(token=2):
                asyncio.get_running_loop().call_soon(ended.set)

        router.attach(handle)
        await ended.wait()
        assert order == ["read", "done"] * 4
        for each in (router, friend):
            each.close()

    asyncio.run(asyncio.wait_for(run(), 60))
