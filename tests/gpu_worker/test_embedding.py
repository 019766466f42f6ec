"""Tables of embeddings that are kept as codes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cpu_kernels import VARIANTS, using

from quire.gpu_worker.kernels.codes import Codes, PerGroup, pack
from quire.gpu_worker.kernels.cpu.codes import pack_codes
from quire.gpu_worker.layers.formats.table import CodedTable

ROWS, COLUMNS = 70, 352


def tables() -> dict[str, Codes]:
    """Of each number of bits and each form that codes have."""
    random = torch.Generator().manual_seed(0)

    def below(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, generator=random)

    scales = PerGroup((torch.rand(ROWS, 11, generator=random) * 0.05 + 0.01).half())
    found = {
        str(bits): Codes(pack(below(1 << bits, ROWS, COLUMNS), bits), bits, COLUMNS, 32, scales, 1 << (bits - 1))
        for bits in range(2, 9)
    }
    four = found["4"]
    signed = PerGroup(torch.rand(ROWS, 2).bfloat16(), below(256, ROWS, 22).view(torch.int8), 16)
    order = torch.randperm(COLUMNS, generator=random).int()
    return found | {
        "zeros": replace(four, zeros=below(16, ROWS, 11)),
        "minima": replace(four, mins=PerGroup(torch.rand(ROWS, 2, generator=random).half(), below(64, ROWS, 11), 8)),
        "signed scales": replace(found["6"], group=16, scales=signed),
        "signed": replace(found["8"], zeros=0, signed=True),
        "one scale": replace(four, group=COLUMNS, scales=PerGroup(torch.full((1, 1), 0.3))),
        "small table": replace(four, zeros=0, table=torch.randn(16, generator=random)),
        "table": replace(found["6"], zeros=0, table=torch.randn(64, generator=random)),
        "tables": replace(four, zeros=0, table=torch.randn(ROWS, 16, generator=random)),
        "ordered": replace(four, order=order.where(order < 340, 340), columns=340),
    }


TABLES = tables()
IDS = torch.tensor([69, 0, 31, 32, 33, 0, 64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TABLES)
def test_rows_of_codes_are_those_of_their_values_to_the_bit(name: str, dtype: torch.dtype) -> None:
    codes = TABLES[name]
    assert torch.equal(CodedTable(codes, dtype)(IDS), codes.values(dtype)[IDS])


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_packed_codes_are_the_same(variant: str) -> None:
    with using(variant):
        for (name, codes), dtype in itertools.product(TABLES.items(), (torch.float32, torch.bfloat16)):
            table = CodedTable(pack_codes(codes), dtype)
            assert torch.equal(table(IDS.int()), codes.values(dtype)[IDS]), name
            assert table.shape == (ROWS, codes.columns) and table(IDS[:0]).shape == (0, codes.columns)


@pytest.mark.skipif(not VARIANTS, reason="the native CPU kernels were not compiled")
@pytest.mark.parametrize("id", [-1, ROWS])
def test_a_row_that_is_not_there_is_refused(id: int) -> None:
    with pytest.raises(IndexError, match="beyond the 70"):
        pack_codes(TABLES["4"]).values_of(torch.tensor([0, id]))
