"""Which sums go over symmetric memory, and what becomes of the rest: torch's operation is a fake with torch's own
signature, as there are no GPUs to map."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from quire.gpu_worker.parallel import one_shot, parallel
from quire.gpu_worker.parallel.one_shot import OneShot, one_shot_of
from quire.gpu_worker.parallel.parallel import Ranks
from quire.gpu_worker.spec import Shard

CPU = torch.device("cpu")
KINDS = {"Tensor": torch.Tensor, "str": str}


class Operation:
    """``one_shot_all_reduce_copy_out`` of two ranks, the other of which has ``theirs``. Like torch's it takes what its
    schema says, contiguous and of one shape."""

    schema = torch.ops.symm_mem.one_shot_all_reduce_copy_out.default._schema

    def __init__(self, buffer, theirs):
        self.buffer, self.theirs, self.calls = buffer, theirs, []

    def __call__(self, *args):
        assert len(args) == len(self.schema.arguments)
        for value, argument in zip(args, self.schema.arguments, strict=True):
            assert isinstance(value, KINDS[str(argument.type)]), argument.name
        room, local, operation, name, out = args
        assert [each.name for each in self.schema.arguments] == [
            "symm_buffer", "local_input", "reduce_op", "group_name", "out",
        ]  # fmt: skip
        assert room.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        assert room.storage_offset() == 0 and room.shape == local.shape == out.shape and room.dtype == local.dtype
        assert all(each.is_contiguous() for each in (room, local, out)) and local.data_ptr() % 16 == 0
        assert operation == "sum" and out.data_ptr() != local.data_ptr()
        room.copy_(local)
        out.copy_(room + self.theirs)
        self.calls.append((name, tuple(local.shape)))
        return out


@pytest.fixture
def summed(monkeypatch):
    """A rank of two: its one-shot sum of up to 256 bytes, the operation, and the sizes that go to NCCL."""
    buffer = torch.zeros(256, dtype=torch.uint8)
    operation = Operation(buffer, 10.0)
    monkeypatch.setattr(
        one_shot.torch.ops, "symm_mem", SimpleNamespace(one_shot_all_reduce_copy_out=operation), raising=False
    )
    rank = object.__new__(Ranks)
    rank.shard, rank._tensor, rank._one_shot = Shard(0, 2), "group", OneShot(buffer, "7")
    library = []
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda x, group: library.append(tuple(x.shape)))
    return rank, operation, library


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_tensors_are_summed_in_one_launch(summed, dtype):
    rank, operation, library = summed
    x = torch.arange(32, dtype=dtype).view(4, 8)
    total = rank.all_reduce(x)
    assert total.dtype == dtype and torch.equal(total, x + 10)
    assert torch.equal(x, torch.arange(32, dtype=dtype).view(4, 8))
    assert operation.calls == [("7", (4, 8))] and not library
    # Turned around, and from where no vector begins.
    assert torch.equal(rank.all_reduce(x.T), x.T + 10)
    assert torch.equal(rank.all_reduce(x.flatten()[1:17]), x.flatten()[1:17] + 10)


def test_the_rest_goes_to_the_library(summed):
    """Large, empty, of no whole vectors, or of a type that torch's kernel does not add up."""
    rank, operation, library = summed
    for shape, dtype in (
        ((65, 1), torch.float32), ((0, 8), torch.float32), ((3, 1), torch.float32), ((4, 8), torch.float16),
    ):  # fmt: skip
        x = torch.ones(shape, dtype=dtype)
        assert rank.all_reduce(x) is x
    assert library == [(65, 1), (0, 8), (3, 1), (4, 8)] and not operation.calls
    rank._one_shot = None
    rank.all_reduce(torch.ones(4, 8))
    assert library[-1] == (4, 8) and not operation.calls


def test_the_choice_is_the_shapes_alone(summed):
    """Else processes would wait for each other in different exchanges, or a graph would replay another one."""
    takes = summed[0]._one_shot.takes
    x = torch.zeros(64)
    assert takes(x) == takes(torch.full((64,), float("nan"))) == takes(torch.zeros(80)[3:67]) is True


# --- whether there is any ---


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """Runs ``one_shot_of`` in both ranks of a stage, as threads: the ranks ``failing`` cannot map."""

    def run(failing=(), places=("here", "here")):
        stores = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
        votes, voted, found, me = {}, threading.Barrier(2), {}, threading.local()

        def rendezvous(buffer, name):
            assert len(buffer) == one_shot.LIMITS[2] and name == "7"
            assert stores[me.rank].timeout == one_shot.PATIENCE
            if me.rank in failing:
                raise RuntimeError("peer access is not supported\nand a trace")
            return "mapped"

        def vote(value, operation, group):
            assert operation == dist.ReduceOp.MIN
            votes[me.rank] = value.item()
            voted.wait(10)
            value.fill_(min(votes.values()))

        def rank(number):
            me.rank = number
            found[number] = one_shot_of(SimpleNamespace(group_name="7"), stores[number], Shard(number, 2), CPU)

        monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
        monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
        monkeypatch.setattr(one_shot.dist, "all_reduce", vote)
        monkeypatch.setattr(one_shot, "_place", lambda: places[me.rank])
        before = [store.timeout for store in stores]
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [store.timeout for store in stores] == before
        return [found[number] for number in range(2)]

    return run


def test_ranks_that_can_map_each_other_sum_so(pair, caplog):
    caplog.set_level("INFO")
    assert all(isinstance(each, OneShot) for each in pair()) and not caplog.records


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_all_ranks_do_or_none_does(pair, caplog, failing):
    """A process that alone summed so would wait for ever."""
    caplog.set_level("INFO")
    assert pair(failing) == [None, None]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and sum("peer access is not supported" in line for line in said) == len(failing)
    assert all("by NCCL too" in line and "\n" not in line for line in said)


def test_ranks_of_several_machines_do_not_try(pair, caplog):
    caplog.set_level("INFO")
    assert pair(failing=(0, 1), places=("here", "there")) == [None, None]
    assert [record.getMessage().count("2 places") for record in caplog.records] == [1, 1]


@pytest.mark.parametrize(("size", "why"), [(3, "2, 4, 8 processes, and these are 3"), (16, "these are 16")])
def test_numbers_of_ranks_that_torch_has_no_kernel_for(size, why, caplog):
    caplog.set_level("INFO")
    assert one_shot_of(SimpleNamespace(), SimpleNamespace(), Shard(0, size), CPU) is None
    assert why in caplog.text and len(caplog.records) == 1


def test_an_older_torch_is_borne(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(one_shot.torch.ops, "symm_mem", SimpleNamespace(), raising=False)
    assert one_shot_of(SimpleNamespace(), SimpleNamespace(), Shard(0, 2), CPU) is None
    assert "has no such operation" in caplog.text


def test_processes_that_see_one_gpu_each_may_all_call_it_number_0(pair, monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "")  # so that it is put back
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    for seen, said in ((2, None), (1, "1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        pair()
        assert os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == said


# --- the same bits in any company ---


def test_ranks_are_added_up_in_their_order(monkeypatch):
    """However many rows there are, and rounded once."""
    parts = [torch.randn(40, 6, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(4)]
    rank = object.__new__(Ranks)
    rank.shard, rank._tensor, rank._one_shot = Shard(2, 4), "group", None
    monkeypatch.setattr(parallel, "batch_invariant", lambda: True)
    rows = slice(0, 40)

    def gather(into, x, group):
        assert torch.equal(x, parts[2][rows])
        for each, part in zip(into, parts, strict=True):
            each.copy_(part[rows])

    monkeypatch.setattr(parallel.dist, "all_gather", gather)
    monkeypatch.setattr(parallel.dist, "all_reduce", None)
    want = (((parts[0].float() + parts[1].float()) + parts[2].float()) + parts[3].float()).bfloat16()
    for rows in (slice(0, 40), slice(7, 8)):
        assert torch.equal(rank.all_reduce(parts[2][rows].clone()), want[rows])
