"""Memory, threads, graphs' padding: what surrounds the step."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worker_toys import CPU, GREEDY, Hand, ToyModel, oracle, prompts, told, toy_logits, unpack

from quire.gpu_worker import ahead, device, kv_cache, memory
from quire.gpu_worker.graphs import DecodeGraphs, capture_sizes
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.memory import GIB, Budget, cpu_budget, fit
from quire.gpu_worker.models import encoder
from quire.gpu_worker.sampling.followers import Follower, Histories
from quire.gpu_worker.state import RowState
from quire.gpu_worker.transfer import packed_size
from quire.gpu_worker.warmup import every_stage, worst_case
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.params import SamplingParams
from quire.proto.process import resident_bytes

torch.set_num_threads(1)
MODEL = ToyModel()
MIB = 2**20

# ---------------------------------------------------------------- how many blocks


def test_blocks_are_what_the_share_leaves():
    budget = Budget(total=10 * GIB, used=4 * GIB, block_bytes=MIB, block_size=16)
    assert fit(EngineArgs(gpu_memory_utilization=0.5), budget, 1024) == 1024
    assert fit(EngineArgs(gpu_memory_utilization=0.5, num_gpu_blocks_override=70), budget, 1024) == 70
    assert fit(EngineArgs(kv_cache_memory_bytes=100 * MIB), budget, 1024) == 100


def test_too_long_a_model_names_the_length_that_fits_and_the_share_needed():
    budget = Budget(total=10 * GIB, used=4 * GIB, block_bytes=MIB, block_size=16)
    with pytest.raises(ConfigError) as error:
        fit(EngineArgs(gpu_memory_utilization=0.45), budget, 16384)
    assert str(error.value) == (
        "The model's max seq len (16384) is larger than the maximum number of tokens that can be stored in KV cache "
        "(8192). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine. "
        "(The largest max_model_len that fits is 8192; 16384 needs gpu_memory_utilization of at least 0.5.)"
    )
    assert fit(EngineArgs(gpu_memory_utilization=0.5), budget, 16384) == 1024
    assert fit(EngineArgs(gpu_memory_utilization=0.45), budget, 8192) == 512


def test_no_room_at_all_names_the_share_needed():
    budget = Budget(total=10 * GIB, used=4 * GIB, block_bytes=MIB, block_size=16)
    with pytest.raises(ConfigError) as error:
        fit(EngineArgs(gpu_memory_utilization=0.4), budget, 16384)
    assert str(error.value).startswith(
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
        "engine."
    )
    assert "at least 0.5" in str(error.value)


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        ({"num_gpu_blocks_override": 2}, "num_gpu_blocks_override of at least 1024"),
        ({"kv_cache_memory_bytes": 3 * MIB}, "kv_cache_memory_bytes of at least 1073741824"),
        ({"gpu_memory_utilization": 0.9}, "5.00 GiB of memory where there are 4.50 GiB"),
    ],
)
def test_the_remedy_is_one_that_helps(args, remedy):
    budget = Budget(total=int(4.5 * GIB), used=4 * GIB, block_bytes=MIB, block_size=16)
    with pytest.raises(ConfigError, match=remedy):
        fit(EngineArgs(**args), budget, 16384)


def test_a_cpu_is_not_filled_unless_asked():
    def blocks(longest_use, max_model_len, **args):
        budget = cpu_budget(GIB, MIB, 16, longest_use, available=100 * GIB)
        return fit(EngineArgs(**args), budget, max_model_len)

    assert blocks(10**6, 1024) == 4096
    assert blocks(10**6, 2**20) == 65536  # one request of max_model_len always counts as asked for
    assert blocks(100, 1024) == 100  # more than every row at full length is of no use
    assert blocks(10**6, 1024, kv_cache_memory_bytes=8 * GIB) == 8192


def test_available_memory_is_plausible(tmp_path, monkeypatch):
    assert 0 < memory.available_memory() < 2**50


def test_cache_memory_is_taken_when_touched():
    spec = types.SimpleNamespace(num_layers=2, kv_heads=(2, 2), head_dim=64)
    before = resident_bytes()
    cache = KVCache(spec, 2**16, 16, torch.float32, CPU)  # 2 GiB of address space
    assert len(cache.k) == len(cache.v) == 2 and cache.k[1].shape == (2**16, 16, 2, 64)
    cache.k[1][2**16 - 1] = 1.0
    assert cache.k[1][2**16 - 1].sum() == 16 * 2 * 64 and cache.v[1][2**16 - 1].sum() == 0
    assert resident_bytes() - before < GIB
    assert KVCache.block_bytes(spec, 16, torch.bfloat16) == 2 * 4 * 16 * 64 * 2


def resident(tensor: torch.Tensor) -> float:
    """The share of its pages that the system has provided (mincore(2)); ``tensor`` is contiguous."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), found) == 0
    return sum(each & 1 for each in found) / count


def provided(cache: KVCache) -> None:
    """Waits for what is being provided."""
    for thread in threading.enumerate():
        if thread.name == "ahead":
            thread.join(30)


def test_cache_memory_is_provided_ahead_of_what_is_written(monkeypatch):
    """In each layer's and head's range, so far and no further, and what was written stays."""
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 2**16)
    spec = types.SimpleNamespace(num_layers=2, kv_heads=(2, 1), head_dim=64)
    cache = KVCache(spec, 2**13, 16, torch.float32, CPU)  # pages of 4 KiB: 16 of them are provided ahead
    ranges = [pool.transpose(1, 2).flatten(0, 1) for pool in cache._pools]
    for pool in ranges:  # MADV_NOHUGEPAGE: else the first touch provides 2 MiB
        start = -(-pool.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(pool.nbytes - mmap.PAGESIZE), 15)
    cache.k[0][10], cache.v[1][110] = 3.0, 4.0
    cache.reach(0)
    provided(cache)
    for each in (part for pool in ranges for part in pool):
        assert resident(each[:17]) == 1.0 and resident(each[120:]) < 0.01
    cache.reach(8)  # half of what is ahead is left
    provided(cache)
    assert resident(ranges[0][0][19:100]) < 0.05
    cache.reach(100)
    cache.reach(50)
    provided(cache)
    for each in (part for pool in ranges for part in pool):
        assert resident(each[:117]) == 1.0 and resident(each[130:]) < 0.01
    assert bool((cache.k[0][10] == 3.0).all()) and bool((cache.v[1][110] == 4.0).all())
    assert not cache.k[0][11].any() and not cache.k[1][100].any()
    cache.reach(2**13 - 1)
    provided(cache)
    assert all(resident(each) == 1.0 for pool in ranges for each in pool)
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(self))
    cache.reach(2**13 - 1)
    assert not started  # there is no more


def test_a_cache_of_no_layers_has_nothing_to_provide():
    KVCache(types.SimpleNamespace(num_layers=0, kv_heads=(), head_dim=64), 64, 16, torch.float32, CPU).reach(0)


def test_a_system_that_provides_nothing_ahead_is_asked_once_each_time(monkeypatch):
    cache = KVCache(types.SimpleNamespace(num_layers=2, kv_heads=(1, 1), head_dim=64), 64, 16, torch.float32, CPU)
    asked = []
    cache._ahead._madvise = lambda *args: asked.append(args) or -1
    cache.reach(0)
    provided(cache)
    assert len(asked) == 1
    cache.k[0][3] = 1.0
    assert bool((cache.k[0][3] == 1.0).all())


def test_layers_may_differ_in_heads():
    spec = types.SimpleNamespace(num_layers=3, kv_heads=(2, 1, 2), head_dim=4)
    cache = KVCache(spec, 3, 8, torch.float32, CPU)
    assert [k.shape[2] for k in cache.k] == [2, 1, 2]
    for tensor in (*cache.k, *cache.v):
        tensor[1] = torch.rand_like(tensor[1])
    cache.copy_blocks(torch.tensor([1]), torch.tensor([2]))
    assert all(torch.equal(t[2], t[1]) and not t[0].any() for t in (*cache.k, *cache.v))


class Gathered(TorchDispatchMode):
    """Bytes of the largest tensor that an index gives."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.name() in ("aten::index.Tensor", "aten::index_select"):
            self.largest = max(self.largest, out.nbytes)
        return out


@pytest.mark.parametrize("limit", [1, 800, 2**30])
def test_a_gpus_blocks_are_copied_in_pieces(limit, monkeypatch):
    """Of bounded bytes; and each layer's blocks are all read before any is written. A cache of one head lies alike on
    both devices."""
    monkeypatch.setattr(kv_cache, "COPY_BYTES", limit)
    spec = types.SimpleNamespace(num_layers=3, kv_heads=(1, 1, 1), head_dim=4)
    cache = KVCache(spec, 5, 8, torch.float64, CPU)
    assert all(pool.is_contiguous() for pool in cache._pools)
    for number, tensor in enumerate((*cache.k, *cache.v)):
        tensor.copy_(torch.arange(5)[:, None, None, None] + 10 * number)
    page = 8 * 4 * 8
    with Gathered() as gathered:
        cache.copy_blocks(torch.tensor([0, 1, 3]), torch.tensor([1, 3, 0]))
    assert 0 < gathered.largest <= max(limit, 3 * page)
    assert gathered.largest < 6 * 3 * page or limit > 6 * 3 * page
    for number, tensor in enumerate((*cache.k, *cache.v)):
        assert tensor.amax((1, 2, 3)).sub(10 * number).tolist() == [3, 0, 2, 1, 4]


def test_uploads_have_room_for_masks_and_a_long_prompt_from_the_start(monkeypatch):
    """A buffer that grows while serving holds up the device."""
    rows, length, vocab = 256, 40_000, 150_000
    asked = []
    monkeypatch.setattr("quire.gpu_worker.state.Upload", lambda device, size: asked.append(size))
    arrays = [np.empty((rows, -(-vocab // 32)), np.int32), np.empty(length, np.int32)]
    RowState(rows, length, 16, vocab, CPU, grammars=Follower(Histories()))
    RowState(rows, length, 16, vocab, CPU)
    RowState(rows, length, 16, vocab, CPU, grammars=Follower(Histories()), draws=False)
    assert asked[0] >= packed_size(arrays) + 2**18 and asked[1] == asked[2] >= packed_size(arrays[1:]) + 2**18
    assert asked[1] < 2**20  # what no row can need is not kept


def test_an_encoders_groups_of_lengths_are_one_copy(monkeypatch):
    copies = []
    monkeypatch.setattr(encoder, "to_device", lambda array, device: copies.append(array) or torch.from_numpy(array))
    monkeypatch.setattr(encoder.torch, "tensor", None)  # a list to a device would be waited for
    groups = encoder._alike([0, 3, 5, 8, 9, 11], CPU)
    assert len(copies) == 1
    assert [group.tolist() for group in groups] == [[[8]], [[3, 4], [9, 10]], [[0, 1, 2], [5, 6, 7]]]


# ---------------------------------------------------------------- device and threads


@pytest.mark.parametrize(
    ("asked", "cores", "parameters", "threads"),
    [(None, 1, 10**9, 1), (None, 2, 10**9, 2), (None, 8, 10**9, 7), (None, 8, 10**6, 1), (3, 2, 10**6, 3)],
)
def test_threads(asked, cores, parameters, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert device.choose_threads(asked, cores, parameters) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert device.choose_threads(asked, cores, parameters) == (asked or 5)


@pytest.mark.parametrize(
    ("asked", "cores", "parameters", "long"),
    [
        (None, 2, 5_000_000, (80, 2)), (None, 8, 7_000_000, (58, 7)), (None, 1, 5_000_000, None),
        (None, 8, 10**9, None), (1, 8, 5_000_000, None), (3, 8, 5_000_000, None),
    ],
)  # fmt: skip
def test_a_long_step_of_a_small_model_takes_the_threads_of_a_large_one(asked, cores, parameters, long, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert device.choose_long_steps(asked, cores, parameters) == long
    monkeypatch.setenv("QUIRE_FEW_BESIDE", "1")
    sooner = long and ({5_000_000: 30, 7_000_000: 58}[parameters], long[1])
    assert device.choose_long_steps(asked, cores, parameters) == sooner
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert device.choose_long_steps(asked, cores, parameters) is None


def test_parameter_estimate():
    hf = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
          "num_hidden_layers": 24}  # fmt: skip
    config = ModelConfig(path="", hf=hf, max_model_len=1, vocab_size=151936)
    assert 480e6 < device.parameter_estimate(config) < 500e6
    assert device.usable_cores() >= 1


def test_the_environment_is_set_before_torch_and_the_users_stays():
    """In a process of its own: the main module alone must not import torch."""
    code = (
        "import sys, os; import quire.gpu_worker.main, quire.gpu_worker.early as early;"
        "assert 'torch' not in sys.modules; early.set_environment();"
        "print(os.environ['KMP_BLOCKTIME'], os.environ['GOMP_SPINCOUNT'])"
    )
    env = {**os.environ, "GOMP_SPINCOUNT": "5"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["0", "5"]


def test_cuda_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert device.choose_device("auto") == CPU
    with pytest.raises(ConfigError, match="--device=cpu"):
        device.choose_device("cuda")


# ---------------------------------------------------------------- graphs


def test_capture_sizes():
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 4]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 24]
    assert capture_sizes(256)[-2:] == capture_sizes(1000)[-2:] == [248, 256]
    assert capture_sizes(20, [64, 3, 16, 3]) == [3, 16, 64]
    assert capture_sizes(20, None, 8) == [1, 2, 4, 8]
    assert capture_sizes(20, [3, 16, 64], 16) == [3, 16]


class FakeRecorder:
    """A graph that runs its step again on the same tensors, into the same output, as a real one does."""

    def __init__(self):
        self.replayed = []

    def __call__(self, step):
        hidden = step()

        def replay():
            self.replayed.append(len(hidden))
            hidden.copy_(step())

        return replay, hidden


def graphed(hand, sizes, max_context):
    recorder = FakeRecorder()
    graphs = DecodeGraphs(sizes, max_context, hand.block_size, CPU)
    with torch.inference_mode():
        graphs.capture(lambda batch: MODEL.forward(batch, hand.kv), recorder, progress=False)
    hand.runner.graphs = graphs
    return recorder


def test_replayed_decodes_equal_eager_ones():
    """Batches shrink and grow between replays, so stale padding would show."""
    asked = prompts(7, 3, 20)
    hand = Hand(MODEL, rows=8, blocks=64)
    recorder = graphed(hand, [1, 2, 4, 8], 64)
    got = [[] for _ in asked]
    for row, ids in enumerate(asked):
        hand.admit(row, ids)
    for row, token in hand.run(*[(row, len(ids)) for row, ids in enumerate(asked[:4])]).items():
        got[row].append(token)
    for row, token in hand.run(*[(row + 4, len(ids)) for row, ids in enumerate(asked[4:])]).items():
        got[row].append(token)
    assert recorder.replayed == []  # prefill is eager
    for rows in (range(7), range(5, 7), range(1), range(3), range(7), range(6, 7)):
        for row, token in hand.run(*[(row, 1) for row in rows]).items():
            got[row].append(token)
    assert recorder.replayed == [8, 2, 1, 4, 8, 1]
    for row, ids in enumerate(asked):
        assert got[row] == oracle(MODEL, ids, len(got[row]))


def test_prompts_of_single_tokens_tell_their_logprobs_from_a_replay():
    """A chunk of one token is a decode to the graph; its hidden state is both drawn from and told of."""
    ids, params = prompts(1, 6, 7)[0], SamplingParams(temperature=0.0, prompt_logprobs=1)
    hand = Hand(MODEL, rows=8, blocks=64)
    recorder = graphed(hand, [1, 2, 4, 8], 64)
    hand.admit(0, [4, 5])
    hand.run((0, 2))
    hand.admit(3, ids, params=params, prompt_logprobs_from=0)
    logits = toy_logits(MODEL, ids)
    for at in range(1, 6):
        hand.run((3, 1), (0, 1))
        (chunk,) = hand.result.prompts
        assert (chunk.at, chunk.start) == (0, at)
        (entry,) = unpack(chunk.logprobs, 1)
        assert entry[0] == told(logits[at - 1], ids[at], 1)[0] and entry[2] == told(logits[at - 1], ids[at], 1)[2]
    assert hand.run((3, 1)) == {3: oracle(MODEL, ids, 1)[0]}
    assert recorder.replayed == [2] * 5 + [1]


def test_long_contexts_and_large_batches_run_eager():
    hand = Hand(MODEL, rows=8, blocks=64)
    recorder = graphed(hand, [1, 2], 12)
    asked = prompts(3, 10, 11)
    for row, ids in enumerate(asked):
        hand.admit(row, ids)
    got = [[token] for token in hand.run(*[(row, 10) for row in range(3)]).values()]
    for rows in (range(3), range(2), range(2), range(2)):
        for row, token in hand.run(*[(row, 1) for row in rows]).items():
            got[row].append(token)
    assert recorder.replayed == [2]  # three rows are too many; contexts of 13 and more are too long
    for row, ids in enumerate(asked):
        assert got[row] == oracle(MODEL, ids, len(got[row]))


def test_the_worst_case_is_a_valid_plan_that_fills_the_budget():
    hand = Hand(MODEL, rows=4, length=64, max_tokens=64, blocks=1)
    worst = worst_case(hand.state, 64, every_stage(5))
    result = hand.runner.launch(worst).result(worst.lease, 0)
    assert MODEL.batches[-1].token_ids.numel() == 64
    assert [len(each.ids) for each in result.logprobs] == [4 * 6] * 4 and not result.failed
    assert [(each.at, len(each.logprobs.ids)) for each in result.prompts] == [(row, 15 * 4 * 6) for row in range(4)]
    needs = hand.state.sampling.needs(np.arange(4), np.full(4, 16))
    assert all(getattr(needs, name) for name in needs.__slots__ if name != "words")
    hand.state.reset()
    assert not hand.state.known.any()
    assert RowState.device_bytes(4, 64, 8, 100) == 4 * 4 * (65 + 8 + 100)
    assert hand.generate(0, [1, 2, 3], 1, params=GREEDY) == oracle(MODEL, [1, 2, 3], 1)
