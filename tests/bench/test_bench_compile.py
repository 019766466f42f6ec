"""The arithmetic of ``python -m bench gpu --compile``: programs of a processor, the roofline, and the documents."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.cards.floor import LLAMA_3_8B, Ceilings, decode_floor  # noqa: E402
from bench.compile import pages, roofline, table  # noqa: E402
from bench.compile.cards import CARDS, occupancy  # noqa: E402


@pytest.mark.parametrize(
    ("card", "registers", "shared", "warps", "programs", "limit"),
    [
        ("sm_80", 32, 0, 4, 16, "warps"),
        ("sm_80", 128, 0, 4, 4, "registers"),
        ("sm_80", 129, 0, 4, 3, "registers"),  # 129 x 32 is rounded up to 17 x 256, and warps go in fours
        ("sm_80", 255, 0, 8, 1, "registers"),
        ("sm_80", 32, 163 * 1024, 4, 1, "shared"),
        ("sm_80", 32, 163 * 1024 + 1, 4, 0, "shared"),
        ("sm_86", 32, 49 * 1024, 4, 2, "shared"),  # a KiB of each is the driver's
        ("sm_86", 16, 0, 1, 16, "programs"),
        ("sm_89", 16, 0, 1, 24, "programs"),
        ("sm_90", 196, 98_816, 8, 1, "registers"),
        ("sm_120", 40, 0, 16, 3, "warps"),
        ("gfx942", 135, 16_384, 4, 3, "registers"),
        ("gfx942", 64, 32_768, 4, 2, "shared"),
        ("gfx942", 16, 0, 1, 32, "warps"),
        ("gfx942", 16, 0, 2, 16, "warps"),
    ],
)
def test_programs_of_a_processor(card, registers, shared, warps, programs, limit):
    assert occupancy(CARDS[card], registers, shared, warps) == (programs, limit)


def test_tensor_memory_limits_programs():
    assert occupancy(CARDS["sm_100"], 64, 1024, 4, tensor_columns=256) == (2, "tensor memory")


def test_a_step_takes_its_floor_and_launches_and_empty_places():
    h100 = CARDS["sm_90"]
    for batch in (1, 64, 256):
        floor, spent = roofline.step_seconds(roofline.decode(batch, 1024), h100, {})
        least = decode_floor(LLAMA_3_8B, batch, 1024, Ceilings(h100.bandwidth, h100.products))
        assert least < floor < 1.15 * least
        launches = sum(work.times * work.launches for work in roofline.decode(batch, 1024))
        assert spent == pytest.approx(floor + launches * h100.launch_s)


def test_waves_that_are_not_full():
    work = roofline.Work("w", 3.35e12, row=("a", "b"), programs=132 * 4 + 1)
    row = table.Row("sm_90", "a", "b", "-", "9", 4, 3, 64, 0, 0, programs=4, limit="warps", products="-")
    assert roofline.fill(work, CARDS["sm_90"], {row.key: row}) == pytest.approx((132 * 4 + 1) / (132 * 8))
    assert roofline.fill(work, CARDS["sm_80"], {row.key: row}) == 1.0
    few = roofline.Work("w", 3.35e12, row=("a", "b"))
    assert roofline.fill(few, CARDS["sm_90"], {row.key: row}) == 1.0


def test_the_documents_say_what_the_table_says():
    for (page, mark), lines in pages.sections().items():
        assert pages.between(page.read_text("utf-8"), mark) == lines, (
            f"{page.name} is older than the table; run python -m bench gpu --compile --rewrite"
        )
