"""Float weights made codes at load: how near they are, and that scales are the same in any number of tensor ranks."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import tiny_moe
import torch
from thread_ranks import CPU, hidden, on_ranks

from quire.gpu_worker.kernels.codes import Codes
from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.layers.formats import coded
from quire.gpu_worker.layers.formats.base import Part, Weight, whole
from quire.gpu_worker.layers.formats.online import Online
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config

METHODS = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8", "int4")
MOST_ERROR = {"int8": 0.01, "int4": 0.15}
"""Of normal values, as a share of their size."""
needs_kernels = pytest.mark.skipif(library() is None, reason="no native CPU kernels here")


def weight_of(parts: tuple[int, ...], columns: int, experts: int | None = None) -> Weight:
    return Weight(tuple(map(whole, parts)), whole(columns), torch.float32, CPU, experts)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("columns", [64, 200, 300])
@pytest.mark.parametrize("method", METHODS)
def test_values_are_near_and_experts_are_each_their_own(method: str, columns: int) -> None:
    matrices = drawn(3, 160, columns) * torch.tensor([0.01, 1.0, 30.0])[:, None, None]
    matrices[1, 7] = 0
    all_values = Online(method).codes({"weight": matrices}, weight_of((100, 60), columns, 3)).values()
    for matrix, found in zip(matrices, all_values, strict=True):
        codes = Online(method).codes({"weight": matrix}, weight_of((100, 60), columns))
        assert torch.equal(codes.values(), found)
        assert (found - matrix).norm() / matrix.norm() < MOST_ERROR.get(method, 0.03)
    assert torch.equal(all_values[1, 7], torch.zeros(columns))


def test_scales_are_vllms() -> None:
    matrix = drawn(96, 256)
    half = matrix[:64].abs().max() / 448
    codes = Online("fp8_per_tensor").codes({"weight": matrix}, weight_of((64, 32), 256))
    want = (matrix[:64] / half).to(torch.float8_e4m3fn).float() * half
    assert torch.equal(codes.values()[:64], want)
    assert codes.activations is not None and codes.activations.kind == "fp8"
    codes = Online("fp8_per_block").codes({"weight": matrix}, weight_of((96,), 256))
    want = matrix.abs().view(96, 2, 128).amax((0, 2)) / 448
    assert torch.equal(codes.scales.values()[0], want)
    rows = matrix.abs().amax(1, keepdim=True) / 127
    codes = Online("int8").codes({"weight": matrix}, weight_of((96,), 256))
    assert torch.equal(codes.values(), (matrix / rows).round() * rows)


def test_int4_is_what_the_native_kernels_make() -> None:
    matrix = drawn(64, 256)
    codes = Online("int4").codes({"weight": matrix}, weight_of((64,), 256))
    run = Online("int4").linear({"weight": matrix}, weight_of((64,), 256))
    ones = torch.eye(256)[:32] * 127  # which int8 rows have exactly
    torch.testing.assert_close(run(ones, None), (codes.values() * 127).T[:32], atol=1e-4, rtol=1e-5)


def test_a_bfloat16_weight_is_quantized_in_pieces(monkeypatch: Any) -> None:
    matrix = drawn(70, 192).bfloat16()
    want = {method: Online(method).codes({"weight": matrix}, weight_of((70,), 192)).values() for method in METHODS}
    monkeypatch.setattr("quire.gpu_worker.layers.formats.online._PIECE", 1000)
    for method in METHODS:
        found = Online(method).codes({"weight": matrix}, weight_of((70,), 192)).values()
        assert torch.equal(found, want[method])


@pytest.mark.parametrize("method", ["fp8_per_tensor", "fp8_per_channel", "int8"])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_the_scales_are_the_same_in_two_ranks(method: str, cut: str) -> None:
    matrix = drawn(64, 96)
    alone = Online(method).codes({"weight": matrix}, weight_of((48, 16), 96)).values()

    def share(group: Any) -> torch.Tensor:
        at = group.shard.rank
        if cut == "columns":
            mine, values = matrix[:, at * 48 : at * 48 + 48], alone[:, at * 48 : at * 48 + 48]
            weight = Weight((whole(48), whole(16)), Part(96, at * 48, at * 48 + 48), torch.float32, CPU)
        else:
            rows = torch.cat((torch.arange(24) + at * 24, torch.arange(8) + 48 + at * 8))
            mine, values = matrix[rows], alone[rows]
            parts = (Part(48, at * 24, at * 24 + 24), Part(16, at * 8, at * 8 + 8))
            weight = Weight(parts, whole(96), torch.float32, CPU)
        found = Online(method, group.maximum).codes({"weight": mine}, weight).values()
        return torch.equal(found, values)

    assert on_ranks(2, share) == [True, True]


@needs_kernels
@pytest.mark.parametrize("method", ["fp8", "fp8_per_channel", "fp8_per_block"])
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_a_model_is_made_fp8_while_it_is_loaded(method: str, model: str, tmp_path: Any, monkeypatch: Any) -> None:
    rows = {**tiny_models.ROWS, **tiny_moe.ROWS}
    kind, values, *_ = rows[model]
    folder = tiny_models.write(kind, tmp_path, 5, values)
    config, seen = load_model_config(str(folder), 64), []
    for name in ("product_of", "experts_of"):
        make = getattr(coded, name)

        def noted(codes: Codes, weight: Weight, make: Any = make) -> Any:
            seen.append(codes)
            return make(codes, weight)

        monkeypatch.setattr(coded, name, noted)

    def load(group: Any = None, method: str | None = method) -> torch.Tensor:
        return hidden(load_model(config, torch.float32, CPU, group=group, quantization=method))

    want, alone = load(method=None), load()
    assert len(seen) == 4 * 3 and {codes.bits for codes in seen} == {8}
    assert 0 < (alone - want).norm() / want.norm() < 0.25
    if method != "fp8_per_block":  # the scales of whose blocks are of one rank
        for each in on_ranks(2, load):
            torch.testing.assert_close(each, alone, atol=1e-4, rtol=1e-4)
