"""Chained block hashes for prefix caching.

The hash of a full block covers its parent's hash, its tokens and a salt, so equal hashes mean equal prefixes: 128 bits
of BLAKE2b, which is cryptographic and the fastest in the standard library. The salt is for what else keys and values
may depend on; nothing gives one yet, so all requests of a deployment share what is cached. Prompts' hashes are made by
the detokenizer, off the scheduler's core.
"""

from __future__ import annotations

from hashlib import blake2b

HASH_SIZE = 16
ROOT = bytes(HASH_SIZE)


def hash_block(parent: bytes, tokens: bytes, salt: bytes = b"") -> bytes:
    """The 16-byte hash of a full block; ``tokens`` are its int32 bytes, ``parent`` the previous block's hash."""
    return blake2b(parent + tokens + salt, digest_size=HASH_SIZE).digest()


def hash_blocks(ids: bytes, block_size: int, salt: bytes = b"", parent: bytes = ROOT) -> list[bytes]:
    """Hashes of every full block of ``ids`` (int32 bytes), in order."""
    step = 4 * block_size
    hashes = []
    for start in range(0, len(ids) - step + 1, step):
        parent = hash_block(parent, ids[start : start + step], salt)
        hashes.append(parent)
    return hashes
