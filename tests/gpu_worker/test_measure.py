"""What the worker counts before it sizes the cache of a GPU, on a device that is not there."""

from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA
from fake_cuda_models import FAMILIES, VOCAB, fake_device, make

from quire.gpu_worker import worker
from quire.gpu_worker.graphs import capture_sizes, piece_sizes
from quire.gpu_worker.speculation.loading import Drafts
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import EngineArgs

ROWS, TOKENS, LENGTH = 64, 128, 4096


@pytest.fixture
def measure(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "warm_up", lambda runner, progress: None)  # test_warmup.py runs it
    with fake_device() as device:
        model = make(tmp_path, FAMILIES["llama"])[0]

        def of(**flags):
            config = ModelConfig(path=str(tmp_path), hf={}, max_model_len=LENGTH, vocab_size=VOCAB)
            made = worker.Worker(EngineArgs(**flags), config, model, torch.bfloat16, CUDA)
            device.take()
            budget = made._measure(16, ROWS, TOKENS)
            recorded, device.graphs = len(device.graphs), []
            return budget.used, recorded

        yield of


def test_graphs_are_captured_and_counted_before_the_cache_is_sized(measure):
    eager, none = measure(enforce_eager=True)
    used, recorded = measure()
    layers, width = FAMILIES["llama"]["num_hidden_layers"], FAMILIES["llama"]["hidden_size"] * 2
    assert none == 0 and recorded == 2 * (layers + 1) + 2  # the two largest of each kind
    tables = capture_sizes(ROWS)[-1] * (LENGTH // 16) * 4
    outputs = [sum(sizes[:-1]) * width for sizes in (capture_sizes(ROWS), piece_sizes(TOKENS))]
    assert used - eager >= tables + sum(outputs)
    assert used - eager < 20 * (tables + sum(outputs))


def test_shorter_graphs_have_smaller_tables(measure):
    whole, short = measure()[0], measure(max_seq_len_to_capture=1024)[0]
    assert whole - short == capture_sizes(ROWS)[-1] * (LENGTH - 1024) // 16 * 4


def test_a_head_that_reads_between_layers_leaves_graphs_out(tmp_path):
    """A replay would not give it the hidden states of its step."""
    with fake_device():
        model = make(tmp_path, FAMILIES["llama"])[0]
        config = ModelConfig(path=str(tmp_path), hf={}, max_model_len=LENGTH, vocab_size=VOCAB)
        for drafts, graphs in (
            (None, True),
            (Drafts(SimpleNamespace(taps=())), True),
            (Drafts(SimpleNamespace(taps=(2, 3))), False),
        ):
            made = worker.Worker(EngineArgs(), config, model, torch.bfloat16, CUDA, drafts=drafts)
            assert made._graphs is graphs
