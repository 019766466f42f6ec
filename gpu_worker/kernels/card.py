"""What a card has that kernels are cut to: its processors, its shared memory, the products its compiler takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...proto.config import ConfigError

KIB = 1024
OLDEST = 80
"""Compute capability, times ten, from which on NVIDIA's cards multiply bfloat16 and Triton's compiler uses their matrix
units. Below it makes scalar code of products: a prompt's attention takes 80 KiB of shared memory, of which 7.5 has 64,
and spills 5 KB of each thread's registers (Triton 3.9)."""
MATRIX_CORES = re.compile(r"gfx(908|90a|94\d|950|11\d\d|12\d\d)")
"""AMD's targets whose matrix instructions Triton's compiler uses."""


@dataclass(frozen=True, slots=True)
class Card:
    """One device, as far as a kernel's tiles depend on it."""

    name: str
    backend: str  # Triton's: "cuda" or "hip"; "" where the interpreter runs
    arch: int | str  # 90, or gfx942
    processors: int  # streaming multiprocessors, or compute units
    shared: int  # bytes of shared memory that one program may use
    shared_processor: int  # bytes that the programs on one processor share

    def precision(self, dtype: torch.dtype) -> str:
        """``input_precision`` of products of ``dtype``: what this card's compiler accepts, and float32 nearly exact."""
        if self.backend == "hip":
            return "ieee"
        return "tf32x3" if dtype == torch.float32 else "tf32"


INTERPRETER = Card("Triton's interpreter", "", 0, 4, 160 * KIB, 160 * KIB)


@lru_cache
def card_of(device: torch.device) -> Card:
    """The card behind ``device``; for a CPU, where kernels run interpreted, a small one."""
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    arch: int | str = found.gcnArchName.split(":")[0] if hip else found.major * 10 + found.minor
    # Older versions of torch do not tell; AMD's have 64 KiB, and the smallest of NVIDIA's from sm_80 on 99.
    least = (64 if hip else 99) * KIB
    shared = getattr(found, "shared_memory_per_block_optin", 0) or getattr(found, "shared_memory_per_block", 0)
    shared = max(shared, least)
    processor = max(getattr(found, "shared_memory_per_multiprocessor", 0), shared)
    return Card(found.name, "hip" if hip else "cuda", arch, found.multi_processor_count, shared, processor)


def check_card(card: Card) -> None:
    """Raises ConfigError where quire's kernels cannot run on ``card``: what it lacks, and what to do."""
    if card.backend == "cuda" and isinstance(card.arch, int) and card.arch < OLDEST:
        has = f"compute capability {card.arch // 10}.{card.arch % 10}"
        raise ConfigError(
            f"{card.name} has {has}, whose matrix units Triton does not use, so that attention does not fit it "
            f"(quantized weights change nothing of that); use a card of at least {OLDEST // 10}.{OLDEST % 10} (A100, "
            "RTX 30 or newer), or --device=cpu."
        )
    if card.backend == "hip" and not MATRIX_CORES.fullmatch(str(card.arch)):
        raise ConfigError(
            f"{card.name} is {card.arch}, which has no matrix instructions that Triton compiles for; use a card of at "
            "least gfx908 (MI100 or newer, RX 7000), or --device=cpu."
        )
