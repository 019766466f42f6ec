"""A whole worker on a GPU that is not there: it measures, warms up, captures its graphs, takes plans and answers."""

import gc

import pytest
import torch
from fake_cuda import CUDA
from fake_cuda_models import FAMILIES, POOLED, fake_device, make
from worker_toys import GREEDY, plan

from quire.gpu_worker.kv_cache import KVCache
from quire.gpu_worker.lora.slots import LoraSpec
from quire.gpu_worker.worker import Worker
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.codec import i32
from quire.proto.config import EngineArgs
from quire.proto.messages import (
    Admit,
    Assign,
    Configure,
    Drain,
    Lease,
    Loaded,
    Ready,
    StepFailed,
    StepPlan,
    StepResult,
)
from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.work import Generate, Pool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: test_worker_gpu runs on it")
SIZES = (16, 4, 64)  # block_size, max_num_seqs, max_num_batched_tokens
PROMPT = list(range(5, 45))


class Desk:
    """In the place of a link: what the scheduler says, one after another, and what it is told.

    ``seen`` is what was allocated when each Assign and each Drain came.
    """

    def __init__(self, device, *said):
        self.device, self.said, self.told, self.seen, self.last_step = device, list(said), [], [], 0

    def get(self, timeout=None):
        message = self.said.pop(0)
        if callable(message):
            message = message(self)
        self.device.strict = isinstance(message, StepPlan)  # from Ready on nothing waits for the device
        if isinstance(message, (Assign, Drain)):
            gc.collect()
            self.seen.append(self.device.allocated)
        return message

    def send(self, message):
        if isinstance(message, StepFailed):
            self.device.strict = False  # what was launched is waited for
        self.told.append(message)

    def post(self, failure):
        self.told.append(failure.error)

    def renew(self):
        pass

    def of(self, kind):
        return [message for message in self.told if isinstance(message, kind)]


def configure(lease):
    return lambda desk: Configure(lease, desk.of(Loaded)[-1].num_blocks)


def steps(lease, work):
    """A prompt in two chunks, three decodes; a second one beside them. Blocks are far apart."""
    run = {"sample_src": [0], "sample_rows": [0]}
    return [
        plan(
            1, lease, admits=[Admit(0, 1, 0, i32(PROMPT), 40, work)], delta_rows=[0, 0, 0], delta_slots=[0, 1, 2],
            delta_blocks=[2000, 1, 70_000], rows=[0], starts=[0], counts=[20],
        ),
        plan(2, lease, rows=[0], starts=[20], counts=[20], **run),
        plan(3, lease, rows=[0], starts=[40], counts=[1], **run),
        plan(
            4, lease, admits=[Admit(1, 1, 0, i32(PROMPT), 40, work)], delta_rows=[1, 1, 1], delta_slots=[0, 1, 2],
            delta_blocks=[5, 6, 7], rows=[0, 1], starts=[41, 0], counts=[1, 40], sample_src=[0, 1], sample_rows=[0, 1],
        ),
        plan(5, lease, rows=[0, 1], starts=[42, 40], counts=[1, 1], sample_src=[0, 1], sample_rows=[0, 1]),
    ]  # fmt: skip


def work_on(folder, device, model, *said, pooler=None, **flags):
    """What a worker of ``model`` says to the scheduler that says ``said``."""
    args = EngineArgs(model=str(folder), **flags)
    worker = Worker(args, load_model_config(str(folder)), model, model.dtype, CUDA, pooler=pooler)
    desk = Desk(device, *said)
    worker.serve(desk)
    return desk


@pytest.fixture
def device():
    with fake_device() as made:
        yield made


LEASES = [Lease(0, 0, 1), Lease(0, 0, 2)]


@pytest.mark.parametrize("family", ["llama", "experts, sinks, windows"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_worker_serves(family, eager, device, tmp_path):
    """Every step is answered in order, with and without graphs, and the cache takes what memory there is."""
    model, _ = make(tmp_path, FAMILIES[family])
    work = Generate(SamplingParams(top_p=0.9, logprobs=2, presence_penalty=0.1), 0)
    lease = LEASES[0]
    desk = work_on(
        tmp_path, device, model, Assign(lease, *SIZES), configure(lease), *steps(lease, work), Drain(""),
        enforce_eager=eager,
    )  # fmt: skip
    assert [type(message) for message in desk.told] == [Loaded, Ready, *[StepResult] * 5]
    assert [message.step for message in desk.of(StepResult)] == [1, 2, 3, 4, 5]
    assert [len(message.tokens) // 4 for message in desk.of(StepResult)] == [0, 1, 1, 2, 2]
    share = EngineArgs().gpu_memory_utilization
    assert 0.99 * share * device.total < desk.seen[-1] < share * device.total
    replays = [note for note in device.take() if note.kind == "replay"]
    assert bool(replays) is not eager


def test_a_second_lease_takes_no_more_memory_than_the_first(device, tmp_path):
    """The first cache, rows and graphs are gone when the second are made."""
    model, _ = make(tmp_path, FAMILIES["llama"])
    other = (16, 2, 48)
    said, work = [], Generate(GREEDY, 0)
    for counter, sizes in enumerate([SIZES, other, SIZES], 1):
        lease = Lease(0, 0, counter)
        said += [Assign(lease, *sizes), configure(lease), *steps(lease, work)]
    desk = work_on(tmp_path, device, model, *said, Drain(""), num_gpu_blocks_override=80_000)
    assert len(desk.of(Ready)) == 3 and len(desk.of(StepResult)) == 15 and not desk.of(StepFailed)
    assert desk.seen[1] == desk.seen[3]


def test_a_step_that_fails_ends_its_lease_and_no_more(device, tmp_path):
    model, _ = make(tmp_path, FAMILIES["llama"])
    work = Generate(GREEDY, 0)
    said = [Assign(LEASES[0], *SIZES), configure(LEASES[0]), *steps(LEASES[0], work)[:2]]
    said += [plan(3, LEASES[0], rows=[3], starts=[0], counts=[1])]
    said += [Assign(LEASES[1], *SIZES), configure(LEASES[1]), *steps(LEASES[1], work)]
    desk = work_on(tmp_path, device, model, *said, Drain(""))
    assert len(desk.of(StepFailed)) == 1 and len(desk.of(StepResult)) == 7
    assert desk.of(Loaded)[0].num_blocks == desk.of(Loaded)[1].num_blocks


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_worker_pools(kind, device, tmp_path):
    model, pooler = make(tmp_path, POOLED[kind], pools=True)
    work, lease = Pool(PoolingParams(task="embed", pooling="MEAN")), LEASES[0]
    said = [Assign(lease, *SIZES), configure(lease)]
    run = {"sample_src": [0, 1], "sample_rows": [0, 1]}
    said += [plan(
        1, lease, admits=[Admit(row, 1, 0, i32(PROMPT[:32]), 32, work) for row in (0, 1)],
        delta_rows=[0, 0, 1, 1], delta_slots=[0, 1, 0, 1], delta_blocks=[1, 2, 3, 4],
        rows=[0, 1], starts=[0, 0], counts=[32, 32], **run,
    )]  # fmt: skip
    desk = work_on(tmp_path, device, model, *said, Drain(""), pooler=pooler)
    (result,) = desk.of(StepResult)
    assert [slot.slot for slot in result.pooled] == [0, 1] and not result.failed


def test_the_cache_leaves_room_for_every_slot(device, tmp_path):
    """Memory for adapters is there before the cache is sized; a worker that sleeps gives it back."""
    cache = {}
    for slots in (0, 16):
        model, _ = make(tmp_path, FAMILIES["experts"], lora=LoraSpec(slots, 64) if slots else None)
        desk = work_on(tmp_path, device, model, Assign(LEASES[0], *SIZES), Drain(""), enforce_eager=True)
        (loaded,) = desk.of(Loaded)
        assert loaded.adapter_slots == slots
        cache[slots] = loaded.num_blocks * KVCache.block_bytes(model.spec, SIZES[0], torch.bfloat16)
    adapters, held = model.adapters, device.allocated
    size = 16 * adapters.most_bytes
    assert size > 1 << 24 and size < cache[0] - cache[16] < 1.5 * size
    adapters.put_away()
    assert held - device.allocated >= size
    adapters.bring_back()
    assert device.allocated == held
