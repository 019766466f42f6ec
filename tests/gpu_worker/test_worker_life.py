"""A worker's life in one process: its link, leases and steps against a scheduler played by the test."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import zmq
from worker_fakes import WAIT_S, FakeScheduler
from worker_toys import CPU, GREEDY, VOCAB, ToyModel, oracle, plan

from quire.gpu_worker.link import MAX_QUEUED, Arrived, Dismissed, LeaseLost, Link
from quire.gpu_worker.moving import MAX_WAITING, Mover
from quire.gpu_worker.outcome import Outcome
from quire.gpu_worker.results import Results
from quire.gpu_worker.transfer import Download
from quire.gpu_worker.worker import TRANSITIONS, Phase, Worker
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.codec import from_i32, i32
from quire.proto.config import ConfigError, EngineArgs
from quire.proto.messages import (
    PROTOCOL,
    Admit,
    Assign,
    BetweenWorkers,
    Bye,
    Configure,
    Drain,
    Heartbeat,
    Hello,
    Lease,
    Pages,
    Ready,
    SlotFailed,
    StepFailed,
    StepResult,
)  # fmt: skip
from quire.proto.params import SamplingParams
from quire.proto.process import new_incarnation
from quire.proto.wire.sockets import Dealer, worker_endpoint
from quire.proto.work import Generate

torch.set_num_threads(1)
MODEL = ToyModel()
IDS = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def scheduler():
    with FakeScheduler() as fake:
        yield fake


@pytest.fixture
def link(scheduler):
    link = Link(worker_endpoint(scheduler.address), "toy")
    link.start()
    yield link
    link.close()


class Running:
    """A Worker in a thread; ``ending`` is what it raised, or None."""

    def __init__(self, scheduler, **args):
        self.link = Link(worker_endpoint(scheduler.address), "toy")
        self.link.loaded = True
        config = ModelConfig(path="", hf={"intermediate_size": 32}, max_model_len=64, vocab_size=VOCAB)
        self.worker = Worker(EngineArgs(**args), config, MODEL, torch.float32, CPU)
        self.ending = None
        self.thread = threading.Thread(target=self._run)
        self.link.start()
        self.thread.start()

    def _run(self):
        try:
            self.worker.serve(self.link)
        except (Dismissed, ConfigError) as error:
            self.ending = error
        finally:
            self.link.close("done")

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()

    def drain(self):
        """End it, from here: what is posted while one session follows another is dropped as the scheduler's word is."""
        deadline = time.monotonic() + 60
        while self.thread.is_alive():
            assert time.monotonic() < deadline
            self.link.post(Drain())
            self.thread.join(1)


@pytest.fixture
def running(scheduler):
    worker = Running(scheduler, num_gpu_blocks_override=32)
    yield worker
    worker.drain()


def first_step(lease, ids=IDS, step=1):
    return plan(
        step, lease, admits=[Admit(0, 1, 0, i32(ids), len(ids), Generate(GREEDY, 0))],
        delta_rows=[0], delta_slots=[0], delta_blocks=[4],
        rows=[0], starts=[0], counts=[len(ids)], sample_src=[0], sample_rows=[0],
    )  # fmt: skip


def test_logprobs_and_failures_reach_the_scheduler(scheduler, running):
    """Logprobs of the prompt and of the token, and a slot that fails beside them."""
    peer, _, lease = scheduler.prepare()
    told = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
    unknown = SamplingParams(temperature=0.0, logits_processors=["nobody:registered"])
    scheduler.send(peer, plan(
        1, lease, admits=[
            Admit(0, 1, 0, i32(IDS), len(IDS), Generate(told, 0), prompt_logprobs_from=4),
            Admit(1, 2, 0, i32(IDS), len(IDS), Generate(unknown, 0)),
        ],
        delta_rows=[0, 1], delta_slots=[0, 0], delta_blocks=[4, 5],
        rows=[0, 1], starts=[0, 0], counts=[len(IDS)] * 2, sample_src=[0, 1], sample_rows=[0, 1],
    ))  # fmt: skip
    result = scheduler.get(StepResult, peer)[1]
    assert from_i32(result.tokens)[0] == oracle(MODEL, IDS, 1)[0]
    assert from_i32(result.logprob_slots) == [0]
    assert from_i32(result.logprobs[0].ids)[0] == from_i32(result.logprobs[0].ids)[1] == from_i32(result.tokens)[0]
    (chunk,) = result.prompts
    assert (chunk.at, chunk.start) == (0, 4) and from_i32(chunk.logprobs.ids)[::2] == IDS[4:]
    (failed,) = result.failed
    assert (failed.slot, failed.status) == (1, 400) and "'nobody:registered'" in failed.message
    scheduler.send(peer, next_step(lease, 2, 6))
    assert from_i32(scheduler.get(StepResult, peer)[1].tokens) == oracle(MODEL, IDS, 2)[1:]


def test_a_thread_sends_what_arrives_and_reports_what_does_not():
    """As on a GPU, where a step's kernels may fail after it was launched."""
    sent, posted = [], []
    results = Results(SimpleNamespace(send=sent.append, post=posted.append, last_step=0), threaded=True)
    download, error = Download(4, CPU), RuntimeError("the device is lost")

    def lost():
        raise error

    broken = Outcome(download, torch.zeros(1, dtype=torch.int32))
    broken.arrival.wait = lost
    results.put("lease", 1, Outcome(download, torch.tensor([4, 5], dtype=torch.int32), failed={1: (400, "why")}))
    results.put("lease", 2, broken)
    results.drain()
    assert [(each.step, from_i32(each.tokens), each.failed) for each in sent] == [
        (1, [4, 5], [SlotFailed(1, 400, "why")])
    ]
    assert [(each.lease, each.step, each.error) for each in posted] == [("lease", 2, error)]


def next_step(lease, step, start):
    return plan(step, lease, rows=[0], starts=[start], counts=[1], sample_src=[0], sample_rows=[0])


# ---------------------------------------------------------------- link


def test_hello_comes_first_and_beats_follow(scheduler, link):
    peer, hello = scheduler.get(Hello)
    assert (hello.kind, hello.incarnation, hello.protocol, hello.loaded) == ("gpu_worker", peer, PROTOCOL, False)
    scheduler.get(Heartbeat)
    link.last_step = 7
    while scheduler.get(Heartbeat)[1].last_step != 7:
        pass


def test_garbage_is_dropped_counted_and_survived(scheduler, link):
    peer, _ = scheduler.get(Hello)
    for frames in ([b""], [b"\x80\x04K\x01."], [b"\xff" * 99], [b"a", b"b"], [b"\x93\xa6Assign"]):
        scheduler.router.socket.send_multipart([peer.encode(), *frames])
    scheduler.send(peer, Bye("after all that"))
    assert link.get(30) == Bye("after all that")
    while scheduler.get(Heartbeat)[1].bad_frames != 5:
        pass


def test_a_broken_connection_is_a_new_session_under_a_new_identity(scheduler, link):
    old, _ = scheduler.get(Hello)
    scheduler.send(old, Bye("not read before the break"))
    while not link._inbox:
        time.sleep(0.01)
    link.loaded = True
    scheduler.restart()
    assert isinstance(link.get(30), Bye | LeaseLost)
    new, hello = scheduler.get(Hello)
    assert new != old and hello.incarnation == new and hello.loaded
    scheduler.send(new, Drain())
    while not isinstance(link.get(30), Drain):
        pass


def test_the_next_message_is_taken_where_it_is_of_a_kind_and_of_this_session(scheduler, link):
    peer, _ = scheduler.get(Hello)
    for message in (Drain("1"), Drain("2"), Bye("3")):
        scheduler.send(peer, message)
    assert link.get(30) == Drain("1")
    while len(link._inbox) < 2:
        link.send(Bye(""))  # which receives, too
        time.sleep(0.01)
    assert link.next_of(Bye) is None
    assert link.next_of(Drain) == Drain("2") and link.next_of(Drain) is None
    link._session += 1
    assert link.next_of(Bye) is None  # of the session before
    link._session -= 1
    assert link.get(30) == Bye("3") and link.next_of(Bye) is None


def test_what_answers_an_old_session_is_not_sent_in_the_new(scheduler, link):
    old, _ = scheduler.get(Hello)
    scheduler.send(old, Drain())
    assert isinstance(link.get(30), Drain)
    scheduler.restart()
    new, _ = scheduler.get(Hello)
    link.send(Ready(Lease(1, 0, 1)))  # the compute thread has not yet seen that the session ended
    assert isinstance(link.get(30), LeaseLost)
    scheduler.send(new, Drain())
    assert isinstance(link.get(30), Drain)
    link.send(Ready(Lease(2, 0, 2)))
    assert scheduler.get(Ready)[1].lease.epoch == 2


def test_it_waits_for_a_scheduler_that_comes_later(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    link = Link(worker_endpoint(f"ipc://{folder}"), "toy")
    link.start()
    try:
        assert link.get(0.3) is None
        with FakeScheduler(str(folder)) as late:
            late.get(Hello)
    finally:
        link.close()


def test_a_lease_that_is_over_is_a_new_session(scheduler, link):
    old, _ = scheduler.get(Hello)
    link.loaded = True
    scheduler.send(old, Bye("silent", again=True))
    assert isinstance(link.get(30), LeaseLost)
    new, hello = scheduler.get(Hello)
    assert new != old and hello.loaded
    scheduler.send(new, Bye("out of its mind"))
    scheduler.send(new, Bye("a stranger", again=True))  # changes nothing: it has been dismissed
    assert link.get(30) == Bye("out of its mind")


def test_a_dismissed_process_whose_step_never_ends_is_ended(monkeypatch, scheduler, link):
    """``monkeypatch`` comes first, and so is undone when the link's thread has ended: it would end this process."""
    ended = threading.Event()
    monkeypatch.setattr("quire.gpu_worker.link.HUNG_S", 0.2)
    monkeypatch.setattr("quire.gpu_worker.link.os._exit", lambda code: ended.set())
    peer, _ = scheduler.get(Hello)
    scheduler.send(peer, Bye("step 3 did not end"))
    scheduler.get(Heartbeat)
    scheduler.get(Heartbeat)
    assert not ended.is_set()  # it still loads: what it was told may be said when it has
    link.loaded = True
    assert ended.wait(30)


def test_a_flood_ends_the_session_instead_of_filling_memory(scheduler, link):
    old, _ = scheduler.get(Hello)
    for _ in range(2 * MAX_QUEUED):
        scheduler.router.send(old, Drain())
    new, _ = scheduler.get(Hello)
    assert new != old


def test_close_says_bye(scheduler, link):
    peer, _ = scheduler.get(Hello)
    link.close("leaving")
    assert scheduler.get(Bye, peer)[1].reason == "leaving"
    link.close("twice is harmless")


# ---------------------------------------------------------------- worker


def test_from_hello_to_results(scheduler, running):
    peer, hello, lease = scheduler.prepare()
    assert hello.loaded and hello.device == "toy"
    scheduler.send(peer, first_step(lease))
    scheduler.send(peer, next_step(lease, 2, 6))  # two in flight: the second needs no value of the first
    results = [scheduler.get(StepResult, peer)[1] for _ in range(2)]
    assert [r.step for r in results] == [1, 2] and all(r.lease == lease for r in results)
    assert [token for r in results for token in from_i32(r.tokens)] == oracle(MODEL, IDS, 2)
    scheduler.send(peer, plan(3, lease))
    assert scheduler.get(StepResult, peer)[1].tokens == b""


def test_a_new_lease_drops_every_row(scheduler, running):
    peer, _, lease = scheduler.prepare()
    scheduler.send(peer, first_step(lease))
    scheduler.get(StepResult, peer)
    second, loaded = scheduler.assign(peer)
    assert loaded.num_blocks == 32
    scheduler.send(peer, next_step(lease, 2, 6))  # of the old lease: dropped without a word
    scheduler.send(peer, Configure(second, 32))
    scheduler.get(Ready, peer)
    scheduler.send(peer, next_step(second, 1, 6))
    failed = scheduler.get(StepFailed, peer)[1]
    assert failed.lease == second and "row 0" in failed.error


@pytest.mark.parametrize("number", [0, 2, 7])
def test_a_step_out_of_turn_ends_the_lease(scheduler, running, number):
    peer, _, lease = scheduler.prepare()
    scheduler.send(peer, first_step(lease, step=number))
    assert "was expected" in scheduler.get(StepFailed, peer)[1].error
    again, hello = scheduler.get(Hello)
    assert again != peer and hello.loaded


def test_a_failed_step_ends_the_lease_and_the_worker_serves_on(scheduler, running):
    peer, _, lease = scheduler.prepare()
    scheduler.send(peer, plan(1, lease, rows=[99], starts=[0], counts=[1]))
    failed = scheduler.get(StepFailed, peer)[1]
    assert failed.step == 1 and "rows holds 99" in failed.error
    peer, hello, lease = scheduler.prepare()
    assert hello.loaded
    scheduler.send(peer, first_step(lease))
    assert from_i32(scheduler.get(StepResult, peer)[1].tokens) == oracle(MODEL, IDS, 1)


def test_other_limits_make_other_rows(scheduler, running):
    peer, _, _ = scheduler.prepare(max_num_seqs=2)
    lease, _ = scheduler.assign(peer, block_size=16, max_num_seqs=4)
    scheduler.send(peer, Configure(lease, 16))
    scheduler.get(Ready, peer)
    scheduler.send(peer, first_step(lease))
    assert from_i32(scheduler.get(StepResult, peer)[1].tokens) == oracle(MODEL, IDS, 1)


def test_a_lower_epoch_is_ignored(scheduler, running):
    peer, _, lease = scheduler.prepare()
    scheduler.send(peer, Assign(Lease(0, 0, 9), 8, 8, 64))
    scheduler.send(peer, first_step(lease))
    assert scheduler.get(StepResult, peer)[1].lease == lease


def test_more_blocks_than_fit_are_refused(scheduler, running):
    peer, _ = scheduler.get(Hello)
    lease, loaded = scheduler.assign(peer)
    scheduler.send(peer, Configure(lease, loaded.num_blocks + 1))
    assert "32 fit" in scheduler.get(StepFailed, peer)[1].error


def test_drain_finishes_what_is_planned(scheduler):
    running = Running(scheduler, num_gpu_blocks_override=32)
    peer, _, lease = scheduler.prepare()
    scheduler.send(peer, first_step(lease))
    scheduler.send(peer, Drain("scaling down"))
    scheduler.get(StepResult, peer)
    scheduler.get(Bye, peer)
    running.join()
    assert running.ending is None


def test_leave_asks_the_scheduler_and_goes_when_it_says_so(scheduler):
    running = Running(scheduler, num_gpu_blocks_override=32)
    peer, _, lease = scheduler.prepare()
    running.link.leave()
    scheduler.get(Drain, peer)
    scheduler.send(peer, first_step(lease))
    scheduler.get(StepResult, peer)
    assert running.thread.is_alive()
    scheduler.send(peer, Drain())
    scheduler.get(Bye, peer)
    running.join()
    assert running.ending is None


@pytest.mark.parametrize("how", ["no lease", "no answer", "lease lost", "bye"])
def test_leave_waits_for_nobody_who_does_not_answer(scheduler, how, monkeypatch):
    monkeypatch.setattr("quire.gpu_worker.worker.ANSWER_S", 0.1)
    running = Running(scheduler, num_gpu_blocks_override=32, drain_timeout=0.0 if how == "no answer" else 60.0)
    if how == "no lease":
        scheduler.get(Hello)
    else:
        peer, _, _ = scheduler.prepare()
    running.link.leave()
    if how != "no lease":
        scheduler.get(Drain, peer)
    if how == "lease lost":
        scheduler.restart()
    elif how == "bye":
        scheduler.send(peer, Bye("out of its mind"))
    running.join()
    assert running.ending is None


def test_bye_dismisses(scheduler):
    running = Running(scheduler)
    peer, _ = scheduler.get(Hello)
    scheduler.send(peer, Bye("protocol 2 is spoken here"))
    running.join()
    assert isinstance(running.ending, Dismissed) and str(running.ending) == "protocol 2 is spoken here"
    assert not running.ending.served


def test_an_expelled_worker_has_served(scheduler):
    running = Running(scheduler, num_gpu_blocks_override=32)
    peer, _, _ = scheduler.prepare()
    scheduler.send(peer, Bye("step 3 did not end"))
    running.join()
    assert isinstance(running.ending, Dismissed) and running.ending.served


def test_configure_of_an_old_lease_is_ignored(scheduler, running):
    peer, _ = scheduler.get(Hello)
    old, _ = scheduler.assign(peer)
    new, _ = scheduler.assign(peer)
    scheduler.send(peer, Configure(old, 5))
    scheduler.send(peer, Configure(new, 32))
    assert scheduler.get()[1] == Ready(new)


def test_a_cache_that_cannot_be_had_is_fatal(scheduler):
    running = Running(scheduler, num_gpu_blocks_override=2**40)
    peer, _ = scheduler.get(Hello)
    lease, loaded = scheduler.assign(peer)
    scheduler.send(peer, Configure(lease, loaded.num_blocks))
    running.join()
    assert isinstance(running.ending, ConfigError) and "`num_gpu_blocks_override`" in str(running.ending)


def test_a_model_that_does_not_fit_is_fatal(scheduler):
    running = Running(scheduler, num_gpu_blocks_override=3)
    peer, _ = scheduler.get(Hello)
    scheduler.send(peer, Assign(scheduler.lease(), 8, 8, 64))
    running.join()
    assert isinstance(running.ending, ConfigError)
    assert "max seq len (64)" in str(running.ending) and "(24)" in str(running.ending)


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("after", Phase)
def test_a_worker_goes_where_its_table_says(before, after):
    worker = Worker(EngineArgs(), ModelConfig("", {}, 8, VOCAB), MODEL, torch.float32, CPU)
    worker._phase = before
    if after in TRANSITIONS[before]:
        worker._enter(after)
        assert worker._phase is after
    else:
        with pytest.raises(RuntimeError, match=f"from {before.name} to {after.name}"):
            worker._enter(after)


def test_pages_that_nobody_wants_make_room_for_others(tmp_path):
    """A worker that rests has no cache to write them to, and takes all the same what others sent before they knew."""
    arrived = threading.Semaphore(0)
    config = ModelConfig(path="", hf={}, max_model_len=64, vocab_size=VOCAB)
    mover = Mover(f"ipc://{tmp_path}/pages", None, None)
    mover.start(arrived.release)
    worker = Worker(EngineArgs(), config, MODEL, torch.float32, CPU, mover=mover)
    context = zmq.Context()
    dealer = Dealer(BetweenWorkers, mover.endpoint, new_incarnation("gpu_worker"), None, context)
    for number in range(3 * MAX_WAITING):
        dealer.send(Pages(Lease(1, 0, 1), number, 0, 1, b""))
    for _ in range(3 * MAX_WAITING):
        assert arrived.acquire(timeout=WAIT_S)
        worker._moves.handle(Arrived(), worker._lease, worker._kv)
    mover.close()
    context.destroy(linger=0)


def test_word_of_pages_of_an_earlier_session_is_not_lost(scheduler, link):
    """Those that wait are counted until they are taken."""
    peer, _ = scheduler.get(Hello)
    scheduler.send(peer, Assign(Lease(1, 0, 1), 8, 8, 128))
    assert isinstance(link.get(WAIT_S), Assign)
    link.post(Arrived())
    link.renew()
    scheduler.get(Hello)
    assert isinstance(link.get(WAIT_S), Arrived)
