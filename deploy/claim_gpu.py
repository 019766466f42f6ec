"""Give each worker container a GPU of its own: ``claim_gpu.py COMMAND…`` takes a free one and becomes the command.
``claim_gpu.py --check`` says whether there is any.

Every replica of a compose service is given the same list of GPUs. A lock on a file in a volume they share says which
of them are taken; it ends with the process that holds it, however that ended.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

CLAIMS = Path(os.environ.get("QUIRE_GPU_CLAIMS", "/claims"))
DEVICES = Path("/dev")
EXIT_CONFIG = 78


def devices(folder: Path) -> list[int]:
    """Numbers of the NVIDIA devices in ``folder``."""
    return sorted(int(found[1]) for entry in folder.iterdir() if (found := re.fullmatch(r"nvidia(\d+)", entry.name)))


def claim(count: int, claims: Path) -> int | None:
    """The first of ``count`` GPUs that nobody has taken, taken now and until this process ends; None if there is none.

    The descriptor outlives ``exec``.
    """
    for number in range(count):
        fd = os.open(claims / f"gpu-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        os.set_inheritable(fd, True)
        return number
    return None


def _die(message: str) -> NoReturn:
    """As quire's own processes do (``die`` in proto/process.py)."""
    print(line := f"quire.gpu_worker: error: {message}", flush=True)
    if told := os.environ.get("QUIRE_FAILURE"):
        Path(told).write_text(line, "utf-8")
    time.sleep(int(os.environ.get("QUIRE_RETRY_AFTER", "0")))
    sys.exit(EXIT_CONFIG)


def main(command: list[str]) -> None:
    """Become ``command`` with a GPU of its own, or end with code 78 where there is none, or none is left."""
    count = len(devices(DEVICES))
    if count == 0:
        _die(
            f"this container sees no NVIDIA GPU in {DEVICES}; install the NVIDIA container toolkit, or serve on the "
            "CPU: `docker compose --profile cpu up`."
        )
    if command == ["--check"]:
        return
    number = claim(count, CLAIMS)
    if number is None:
        _die(f"all {count} GPUs here are taken; scale gpu_worker_cuda to {count} at most.")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
