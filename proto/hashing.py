"""Chained block hashes for prefix caching.

The hash of a full block covers its parent's hash and its tokens, so equal hashes mean equal prefixes: 128 bits of
BLAKE2b, which is cryptographic and the fastest in the standard library. Prompts' hashes are made by the detokenizer,
off the scheduler's core; those of blocks that fill while decoding by the scheduler.

Whatever else makes equal token ids mean different keys and values, or must keep them apart, goes into the root, the
parent of a first block, and through the chain into every hash: ``root_of`` is the one place for it.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

HASH_SIZE = 16
ROOT = bytes(HASH_SIZE)
_EMPTY = blake2b(digest_size=HASH_SIZE)
"""A hash of nothing. To copy it is quicker than to make one, which reads a dozen arguments."""


def root_of(cache_salt: str, adapter: bytes = b"", embeds: bytes = b"") -> bytes:
    """The parent of a request's first block. Requests share cached blocks only where their salts are equal, and their
    adapters: ``adapter`` is the digest of its files, so another adapter of the same name or path is another. Prompts of
    embeddings, whose digest ``embeds`` is, share blocks with those of all the same embeddings."""
    root = blake2b(cache_salt.encode(), digest_size=HASH_SIZE, person=b"cache salt").digest() if cache_salt else ROOT
    root = blake2b(root + adapter, digest_size=HASH_SIZE, person=b"adapter").digest() if adapter else root
    return blake2b(root + embeds, digest_size=HASH_SIZE, person=b"embeds").digest() if embeds else root


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """The 16-byte hash of a full block; ``tokens`` are its int32 bytes, ``parent`` the previous block's hash."""
    made = _EMPTY.copy()
    made.update(parent + tokens)
    return made.digest()


def noting(made: list[bytes]) -> Callable[[bytes, bytes], bytes]:
    """A ``hash_block`` that also adds to ``made`` what it makes."""

    def noted(parent: bytes, tokens: bytes) -> bytes:
        made.append(digest := hash_block(parent, tokens))
        return digest

    return noted


def hash_blocks(ids: bytes, block_size: int, root: bytes = ROOT) -> list[bytes]:
    """Hashes of every full block of ``ids`` (int32 bytes), in order."""
    step = 4 * block_size
    hashes, parent = [], root
    for start in range(0, len(ids) - step + 1, step):
        parent = hash_block(parent, ids[start : start + step])
        hashes.append(parent)
    return hashes
