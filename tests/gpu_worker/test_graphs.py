"""CUDA graphs without a GPU: the device's code path by the kernels' twins, captured on tapes; and what they take."""

import logging
from types import SimpleNamespace

import pytest
import tiny_gpt
import tiny_models
import tiny_modern
import torch
from op_tape import TapeRecorder, opaque
from worker_toys import CPU, Hand

from quire.gpu_worker import graphs as graphs_module
from quire.gpu_worker import memory
from quire.gpu_worker.graphs import (
    CudaRecorder,
    DecodeGraphs,
    PieceGraphs,
    VoidCapture,
    capture,
    graph_bytes,
    piece_sizes,
)  # fmt: skip
from quire.gpu_worker.kernels import activation, attention, norm, rope
from quire.gpu_worker.layers import attention as attention_layer
from quire.gpu_worker.layers import dispatch
from quire.gpu_worker.layers.linear import Linear
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.recorded import kinds_of
from quire.gpu_worker.sampling import sampler
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.config import EngineArgs
from quire.proto.params import SamplingParams

LIMITS = {"rows": 16, "length": 128, "block_size": 16, "blocks": 128, "max_tokens": 256, "vocab": tiny_models.VOCAB}
PARAMS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(top_p=0.8, top_k=40)]
TABLE = {**tiny_models.ROWS, **tiny_modern.ROWS, **tiny_gpt.ROWS}
ROWS = ["llama", "gemma2", "opt-350m", "gptj"]  # one of each shape of layer


def attend(q, k_cache, v_cache, batch, scores, out=None):
    """``paged_attention`` by its twin."""
    found = attention.paged_attention_torch(q, k_cache, v_cache, batch, scores)
    return found if out is None else out.copy_(found)


@pytest.fixture
def on_device(monkeypatch):
    """Layers take the device's path; kernels are their twins, each an operation of its own to a tape."""
    monkeypatch.setattr(sampler, "dispatch", SimpleNamespace(use_kernels=dispatch.use_kernels))  # it draws on the host
    monkeypatch.setattr(dispatch, "use_kernels", lambda x: True)
    monkeypatch.setattr(Linear, "__call__", _method(Linear.__call__))
    for module, name in (
        (norm, "rms_norm"), (norm, "layer_norm"), (activation, "activation"), (activation, "gated_activation"),
        (rope, "rope_write"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, opaque(getattr(module, f"{name}_torch")))
    monkeypatch.setattr(attention_layer, "paged_attention", opaque(attend))


def _method(function):
    call = opaque(function)
    return lambda self, x: call(self, x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def hand_of(folder, row="llama", **limits):
    path = folder / row
    if not path.exists():
        kind, values, *_ = TABLE[row]
        tiny_models.write(kind, path, 0, values)
    model = load_model(load_model_config(str(path)), torch.float32, CPU)
    hand = Hand(model, **{**LIMITS, **limits})
    hand.runner.program = None  # a step of a CPU's own, with no forward pass to record
    return hand


def generate(hand, prompts, new):
    """Prompts are admitted one a step, in chunks of 40, while earlier ones decode."""
    got = [[] for _ in prompts]
    for row, ids in enumerate(prompts):
        hand.admit(row, ids, params=PARAMS[row % len(PARAMS)], seed=row)
        while hand.done[row] < len(ids):
            count = min(40, len(ids) - hand.done[row])
            for at, token in hand.run((row, count), *[(r, 1) for r in range(row)]).items():
                got[at].append(token)
    while min(map(len, got)) < new:
        for row, token in hand.run(*[(row, 1) for row in range(len(prompts)) if len(got[row]) < new]).items():
            got[row].append(token)
    return got


# ---------------------------------------------------------------- pieces


def test_piece_sizes():
    assert piece_sizes(8) == [16]
    assert piece_sizes(100) == [16, 32, 64, 128]
    assert piece_sizes(512)[-2:] == piece_sizes(8192)[-2:] == [448, 512]


@pytest.mark.parametrize("row", ROWS)
def test_mixed_steps_in_pieces_equal_eager_ones(row, folder, on_device):
    """Every shape of layer: what lies between the attentions is replayed, with rows, lengths, tokens that change."""
    prompts = tiny_models.random_prompts(7, seed=3, longest=90)
    want = generate(hand_of(folder, row), prompts, 4)
    hand, recorder = hand_of(folder, row), TapeRecorder()
    layers = hand.runner.model.spec.num_layers
    hand.runner.capture(None, False, recorder)
    assert recorder.recorded[:5] == [(size, layers + 1) for size in (256, 192, 128, 64, 32)]
    assert recorder.recorded[6:] == [(size, 1) for size in (16, 8, 4, 2, 1)]
    assert generate(hand, prompts, 4) == want
    steps = recorder.replayed
    assert steps.count(64) >= layers + 1 and min(steps) < 16  # prompts' chunks beside decodes; decodes alone


def test_a_step_of_too_many_tokens_is_eager(folder, on_device):
    hand, recorder = hand_of(folder), TapeRecorder()
    hand.runner.capture(None, False, recorder)
    hand.runner.pieces.sizes = [size for size in hand.runner.pieces.sizes if size <= 32]
    ids = tiny_models.random_prompts(1, seed=1, shortest=60, longest=60)[0]
    hand.admit(0, ids)
    hand.run((0, 40))
    assert recorder.replayed == []
    hand.run((0, 20))
    assert recorder.replayed == [32] * (hand.runner.model.spec.num_layers + 1)


def test_decodes_past_the_longest_captured_go_in_pieces(folder, on_device):
    hand, recorder = hand_of(folder), TapeRecorder()
    hand.runner.capture(12, False, recorder)
    assert hand.runner.graphs.max_context == 12
    hand.admit(0, list(range(11)))
    hand.run((0, 11))
    recorder.replayed.clear()
    hand.run((0, 1))
    hand.run((0, 1))
    assert recorder.replayed == [1] + [16] * (hand.runner.model.spec.num_layers + 1)


def test_graphs_cover_every_length_unless_told(folder, on_device):
    hand = hand_of(folder, length=128)
    hand.runner.capture(None, False, TapeRecorder())
    assert hand.runner.graphs.max_context == 128
    assert EngineArgs().max_seq_len_to_capture is None


# ---------------------------------------------------------------- memory


class Full(TapeRecorder):
    """Refuses some sizes for lack of memory."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def pieces(self, step):
        def tried(cut):
            hidden = step(cut)
            if len(hidden) in self.sizes:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
            return hidden

        return super().pieces(tried)


def test_sizes_without_memory_are_dropped_with_one_warning(folder, on_device, caplog):
    prompts = tiny_models.random_prompts(3, seed=8, longest=30)
    want = generate(hand_of(folder), prompts, 3)
    hand, recorder = hand_of(folder), Full({256, 64, 16, 2})
    with caplog.at_level(logging.WARNING):
        hand.runner.capture(None, False, recorder)
    (record,) = caplog.records
    assert "256 tokens, 64 tokens, 16 tokens, 16 rows, 2 rows: " in record.message
    assert "gpu_memory_utilization" in record.message
    assert hand.runner.pieces.sizes == [32, 128, 192] and hand.runner.graphs.sizes == [1, 4, 8]
    assert generate(hand, prompts, 3) == want
    assert 4 in recorder.replayed and 2 not in recorder.replayed  # two rows in a graph of four


def kinds(hand):
    """Graphs of which nothing is recorded."""
    return [make() for make in kinds_of(hand.runner.model, hand.state, hand.runner.max_tokens, None)]


def test_a_group_pads_alike_or_ends(folder, on_device):
    """One rank that left a size out would exchange tensors of other shapes than the rest."""
    hand = hand_of(folder)
    pieces, _ = kinds(hand)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        capture([pieces], hand.runner._forward_eager, Full({64}), False, drop=False)


def test_other_errors_of_a_capture_are_told(folder, on_device):
    hand = hand_of(folder)

    def forward(batch):
        batch.token_ids.max().item()

    _, decodes = kinds(hand)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture([decodes], forward, TapeRecorder(), False)


class Device:
    """A device's memory in MiB: what each captured size takes."""

    def __init__(self, static, of_size):
        self.taken, self.static, self.of_size = 1000, static, of_size

    def used(self):
        return self.taken

    def kind(self, sizes):
        device = self

        class Kind(graphs_module.Graphs):
            unit = "rows"

            def record(self, size, forward, recorder):
                device.taken += device.of_size(size)

        def make():
            device.taken += device.static
            return Kind(sizes)

        return make


def test_graphs_are_counted_from_the_two_largest():
    device = Device(7, lambda size: {256: 100, 248: 3, 512: 60, 448: 0}[size])
    kinds = [device.kind([1, 2, 4, 248, 256]), device.kind([128, 448, 512]), device.kind([256])]
    got = graph_bytes(kinds, None, None, device.used, 0)
    assert got == (7 + 100 + 4 * 3) + (7 + 60) + (7 + 100)
    # The allocator's segments hide a small output: it is counted all the same.
    device = Device(0, lambda size: 0)
    assert graph_bytes([device.kind([1, 2, 4])], None, None, device.used, 10) == 2 * 2 * 10


def test_memory_that_shrinks_meanwhile_is_no_gain():
    """Another process on the device gave some back."""
    device = Device(0, lambda size: -50)
    assert graph_bytes([device.kind([8, 16])], None, None, device.used, 0) == 0


class FakeCuda:
    """``torch.cuda``'s statistics: ``total`` bytes, of which ``others`` are not torch's."""

    def __init__(self, total, others, kept, peak):
        self.total, self.others, self.kept, self.peak, self.reserved = total, others, kept, peak, kept

    def install(self, monkeypatch):
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak // 2)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (self.total - self.others - self.reserved, self.total)
        )

    def empty_cache(self):
        self.reserved = self.kept

    def step(self):
        self.reserved = self.peak
        self.others += 40  # NCCL's buffers, a cuBLAS handle, kernels


def test_a_gpus_budget_counts_reserved_memory_graphs_and_what_a_step_leaves_outside(monkeypatch):
    cuda = FakeCuda(total=1000, others=100, kept=300, peak=500)
    cuda.install(monkeypatch)
    budget = memory.cuda_budget(cuda.step, lambda: 60, 1, 16, CPU)
    assert (budget.total, budget.used) == (1000, 500 + (100 + 40) + 60)


class FakeCaptures:
    """What of ``torch.cuda`` a recorder calls. ``begun``: the stream and pool of each capture; ``ends``: what ending
    the next ones raises, None for nothing."""

    def __init__(self, monkeypatch):
        self.streams, self.begun, self.ends, self.capturing = [], [], [], False
        current, pools, fake = [], ["b", "a"], self

        class Stream:
            def __init__(self, device=None):
                fake.streams.append(self)

            def wait_stream(self, other):
                pass

            def __enter__(self):
                current.append(self)

            def __exit__(self, *error):
                current.pop()

        class Graph:
            def capture_begin(self, pool):
                fake.begun.append((current[-1], pool))
                fake.capturing = True

            def capture_end(self):
                fake.capturing = False
                if fake.ends and (error := fake.ends.pop(0)) is not None:
                    raise error

            def replay(self):
                pass

        for name, put in {
            "Stream": Stream, "CUDAGraph": Graph, "stream": lambda stream: stream, "synchronize": lambda: None,
            "empty_cache": lambda: None, "current_device": lambda: 0, "graph_pool_handle": pools.pop,
            "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "is_current_stream_capturing": lambda: fake.capturing,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, put)


@pytest.fixture
def captures(monkeypatch):
    graphs_module._stream.cache_clear()
    yield FakeCaptures(monkeypatch)
    graphs_module._stream.cache_clear()


def test_every_recorder_captures_on_the_same_stream(captures):
    """Each stream that cuBLAS has run on keeps a workspace, 32 MiB on Hopper."""
    first = DecodeGraphs([1, 2, 4], 64, 16, CPU)
    first.capture(lambda batch: batch.token_ids, CudaRecorder(), progress=False)
    pieces = PieceGraphs([16], 2, 8, 16, torch.float32, CPU)
    q = torch.zeros(16, 2, 8)
    capture([pieces], lambda batch: batch.attend(None, q, q, q, batch, None), CudaRecorder(), progress=False)
    (stream,) = captures.streams
    assert captures.begun == [(stream, "a")] * 3 + [(stream, "b")] * 2 and not captures.capturing


def test_memory_that_runs_out_within_a_capture_or_at_its_end(captures):
    graphs, runs = DecodeGraphs([1, 2, 4, 8], 64, 16, CPU), []

    def forward(batch):
        runs.append(len(batch.token_ids))
        if runs == [8, 8]:  # once to warm up, once in the capture
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch.token_ids

    captures.ends = [None, RuntimeError("CUDA error: out of memory")]  # of 8, and the instantiation of 4
    graphs.capture(forward, CudaRecorder(), progress=False)
    assert graphs.sizes == [1, 2] and not captures.capturing


def test_a_capture_whose_end_lacks_memory_too_has_ended(captures):
    """Memory ran out within it, and again where what was captured by then was instantiated."""
    graphs, runs = DecodeGraphs([1, 2], 64, 16, CPU), []

    def forward(batch):
        runs.append(len(batch.token_ids))
        if runs == [2, 2]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch.token_ids

    captures.ends = [RuntimeError("CUDA error: out of memory")]
    graphs.capture(forward, CudaRecorder(), progress=False)
    assert graphs.sizes == [1] and not captures.capturing


def test_a_capture_that_cannot_be_ended_ends_the_worker(captures):
    """In one line that says what to do: ``out_of_memory`` sees what it came of."""
    runs = []

    def forward(batch):
        runs.append(batch)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    captures.ends = [RuntimeError("CUDA error: operation failed due to a previous error during capture")]
    with pytest.raises(VoidCapture) as error:
        DecodeGraphs([1, 2], 64, 16, CPU).capture(forward, CudaRecorder(), progress=False)
    assert memory.out_of_memory(error.value) and not memory.out_of_memory(RuntimeError("no"))
