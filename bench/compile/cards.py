"""The cards that quire's kernels are compiled for: what a multiprocessor holds, and what the maker says it does.

One table, from which come the tiles that a wrapper chooses (``compiler`` shows it the card's properties), the
programs that a multiprocessor holds at a time (``occupancy``), and the roofline (``roofline``).

Sources. Limits of NVIDIA's: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (registers,
warps, blocks and shared memory of a multiprocessor), and cuda_occupancy.h of the toolkit for the units in which they
are given out. Limits of AMD's: LLVM, "User Guide for AMDGPU Backend", and GCNSubtarget, whose arithmetic
``llvm-calc-occupancy`` shows. Processors: the makers' architecture papers (GA102, Ada, HGX B200 for one of its eight,
RTX Blackwell). Bandwidth and products: quire's own table, ``cli/cards.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire.cli.cards import SHEETS

KIB = 1024


@dataclass(frozen=True)
class Card:
    """One target of the compiler, and the card of that kind that its figures are of."""

    name: str
    backend: str  # Triton's: "cuda" or "hip"
    arch: int | str
    processors: int
    bandwidth: float  # bytes a second
    products: float  # dense bfloat16 floating-point operations a second, summed in float32
    warps: int  # that a processor holds
    programs: int  # that a processor holds
    shared: int  # bytes of a processor
    shared_program: int  # bytes that one program may have
    shared_reserved: int = KIB  # bytes of each program that the driver keeps
    shared_unit: int = 128
    warp_size: int = 32
    registers: int = 65536  # of a processor; of a lane in one of four SIMDs on AMD's
    register_unit: int = 256  # registers that a warp's are rounded up to; of a lane on AMD's
    launch_s: float = 1e-6
    """Seconds between two kernels of a CUDA graph: "1.3 us lost per kernel even inside a graph" on an H100 (the
    megakernel of "No Bubbles"), of which newer ones hide a part. An assumption of the roofline."""

    @property
    def capability(self) -> tuple[int, int]:
        """What ``torch.cuda.get_device_capability`` says: gfx942 is (9, 4)."""
        if isinstance(self.arch, str):
            return int(self.arch[3]), int(self.arch[4])
        return divmod(self.arch, 10)

    @property
    def target(self) -> str:
        """``sm_90`` or ``gfx942``."""
        return self.arch if isinstance(self.arch, str) else f"sm_{self.arch}"


def _nvidia(name: str, sheet: str, arch: int, processors: int, warps: int, programs: int, kib: int) -> Card:
    known = SHEETS[sheet]
    return Card(
        name, "cuda", arch, processors, known.bandwidth, known.products, warps, programs, kib * KIB, (kib - 1) * KIB
    )


CARDS = {
    card.target: card
    for card in (
        _nvidia("A100 80GB SXM", "A100-80GB", 80, 108, 64, 32, 164),
        _nvidia("RTX 3090", "RTX-3090", 86, 82, 48, 16, 100),
        _nvidia("RTX 4090", "RTX-4090", 89, 128, 48, 24, 100),
        _nvidia("H100 SXM", "H100", 90, 132, 64, 32, 228),
        _nvidia("B200", "B200", 100, 148, 64, 32, 228),
        _nvidia("RTX 5090", "RTX-5090", 120, 170, 48, 24, 100),
        Card(
            "MI300X", "hip", "gfx942", 304, SHEETS["MI300X"].bandwidth, SHEETS["MI300X"].products, warps=32,
            programs=16, shared=64 * KIB,
            shared_program=64 * KIB, shared_reserved=0, shared_unit=512, warp_size=64, registers=512, register_unit=8,
        ),
    )
}  # fmt: skip
"""By target."""

TENSOR_COLUMNS = 512
"""Columns of tensor memory of an sm_100 processor, shared out among its programs."""


class Occupancy(NamedTuple):
    """Programs that a processor holds at a time, and what keeps it from holding more."""

    programs: int
    limit: str


def occupancy(card: Card, registers: int, shared: int, warps: int, tensor_columns: int = 0) -> Occupancy:
    """How many programs (CTAs, workgroups) of a kernel one processor holds.

    Args:
        registers: of a thread, as the assembler says.
        shared: bytes of a program.
        warps: of a program.
        tensor_columns: of tensor memory of a program.
    """
    held = {
        "warps": card.warps // warps,
        "registers": _by_registers(card, registers, warps),
        "programs": card.warps if card.backend == "hip" and warps == 1 else card.programs,
    }
    taken = _up(shared + card.shared_reserved, card.shared_unit) if shared + card.shared_reserved else 0
    if taken:
        held["shared"] = card.shared // taken if shared <= card.shared_program else 0
    if tensor_columns:
        held["tensor memory"] = TENSOR_COLUMNS // tensor_columns
    limit = min(held, key=lambda name: held[name])
    return Occupancy(held[limit], limit)


def _by_registers(card: Card, registers: int, warps: int) -> int:
    if card.backend == "hip":
        # Each of the four SIMDs holds up to 512 registers a lane, and a workgroup's waves go round them.
        waves = min(card.warps // 4, card.registers // max(card.register_unit, _up(registers, card.register_unit)))
        return 4 * waves // warps
    each = _up(max(registers, 1) * card.warp_size, card.register_unit)
    # The four quarters of a multiprocessor have their own registers, so warps come in fours.
    return card.registers // each // 4 * 4 // warps


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
