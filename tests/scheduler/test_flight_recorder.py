"""A recording, replayed, gives the same plans, from its start or from where its ring begins, and holds no secrets."""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from pathlib import Path

import msgspec
import pytest
from flight_requests import submits
from recorded_world import RecordedWorld

from quire.cli.main import run
from quire.proto.codec import from_i32, i32, i64
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import (
    PROTOCOL,
    Hello,
    Lease,
    Logprobs,
    StepPlan,
    StepResult,
    TokenBatch,
)
from quire.proto.process import EXIT_CONFIG
from quire.proto.work import Generate
from quire.scheduler.core import Scheduler
from quire.scheduler.fake.fake_worker import FakeWorker
from quire.scheduler.membership import Membership
from quire.scheduler.recorder import Recorder, TurnClock, open_ring
from quire.scheduler.recording import FORMAT, HEAD, MAGIC, SEGMENTS, RecordingError, Ring
from quire.scheduler.replay import Replay
from quire.scheduler.snapshot import SnapshotError, load


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
    world = RecordedWorld(seed, tmp_path / "r", 0.15, tokens)
    while world.ring.number <= SEGMENTS + 1:
        world.run()
        assert world.recorder._on
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
    for start, length in [starts[0], *starts[2 :: len(starts) // 15]]:  # the second is read with the first
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


def test_a_record_that_is_damaged_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorded(path, 5, 0.5)
    data = bytearray(path.read_bytes())
    second = HEAD + 16 + struct.unpack_from("<I", data, HEAD + 8)[0]
    data[second + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordingError, match="is damaged in segment 1"):
        Replay(str(path))


def test_what_is_no_plain_file_or_too_long_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe would keep its reader waiting, and a file of a TB would fill the memory."""
    path = tmp_path / "r"
    recorded(path, 5, 0.5)
    os.truncate(path, 2**40)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "letter").touch()
    os.truncate(tmp_path / "letter", 2**40)
    for name, line in (("r", "is cut off"), ("pipe", "no plain file"), ("letter", "is no flight"), (".", "directory")):
        assert run(["replay", str(tmp_path / name)]) == EXIT_CONFIG
        said = capsys.readouterr().err
        assert line in said and said.count("\n") == 1, said
    with pytest.raises(ConfigError, match="is no recording"):
        Ring(str(tmp_path / "pipe"), 1, False)


@pytest.mark.parametrize(
    "table",
    [
        [["object", "scheduler.block_pool:BlockPool", {"refs": [2**40, 0], "_by_hash": ["at", 1]}], ["dict", [], []]],
        [["tuple", [["at", 0]]]],
        [["list", [["enum", "scheduler.replay:Replay", "/etc/passwd"]], None]],
        [["list", [["struct", "scheduler.replay:Replay", msgspec.msgpack.encode({"path": "/etc/passwd"})]], None]],
        [["list", [["outside", "nothing"]], None]],
    ],
)
def test_a_state_made_up_by_somebody(table: list[object]) -> None:
    """It fills no memory, goes round in no circle, and runs no code of a class of ours."""
    with pytest.raises(SnapshotError):
        load(msgspec.msgpack.encode(table), {})


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


@pytest.mark.parametrize("name", ["submit", "plan", "commit"])
def test_an_exception_that_ended_the_scheduler_comes_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = getattr(Scheduler, name)

    def fails(self: Scheduler, *args: object) -> object:
        if self.steps == 4:
            raise RuntimeError("of all things")
        return before(self, *args)

    world = Secretive(tmp_path / "r", False)
    first, second = submits([[7] * 20] * 4, [5], world.token, SECRETS)[2:]
    monkeypatch.setattr(Scheduler, name, fails)
    world.inputs.front("d", first)
    with pytest.raises(RuntimeError):
        for _ in range(9):
            world.turn()
            world.run()
            if world.core.steps == 4:
                world.inputs.front("d", second)
    world.inputs.close()
    assert run(["replay", str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert "the scheduler ended by RuntimeError: of all things" in said and "Traceback" in said
    monkeypatch.undo()
    _, replay = replayed(tmp_path / "r")  # mended
    assert "RuntimeError" not in replay.ended


def test_an_exception_that_did_not_come_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "r", 5)
    monkeypatch.setattr("quire.scheduler.planner._plan_chunk", None)
    found = [turn.different for turn in Replay(str(tmp_path / "r")).turns() if turn.different]
    assert "TypeError" in found[0] and "where the recording goes on" in found[0]


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


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start says so. A later one serves without, and what is there stays as it is."""

    def full(handle: int, at: int, size: int) -> None:
        os.truncate(handle, size)
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "r"
    config = EngineArgs(flight_recorder=str(path), flight_recorder_size=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match="No space left"):
            open_ring(config)
        assert not list(tmp_path.iterdir())
    Ring(str(path), 1, False).close()
    before = path.read_bytes()
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        assert open_ring(config) is None
        assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_a_file_beside_it_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "r"
    Ring(str(path), 1, False).close()
    (tmp_path / "r.1").write_text("Dear all")
    with pytest.raises(ConfigError, match=r"r\.1 exists and is no recording"):
        Ring(str(path), 1, False)
    (tmp_path / "new").touch()  # as mktemp makes one
    Ring(str(tmp_path / "new"), 1, False).close()
    assert not (tmp_path / "new.1").exists()


def test_a_size_without_end() -> None:
    with pytest.raises(ConfigError, match="flight_recorder_size"):
        EngineArgs(flight_recorder_size=float("inf")).check()


def test_a_ring_too_small_for_the_state(tmp_path: Path) -> None:
    clock = TurnClock(lambda: 0.0)
    membership = Membership(Scheduler(EngineArgs(), clock), 1)
    ring = Ring(str(tmp_path / "r"), 1, False)
    ring.size = 100
    with pytest.raises(ConfigError, match="--flight-recorder-size is too small"):
        Recorder(membership, ring, clock, False)


VOCAB = 2**30
SECRETS = ["sk-very-secret", "STOPHERE", "BADWORD", "SCHEMA"]


class Secretive:
    """Requests whose tokens, text and keys are easy to find again. Every token is a number above 2^28."""

    def __init__(self, path: Path, tokens: bool):
        clock = TurnClock(time.monotonic)
        self.core = Scheduler(EngineArgs(block_size=8, max_num_seqs=6, max_num_batched_tokens=40), clock)
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


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_message_that_did_not_arrive(tokens: bool, over: bool, tmp_path: Path) -> None:
    """``over``: a segment has begun since it was sent."""
    world = Secretive(tmp_path / "r", tokens)
    for message in submits([[world.token() for _ in range(20)] for _ in range(4)], [5], world.token, SECRETS):
        world.inputs.front("d", message)
    for _ in range(6):
        world.turn()
        world.run()
    (lost,) = world.inputs.to_front()
    if over:
        assert world.inputs._begin(b"")
    world.inputs.undelivered(*lost)
    assert list(world.core.requests) == [4]  # the beam search had no token in it
    world.turn()
    world.inputs.close()
    plans, _ = replayed(tmp_path / "r")
    assert plans > 3


@pytest.mark.parametrize("tokens", [False, True])
def test_what_was_refused_is_refused_again(tokens: bool, tmp_path: Path) -> None:
    """No id is in the file, so what the scheduler thought of them must be."""
    world = Secretive(tmp_path / "r", tokens)
    requests = submits([[world.token() for _ in range(20)] for _ in range(4)], [5, 6, 7], world.token, SECRETS)
    requests[0].ids = i32([VOCAB] * 20)
    requests[1].children[0].ids = i32([-1])
    requests[2].work = Generate(requests[2].work.params, 1, [], bad_words=[[]])
    for message in requests:
        world.inputs.front("d", message)
    world.turn()
    assert list(world.core.requests) == [4] and world.core.bad_messages == 1
    world.run({0: VOCAB})  # whose worker is expelled
    assert not world.inputs.registry.workers
    world.turn()
    world.inputs.undelivered("d", TokenBatch(i64([4]), *[b""] * 7))
    assert not world.core.requests
    world.turn()
    world.inputs.close()
    lines = []
    for turn in Replay(str(tmp_path / "r")).turns():
        assert not turn.different
        lines += turn.lines
    assert sum("failed: uid" in line for line in lines) == 3
    assert any("this worker's lease" in line for line in lines) and "! TokenBatch did not reach d" in lines
