"""Codes: planes of bits, and the values that they stand for."""

from __future__ import annotations

import pytest
import torch

from quire.gpu_worker.kernels.codes import Codes, PerGroup, pack, plane_widths, unpack


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [32, 96, 45])
def test_planes_give_back_what_was_packed(bits, columns):
    codes = torch.randint(0, 1 << bits, (2, 3, columns), dtype=torch.uint8)
    planes = pack(codes, bits)
    padded = -(-columns // 32) * 32
    assert [plane.shape[-1] for plane in planes] == [padded * width // 32 for width in plane_widths(bits)]
    assert torch.equal(unpack(planes, bits)[..., :columns], codes)


def test_words_of_four_bits_lie_as_compressed_tensors_has_them():
    (plane,) = pack(torch.arange(32, dtype=torch.uint8)[None] % 8, 4)
    assert plane[0, 0].item() == 0x76543210


def test_a_value_is_a_code_less_its_zero_times_its_scale_less_a_minimum():
    codes = torch.randint(0, 16, (4, 64), dtype=torch.uint8)
    scales, zeros, mins = torch.rand(4, 2).half(), torch.randint(0, 16, (4, 2), dtype=torch.uint8), torch.rand(4, 2)
    found = Codes(pack(codes, 4), 4, 64, 32, PerGroup(scales), zeros, PerGroup(mins)).values()
    for row in range(4):
        for column in range(64):
            at = row, column // 32
            value = (codes[row, column].float() - zeros[at]) * scales[at].float() - mins[at]
            assert found[row, column] == value


def test_groups_that_end_with_the_weight_within_a_unit_of_the_planes():
    codes, scales = torch.randint(0, 16, (3, 48), dtype=torch.uint8), torch.rand(3, 3)
    found = Codes(pack(codes, 4), 4, 48, 16, PerGroup(scales), 8).values()
    assert torch.equal(found, (codes.float() - 8) * scales.repeat_interleave(16, 1))


def test_scales_in_two_steps_and_a_table_of_each_row():
    codes, table = torch.randint(0, 8, (2, 64), dtype=torch.uint8), torch.randn(2, 8)
    base, fine = torch.rand(2, 1).half(), torch.randint(0, 64, (2, 4), dtype=torch.uint8)
    found = Codes(pack(codes, 3), 3, 64, 16, PerGroup(base, fine, 4), table=table).values()
    want = table.gather(1, codes.long()) * (base.float() * fine).repeat_interleave(16, 1)
    assert torch.equal(found, want)


def test_columns_in_another_order_and_columns_of_nothing():
    codes = torch.randint(0, 16, (3, 32), dtype=torch.uint8)
    order = torch.cat([torch.randperm(24), torch.full((8,), 24)]).int()
    plain = Codes(pack(codes, 4), 4, 32, 32, PerGroup(torch.ones(1, 1)), 8)
    ordered = Codes(plain.planes, 4, 24, 32, plain.scales, 8, order=order)
    assert torch.equal(ordered.values()[:, order[:24].long()], plain.values()[:, :24])


def test_experts_and_smaller_dtypes_are_the_same_values():
    codes = torch.randint(-128, 128, (3, 4, 32), dtype=torch.int8)
    scales = torch.rand(3, 4, 1)
    both = Codes(pack(codes, 8), 8, 32, 32, PerGroup(scales), signed=True)
    assert torch.equal(both.values(), codes * scales)
    assert torch.equal(both.expert(1).values(torch.bfloat16), (codes * scales)[1].bfloat16())
    assert both.nbytes == 3 * 4 * (32 + 4)
