"""Adapters (LoRA): who knows which names, and what a worker has in its slots.

The names are kept at the scheduler, and by every frontend as a copy: each tells the other all that it knows when they
meet, and of two entries of one name the higher generation is right. So a scheduler that starts anew has them again from
any frontend, and a frontend from the scheduler.
"""

from __future__ import annotations

import msgspec

from ..work import Adapter
from .base import Message
from .plans import Lease


class AdapterEntry(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A name, and what it means. ``generation`` rises with every change of any name; it is 0 for those of
    ``--lora-modules`` until somebody changes them. ``adapter`` None: the name was removed."""

    name: str
    generation: int
    adapter: Adapter | None
    parent: str = ""  # the model it is shown to be made for; "": the served one


class Adapters(Message):
    """frontend <-> scheduler: names the sender knows. On every change, and all of them when the two meet."""

    entries: list[AdapterEntry]


class Register(Message):
    """frontend -> scheduler: load ``adapter`` on a worker, and keep its name if that succeeds."""

    token: int
    adapter: Adapter
    parent: str = ""
    replace: bool = False  # another adapter of this name may be there
    again: bool = False  # sent before, perhaps to a scheduler that is gone: it may have been done


class Unregister(Message):
    """frontend -> scheduler: forget a name. Requests that have begun to be served keep the adapter."""

    token: int
    name: str
    again: bool = False  # as in Register


class Registered(Message):
    """scheduler -> frontend, answering Register and Unregister, with an HTTP status; Adapters comes before it."""

    token: int
    status: int = 200
    error: str = ""


class LoadAdapter(Message):
    """scheduler -> worker: read an adapter beside the steps and put it into a slot, in place of what is there.

    No plan that is sent later uses what was in the slot. ``digest`` is that of the files that are meant.
    """

    lease: Lease
    slot: int
    name: str
    path: str
    generation: int  # of this load: rises under a lease
    digest: bytes = b""


class DropAdapter(Message):
    """scheduler -> worker: nobody needs the adapter of this digest any more, so its slot and the memory that its files
    have are free. ``slot`` -1: it is in none, and may be kept in memory."""

    lease: Lease
    slot: int
    digest: bytes


class AdapterReady(Message):
    """worker -> scheduler: rows may be admitted with this slot; or why not, in one line that names the file or the
    tensor at fault, with the HTTP status for the requests that wait for it. Nothing is in the slot then."""

    lease: Lease
    slot: int
    generation: int
    error: str = ""
    status: int = 400
