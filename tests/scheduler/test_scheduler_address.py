"""The scheduler's lock on its address, and epochs that only rise."""

from __future__ import annotations

import errno
import os
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
