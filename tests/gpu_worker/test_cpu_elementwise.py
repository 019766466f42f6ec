"""Norms, rotary positions, activations and embeddings in C, by every instruction set, against torch in float64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.gpu_worker.kernels.activation import function, gated_activation_torch
from quire.gpu_worker.kernels.cpu.library import BF16, F32, Library
from quire.gpu_worker.layers.rope import rotate

from ..support.cpu_kernels import VARIANTS, address, using

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
KINDS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "swiglu_oai"]
"""In the order of kernels.h."""
SIZES = [1, 3, 15, 16, 17, 64, 100, 257]
RMS, LAYER = 0, 1


class QNorm(ctypes.Structure):
    """kernels.h's q_norm."""

    _fields_ = (("kind", INT), ("size", INT), ("eps", FLOAT), ("weight", POINTER), ("bias", POINTER))


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    with using(request.param) as found:
        yield found


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def padded(size: int) -> np.ndarray:
    """Room for ``size`` values and some more, which must stay as they are."""
    return np.full(size + 32, 77, np.float32)


def checked(out: np.ndarray, size: int) -> torch.Tensor:
    """The values, if nothing was written past them."""
    assert (out[size:] == 77).all()
    return torch.from_numpy(out[:size])


def close(found: torch.Tensor, exact: torch.Tensor, ulps: float) -> None:
    """Within ``ulps`` units in the last place of the float64 result, or of 1e-30 where it is smaller."""
    wanted = exact.float().numpy()
    unit = np.spacing(np.maximum(np.abs(wanted), 1e-30)).astype(np.float64)
    apart = np.abs(found.numpy().astype(np.float64) - exact.numpy()) / unit
    assert apart.max(initial=0) <= ulps, (apart.max(), int(apart.argmax()))


def activate(kernels: Library, kind: str, x: np.ndarray) -> torch.Tensor:
    out = padded(len(x))
    kernels.function("activate", INT, POINTER, POINTER, INT)(KINDS.index(kind), address(x), address(out), len(x))
    return checked(out, len(x))


def gate(kernels: Library, kind: str, x: np.ndarray, up: np.ndarray) -> torch.Tensor:
    out = padded(len(x))
    call = kernels.function("gate", INT, POINTER, POINTER, POINTER, INT)
    call(KINDS.index(kind), address(x), address(up), address(out), len(x))
    return checked(out, len(x))


def norm(kernels: Library, kind: int, x: np.ndarray, weight: Any, bias: Any, in_place: bool = False) -> torch.Tensor:
    out = x.copy() if in_place else padded(len(x))
    layer = QNorm(kind, len(x), 1e-5, address(weight), address(bias))
    kernels.function("norm", POINTER, POINTER, POINTER)(
        ctypes.addressof(layer), address(out if in_place else x), address(out)
    )
    return torch.from_numpy(out) if in_place else checked(out, len(x))


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_an_activation_is_right_to_a_few_last_places(kernels: Library, kind: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 20_011), np.logspace(-30, 1.5, 999), [0.0]]).astype(np.float32)
    exact = function(kind)(torch.from_numpy(x).double())
    # torch's own float64 loses the last places of small results of 1 + erf and 1 + tanh.
    if kind == "gelu":
        wide = torch.from_numpy(x).double()
        exact = wide * torch.special.erfc(-wide / math.sqrt(2)) / 2
    if kind == "gelu_tanh":
        wide = torch.from_numpy(x).double()
        exact = wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    found = activate(kernels, kind, x)
    # Of e^y with a rounded y, the units in the last place that are wrong grow with y.
    close(found, exact, 200 if kind in ("gelu_tanh", "quick_gelu") else 8)
    assert (found - function(kind)(torch.from_numpy(x))).abs().max() <= 4e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_gate_of_any_size(kernels: Library, kind: str, size: int) -> None:
    x, up = normal(size) * 6, normal(size, seed=1) * 6
    wide = torch.from_numpy(np.concatenate([x, up])).double()[None]
    exact = _gated(wide, kind)
    torch.testing.assert_close(gate(kernels, kind, x, up).double(), exact, rtol=2e-6, atol=1e-6)
    if kind != "swiglu_oai":
        alone = activate(kernels, kind, x)
        assert torch.equal(alone, gate(kernels, kind, x, np.ones(size, np.float32)))


def _gated(wide: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = wide[0].chunk(2)
    if kind == "swiglu_oai":
        return function("quick_gelu")(gate.clamp(max=7.0)) * (up.clamp(-7, 7) + 1)
    return function(kind)(gate) * up


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_as_in_torch(kernels: Library, kind: str) -> None:
    x = np.array([np.nan, 3, 200, -200, 3e38, 1, 2], np.float32)
    up = np.array([1, 2, 3, 4, -5, np.nan, np.inf], np.float32)
    both = torch.from_numpy(np.concatenate([x, up]))[None]
    torch.testing.assert_close(
        gate(kernels, kind, x, up), gated_activation_torch(both, kind)[0], equal_nan=True, rtol=1e-5, atol=1e-30
    )


@pytest.mark.parametrize("size", [*SIZES, 4096, 11_008])
@pytest.mark.parametrize("kind", [RMS, LAYER])
def test_a_norm_of_any_size(kernels: Library, kind: int, size: int) -> None:
    x, weight, bias = normal(size) * 3 + 0.5, normal(size, seed=1), normal(size, seed=2)
    wide = torch.from_numpy(x).double()
    centred = wide - wide.mean() if kind == LAYER else wide
    exact = centred * torch.rsqrt(centred.square().mean() + 1e-5)
    w, b = torch.from_numpy(weight).double(), torch.from_numpy(bias).double()
    torch.testing.assert_close(norm(kernels, kind, x, None, None).double(), exact, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(norm(kernels, kind, x, weight, None).double(), exact * w, rtol=2e-6, atol=2e-6)
    full = norm(kernels, kind, x, weight, bias)
    torch.testing.assert_close(full.double(), exact * w + b, rtol=2e-6, atol=2e-6)
    assert torch.equal(full, norm(kernels, kind, x, weight, bias, in_place=True))


def test_a_norm_of_a_row_far_from_zero_keeps_its_variance(kernels: Library) -> None:
    x = (1000 + normal(768)).astype(np.float32)
    exact = torch.nn.functional.layer_norm(torch.from_numpy(x).double(), (768,), eps=1e-5)
    torch.testing.assert_close(norm(kernels, LAYER, x, None, None).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (128, 64), (6, 2), (20, 10)])
def test_heads_are_rotated(kernels: Library, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    heads, angles = 5, np.random.default_rng(3).uniform(-9, 9, rotary_dim // 2)
    x, cos, sin = normal(heads, head_dim), np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    wide = torch.from_numpy(x).double()[None]
    rotate(wide, torch.from_numpy(cos).double()[None, None], torch.from_numpy(sin).double()[None, None], interleaved)
    call = kernels.function("rotate", POINTER, INT, INT, POINTER, POINTER, INT, INT)
    call(address(x), heads, head_dim, address(cos), address(sin), rotary_dim, interleaved)
    torch.testing.assert_close(torch.from_numpy(x).double(), wide[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_and_sums(kernels: Library, size: int) -> None:
    row, call = torch.from_numpy(normal(size)), kernels.function("embed", INT, POINTER, FLOAT, POINTER, INT)
    narrow = row.bfloat16()
    for table, code in ((row, F32), (narrow, BF16)):
        out = padded(size)
        call(code, table.data_ptr(), 2.5, address(out), size)
        assert torch.equal(checked(out, size), table.float() * 2.5)
    out, x = padded(size), normal(size, seed=1)
    out[:size] = row.numpy()
    kernels.function("add", POINTER, FLOAT, POINTER, INT)(address(x), 0.5, address(out), size)
    assert torch.equal(checked(out, size), row + torch.from_numpy(x) * 0.5)


def test_a_soft_cap_is_right_to_a_few_last_places(kernels: Library) -> None:
    x = np.concatenate([np.linspace(-400, 400, 20_011), np.logspace(-30, 30, 999), [0.0, -0.0]]).astype(np.float32)
    exact = 30 * torch.tanh(torch.from_numpy(x).double() / 30)
    kernels.function("softcap", POINTER, FLOAT, INT)(address(x), 30.0, len(x))
    close(torch.from_numpy(x), exact, 5)
    special = np.array([np.nan, np.inf, -np.inf], np.float32)
    kernels.function("softcap", POINTER, FLOAT, INT)(address(special), 30.0, 3)
    assert np.isnan(special[0]) and special[1:].tolist() == [30, -30]
