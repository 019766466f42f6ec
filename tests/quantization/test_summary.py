"""What the log says of a quantized model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import quantized
import quantized_toy
import torch

from quire.gpu_worker.kernels.cpu.library import library
from quire.gpu_worker.layers.formats import coded, summary
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import demo_model_path, load_model_config

CPU = torch.device("cpu")


def said(folder: Path, caplog: pytest.LogCaptureFixture, quantization: str | None = None) -> list[str]:
    with caplog.at_level(logging.INFO, "quire.gpu_worker.models.loader"):
        load_model(load_model_config(str(folder), 64), torch.float32, CPU, quantization=quantization)
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "quantiz" in line]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    quantized_toy.write(quantized.plain("llama", tmp_path / "plain"), tmp_path / "toy")
    return tmp_path / "toy"


@pytest.mark.skipif(library() is None, reason="no native CPU kernels here")
def test_codes_that_are_multiplied_as_they_are(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = said(toy, caplog)
    assert first == "quantization toy_rows: 8 bits, a scale a row; 8 of 9 weights; lm_head: float32"
    floats, codes = 2 * 4 * (4 * 128 * 128 + 3 * 128 * 256), 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert second.endswith(" less than as floats; kernel: native, of codes")
    saved = float(second.split(", ")[1].split(" MiB")[0])
    assert saved == pytest.approx((floats - codes) / 2**20, abs=0.1)


def test_codes_that_no_kernel_multiplies(
    toy: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (coded, summary):
        monkeypatch.setattr(module, "library", lambda: None)
    _, second = said(toy, caplog)
    assert second.endswith(
        " 0.0 MiB less than as floats; kernel: none of codes, float weights made at load (the native CPU kernels are "
        "off)"
    )


@pytest.mark.skipif(library() is None, reason="no native CPU kernels here")
def test_weights_made_narrower_at_load(caplog: pytest.LogCaptureFixture) -> None:
    first, second = said(Path(demo_model_path()), caplog, "int4")
    assert first == "quantization int4: 4 bits; 17 of 17 weights; lm_head: 4 bits"
    assert "kernel: native, int4 by int8" in second


@pytest.mark.skipif(library() is None, reason="no native CPU kernels here")
def test_the_scales_of_tiny_rows_are_no_bits_of_a_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = said(quantized.plain("llama", tmp_path / "plain"), caplog, "fp8_per_block")
    assert first == "quantization fp8_per_block: 8 bits; 8 of 9 weights; lm_head: float32"


def test_a_float_model_is_not_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert said(quantized.plain("llama", tmp_path / "plain"), caplog) == []
