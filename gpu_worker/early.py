"""What a worker does before it imports anything else; so nothing is imported here that takes time itself."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from pathlib import Path

ENVIRONMENT = {
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "OMP_WAIT_POLICY": "passive",
    "OPENBLAS_NUM_THREADS": "1",  # numpy's; it multiplies nothing here
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""OpenMP's threads sleep between parallel regions (``device.py`` has what that is worth). It reads this once, when
torch's libraries are opened."""


def set_environment() -> None:
    """Set ENVIRONMENT, but for what the user has set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def open_torch() -> None:
    """Let a thread open torch's libraries while this one imports Python modules.

    The system needs a fifth of a second to map, relocate and initialise them, and not Python's lock. ``import torch``
    then finds them open. Where they cannot be opened so, it opens them itself, and says what is wrong.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0], "lib")
        threading.Thread(target=_open, args=(folder,), name="libraries", daemon=True).start()


def _open(folder: Path) -> None:
    """In torch's own order and modes."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libtorch_python.so"))
