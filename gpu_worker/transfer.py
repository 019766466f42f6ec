"""Moving a step's small arrays between host and device without stopping either.

To a GPU everything of one step goes in one copy through pinned memory; results come back on a side stream. Pinned
buffers are used in a ring of three, each again only after its event: two plans are in flight at most, so the third is
always free in time. On a CPU both are views of the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

RING = 3
PINNED_BYTES = 1 << 24
"""Most that one buffer of the ring holds beside tokens; the logprobs of 97,000 tokens with 20 others each."""


PLAN_BYTES = 1 << 18
"""Bytes of a plan's columns, and of what a step of some thousand tokens needs beside them."""


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for it; on the host the array itself.

    torch keeps the pinned copy until the stream has read it.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Upload:
    """Host arrays to device tensors of the same types, through one pinned buffer for each plan.

    ``begin`` opens a plan; each call then copies its arrays together on the current stream.
    """

    def __init__(self, device: torch.device, size: int = PLAN_BYTES):
        self._device = device
        self._turn = self._used = 0
        self._capacity = size
        if device.type != "cpu":
            self._pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
            self._events = [torch.cuda.Event(blocking=True) for _ in range(RING)]
            # One device buffer is enough: a copy waits in the stream behind the kernels that read the last plan's.
            self._on_device = torch.empty(size, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        """Take the next pinned buffer, once the copies out of it are done."""
        if self._device.type != "cpu":
            self._turn, self._used = (self._turn + 1) % RING, 0
            self._events[self._turn].synchronize()

    def __call__(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Tensors of ``arrays``, valid for kernels launched before the next plan's copies."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        first, self._used = self._used, self._used + packed_size(arrays)
        if self._used > self._capacity:
            return self._grow(arrays)
        pack(arrays, self._pinned[self._turn][first : self._used])
        self._on_device[first : self._used].copy_(self._pinned[self._turn][first : self._used], non_blocking=True)
        self._events[self._turn].record()
        return unpack(arrays, self._on_device[first : self._used])

    def _grow(self, arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        """Start over in larger buffers. torch keeps the old ones until copies and kernels are done with them."""
        self.__init__(self._device, 1 << self._used.bit_length())  # type: ignore[misc]
        return self(*arrays)


def packed_size(arrays: Sequence[np.ndarray]) -> int:
    """Bytes of ``arrays`` one after another, each from a multiple of 16 on."""
    return sum(_aligned(array.nbytes) for array in arrays)


def pack(arrays: Sequence[np.ndarray], into: torch.Tensor) -> None:
    """Write ``arrays`` one after another into a uint8 tensor of the host."""
    memory, start = into.numpy(), 0
    for array in arrays:
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        start += _aligned(array.nbytes)


def unpack(arrays: Sequence[np.ndarray], packed: torch.Tensor) -> list[torch.Tensor]:
    """Views of what ``pack`` wrote, in the types and shapes of ``arrays``."""
    views, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        views.append(packed[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _aligned(array.nbytes)
    return views


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


class Arrival:
    """Sampled tokens on their way to the host, and arrays beside them."""

    def __init__(self, tokens: torch.Tensor, extras: list[torch.Tensor], event: torch.cuda.Event | None):
        self._tokens, self._extras, self._event = tokens, extras, event
        self._lock = threading.Lock()
        self._bytes: bytes | None = None

    @property
    def landed(self) -> bool:
        """True where ``wait`` would not sleep."""
        return self._bytes is not None or self._event is None or self._event.query()

    def wait(self) -> bytes:
        """The tokens as an int32 column; sleeps until they are there.

        Any number of threads may wait. The first one keeps the bytes, so that later ones need no buffer of the ring.
        """
        with self._lock:
            if self._bytes is None:
                if self._event is not None:
                    self._event.synchronize()
                self._bytes = self._tokens.numpy().tobytes()
            return self._bytes

    def extras(self) -> list[np.ndarray]:
        """The other arrays, once ``wait`` has returned; to be copied before the buffer comes round again."""
        return [tensor.numpy() for tensor in self._extras]


class Download:
    """int32 tokens (at most ``size``) and other tensors to the host, on a side stream, in a ring of pinned buffers.

    The caller waits for an arrival before its buffer comes round again (RING calls later). A step's other tensors
    share a buffer that grows up to PINNED_BYTES; those of a step that needs more are copied at once, holding it up.
    """

    def __init__(self, size: int, device: torch.device):
        self._device, self._turn = device, 0
        if device.type != "cpu":
            self._stream = torch.cuda.Stream(device)
            self._pinned = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
            self._beside = [torch.empty(0, dtype=torch.uint8) for _ in range(RING)]
            self._events = [torch.cuda.Event(blocking=True) for _ in range(RING)]

    def __call__(self, tokens: torch.Tensor, extras: Sequence[torch.Tensor] = ()) -> Arrival:
        """Start copying; later work on the compute stream is not held up."""
        if self._device.type == "cpu":
            return Arrival(tokens, list(extras), None)
        self._turn = (self._turn + 1) % RING
        self._stream.wait_stream(torch.cuda.current_stream())
        landing = self._landing(extras)
        moves = [(self._pinned[self._turn][: tokens.numel()], tokens), *zip(landing, extras, strict=True)]
        with torch.cuda.stream(self._stream):
            for host, source in moves:
                source.record_stream(self._stream)
                host.copy_(source, non_blocking=True)
            self._events[self._turn].record()
        return Arrival(moves[0][0], landing, self._events[self._turn])

    def _landing(self, extras: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where ``extras`` go on the host: views of this turn's buffer, or memory that is not pinned."""
        total = sum(_aligned(tensor.nbytes) for tensor in extras)
        if total > PINNED_BYTES:
            return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in extras]
        if total > self._beside[self._turn].numel():
            self._beside[self._turn] = torch.empty(1 << total.bit_length(), dtype=torch.uint8, pin_memory=True)
        views, start = [], 0
        for tensor in extras:
            view = self._beside[self._turn][start : start + tensor.nbytes]
            views.append(view.view(tensor.dtype).view(tensor.shape))
            start += _aligned(tensor.nbytes)
        return views
