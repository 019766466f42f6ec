"""The files of an adapter's folder, and what tells one adapter from another."""

from __future__ import annotations

from hashlib import blake2b, file_digest
from pathlib import Path

from ..config_error import ConfigError
from ..hashing import HASH_SIZE

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_digest(folder: str | Path) -> bytes:
    """16 bytes that are the same only for the same configuration and weights. Reads both files whole.

    Raises ConfigError where one cannot be read.
    """
    found = blake2b(digest_size=HASH_SIZE, person=b"adapter files")
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        path = Path(folder) / name
        try:
            with path.open("rb") as file:
                found.update(file_digest(file, lambda: blake2b(digest_size=HASH_SIZE)).digest())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}; an adapter has both files.") from None
    return found.digest()
