"""Counts where a compiled product of codes adds a scaled part to the parts before in one rounding; see
``linear_jit._rounded_product``.

A script, run without TRITON_INTERPRET from the repository's root: JSON of launch -> [parts, multiply-add instructions
that add 0, those that add something else], in the machine's text of the launches in which one program has all parts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton

from bench.compile import launches
from bench.compile.cards import CARDS
from bench.compile.compiler import requests, target_of
from quire.gpu_worker.kernels import coded, w8a8
from quire.gpu_worker.kernels.codes import Activations, Codes

ROWS = coded.APART_ROWS + 1
CARD = CARDS["sm_90"]


def by_row(codes: Codes) -> None:
    """A weight with a scale for each row, times rows as they are."""
    held = coded.Held.of(codes)
    tiles = coded.invariant_tiles(held, torch.bfloat16, launches.card_of(torch.device("cuda")))
    coded.product(launches.empty(ROWS, codes.columns), held, None, tiles)


def narrow(kind: str, **how: bool) -> None:
    """The same, times narrow rows."""
    more = {"signed": True}
    if kind == "fp8":
        more = {"table": launches.empty(256, dtype=torch.float32), "floats": "e4m3"}
    codes = launches.codes_of(4096, 4096, **launches.row_scales(), **more, activations=Activations(kind, **how))
    held = w8a8.HeldNarrow.of(codes)
    tiles = w8a8.invariant_tiles(held, launches.card_of(torch.device("cuda")))
    w8a8.product(launches.empty(ROWS, 4096), held, None, tiles)


WANTED: dict[str, Callable[[], None]] = {
    "int8": lambda: by_row(launches.codes_of(4096, 4096, **launches.row_scales(), signed=True)),
    "int8 rows": lambda: narrow("int8"),
    "fp8 rows": lambda: narrow("fp8"),
}


def sums(ptx: str) -> Iterator[str]:
    """What each multiply-add of float32 adds."""
    known = dict(re.findall(r"mov\.[bf]32\s+(%\w+), (\w+);", ptx))
    for added in re.findall(r"fma\.rn\.f32\s+%\w+, [^,]+, [^,]+, (\S+);", ptx):
        yield known.get(added, added)


def main() -> None:
    found = {}
    for asked in requests(CARD, [launches.Launch(name, run) for name, run in WANTED.items()]):
        if isinstance(asked, tuple):
            raise asked[1]
        for one in asked:
            if one.kernel in ("coded_kernel", "rows_kernel"):
                made = triton.compile(one.source, target=target_of(CARD), options=one.options)
                added = [value in ("0f00000000", "0") for value in sums(made.asm["ptx"])]
                found[one.launch] = [one.constants["SPLITS"], added.count(True), added.count(False)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
