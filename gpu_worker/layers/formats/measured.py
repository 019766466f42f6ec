"""Which product is fastest on this card for few rows, measured when a weight is loaded and remembered.

A step of up to 16 rows is most of decode's time, and neither the vendor's library nor one Triton tile is the best for
every shape. For each shape the library and a handful of tiles are run on the weight itself; a tile is taken where it is
clearly faster. What was found lasts for the process, and in a small file in the user's cache folder for the next one:
a worker that starts again takes the same products, and so rounds as it did before. Of workers that measure at the same
time all take what the first of them has kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.activation import gated_activation
from ...kernels.card import Card, card_of
from ...kernels.linear import STEPS, Tiles, few_rows_tiles, product

log = logging.getLogger(__name__)

CLEARLY = 0.97
"""A tile must take less than this share of the library's time."""
WASH_BYTES = 2**27
"""More than any L2 cache holds."""
AHEAD_CYCLES = 10**6
"""Half a millisecond of the device and more: several times what the host takes to launch a call."""
_UNKNOWN = Tiles(0, 0, 0, 0, 0, 0)
Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of one call."""


class Table:
    """The products of one card; ``timer`` measures, ``file`` keeps what it found (None: nothing does)."""

    def __init__(self, card: Card, timer: Timer, file: Path | None) -> None:
        self._card, self._timer, self._file = card, timer, file
        self._known = {} if file is None else read(file)
        self._told = False

    def few_rows(self, matrix: torch.Tensor, activation: str = "") -> list[Tiles | None]:
        """For 1 to FEW_ROWS rows of x, which tiles multiply by ``matrix`` [out, in]; None: the library does.

        ``activation``: "", or the gated one that joins the outputs' halves.
        """
        rows, inner = matrix.shape
        candidates = few_rows_tiles(rows // (2 if activation else 1), inner, matrix.dtype, activation, self._card)
        found: list[Tiles | None] = []
        for step in STEPS:
            key = f"{str(matrix.dtype).removeprefix('torch.')} {rows}x{inner} {activation or 'plain'} {step}"
            # What another version of quire has kept may not fit this one's kernels.
            if self._known.get(key, _UNKNOWN) not in (None, *candidates):
                best = self._measure(matrix, activation, step, candidates)
                self._known[key] = best if self._file is None else keep(self._file, key, best, candidates)
            found += [self._known[key]] * (step - len(found))
        return found

    def _measure(self, matrix: torch.Tensor, activation: str, rows: int, candidates: list[Tiles]) -> Tiles | None:
        if not self._told:
            log.info("measuring which products are the fastest for few rows; the next start reads %s", self._file)
            self._told = True
        x = torch.zeros((rows, matrix.shape[1]), dtype=matrix.dtype, device=matrix.device)
        least, best = CLEARLY * self._timer(lambda: library(x, matrix, None, activation)), None
        for tiles in candidates:
            try:
                took = self._timer(lambda tiles=tiles: product(x, matrix, None, tiles, activation))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001  # Triton's own types say what does not compile on this card
                log.debug("a product of %s in %s does not run here: %s", tuple(matrix.shape), tiles, error)
                continue
            if took < least:
                least, best = took, tiles
        return best


def library(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, activation: str = "") -> torch.Tensor:
    """What ``kernels.linear.product`` computes, by the vendor's library."""
    y = F.linear(x, matrix, bias)
    return gated_activation(y, activation) if activation else y


@lru_cache
def table_of(device: torch.device) -> Table:
    """The table of the card behind ``device``."""
    return Table(card_of(device), _gpu_timer(device), cache_file(card_of(device)))


def cache_file(card: Card) -> Path:
    """Where measurements of ``card``, by these versions of torch and Triton, are kept: in $XDG_CACHE_HOME/quire."""
    import triton

    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = re.sub(r"[^\w.+-]+", "-", f"{card.name}-torch-{torch.__version__}-triton-{triton.__version__}")
    return Path(base, "quire", "products", f"{name}.json")


def read(file: Path) -> dict[str, Tiles | None]:
    """What ``keep`` kept; nothing where the file is not there or not whole, as it is only a saving of time."""
    try:
        kept: Any = json.loads(file.read_text("utf-8"))
        return {str(key): None if value is None else Tiles(*value) for key, value in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if not isinstance(error, FileNotFoundError | PermissionError):
            log.warning("ignoring %s, which cannot be read (%s); products are measured anew", file, error)
        return {}


def keep(file: Path, key: str, best: Tiles | None, candidates: Sequence[Tiles]) -> Tiles | None:
    """Keep ``best`` for ``key``; or, where another process has kept one of ``candidates`` or None meanwhile, give that.

    A reader finds the old or the new file whole.
    """
    with contextlib.suppress(OSError):  # a read-only home costs the next start its measurements
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = read(file)
            if kept.get(key, _UNKNOWN) in (None, *candidates):
                return kept[key]
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as out:
                json.dump({**kept, key: best}, out, indent=0)
            os.replace(out.name, file)
    return best


def _gpu_timer(device: torch.device) -> Timer:
    """Times a call by events, after a first one that compiles. Between calls the L2 cache is emptied, as a step's other
    layers empty it. Then the device waits until the host has launched the whole call: a decode's CUDA graph has no
    launches by the host, and a call of two kernels must not seem slow for them."""

    def timer(call: Callable[[], object]) -> float:
        wash, times = torch.empty(WASH_BYTES, dtype=torch.int8, device=device), []
        call()
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            wash.zero_()
            torch.cuda._sleep(AHEAD_CYCLES)
            begin.record()
            call()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize(device)
        return sorted(begin.elapsed_time(end) for begin, end in times)[len(times) // 2]

    return timer
