"""The worker link where blocks are kept outside of the device's cache: what is to be moved, and what came of it.

A block is named by its hash. ``slot`` is a place in the worker's host memory, which the scheduler gives out; files on
the worker's disk have no places. Sent only where a worker has such tiers.
"""

from __future__ import annotations

from .base import Message
from .plans import Lease


class Tiers(Message):
    """worker -> scheduler, before Ready: it keeps blocks outside of the device's cache."""

    lease: Lease
    slots: int  # in host memory; 0: none
    disk: bool  # it writes to disk what is to be kept there
    block_bytes: int  # of one block, in all of its processes


class Move(Message):
    """scheduler -> the group's leader, in one order with plans: what a plan sent later writes over is stored first.

    Blocks that are loaded belong to nobody until they are there: other plans run meanwhile. Each Move is answered by
    one Moved of its number, in any order.
    """

    lease: Lease
    number: int  # from 1
    store_blocks: bytes = b""  # i32
    store_slots: bytes = b""  # i32; -1: to no place in host memory
    store_files: bytes = b""  # i8; 1: to disk as well
    store_hashes: bytes = b""  # 16 bytes each
    load_blocks: bytes = b""  # i32
    load_slots: bytes = b""  # i32; -1: from disk
    load_hashes: bytes = b""  # 16 bytes each


class Moved(Message):
    """worker -> scheduler: a Move is done, or, with ``number`` 0, something has become of files.

    What is written to disk is told when it is there, which may be long after its Move: each hash of ``store_files`` is
    in ``written`` or ``lost`` of some Moved. A hash that was written may be lost later, as room is made for others.
    """

    lease: Lease
    number: int = 0
    failed: bytes = b""  # i32, rising: places among the Move's loads whose blocks hold nothing of use
    written: bytes = b""  # hashes of 16 bytes: there are files of these now
    lost: bytes = b""  # hashes: there are none of these, or no more
    load_s: float = 0.0  # seconds for each block that was loaded from host memory, by the last ones; 0: not known
    disk_s: float = 0.0  # the same from disk
    token_s: float = 0.0  # seconds for each prompt token that was computed, by the last ones; 0: not known
