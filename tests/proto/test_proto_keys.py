"""Who may talk over tcp: keys shared and apart, the file of those let in, and strangers who harm nobody."""

import asyncio
import os
import socket
import stat
import time
from pathlib import Path

import pytest
import zmq

from quire.cli.main import run
from quire.proto import messages as m
from quire.proto.config import ConfigError
from quire.proto.process import new_incarnation
from quire.proto.wire import keys as keys_module
from quire.proto.wire import sockets
from quire.proto.wire.keys import Keys, generate_apart

WAIT_S = 60.0


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


class House:
    """A Router and those who knock; everything is polled by hand, in one thread."""

    def __init__(self, context, keys, endpoint="tcp://127.0.0.1:*"):
        self.context = context
        self.router = sockets.Router(m.ToSchedulerFront, endpoint, keys, context)
        self.wires = [self.router]

    def knock(self, keys, endpoint=None):
        name = new_incarnation("frontend")
        wire = sockets.Dealer(m.FromSchedulerFront, endpoint or self.router.endpoint, name, keys, self.context)
        self.wires.append(wire)
        return wire

    def hears(self, wire, wait=WAIT_S):
        """Whether a message of ``wire`` arrives, and an answer reaches it."""
        wire.send(m.GetStats(token=7))
        until = time.monotonic() + wait
        while time.monotonic() < until:
            while (received := self.router.recv()) is not None:
                self.router.send(received[0], m.Heartbeat(last_step=1))
            if wire.recv() is not None:
                return True
            time.sleep(0.005)
        return False

    def refuses(self, wire):
        """Whether ``wire`` is sent away, and nothing of it heard."""
        until = time.monotonic() + WAIT_S
        while wire.next_event() != sockets.DISCONNECTED:
            assert time.monotonic() < until, "it was neither refused nor broken off"
            time.sleep(0.005)
        return not self.hears(wire, wait=0.05)

    def close(self):
        for wire in self.wires:
            wire.close()


@pytest.fixture
def house(request, context):
    made = []

    def make(keys, **kwargs):
        made.append(House(context, keys, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def folder_of_keys(tmp_path, *names):
    folder = str(tmp_path / "keys")
    generate_apart(folder, list(names))
    return folder, [Keys.load(f"{folder}/{name}.key") for name in ("scheduler", *names)]


def set_allowed(folder, keep):
    path = Path(folder, "allowed")
    lines = path.read_text().splitlines()
    path.write_text("".join(line + "\n" for line in lines if line.split()[0] in keep))


def test_plain_tcp_off_loopback_is_refused_at_both_ends(context):
    for endpoint in (
        "tcp://0.0.0.0:5999",
        "tcp://*:5999",
        "tcp://[::]:5999",
        "tcp://192.0.2.1:5999",
        "tcp://host:5999",
    ):
        with pytest.raises(ConfigError, match="needs --keys"):
            sockets.Router(m.ToSchedulerFront, endpoint, None, context)
        with pytest.raises(ConfigError, match="needs --keys"):
            sockets.Dealer(m.FromSchedulerFront, endpoint, "x", None, context)
    for endpoint in ("ws://127.0.0.1:5", "udp://127.0.0.1:5", "inproc://x"):
        with pytest.raises(ConfigError, match="must look like"):
            sockets.Dealer(m.FromSchedulerFront, endpoint, "x", Keys.generate(), context)


def test_strangers_are_refused_and_harm_nobody(house, caplog):
    keys = Keys.generate()
    here = house(keys)
    friend = here.knock(keys)
    assert here.hears(friend)
    own = Keys.generate()
    strangers = [None, own, Keys(own.public, own.secret, server=keys.public)]  # plain; other keys; knows the server's
    wires = [here.knock(stranger) for stranger in strangers]
    for wire in wires:
        wire.send(m.Hello("frontend", "x", m.PROTOCOL, 1))
    _, port = here.router.endpoint.removeprefix("tcp://").rsplit(":", 1)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(200)):
        with socket.create_connection(("127.0.0.1", int(port))) as raw:
            raw.sendall(junk)
    for wire in wires:
        assert here.refuses(wire)
    assert here.hears(friend)
    assert "its key is not allowed" in caplog.text
    assert here.router.bad_frames == 0


def test_a_wrong_key_is_told_in_one_line(house, caplog):
    keys, own = Keys.generate(), Keys.generate()
    here = house(keys)
    # Refused by the list, ZeroMQ does not try again by itself; and each time it is refused is two events at most.
    for stranger, times in ((own, 4), (Keys(own.public, own.secret, server=keys.public), 1)):
        caplog.clear()
        wire = here.knock(stranger)
        for _ in range(times):
            assert here.refuses(wire)
        until = time.monotonic() + WAIT_S
        while wire.next_event() is not None or "trying again" not in caplog.text:
            assert time.monotonic() < until, caplog.text
            time.sleep(0.005)
        assert caplog.text.count("trying again") == 1, caplog.text
        sockets._not_let_in.clear()
        wire.close()


def test_keys_apart_let_in_who_is_listed_now(house, tmp_path):
    folder, (scheduler, one, two) = folder_of_keys(tmp_path, "one", "two")
    here = house(scheduler)
    first, second = here.knock(one), here.knock(two)
    assert here.hears(first) and here.hears(second)
    set_allowed(folder, ["scheduler", "two"])
    assert here.refuses(here.knock(one))  # its next connection
    assert here.hears(here.knock(two))
    generate_apart(folder, ["three"])
    assert here.hears(here.knock(Keys.load(f"{folder}/three.key")))
    assert here.refuses(here.knock(Keys.generate()))


def test_a_list_that_cannot_be_read_lets_nobody_new_in(house, tmp_path, caplog):
    folder, (scheduler, one) = folder_of_keys(tmp_path, "one")
    here = house(scheduler)
    friend = here.knock(one)
    assert here.hears(friend)
    os.chmod(f"{folder}/allowed", 0o644)
    assert here.refuses(here.knock(one))
    assert "chmod 600" in caplog.text and "Nobody new is let in" in caplog.text
    assert here.hears(friend)
    os.chmod(f"{folder}/allowed", 0o600)
    assert here.hears(here.knock(one))


def test_who_is_put_on_the_list_later_gets_in_by_itself(context, tmp_path, monkeypatch):
    monkeypatch.setattr(sockets, "REFUSED_S", 0.1)
    folder, (scheduler, one) = folder_of_keys(tmp_path, "one")
    path = Path(folder, "allowed")
    every = path.read_text()
    set_allowed(folder, ["scheduler"])

    async def run():
        router = sockets.Router(m.ToSchedulerFront, "tcp://127.0.0.1:*", scheduler, context)
        dealer = sockets.Dealer(m.FromSchedulerFront, router.endpoint, "one", one, context)
        events, heard = asyncio.Queue(), asyncio.Queue()
        router.attach(lambda peer, message: heard.put_nowait(message))
        dealer.attach(lambda message: None, events.put_nowait)
        try:
            for _ in range(4):  # refused twice: each is two events
                assert await asyncio.wait_for(events.get(), WAIT_S) == sockets.DISCONNECTED
            path.write_text(every)  # noqa: ASYNC240
            while await asyncio.wait_for(events.get(), WAIT_S) != sockets.CONNECTED:
                pass
            dealer.send(m.GetStats(token=5))
            assert await asyncio.wait_for(heard.get(), WAIT_S) == m.GetStats(token=5)
        finally:
            dealer.close()
            router.close()

    asyncio.run(run())


def test_one_pair_for_all_does_not_open_a_house_of_keys_apart(house, tmp_path):
    _, (scheduler, _) = folder_of_keys(tmp_path, "one")
    here = house(scheduler)
    assert here.refuses(here.knock(Keys.generate()))
    assert here.refuses(here.knock(None))


def test_a_listener_tells_its_own_key_with_its_address(house, tmp_path):
    _, (_, text, front) = folder_of_keys(tmp_path, "text", "front")
    here = house(text)  # a detokenizer: the frontend knows only the scheduler's key beforehand
    address = here.router.advertised()
    assert here.hears(here.knock(front, address))
    assert here.refuses(here.knock(front, here.router.endpoint))
    assert here.router.advertised("tcp://10.1.2.3:5").startswith("tcp://10.1.2.3:5 ")
    with pytest.raises(zmq.ZMQError):
        here.knock(front, here.router.endpoint + " nonsense")
    shared = house(Keys.generate(), endpoint="tcp://0.0.0.0:*")
    assert shared.router.advertised("tcp://10.1.2.3:5") == "tcp://10.1.2.3:5"
    with pytest.raises(ConfigError, match="--advertise"):
        shared.router.advertised()


def test_two_listeners_of_one_process_have_their_own_lists(house, tmp_path):
    keys = Keys.generate()
    _, (scheduler, one) = folder_of_keys(tmp_path, "one")
    shared, apart = house(keys), house(scheduler)
    assert shared.hears(shared.knock(keys)) and apart.hears(apart.knock(one))
    crossed = Keys(keys.public, keys.secret, server=scheduler.public)
    assert apart.refuses(apart.knock(crossed))


def test_keygen_makes_both_kinds(tmp_path, capsys):
    folder = tmp_path / "k"
    assert run(["keygen", str(folder), "--each", "worker-1", "frontend"]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(os.listdir(folder)) == ["allowed", "frontend.key", "scheduler.key", "worker-1.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    worker, scheduler = (Keys.load(str(folder / f"{name}.key")) for name in ("worker-1", "scheduler"))
    assert worker.server == scheduler.public == scheduler.server and not worker.shared
    before = (folder / "allowed").read_text()
    capsys.readouterr()
    for again, said in (("worker-1", "exists"), ("../up", "cannot name"), ("allowed", "cannot name")):
        assert run(["keygen", str(folder), "--each", "new", again]) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert (folder / "allowed").read_text() == before and not (folder / "new.key").exists()
    assert run(["keygen", str(folder), "--each", "worker-2"]) == 0
    assert len((folder / "allowed").read_text().splitlines()) == 4
    assert Keys.load(str(folder / "worker-2.key")).server == scheduler.public


@pytest.mark.parametrize("text", [
    "", "[]", "{}", '{"public": 1, "secret": 2}', '{"public": "a", "secret": "b"}', "\xff", '{"public": "a"}',
])  # fmt: skip
def test_a_file_that_is_no_key_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "k"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        Keys.load(str(path))
    assert "\n" not in str(caught.value)


def test_halves_of_two_pairs_are_no_key(tmp_path):
    one, two = Keys.generate(), Keys.generate()
    Keys(one.public, two.secret).save(str(tmp_path / "k"))
    with pytest.raises(ConfigError, match="do not fit"):
        Keys.load(str(tmp_path / "k"))


@pytest.mark.parametrize(("text", "said"), [
    ("w1\n", "not a name and a public key"), ("w1 short\n", "not a name and"), ("\xff\n", "cannot be read"),
    (None, "cannot be read"),
])  # fmt: skip
def test_a_list_that_is_wrong_from_the_start_is_refused(context, tmp_path, text, said):
    folder, (scheduler,) = folder_of_keys(tmp_path)
    if text is None:
        os.unlink(f"{folder}/allowed")
    else:
        with open(f"{folder}/allowed", "ab") as out:
            out.write(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=said):
        sockets.Router(m.ToSchedulerFront, "tcp://127.0.0.1:*", scheduler, context)


def test_a_lookup_that_fails_refuses_one_and_not_all(house, monkeypatch, caplog):
    keys = Keys.generate()
    here = house(keys)
    real = keys_module.z85.encode
    monkeypatch.setattr(keys_module.z85, "encode", lambda key: 1 / 0)
    assert here.refuses(here.knock(keys))
    assert "could not be looked up" in caplog.text
    monkeypatch.setattr(keys_module.z85, "encode", real)
    assert here.hears(here.knock(keys))
