"""The scheduler's lock on its address, and epochs that only rise."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from quire.proto.config import ConfigError, EngineArgs
from quire.scheduler import blame
from quire.scheduler.blame import Blame
from quire.scheduler.main import MAX_EPOCH, next_epoch, take_address


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineArgs:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return EngineArgs(scheduler=f"ipc://{tmp_path}/s")


def start(config: EngineArgs, now_ms: int = 1_700_000_000_000) -> int:
    lock = take_address(config)
    assert lock is not None
    epoch = next_epoch(lock, now_ms)
    Blame(lock).begin(7)  # which is written behind it
    os.close(lock)
    return epoch


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_epochs_rise_although_the_clock_goes_back(config: EngineArgs, scheme: str) -> None:
    if scheme == "tcp":
        config.scheduler = "tcp://127.0.0.1:5000"
    first = start(config)
    assert first == 1_700_000_000_000
    second, third = start(config, 1_000_000), start(config, 1_000_000)
    assert first < second < third
    other = EngineArgs(scheduler="tcp://127.0.0.1:6000")
    assert start(other, 1_000_000) == 1_000_000


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-5", b"9" * 30, str(MAX_EPOCH).encode(), b"\xff" * 99])
def test_a_broken_lock_file_is_no_obstacle(config: EngineArgs, content: bytes) -> None:
    start(config)
    assert config.scheduler is not None
    Path(config.scheduler.removeprefix("ipc://"), "scheduler.lock").write_bytes(content)
    assert start(config) == 1_700_000_000_000


def test_one_scheduler_at_an_address(config: EngineArgs) -> None:
    lock = take_address(config)
    assert lock is not None
    with pytest.raises(ConfigError, match="another scheduler serves"):
        take_address(config)
    os.close(lock)
    start(config)


def test_without_a_run_folder_the_clock_decides(
    config: EngineArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert take_address(EngineArgs(scheduler="tcp://127.0.0.1:5000")) is None
    assert next_epoch(None, 1_000_000) == 1_000_000


def test_a_full_disk_is_no_obstacle(
    config: EngineArgs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To write into shared memory that the disk has no room for would end the process by a signal."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(blame, "mmap", None)  # not used
    start(config)
    assert caplog.text.count("No space left on device") == 2


def test_what_one_scheduler_writes_of_a_request_another_version_reads(tmp_path: Path) -> None:
    """Byte by byte: behind the epoch whether one is being taken in, and its uid; then uid and deaths of 32."""
    path = tmp_path / "lock"
    deaths = [(uid, 2) for uid in range(100, 132)]
    path.write_bytes(
        b"1".ljust(64, b"\0") + b"".join(struct.pack("<qq", *pair) for pair in [(1, 7), *deaths, (200, 2)])
    )
    lock = os.open(path, os.O_RDWR)
    found = Blame(lock)
    assert (found.last, found.losses(7).count, found.losses(200).count) == (7, 1, 0)
    assert [found.losses(uid).count for uid, _ in deaths] == [2] * 32
    left = [*deaths[1:], (7, 1)]  # the latest stands last, and the first makes room for it
    for busy in ((0, 0), (1, 9)):
        data = path.read_bytes()[64 : 64 + 33 * 16]
        assert list(struct.iter_unpack("<qq", data)) == [busy, *left]
        found.begin(9)
    os.close(lock)
