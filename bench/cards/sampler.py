"""The sampler, from logits to tokens, by what a request asks for; the floor is reading the logits once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample
from quire.gpu_worker.sampling.sampling_state import SamplingState
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

from .card import Card, Row
from .timing import seconds_each

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=1.0, top_k=50),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "all": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.1),
    "logprobs": SamplingParams(temperature=1.0, logprobs=5),
}


def rows(card: Card) -> Iterator[Row]:
    """Every kind of sampling, at the vocabularies of Llama 3 and Qwen 2."""
    for vocab in card.few((300,), (128_256, 151_936)):
        for batch in card.few((2,), (1, 64, 256)):
            # As a model's last product gives them on a GPU.
            logits = (torch.randn(batch, vocab, device=card.device) * 3).to(card.dtype)
            for name, params in SAMPLINGS.items():
                seconds = _sample(logits, params)
                yield card.row(f"sampler {name}", f"batch {batch} vocab {vocab}", seconds, logits.nbytes)


def _sample(logits: torch.Tensor, params: SamplingParams) -> float:
    batch, device = len(logits), logits.device
    state = SamplingState(batch, logits.shape[1], device)
    for row in range(batch):
        state.admit(row, Generate(params, row), row, 0, np.zeros(0, np.int32))
    host, at = np.arange(batch), torch.arange(batch, device=device)
    state.of(at)  # parameters are uploaded before anything is captured
    needs, history = state.needs(host, host), torch.zeros((batch, 1), dtype=torch.int32, device=device)
    slots = SampleBatch(at, at, host, host, history, needs)
    return seconds_each([lambda: sample(logits, state, slots)], device)
