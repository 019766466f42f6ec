"""Writes what the compile table and the roofline say into the documents, between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..machine import ROOT
from .cards import CARDS, KIB
from .roofline import kernel_table, step_table
from .table import TABLES, Row, load

GPU, BENCHMARKS = ROOT / "docs" / "gpu.md", ROOT / "docs" / "benchmarks.md"
SHOWN = (
    "attention.decode-8", "attention.decode-256", "attention.prefill-8", "attention.prefill-2048",
    "attention.dim-256-prefill", "attention.fp32-prefill", "attention.e4m3-decode-8", "attention.e4m3-prefill-2048",
    "moe.decode-8", "moe.prefill-2048", "codes.awq-8", "codes.awq-256", "codes.experts-8", "narrow.int8-2048",
    "sampler.threshold", "sampler.draw", "layers.rms-norm-and-residual", "layers.rope-and-cache",
)  # fmt: skip
"""The launches whose rows docs/gpu.md shows; the file has all."""


def newest() -> Path:
    """The table of the newest Triton."""
    return max(TABLES.glob("triton-*.txt"), key=lambda path: [int(part) for part in path.stem[7:].split(".")])


def compiled_section(table: Mapping[tuple[str, str, str], Row], versions: list[str]) -> list[str]:
    """What was compiled: the cards, a row for each launch shown, and what spills."""
    rows = list(table.values())
    lines = [
        f"{len({(row.launch, row.kernel) for row in rows})} launches of {len({row.kernel for row in rows})} kernels "
        f"are compiled for each card, with the tiles that the wrappers choose there, by Triton {', '.join(versions)}.",
        "",
        "| target | as on | processors | shared memory, of a program | warps | bandwidth | bf16 products |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {card.target} | {card.name} | {card.processors} "
            f"| {card.shared // KIB}, {card.shared_program // KIB} KiB | {card.warps} "
            f"| {card.bandwidth / 1e12:.3g} TB/s | {card.products / 1e12:,.4g} TFLOP/s |"
            for card in CARDS.values()
        ),
        "",
        "A cell says the tile, then registers of a thread, KiB of shared memory of a program, and how many programs a",
        "processor holds.",
        "",
        "| launch | " + " | ".join(CARDS) + " |",
        "|---" * (len(CARDS) + 1) + "|",
    ]
    keys = sorted({(row.launch, row.kernel) for row in rows if row.launch in SHOWN and row.kernel != "reduce_kernel"})
    for launch, kernel in keys:
        cells = (_cell(table.get((card, launch, kernel))) for card in CARDS)
        lines.append(f"| {launch}, `{kernel}` | " + " | ".join(cells) + " |")
    rows.sort(key=lambda row: row.key)
    spilled = [f"{row.launch} on {row.card} ({row.spills} bytes)" for row in rows if row.spills]
    lines += ["", f"Spills with Triton {versions[-1]}: " + ("; ".join(spilled) if spilled else "none") + "."]
    return lines


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    tile = "" if row.tile == "-" else row.tile.replace(",", " ") + ": "
    return f"{tile}{row.registers}, {row.shared / KIB:.3g}, {row.programs}"


def marks(mark: str) -> tuple[str, str]:
    """The lines that begin and end a section."""
    return f"<!-- {mark}: made by python -m bench gpu --compile --rewrite -->", f"<!-- end of {mark} -->"


def between(text: str, mark: str) -> list[str]:
    """The lines of a page's section."""
    begin, end = marks(mark)
    return text.partition(begin)[2].partition(end)[0].strip("\n").split("\n")


def put(page: Path, mark: str, lines: list[str]) -> None:
    """Write a section of a page anew. ValueError: the page has no place for it."""
    begin, end = marks(mark)
    before, found, rest = page.read_text("utf-8").partition(begin)
    if not found:
        raise ValueError(f"{page.name} has no line {begin!r}; put it, and {end!r}, where the text belongs.")
    page.write_text("\n".join([before + begin, *lines, end]) + rest.partition(end)[2])


def sections() -> dict[tuple[Path, str], list[str]]:
    """All that is written: (page, mark) -> lines."""
    table = load(newest())
    versions = sorted((path.stem[7:] for path in TABLES.glob("triton-*.txt")), key=lambda v: int(v.split(".")[1]))
    counts = ((of, load(TABLES / f"triton-{of}.txt").values()) for of in versions)
    spill = ", ".join(f"{of}: {sum(row.spills > 0 for row in rows)} of {len(rows)}" for of, rows in counts)
    return {
        (GPU, "what was compiled"): [
            *compiled_section(table, versions),
            "",
            f"Kernels that spill, by version: {spill}.",
        ],
        (BENCHMARKS, "roofline of steps"): step_table(table),
        (BENCHMARKS, "roofline of kernels"): kernel_table(table),
    }


def write() -> None:
    """Write every section."""
    for (page, mark), lines in sections().items():
        put(page, mark, lines)
