"""What a worker does before it imports anything else; so nothing is imported here that takes time itself."""

from __future__ import annotations

import os

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
