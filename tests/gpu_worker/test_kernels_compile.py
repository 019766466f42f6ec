"""Every kernel compiles for every card, where there is none: the compile matrix, and no 32-bit product in a pointer.

What the interpreter accepts, the compiler may refuse; what compiles may spill, or leave a processor half empty.
``python -m bench gpu --compile`` compiles all launches; here are the main ones.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ir_products import Reader

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.compile import table as matrix  # noqa: E402
from bench.compile.cards import CARDS  # noqa: E402
from bench.compile.launches import LAUNCHES, kernels  # noqa: E402

OFTEN = ["sm_86", "sm_90", "gfx942"]


def check(cards: list[str]) -> None:
    rows, wrong = matrix.rows_of(matrix.compile_cards(cards, short=True))
    assert not wrong + matrix.compare(rows, matrix.triton_version())
    assert {row.card for row in rows} == set(cards)
    assert {row.launch for row in rows} == {launch.name for launch in LAUNCHES if launch.short}
    slow = [row.key for row in rows if row.kernel.startswith(("attention", "grouped")) and row.products == "-"]
    assert not slow, f"these multiply without the card's matrix units: {slow}"


def test_main_kernels_compile():
    check(OFTEN)


@pytest.mark.slow
@pytest.mark.parametrize("card", [card for card in CARDS if card not in OFTEN])
def test_main_kernels_compile_for_the_other_cards(card):
    check([card])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What ``kernel_products.py`` prints."""
    return of_script("kernel_products.py", tmp_path_factory.mktemp("triton"))


def of_script(name: str, cache: Path) -> dict:
    """What a script of tests/support prints, with the compiler."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "support" / name
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kernel_is_launched(seen):
    assert not seen["failed"]
    assert set(seen["kernels"]) == kernels(), "bench/compile/launches.py has to launch every kernel through its wrapper"


def test_no_32_bit_product_feeds_a_pointer(seen):
    assert not seen["wrong"]
    assert not seen["unused"], "these assumptions are of lines that are no longer there"


def test_parts_are_rounded_before_they_are_added(tmp_path):
    """As those are that different programs leave: with --batch-invariant bits are equal for few rows and for many."""
    found = of_script("rounded_parts.py", tmp_path)
    assert set(found) == {"int8", "int8 rows", "fp8 rows"}
    for parts, rounded, together in found.values():
        assert parts > 1 and rounded and not together


BAD = """
#loc = loc("a_jit.py":3:1)
module {
  tt.func public @bad(%x: !tt.ptr<f32> loc(#loc), %stride: i32 loc(#loc), %n: i32 loc(#loc)) attributes {one} {
    %c1 = arith.constant 1 : i32 loc(#loc)
    %c0 = arith.constant 0 : i32 loc(#loc)
    %row = tt.get_program_id x : i32 loc(#loc)
    %0 = FIRST
    %1 = tt.splat %0 : TYPE -> tensor<64xTYPE> loc(#loc)
    %2 = scf.for %i = %c0 to %n step %c1 iter_args(%at = %1) -> (tensor<64xTYPE>)  : i32 {
      %3 = arith.addi %at, %1 : tensor<64xTYPE> loc(#loc)
      scf.yield %3 : tensor<64xTYPE> loc(#loc)
    } loc(#loc)
    %4 = tt.splat %x : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>> loc(#loc)
    %5 = tt.addptr %4, %2 : tensor<64x!tt.ptr<f32>>, tensor<64xTYPE> loc(#loc)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def found(first: str, kind: str, largest: dict[str, int]) -> list[str]:
    ir = BAD.replace("FIRST", first + " loc(#loc)").replace("TYPE", kind)
    return [finding.op for finding in Reader(ir, ["x", "stride", "n"], largest).findings()]


def test_a_narrow_product_is_found_through_a_loop():
    product = "arith.muli %row, %stride : i32"
    assert found(product, "i32", {}) == ["arith.muli"]
    assert found(product, "i32", {"program x": 1 << 20, "stride": 1 << 11}) == ["arith.muli"]
    assert found(product, "i32", {"program x": 1 << 20, "stride": 1 << 10}) == []
    assert found("arith.shli %row, %c1 : i32", "i32", {}) == ["arith.shli"]
    assert found("arith.muli %row, %stride : i64", "i64", {}) == []
    assert found("arith.divsi %row, %stride : i32", "i32", {}) == []


def test_a_worse_row_is_told():
    row = matrix.Row(
        "sm_90", "a", "b", "M16", "8", 4, 3, registers=64, spills=0, shared=1024, programs=4, limit="registers",
        products="-",
    )  # fmt: skip
    table = {row.key: row}
    worse = replace(row, programs=2)
    assert matrix.judge([row], table) == []
    assert "2 programs a processor, 4 in the table" in matrix.judge([worse], table)[0]
    assert matrix.judge([worse], table, exact=False) == []
    assert "spills 8 bytes" in matrix.judge([replace(row, spills=8)], table)[0]
    assert "does not fit" in matrix.judge([replace(row, programs=0)], table)[0]
    assert "not in the table" in matrix.judge([row], {})[0]


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = matrix.nearest("3.0.0")
    rows = matrix.load(path)
    matrix.save(rows.values(), tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == path.read_text()
