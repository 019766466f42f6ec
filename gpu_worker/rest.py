"""Weights of a worker that sleeps: on a GPU in the host's memory (level 1), or nowhere until they are read again (2).

A CPU's weights are in the host's memory already, so level 1 leaves them where they are.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .models.model import Model

log = logging.getLogger(__name__)

DROPPED = 2
"""The level from which on the weights are not kept."""
_OURS = __package__.partition(".")[0]


class Weights:
    """The model, wherever its weights are. ``load`` reads it again; without it nothing is ever dropped."""

    def __init__(self, model: Model, load: Callable[[], Model] | None = None):
        self._model: Model | None = model
        self._load, self._device = load, model.device
        self.identity = ""  # of what was read, once it is known
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # a device's storage, the host's copy

    @property
    def model(self) -> Model:
        """Raises RuntimeError while its weights are away."""
        if self._model is None or self._kept:
            raise RuntimeError("the weights are put away, and nobody has brought them back")
        return self._model

    @property
    def there(self) -> bool:
        """They are in the memory of this machine, if not on the device."""
        return self._model is not None

    def put_away(self, level: int) -> None:
        """As Rest says; nobody may use the model's tensors meanwhile. What was dropped stays so at level 1."""
        if not level:
            self.bring_back()
        elif level >= DROPPED and self._load is not None:
            self._kept = []
            self._model = None
        elif self._device.type != "cpu" and self._model is not None and not self._kept:
            self._kept = to_host(self._model, self._device)
        give_back(self._device)

    def bring_back(self) -> None:
        """They are on the device. Raises what the loader does."""
        began = time.monotonic()
        if self._model is None and self._load is not None:
            self._model, self.identity = self._load(), ""
        elif self._kept:
            kept, self._kept = self._kept, []
            to_device(kept)
        else:
            return
        log.info("the weights are back after %.2f s", time.monotonic() - began)


def to_host(model: object, device: torch.device) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
    """Copy each storage of ``model`` on ``device`` to the host, pinned where that is a GPU's, and free it there.

    The tensors stay, views of storages of no bytes, until ``to_device``.
    """
    kept = []
    for storage in storages(model, device):
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda").untyped_storage()
        copy.copy_(storage, non_blocking=False)
        kept.append((storage, copy))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for storage, _ in kept:
        storage.resize_(0)
    return kept


def to_device(kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]) -> None:
    """What ``to_host`` freed is there again, perhaps at other addresses."""
    for storage, copy in kept:
        storage.resize_(copy.nbytes())
        storage.copy_(copy, non_blocking=False)


def storages(root: object, device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors on ``device`` that ``root`` reaches through objects of ours, modules of torch's and
    containers; each once."""
    seen: set[int] = set()
    found: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            if item.device.type == device.type and storage.nbytes() and storage.data_ptr() not in found:
                found.add(storage.data_ptr())
                yield storage
        else:
            waiting += _parts(item)


def _parts(item: object) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif isinstance(item, torch.nn.Module) or type(item).__module__.partition(".")[0] == _OURS:
        yield from getattr(item, "__dict__", {}).values()
        for cls in type(item).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(item, name, None)


def give_back(device: torch.device) -> None:
    """Give memory that nobody uses any more back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(0)
