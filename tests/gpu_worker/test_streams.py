"""Copies between host and device, and whole steps, in any order that streams allow (``tests/support/fake_cuda.py``).

Memory that is free, or that nothing was written to yet, holds garbage here: what is read too early, or used again too
early, comes out wrong in some order. Each protection is taken away once, to see that some order shows it.
"""

import threading
from collections import deque
from functools import partial
from types import SimpleNamespace

import kernel_device  # noqa: F401  # before Triton: its kernels are interpreted here
import numpy as np
import pytest
import tiny_models
import torch
from fake_cuda import CUDA, FakeCuda
from fake_cuda_models import fake_device, products
from fake_streams import Event, Stream, Streams, as_late_as_possible, at_once, at_random
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_toys import CPU, GREEDY, LADDER, LEASE, Hand, Ladder, plan

from quire.gpu_worker import results as sending
from quire.gpu_worker import transfer
from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.models.loader import load_model
from quire.gpu_worker.tiers import mover
from quire.gpu_worker.tiers.host_memory import HostMemory
from quire.gpu_worker.transfer import Download, Upload
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.codec import i8, i32
from quire.proto.messages import Move
from quire.proto.params import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: test_worker_gpu runs on it")
SEEDS = st.integers(0, 2**32 - 1)
ENDED = "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # a thread that nothing comes to any more leaves
ORDERS = [at_once, as_late_as_possible, *map(at_random, range(25))]


def found_wrong(world):
    """Whether some order of streams shows a fault: ``world`` raises AssertionError."""
    for order in ORDERS:
        try:
            world(order)
        except AssertionError:
            return True
    return False


# ---------------------------------------------------------------- the simulator itself


def ran(seed, wait):
    """The order in which work of two streams ran; with ``wait`` the other one begins behind what the first has."""
    streams, seen = Streams(at_random(seed)), []
    side = Stream(streams)
    for number in range(5):
        streams.current.add(partial(seen.append, number))
    if wait:
        side.wait_stream(streams.current)
    side.add(partial(seen.append, "side"))
    streams.current.add(partial(seen.append, 5))
    streams.finish()
    return seen


def test_a_stream_is_in_order_and_events_order_streams():
    for seed in range(50):
        seen = ran(seed, wait=True)
        assert [each for each in seen if each != "side"] == list(range(6))
        assert seen.index("side") >= 5


def test_streams_run_in_every_order():
    assert {ran(seed, wait=False).index("side") for seed in range(100)} >= {0, 1, 5, 6}
    assert {ran(seed, wait=True).index("side") for seed in range(50)} == {5, 6}


# ---------------------------------------------------------------- host to device


def uploads(order, size=1 << 9, plans=8):
    """Plans of several uploads; a kernel reads each before the next plan's copies."""
    rng = np.random.default_rng(3)
    with FakeCuda(values=True, choose=order) as device, torch.inference_mode():
        upload, told = Upload(CUDA, size), []
        for _ in range(plans):
            upload.begin()
            for _ in range(rng.integers(1, 4)):
                arrays = [
                    rng.integers(0, 1000, rng.integers(0, 12)).astype(kind) for kind in (np.int64, np.int32, np.int64)
                ]
                with device.step():
                    tensors = upload(*(array.copy() for array in arrays))
                    told.append((arrays, [tensor + 0 for tensor in tensors]))
        device.streams.finish()
        for arrays, tensors in told:
            for array, tensor in zip(arrays, tensors, strict=True):
                assert tensor.held.numpy().dtype == array.dtype and np.array_equal(tensor.held.numpy(), array)


@settings(max_examples=25)
@given(SEEDS)
def test_uploads_arrive_whole(seed):
    uploads(at_random(seed))


@settings(max_examples=10)
@given(SEEDS)
def test_uploads_outgrow_their_buffers(seed):
    uploads(at_random(seed), size=64)


def test_a_buffer_that_is_filled_before_its_copy_is_seen(monkeypatch):
    def begin(self):  # without waiting for the copies out of the buffer
        self._turn, self._used = (self._turn + 1) % transfer.RING, 0

    monkeypatch.setattr(Upload, "begin", begin)
    assert found_wrong(uploads)


# ---------------------------------------------------------------- device to host


def downloads(order, ahead=transfer.RING - 1, steps=12, extras=2):
    """Steps that make tokens and throw them away; at most ``ahead`` are launched and not waited for."""
    with FakeCuda(values=True, choose=order) as device, torch.inference_mode():
        download, flying = Download(8, CUDA), deque()

        def land():
            step, arrival = flying.popleft()
            assert np.frombuffer(arrival.wait(), np.int32).tolist() == [step] * (1 + step % 8)
            for number, array in enumerate(arrival.extras()):
                assert array.tolist() == [[step + number] * 3] * (1 + step % 5)

        for step in range(1, steps):
            with device.step():
                tokens = torch.full((1 + step % 8,), step, dtype=torch.int32, device=CUDA)
                more = [torch.full((1 + step % 5, 3), float(step + number), device=CUDA) for number in range(extras)]
                flying.append((step, download(tokens, more)))
            del tokens, more
            torch.zeros(64, device=CUDA)  # the next step's work
            if len(flying) > ahead:
                land()
        while flying:
            land()


@settings(max_examples=25)
@given(SEEDS)
def test_downloads_arrive_whole(seed):
    downloads(at_random(seed))


def spoil(monkeypatch, kind, name):
    monkeypatch.setattr(kind, name, lambda *args: None)


def test_results_that_are_read_before_they_landed_are_seen(monkeypatch):
    spoil(monkeypatch, Event, "synchronize")
    assert found_wrong(downloads)


def test_a_copy_that_does_not_wait_for_its_step_is_seen(monkeypatch):
    spoil(monkeypatch, Stream, "wait_stream")
    assert found_wrong(downloads)


def test_memory_that_is_given_away_under_a_copy_is_seen(monkeypatch):
    """Without ``record_stream`` the allocator takes the tokens' memory for free when the step is over."""
    call = Download.__call__

    def forgetful(self, tokens, extras=()):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
            return call(self, tokens, extras)

    assert not found_wrong(downloads)
    monkeypatch.setattr(Download, "__call__", forgetful)
    assert found_wrong(downloads)


def test_a_ring_that_is_one_too_small_is_seen(monkeypatch):
    monkeypatch.setattr(transfer, "RING", transfer.RING - 1)
    assert found_wrong(downloads)


def test_a_result_that_is_taken_one_step_too_late_is_seen():
    assert found_wrong(lambda order: downloads(order, ahead=transfer.RING))


# ---------------------------------------------------------------- the thread that sends results


class Turns:
    """Two threads of which one runs at a time; where one waits, ``order`` says who goes on."""

    def __init__(self, order):
        self.order, self.lock = order, threading.Condition()
        self.known = [threading.get_ident()]
        self.waiting = {}  # thread -> what it waits for
        self.running, self.over = self.known[0], False

    def until(self, ready=lambda: True):
        """Let the other one go on; returns when ``ready`` holds and it is this thread's turn."""
        me = threading.get_ident()
        with self.lock:
            self.waiting[me] = ready
            if me not in self.known:
                self.known.append(me)
                self.lock.notify_all()
            self.lock.wait_for(lambda: len(self.known) == 2)
            if self.running in (me, None):
                self._choose()
            self.lock.wait_for(lambda: self.running == me or self.over)
            if self.over:
                raise SystemExit  # which ends a thread without a word
            del self.waiting[me]

    def end(self):
        with self.lock:
            self.over = True
            self.lock.notify_all()

    def _choose(self):
        able = [thread for thread in self.known if thread in self.waiting and self.waiting[thread]()]
        self.running = able[min(self.order(len(able)), len(able) - 1)] if able else None
        self.lock.notify_all()


class TurnQueue:
    """In the place of queue.Queue: whoever waits gives its turn away."""

    def __init__(self, turns, maxsize):
        self.turns, self.size = turns, maxsize
        self.items, self.open = deque(), 0

    def put(self, item):
        self.turns.until(lambda: self.size <= 0 or len(self.items) < self.size)
        self.items.append(item)
        self.open += 1
        self.turns.until()

    def get(self):
        self.turns.until(lambda: bool(self.items))
        item = self.items.popleft()
        self.turns.until()
        return item

    def task_done(self):
        self.open -= 1

    def join(self):
        self.turns.until(lambda: not self.open)


def results(order, room=None, steps=10):
    """``results.Results`` over ``Download``, its thread and the device in the order that ``order`` says."""
    turns = Turns(order)
    sent = []

    class Link:
        last_step = 0

        def send(self, result):
            sent.append(result)

        def post(self, failure):
            sent.append(failure)

    class Step:
        def __init__(self, arrival, step):
            self.arrival, self.step = arrival, step

        def result(self, lease, step):
            tokens = np.frombuffer(self.arrival.wait(), np.int32).tolist()
            turns.until()  # packing takes its time
            return step, tokens, [array.tolist() for array in self.arrival.extras()]

    with pytest.MonkeyPatch.context() as patch, FakeCuda(values=True, choose=order) as device, torch.inference_mode():
        patch.setattr(sending.queue, "Queue", lambda maxsize: TurnQueue(turns, maxsize if room is None else room))
        others = set(threading.enumerate())
        sender = sending.Results(Link(), threaded=True)
        (thread,) = set(threading.enumerate()) - others
        download = Download(8, CUDA)
        for step in range(1, steps):
            with device.step():
                tokens = torch.full((4,), step, dtype=torch.int32, device=CUDA)
                arrival = download(tokens, [torch.full((2,), float(step), device=CUDA)])
            sender.put(LEASE, step, Step(arrival, step))
        sender.drain()
        turns.end()
        thread.join()
    assert sent == [(step, [step] * 4, [[float(step)] * 2]) for step in range(1, steps)]


@pytest.mark.filterwarnings(ENDED)
@settings(max_examples=25)
@given(SEEDS)
def test_results_are_those_of_their_own_step(seed):
    results(at_random(seed))


@pytest.mark.filterwarnings(ENDED)
def test_a_queue_that_is_longer_than_the_ring_is_seen():
    """One in hand, RING - 2 in the queue and one being launched are all that the ring has room for."""
    assert not found_wrong(results)
    assert found_wrong(lambda order: results(order, room=transfer.RING - 1))


# ---------------------------------------------------------------- whole steps


LIMITS = {"rows": 3, "length": 64, "block_size": 16, "blocks": 24, "max_tokens": 64, "vocab": tiny_models.VOCAB}
PARAMS = [GREEDY, SamplingParams(top_p=0.8, top_k=40, frequency_penalty=0.5), LADDER]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return load_model_config(str(tiny_models.make("llama", tmp_path_factory.mktemp("model") / "llama")))


def hand_of(model):
    return Hand(model, device=model.device, grammars=Ladder(tiny_models.VOCAB), **LIMITS)


def generate(hand, prompts, new):
    """Mixed steps first; each step is launched before the result of the one before is read."""
    got, flying = [[] for _ in prompts], deque()

    def later():
        hand.step += 1
        queued, hand.queue = hand.queue, {}
        outcome = hand.runner.launch(plan(hand.step, **queued))
        flying.append((queued["sample_rows"], outcome))
        while len(flying) > 1:
            land()
        return [None] * len(queued["sample_rows"])

    def land():
        rows, outcome = flying.popleft()
        for row, token in zip(rows, np.frombuffer(outcome.result(LEASE, 0).tokens, np.int32).tolist(), strict=True):
            got[row].append(token)

    hand.send = later
    for row, ids in enumerate(prompts):
        hand.admit(row, ids, params=PARAMS[row % len(PARAMS)], seed=row)
        hand.run((row, len(ids)), *[(r, 1) for r in range(row)])
    for _ in range(new):
        hand.run(*[(row, 1) for row in range(len(prompts))])
    while flying:
        land()
    return got


@pytest.fixture(scope="module")
def on_cpu(config):
    prompts = tiny_models.random_prompts(3, seed=4, longest=20)
    return prompts, generate(hand_of(load_model(config, torch.float32, CPU)), prompts, 4)


@pytest.mark.parametrize(
    ("order", "graphs"), [(as_late_as_possible, False), pytest.param(at_random(1), True, marks=pytest.mark.slow)]
)
def test_steps_draw_what_the_cpu_draws(order, graphs, config, on_cpu):
    prompts, expected = on_cpu
    with fake_device(values=True, choose=order), products(tiles=graphs):
        model = load_model(config, torch.float32, CUDA)
        hand = hand_of(model)
        if graphs:
            hand.runner.capture(64, progress=False)
        assert generate(hand, prompts, 4) == expected


# ---------------------------------------------------------------- blocks that leave the cache and come back


class AtOnce:
    """In the place of a thread: what is handed over is done at once."""

    def __init__(self, name, do):
        self.put = do

    def empty(self):
        return True

    def join(self, seconds=None):
        return True

    def close(self):
        pass


def tiers(order):
    """Blocks are stored behind the steps that wrote them, written over, and loaded behind the steps that read what was
    in their new place before."""
    spec, told, errors = SimpleNamespace(kv_heads=(2, 2), head_dim=8), [], []
    with FakeCuda(values=True, choose=order) as device, torch.inference_mode():
        kv = KVCache(spec, 4, 8, torch.float32, CUDA)

        def fill(block, value):
            page = torch.full((1, kv.bytes_of_block), value, dtype=torch.uint8).pin_memory()
            kv.write_blocks([block], page)

        def read(block):
            page = torch.empty((1, kv.bytes_of_block), dtype=torch.uint8, pin_memory=True)
            kv.read_blocks([block], page)
            return page

        moving = mover.Mover(kv, HostMemory(2, kv.bytes_of_block, cuda=True), None, told.append, errors.append)
        moving.open(LEASE)
        with device.step():
            fill(0, 7)
            fill(1, 8)
        both = {"store_slots": i32([0, 1]), "store_files": i8([0, 0]), "store_hashes": b"a" * 16 + b"b" * 16}
        moving.move(Move(LEASE, 1, i32([0, 1]), **both))
        moving.guard(i32([0]))
        with device.step():
            fill(0, 9)
            before = read(2)
        moving.move(Move(LEASE, 2, load_blocks=i32([2, 3]), load_slots=i32([1, 0]), load_hashes=b"b" * 16 + b"a" * 16))
        assert [each.number for each in told] == [1, 2]
        found = [read(block) for block in (0, 2, 3)]
        moving.close()
        device.streams.finish()
        assert not before.any() and [set(page.flatten().tolist()) for page in found] == [{9}, {8}, {7}]
        assert not errors and not any(each is None for each in device._pinned.values())  # nothing stays registered


def test_blocks_come_back_from_host_memory_in_any_order_of_streams(monkeypatch):
    monkeypatch.setattr(mover, "Line", AtOnce)
    for order in ORDERS[:6]:
        tiers(order)


@pytest.mark.parametrize("left_out", ["_on", "_synchronize"])
def test_copies_of_blocks_that_wait_for_nothing_are_seen(monkeypatch, left_out):
    monkeypatch.setattr(mover, "Line", AtOnce)
    if left_out == "_on":  # not behind what was launched before
        monkeypatch.setattr(mover.Mover, "_on", lambda self, number, after: torch.cuda.stream(self._streams[number]))
    else:  # it is said to be done before it is
        monkeypatch.setattr(mover.Mover, "_synchronize", lambda self, number: None)
    assert found_wrong(tiers)
