"""Scheduler here, worker there, tcp with CURVE between: what is let in, and what a cut wire does to open streams."""

import json
import os
import select
import subprocess
import time
from pathlib import Path

import pytest

from quire.proto.wire.keys import Keys, generate_apart

from . import net

REASON = net.missing() or (None if os.environ.get("QUIRE_TEST_NETNS") else "75 s of cut wires; set QUIRE_TEST_NETNS=1")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

STREAMS, TOKENS = 12, 120
PORT = 5600
URL = "http://127.0.0.1:8000"
DRIVER = str(Path(__file__).with_name("streams.py"))


class House(net.Net):
    """scheduler and frontend here, a worker there, the detokenizer on either side; a key for each."""

    def __init__(self, folder, text_is_there=False, **wire):
        super().__init__(folder, **wire)
        self.address = f"tcp://{net.HERE}:{PORT}"
        self.keys = self.folder / "keys"
        generate_apart(str(self.keys), ["detokenizer", "frontend", "worker"])
        self.scheduler = self.service(self.here, "scheduler", *self.flags("scheduler"), "--worker-timeout=8")
        side, host = (self.there, net.THERE) if text_is_there else (self.here, net.HERE)
        bind = f"--bind=tcp://{host}:5610"
        self.service(side, "detokenizer", *self.flags("detokenizer"), bind)
        self.service(self.here, "frontend", *self.flags("frontend"), "--host=127.0.0.1", "--port=8000")

    def flags(self, name):
        return [f"--scheduler={self.address}", f"--keys={self.keys}/{name}.key"]

    def worker(self, *flags):
        flags = flags or tuple(self.flags("worker"))
        return self.service(self.there, "gpu_worker", *flags, "--device=cpu", "--num-gpu-blocks-override=512")

    def run(self, between=None):
        """What STREAMS streams say; ``between`` is called with their process when all have begun."""
        driver = self.start(self.here, DRIVER, URL, str(STREAMS), str(TOKENS), stdout=subprocess.PIPE, text=True)
        try:
            assert driver.stdout.readline() == "flowing\n"
            if between is not None:
                between(driver)
            line = driver.stdout.readline()
            driver.wait(60)
            return json.loads(line)
        except BaseException:
            print(self.logs())
            raise

    def until_log(self, process, words, wait=60.0):
        deadline = time.monotonic() + wait
        while words not in process.log.read_text():
            assert time.monotonic() < deadline, f"{words!r} was never said:\n{self.logs()}"
            time.sleep(0.05)

    def run_cut(self, seconds, expected):
        """Streams that are open while the wire is cut say what is expected. If they were too quick for that, again."""
        open_still = []

        def cut(driver):
            self.cut()
            select.select([driver.stdout], [], [], seconds)
            self.mend()
            open_still.append(driver.poll() is None)

        while not any(open_still):
            assert len(open_still) < 5, "the streams had ended before the wire was cut, five times"
            assert self.run(cut) == expected


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("veth"))
    yield house
    house.close()


@pytest.fixture(scope="module")
def undisturbed(house):
    """What every stream is when nothing happens."""
    house.worker()
    found = house.run()
    assert len(found) == STREAMS
    for got in found.values():
        assert "error" not in got and got["finish"] == "length", got
        assert len(got["tokens"]) == got["usage"]["completion_tokens"] == TOKENS
    return found


def one_line(process, code=78):
    assert process.wait(60) == code
    text = process.log.read_text()
    lines = [line for line in text.splitlines() if "error:" in line]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def test_without_keys_it_is_refused_in_one_line(house):
    refused = [
        house.service(house.there, "scheduler", f"--scheduler=tcp://{net.THERE}:5600"),
        house.worker(f"--scheduler={house.address}"),
    ]
    for process in refused:
        assert "is off loopback and needs --keys" in one_line(process)


def test_with_other_keys_nothing_joins(house):
    other = house.folder / "other.key"
    Keys.generate().save(str(other))  # its own idea of the scheduler's key
    known = json.loads((house.keys / "worker.key").read_text())["server"]
    stranger = Keys.generate()
    forged = house.folder / "forged.key"
    Keys(stranger.public, stranger.secret, known.encode(), "allowed").save(str(forged))  # knows the scheduler's key
    workers = [house.worker(f"--scheduler={house.address}", f"--keys={path}") for path in (other, forged)]
    house.until_log(workers[0], "as when they are not the same")
    house.until_log(workers[1], "this process's key is not allowed there")
    house.until_log(house.scheduler, f"refused a connection from '::ffff:{net.THERE}'")
    for worker in workers:
        assert worker.poll() is None
        worker.terminate()
        worker.wait(60)
    assert "joins" not in house.scheduler.log.read_text()


def test_it_works_with_keys(house, undisturbed):
    assert undisturbed["1"]["text"] != undisturbed["3"]["text"]


def test_a_cut_of_ten_seconds_loses_nothing(house, undisturbed):
    house.run_cut(10, undisturbed)


def test_a_slow_lossy_wire_cut_in_silence_with_the_detokenizer_beyond_it(undisturbed, tmp_path):
    """Long enough that both sides give their connections up, and make them anew."""
    far = House(tmp_path, text_is_there=True, delay_ms=50, loss=0.01)
    try:
        worker = far.worker()
        far.run_cut(14, undisturbed)
        assert "saying Hello again" in worker.log.read_text()
        assert far.scheduler.log.read_text().count("joins as replica") == 2
    finally:
        far.close()
