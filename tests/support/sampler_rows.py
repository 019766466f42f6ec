"""Rows for tests of the sampler: requests in, one step of ``sample`` out."""

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.gpu_worker.sampling.sample_batch import SampleBatch
from quire.gpu_worker.sampling.sampler import sample
from quire.gpu_worker.sampling.sampling_state import SamplingState
from quire.proto.params import SamplingParams
from quire.proto.work import Generate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Request:
    """One row: its parameters, what it has, and what the front side resolved for it."""

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [0])
    outputs: list[int] = field(default_factory=list)
    suppressed: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    @property
    def ids(self):
        return self.prompt + self.outputs

    def admit(self):
        """What SamplingState.admit takes beside the row."""
        ids = np.array(self.ids, np.int32)
        suppressed = np.array(self.suppressed, np.int32).tobytes()
        work = Generate(self.params, self.seed, suppressed_ids=suppressed, bad_words=self.bad_words)
        return work, self.seed, len(self.prompt), ids


def state_of(requests, vocab, rows=None, max_rows=None, device=DEVICE, mode="raw_logprobs"):
    """A fresh state that holds ``requests`` in ``rows``."""
    rows = range(len(requests)) if rows is None else rows
    state = SamplingState(max_rows or max(rows) + 1, vocab, device, mode)
    for row, request in zip(rows, requests, strict=True):
        state.admit(row, *request.admit())
    return state


def step(state, logits, requests, rows=None, mask=None, edit=None, positions=None):
    """One step of ``requests``, which lie in ``rows``. Returns what ``sample`` does; ``logits`` may be changed."""
    rows = np.array(range(len(requests)) if rows is None else rows, np.int64)
    places = np.array([len(r.ids) for r in requests] if positions is None else positions, np.int64)
    history = np.full((max(rows, default=0) + 1, max((len(r.ids) for r in requests), default=0) + 1), -1, np.int32)
    for row, request in zip(rows, requests, strict=True):
        history[row, : len(request.ids)] = request.ids
    device = state.device
    batch = SampleBatch(
        torch.tensor(rows, device=device), torch.tensor(places, device=device), rows, places,
        torch.tensor(history, device=device), state.needs(rows, places), mask, edit,
    )  # fmt: skip
    return sample(logits, state, batch)


def real_logits(rows, vocab, seed=0):
    """Logits as models give them: most around -3, few high, rounded as bfloat16 products are, so that some tie."""
    generator = torch.Generator().manual_seed(seed)
    body = torch.randn(rows, vocab, generator=generator) * 2.2 - 3
    peaks = torch.randint(0, vocab, (rows, 12), generator=generator)
    body.scatter_add_(1, peaks, torch.rand(rows, 12, generator=generator) * 14)
    return body.bfloat16().float()


def plain_penalties(logits, request):
    """Repetition, frequency, presence by their definition, token by token."""
    logits, p = logits.clone(), request.params
    for token in set(request.ids):
        value = np.float32(logits[token])
        by = np.float32(p.repetition_penalty)
        value = value / by if value > 0 else value * by
        count = request.outputs.count(token)
        value -= np.float32(p.frequency_penalty) * np.float32(count)
        value -= np.float32(p.presence_penalty) * np.float32(count > 0)
        logits[token] = float(value)
    return logits


def bits_of(allowed, width):
    bits = np.zeros((len(allowed), width * 32), bool)
    for row, ids in enumerate(allowed):
        bits[row, list(ids)] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(DEVICE)
