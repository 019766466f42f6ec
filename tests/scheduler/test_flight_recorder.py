"""A recording, replayed, gives the same plans, from its start or from where its ring begins, and holds no secrets."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest
from flight_requests import submits
from recorded_world import RecordedWorld

from quire.cli.main import run
from quire.proto.codec import from_i32, i32
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import PROTOCOL, Hello, Lease, Logprobs, StepPlan, StepResult
from quire.proto.process import EXIT_CONFIG
from quire.scheduler.core import Scheduler
from quire.scheduler.fake.fake_worker import FakeWorker
from quire.scheduler.membership import Membership
from quire.scheduler.recorder import Recorder, TurnClock
from quire.scheduler.recording import FORMAT, HEAD, MAGIC, SEGMENTS, Ring
from quire.scheduler.replay import Replay


def replayed(path: Path) -> tuple[int, Replay]:
    """Replay; how many plans came out, all of them the same."""
    plans, replay = 0, Replay(str(path))
    for turn in replay.turns():
        assert not turn.different, (turn.different, turn.lines)
        plans += len(turn.plans)
    return plans, replay


def recorded(path: Path, seed: int = 3, megabytes: float = 8, tokens: bool = False) -> RecordedWorld:
    """A history that was recorded from its beginning to its end."""
    world = RecordedWorld(seed, path, megabytes, tokens)
    world.run()
    world.recorder.close()
    return world


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_random_histories(part: int, tokens: bool, tmp_path: Path) -> None:
    total = 0
    for seed in range(part * 15, part * 15 + 15):
        recorded(tmp_path / "r", seed, 8, tokens)
        plans, replay = replayed(tmp_path / "r")
        assert replay.whole and replay.ended == "the scheduler ended"
        total += plans
    assert total > 100


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("seed", range(200, 208))
def test_a_ring_that_has_wrapped(seed: int, tokens: bool, tmp_path: Path) -> None:
    """It begins with the state at some moment, whatever was going on then."""
    world = RecordedWorld(seed, tmp_path / "r", 0.1, tokens)
    while world.ring.number <= SEGMENTS + 1:
        world.run()
    world.recorder.close()
    plans, replay = replayed(tmp_path / "r")
    assert plans and not replay.whole


def test_the_file_of_a_killed_scheduler(tmp_path: Path) -> None:
    """What was written is there, whatever the last thing written: nobody closed it."""
    path = tmp_path / "r"
    world = RecordedWorld(5, path, 1)
    world.run()
    plans, replay = replayed(path)
    assert plans and "killed" in replay.ended
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    world.recorder.close()


def test_a_torn_record(tmp_path: Path) -> None:
    """Cut at every record's beginning and within: what stands before is replayed, what is torn is not."""
    path = tmp_path / "r"
    recorded(path, 5, 0.5)
    data = bytearray(path.read_bytes())
    at, before, starts = HEAD + 8, 0, []
    while (length := struct.unpack_from("<I", data, at)[0]) > 0:
        starts.append((at, length))
        at += 8 + length
    assert len(starts) > 20
    for start, length in starts[:: max(1, len(starts) // 15)]:
        for cut in (start, start + 3, start + 8, start + 8 + length // 2, start + 7 + length):
            path.write_bytes(data[:cut] + bytes(len(data) - cut))
            if start == HEAD + 8:
                assert run(["replay", str(path)]) == EXIT_CONFIG
                continue
            plans, replay = replayed(path)
            assert plans >= before
            whole = bytes(data[start:cut]).ljust(8 + length, b"\0") == data[start : start + 8 + length]
            assert ("middle of a record" in replay.ended) is (any(data[start:cut]) and not whole)
            before = plans if cut == start else before


def test_files_that_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r"
    recorded(path, 5, 0.5)
    data = path.read_bytes()
    head = len(MAGIC)
    damaged = bytearray(data)
    damaged[head + 20] ^= 1
    cases = [
        (b"", "is no flight recording"),
        (b"hello" * 5000, "is no flight recording"),
        (data[: head + 2], "is no flight recording"),
        (data[: head + 8], "is cut off or damaged"),
        (bytes(damaged), "is cut off or damaged"),
        (data[:HEAD], "is cut off"),
        (data[:-1], "is cut off"),
        (data[: len(data) // 2], "is cut off"),
        (data[:HEAD] + bytes(len(data) - HEAD), "holds nothing"),
        (MAGIC + struct.pack("<I", FORMAT + 1) + data[head + 4 :], f"has format {FORMAT + 1}"),
    ]
    for content, line in cases:
        path.write_bytes(content)
        assert run(["replay", str(path)]) == EXIT_CONFIG
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1, (line, said)
    assert run(["replay", str(tmp_path / "none")]) == EXIT_CONFIG
    assert "cannot read" in capsys.readouterr().err


def test_the_file_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.scheduler.recording.__version__", "99.0")
    recorded(tmp_path / "r", 5, 0.5)
    monkeypatch.undo()
    assert run(["replay", str(tmp_path / "r")]) == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "quire 99.0" in said and said.count("\n") == 1


def test_a_plan_that_is_different(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    recorded(tmp_path / "r", 5)
    monkeypatch.setattr("quire.scheduler.planner.LOOKAHEAD", 64)  # changes nothing
    assert run(["replay", str(tmp_path / "r")]) == 0
    assert "the same" in capsys.readouterr().out
    admit = Scheduler.submit
    monkeypatch.setattr(Scheduler, "submit", lambda self, owner, message: admit(
        self, owner, message) if message.uid != 1 else None)  # fmt: skip
    assert run(["replay", str(tmp_path / "r")]) == 1
    assert "DIFFERENT in turn" in capsys.readouterr().out


def test_lines_of_a_step_and_of_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "r", 5, 8, True)
    assert run(["replay", str(tmp_path / "r"), "--from-step", "2", "--steps", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(": step 2 of lease" in line for line in lines)
    assert len([line for line in lines if ": step " in line]) <= 3  # of every worker in that turn
    assert run(["replay", str(tmp_path / "r"), "--request", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("submit 1:" in line for line in lines) and any("admit 1.0 " in line for line in lines)
    assert not any("submit 2:" in line for line in lines)


def test_the_recording_before_is_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "r")
    Ring(path, 1, False).close()
    first = Path(path).read_bytes()
    Ring(path, 1, True).close()
    assert Path(path + ".1").read_bytes() == first != Path(path).read_bytes()
    (tmp_path / "letter").write_text("Dear all")
    with pytest.raises(ConfigError, match="is no recording"):
        Ring(str(tmp_path / "letter"), 1, False)
    with pytest.raises(ConfigError, match="cannot record into"):
        Ring(str(tmp_path / "no" / "folder"), 1, False)


def test_a_ring_too_small_for_the_state(tmp_path: Path) -> None:
    membership = Membership(Scheduler(EngineArgs()), 1)
    ring = Ring(str(tmp_path / "r"), 1, False)
    ring.size = 100
    with pytest.raises(ConfigError, match="--flight-recorder-size is too small"):
        Recorder(membership, ring, TurnClock(), False)


VOCAB = 2**30
SECRETS = ["sk-very-secret", "STOPHERE", "BADWORD", "SCHEMA"]


class Secretive:
    """Requests whose tokens, text and keys are easy to find again. Every token is a number above 2^28."""

    def __init__(self, path: Path, tokens: bool):
        self.core = Scheduler(EngineArgs(block_size=8, max_num_seqs=6, max_num_batched_tokens=40))
        clock = self.core.clock = TurnClock()
        self.inputs = Recorder(Membership(self.core, 1), Ring(str(path), 1, tokens), clock, tokens)
        self.worker = FakeWorker(40, 200, VOCAB)
        self.tokens: set[int] = set()
        self.plans: list[StepPlan] = []
        self.next = 2**28
        self.inputs.front("d", Hello("detokenizer", "d", PROTOCOL, 1))
        self.inputs.worker("w", self.worker.hello("w"))
        for _ in range(2):
            self.turn()

    def token(self) -> int:
        self.next += 7919 * 31
        self.tokens.add(self.next)
        return self.next

    def turn(self) -> None:
        self.inputs.notice()
        self.inputs.tick()
        self.inputs.plans()
        for _, message in self.inputs.to_workers():
            if isinstance(message, StepPlan):
                self.plans.append(message)
            else:
                for answer in self.worker.handle(message):
                    self.inputs.worker("w", answer)
        self.inputs.to_front()

    def run(self, ends: dict[int, int] | None = None) -> None:
        """The oldest plan runs; slot k draws ``ends[k]``."""
        plan = self.plans.pop(0)
        replica = next(iter(self.core.replicas.values()))
        slots = [slot[0] for slot in replica.in_flight[0].slots()]
        drawn = [(ends or {}).get(at) or self.token() for at in range(len(slots))]
        asked = [at for at, seq in enumerate(slots) if seq.width > 1]
        records = []
        for _ in asked:
            values = [-1.0, -2.0, -2.0, -2.0]
            best = sorted(self.token() for _ in values)
            records.append(Logprobs(i32([self.token(), *best]), struct.pack("<5f", -1.0, *values), i32([1])))
        lease = Lease(plan.lease.epoch, plan.lease.replica, plan.lease.counter)
        result = StepResult(lease, plan.step, i32(drawn), logprob_slots=i32(asked), logprobs=records)
        self.inputs.worker("w", result)


@pytest.mark.parametrize("tokens", [False, True])
def test_no_token_text_or_key_is_in_the_file(tokens: bool, tmp_path: Path) -> None:
    world = Secretive(tmp_path / "r", tokens)
    stops = [world.token() for _ in range(3)]
    requests = submits([[world.token() for _ in range(20)] for _ in range(4)], stops, world.token, SECRETS)
    for message in requests:
        world.inputs.front("d", message)
    for number in range(12):
        world.turn()
        if number == 6:
            assert world.inputs._begin(b"")  # a snapshot while all of them run
        world.run({0: stops[1]} if number == 4 else None)
    world.turn()
    assert not world.core.bad_messages
    world.inputs.close()
    plans, replay = replayed(tmp_path / "r")
    assert plans > 3 and replay.tokens is tokens
    data = (tmp_path / "r").read_bytes()
    for secret in SECRETS if not tokens else SECRETS[:1]:
        assert secret.encode() not in data
    found = [t for t in world.tokens if any(p in data for p in (i32([t]), struct.pack(">I", t), str(t).encode()))]
    assert bool(found) is tokens
    assert set(from_i32(requests[0].ids)) <= world.tokens
