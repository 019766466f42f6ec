"""The steps of a GPU that speculate, on one that is not there: they draw what a CPU draws without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

pytest.importorskip("triton")

import kernel_device  # noqa: F401  # before Triton is imported
from fake_cuda import CUDA
from fake_cuda_models import fake_device, products
from fake_streams import as_late_as_possible
from speculation_rig import Driven
from worker_toys import Ladder

from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.speculation.ngram import Ngram
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.structured import StructuredOutputsParams

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 30, "frequency_penalty": 0.4, "logprobs": 1},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="a+")},
]


def run(model: Any, make: Any = None) -> Driven:
    vocab = tiny_models.VOCAB
    driven = Driven(model, vocab, make, drafts=2, rows=3, length=64, blocks=24, budget=64, grammars=Ladder(vocab))
    for uid, params in enumerate(REQUESTS, 1):
        driven.submit(uid, [5, 6, uid, 5, 6], max_tokens=5, ignore_eos=True, **params)
    return driven.run()


@pytest.mark.slow
def test_steps_that_speculate_draw_what_the_cpu_draws(tmp_path: Any) -> None:
    config = load_model_config(str(tiny_models.make("llama", tmp_path / "llama")))
    plain = run(load_model(config, torch.float32, torch.device("cpu")))
    with fake_device(values=True, choose=as_late_as_possible), products(tiles=False):
        found = run(load_model(config, torch.float32, CUDA), lambda state: Ngram(state, 2, 1, 3))
        assert found.core.stats().draft_tokens
    assert found.tokens == plain.tokens
