"""The links within a replica, and the flags and errors of splitting a model."""

import threading
import time
from types import SimpleNamespace
from typing import get_args

import pytest
from stack import wait_until

from quire.client.supervisor.launch import Supervisor
from quire.gpu_worker.parallel import group_link
from quire.gpu_worker.parallel.parallel import check_shards, leader_of, number_of, shard_of
from quire.gpu_worker.spec import Shard
from quire.proto.config import ConfigError, EngineArgs, parse_service_args
from quire.proto.group import FromLeader
from quire.proto.messages import Configure, Drain, FromSchedulerWorkers, Lease, Loaded, TraceRows
from quire.proto.wire.sockets import Keys

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
LEASE = Lease(1, 0, 1)
SETTINGS = {"dtype": "float32", "seed": "0"}


@pytest.fixture
def ends(monkeypatch):
    """What ``end`` was told; the thread that told it ends."""
    told = []

    def end(reason, code=1):
        told.append(str(reason))
        raise SystemExit

    monkeypatch.setattr(group_link, "end", end)
    return told


@pytest.fixture
def make(tmp_path, ends):
    made = []

    def make(kind, *args, keys=None, at=f"ipc://{tmp_path}/replica", settings=SETTINGS):
        link = kind(at, *args, settings, keys, *([lambda: ends.append("leave")] if kind is group_link.Leader else []))
        link.start()
        made.append(link)
        return link

    yield make
    for link in made[::-1]:
        link.close("over", True) if isinstance(link, group_link.Leader) else link.close()


def test_what_the_leader_says_reaches_all_and_their_answers_come_back(make, ends):
    first = make(group_link.Member, 0)  # before there is a leader
    leader = make(group_link.Leader, [0, 2])
    waiting = threading.Thread(target=leader.meet, args=("/there", 0))
    waiting.start()
    last = make(group_link.Member, 2)
    for member in (first, last):
        assert member.meet().file == "/there"
    waiting.join(60)
    leader.send(Configure(LEASE, 7))
    for member, blocks in ((first, 5), (last, 9)):
        assert member.get(60) == Configure(LEASE, 7)
        member.send(Loaded(Lease(1, 0, 0), 1, 1, 1))  # of a lease that is over
        member.send(Loaded(LEASE, blocks, 64, 128))
    assert sorted(each.num_blocks for each in leader.collect(Loaded, LEASE)) == [5, 9]
    assert first.get(0.01) is None
    last.send(Drain("asked"))
    wait_until(lambda: ends == ["leave"], "the leader hears that a process was asked to end")
    leader.close("drained", True)
    for member in (first, last):
        assert member.get(60) == Drain("drained")
    time.sleep(0.2)
    assert ends == ["leave"]  # and nobody's going was news


@pytest.mark.parametrize("who", ["leader", "member"])
def test_a_broken_link_ends_the_process(make, ends, who):
    leader, member = make(group_link.Leader, [1]), make(group_link.Member, 1)
    leader.meet("", 1)
    member.meet()
    gone, said = (leader, "its leader is gone") if who == "leader" else (member, "process 1 of this replica")
    gone._closing = True  # as kill -9 would: it says nothing, and nobody there hears of it
    gone._hand_over(b"")
    wait_until(lambda: any(said in each for each in ends), f"the other end sees the {who} go: {ends}")


def test_a_farewell_that_was_not_asked_for_ends_the_process_with_its_reason(make, ends):
    leader, member = make(group_link.Leader, [1]), make(group_link.Member, 1)
    leader.meet("", 1)
    member.meet()
    member.close("it does not fit")
    wait_until(lambda: "process 1 of this replica has left: it does not fit" in ends, "the leader ends")


@pytest.mark.parametrize("who", ["leader", "member"])
def test_last_words_count_before_the_broken_link_behind_them(make, ends, who):
    """However slow a process is: both may have come since it last looked for messages."""
    leader, member = make(group_link.Leader, [1]), make(group_link.Member, 1)
    leader.meet("", 1)
    member.meet()
    leaves, stays = (leader, member) if who == "leader" else (member, leader)
    looks, goes_on, next_event = threading.Event(), threading.Event(), stays._wire.next_event

    def slow():
        looks.set()
        assert goes_on.wait(60)
        return next_event()

    stays._wire.next_event = slow
    assert looks.wait(60)  # it has found no message, and has yet to look for events
    leaves.close(*(("drained", True) if who == "leader" else ("it does not fit",)))
    assert stays._wire.monitor().poll(60_000)
    goes_on.set()
    if who == "leader":
        assert member.get(60) == Drain("drained") and not ends
    else:
        wait_until(lambda: ends, "the leader ends")
        assert ends == ["process 1 of this replica has left: it does not fit"]


def test_who_is_different_or_here_already_is_refused(make, ends):
    make(group_link.Leader, [1])
    make(group_link.Member, 1, settings={**SETTINGS, "dtype": "bfloat16"})
    wait_until(lambda: any("its dtype is bfloat16 where its leader's is float32" in each for each in ends), "refusal")
    make(group_link.Member, 1)
    make(group_link.Member, 1)
    wait_until(lambda: any("process 1 of this replica is here already" in each for each in ends), "refusal")


def test_keys(make, ends):
    keys = Keys.generate()
    leader = make(group_link.Leader, [1], keys=keys, at="tcp://127.0.0.1:*")
    make(group_link.Member, 1, keys=keys, at=f"{leader._wire.endpoint.replace('[::ffff:127.0.0.1]', '127.0.0.1')} "
         f"{keys.public.decode()}").send(Drain())  # fmt: skip
    leader.meet("", 5)
    wait_until(lambda: ends == ["leave"], "it is let in")
    with pytest.raises(ConfigError, match="off loopback and needs --keys"):
        group_link.Leader("tcp://0.0.0.0:29501", [1], SETTINGS, None, lambda: None)


def test_places():
    assert [number_of(shard_of(number, 2, 3)) for number in range(6)] == list(range(6))
    assert shard_of(leader_of(2, 3), 2, 3) == Shard(0, 2, 2, 3)
    assert shard_of(0, 1, 1) == Shard()


@pytest.mark.parametrize(
    ("size", "stages", "said"),
    [
        (4, 1, "Total number of attention heads (6) must be divisible by tensor parallel size (4)."),
        (3, 1, "Total number of key/value heads (2) must be divisible by tensor parallel size (3)"),
        (1, 4, "Pipeline parallel size (4) must be at most the model's number of layers (3)."),
        (2, 3, None), (6, 1, None),
    ],
)  # fmt: skip
def test_what_cannot_be_split(size, stages, said):
    spec = SimpleNamespace(heads=6, kv_heads=(2, 2, 2), num_layers=3)
    if said is None:
        check_shards(spec, size, stages)
    else:
        with pytest.raises(ConfigError) as error:
            check_shards(spec, size, stages)
        assert said in str(error.value)


def test_flags(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert parse_service_args("gpu_worker", ["-tp", "4", "-pp=2", "--rank=7"]).rank == 7
    args = EngineArgs(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2).check()
    with Supervisor(args) as stack:
        workers = [child for child in stack._plan() if child.service == "gpu_worker"]
    assert [child.replica for child in workers] == [0] * 4 + [1] * 4
    assert [child.environment["CUDA_VISIBLE_DEVICES"] for child in workers] == [str(number) for number in range(8)]
    for number, child in enumerate(workers):
        flags = {"--tensor-parallel-size=2", "--pipeline-parallel-size=2", f"--rank={number % 4}"}
        assert flags <= set(child.command)
        assert any(flag.startswith("--master-addr=ipc://") and flag.endswith(f"/replica{number // 4}")
                   for flag in child.command)  # fmt: skip
    with pytest.raises(ConfigError, match=r"attention heads \(8\) must be divisible by tensor parallel size \(3\)"):
        Supervisor(EngineArgs(tensor_parallel_size=3))


def test_a_leader_passes_on_whatever_the_scheduler_says():
    told = set(get_args(FromSchedulerWorkers)) - {TraceRows}  # TracedLink keeps those for itself
    assert told <= set(get_args(FromLeader))
