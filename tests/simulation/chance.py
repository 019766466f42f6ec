"""Draws that do not depend on one another: each is a hash of what it is for, and of how many came before it there.

A history that is shrunk leaves out requests and faults; what is drawn for the rest must stay as it was, so nothing is
taken from one stream that all share.
"""

from __future__ import annotations

import zlib

MASK = 0xFFFFFFFF
SCALE = 2.0**-32


def key(*names: object) -> int:
    """32 bits of the names of something."""
    return zlib.crc32("\0".join(map(str, names)).encode())


def bits(key: int, count: int) -> int:
    """32 bits that look like chance: draw number ``count`` of ``key``."""
    x = (key + count * 0x9E3779B9) & MASK
    x = ((x ^ x >> 16) * 0x21F0AAAD) & MASK
    x = ((x ^ x >> 15) * 0x735A2D97) & MASK
    return x ^ x >> 15


def draw(key: int, count: int) -> float:
    """The same as a number from 0 to 1, without 1."""
    return bits(key, count) * SCALE


class Draws:
    """One stream of draws, of its own."""

    __slots__ = ("_count", "_key")

    def __init__(self, *names: object):
        self._key, self._count = key(*names), 0

    def __call__(self) -> float:
        """From 0 to 1, without 1."""
        self._count += 1
        return bits(self._key, self._count) * SCALE

    def below(self, count: int) -> int:
        """A whole number from 0 to ``count`` - 1."""
        return int(self() * count)
