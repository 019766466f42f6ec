"""The scheduler's own key: with another process's it would wait for ever for peers who look for its own."""

from pathlib import Path

import pytest

from quire.proto.config import ConfigError, EngineArgs
from quire.proto.wire.keys import generate_apart
from quire.scheduler.blame import Blame
from quire.scheduler.loop import Loop


def test_another_process_s_key_is_refused(tmp_path: Path) -> None:
    generate_apart(str(tmp_path / "keys"), ["gpu1"])
    wrong = str(tmp_path / "keys" / "gpu1.key")
    with pytest.raises(ConfigError, match=r"gpu1\.key is the key of another process.* scheduler\.key"):
        Loop(EngineArgs(scheduler="tcp://127.0.0.1:1", keys=wrong), 1, Blame())
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    Loop(EngineArgs(scheduler=f"ipc://{folder}", keys=wrong), 1, Blame()).close()  # there it is not used
