"""Faults put into the code by hand, one at a time: what the simulation must find.

A fault is a line or two of one function, as they are and as they become. The function gets new code, so everybody who
has it, has the fault; when the fault is taken out the function is as it was. Where the lines are not in the product any
more, ``put_in`` raises LookupError: the fault is to be written anew.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """``was`` becomes ``becomes`` in a function of the product, named ``package.module:Class.function``."""

    function: str
    was: str
    becomes: str


class Fault:
    """One fault: its edits, and what it is in words."""

    def __init__(self, words: str, *edits: tuple[str, str, str]):
        self.words, self.edits = words, [Edit(*edit) for edit in edits]

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Have the fault in the code meanwhile."""
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(_edited(edit))
            yield


@contextmanager
def _edited(edit: Edit) -> Iterator[None]:
    function = _find(edit.function)
    before = function.__code__
    function.__code__ = _code(function, edit)
    try:
        yield
    finally:
        function.__code__ = before


def _find(name: str) -> FunctionType:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(f"quire.{module}")
    for step in path.split("."):
        found = inspect.getattr_static(found, step)
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__func__", found)
    if not isinstance(found, FunctionType):
        raise LookupError(f"{name} is no function")
    return found


def _code(function: FunctionType, edit: Edit) -> CodeType:
    """The function's code with the edit in it. It is compiled within another function that has a ``__class__``, as the
    compiler gives one to methods that say ``super()``."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(edit.was) != 1:
        raise LookupError(f"{edit.was!r} is {source.count(edit.was)} times in {edit.function}, not once")
    source = source.replace(edit.was, edit.becomes)
    outer = "def outer(__class__):\n" + textwrap.indent(source, "    ")
    flags = __future__.annotations.compiler_flag
    code = compile(outer, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    found = _named(function.__name__, code)
    if found is None or found.co_freevars != function.__code__.co_freevars:
        raise LookupError(f"{edit.function} cannot be compiled alone")
    return found


def _named(name: str, code: CodeType) -> CodeType | None:
    """The code of the outermost function of that name within ``code``."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    own: Callable[[CodeType], bool] = lambda each: each.co_name == name  # noqa: E731
    return next(filter(own, inner), None) or next((f for each in inner if (f := _named(name, each))), None)


BROKEN: dict[str, Fault] = {
    # -- what the scheduler knows of workers
    "a lease not checked": Fault(
        "what a worker says of an earlier lease is taken for the present one's; only a worker that comes back under "
        "the identity that it had can say such a thing, and a gpu_worker takes a new one",
        ("scheduler.worker_registry:WorkerRegistry.on_worker", "elif message.lease != worker.lease:", "elif False:"),
    ),
    "a result committed twice": Fault(
        "a StepResult is committed whatever step it is of",
        (
            "scheduler.commit:_check",
            "if not replica.in_flight or result.step != replica.in_flight[0].number:",
            "if not replica.in_flight:",
        ),
    ),
    "silence ignored": Fault(
        "a worker that sends no heartbeat keeps its lease",
        (
            "scheduler.worker_registry:WorkerRegistry._check",
            "return\n    if now - worker.heartbeat_at > silent:",
            "return\n    if False:",
        ),
    ),
    "a hung step waited for": Fault(
        "a step may take for ever",
        ("scheduler.worker_registry:WorkerRegistry._check", "elif replica.waited(now) > hung:", "elif False:"),
    ),
    "a loss not counted": Fault(
        "a request that ends workers is never given up",
        ("scheduler.request:Sequence.note_loss", "self.losses.lost(self.computed)", "pass"),
    ),
    "quarantine ignored": Fault(
        "a request that ended two workers goes on running beside others",
        ("proto.losses:Losses.in_quarantine", "return self.count >= self.limit - 1 and", "return False and"),
    ),
    "no request forgiven": Fault(
        "a worker's end is held against requests also where the scheduler had stood still",
        ("scheduler.worker_registry:WorkerRegistry.gone", "blame = blame and self.core.clock()", "self.core.clock()"),
    ),
    "a plan that never left blamed": Fault(
        "what is in a plan that could not be sent pays for the worker's end",
        ("scheduler.replica:Replica.withdraw", "self.in_flight.pop()", "pass"),
    ),
    "a drain forgets": Fault(
        "what still runs on a worker that drains is dropped when its time is up",
        ("scheduler.worker_registry:WorkerRegistry._let_go", "self.core.requeue(seq)", "self.core.drop(seq.request)"),
    ),
    # -- blocks, rows and counters
    "a block freed early": Fault(
        "a block that two sequences hold is freed by the first that lets go",
        (
            "scheduler.block_pool:BlockPool._free",
            "refs[block] = held - 1",
            "refs[block] = 0\n            free.append(block)",
        ),
    ),
    "a cached block not held": Fault(
        "blocks found in the prefix cache may be given to somebody else meanwhile",
        ("scheduler.replica:Replica.start", "self.pool.share(block)", "pass"),
    ),
    "a row leaked": Fault(
        "the worker is not told of rows that are given up",
        ("scheduler.replica:Replica.drop_rows", "self.drops += rows", "pass"),
    ),
    "a row not given back": Fault(
        "the row of a sequence that was preempted or ended is never used again",
        ("scheduler.replica:Replica.release", "self.free_rows += rows", "pass"),
    ),
    "a late result kept": Fault(
        "the generation is not raised, so what was in flight counts for a sequence that was put back",
        ("scheduler.request:Sequence._leave", "self.generation += 1", "pass"),
    ),
    "a token forgotten": Fault(
        "a sequence put back in line forgets its last token",
        ("scheduler.request:Sequence.requeue", "self.keep_drawn(self.total)", "self.keep_drawn(self.total - 1)"),
    ),
    "a shared block written": Fault(
        "a block that siblings share is written without a copy",
        ("scheduler.draft:Draft.own_block", "pool.refs[held] == 1", "pool.refs[held] >= 1"),
    ),
    "no block to spare": Fault(
        "a sequence begins where its tokens fit, and no block is left for the next of those that run",
        (
            "scheduler.placement:has_room",
            "return pool.free_count - need >= replica.running + seq.spare_blocks(replica.block_size)",
            "return pool.free_count >= need",
        ),
    ),
    "a salt forgotten": Fault(
        "cache salts are left out of the root of hashes",
        ("proto.hashing:root_of", "if cache_salt else ROOT", "if not cache_salt else ROOT"),
    ),
    "an adapter forgotten": Fault(
        "adapters are left out of the root of hashes",
        ("proto.hashing:root_of", "if adapter else root", "if not adapter else root"),
    ),
    # -- who waits
    "fairness ignored": Fault(
        "the key with the most running sequences goes next",
        (
            "scheduler.queue:WaitingQueue.in_turn",
            "heads.append((first.key[0], counts[account],",
            "heads.append((first.key[0], -counts[account],",
        ),
    ),
    "passed over for want of room": Fault(
        "whose blocks could be loaded, were there room for them, is passed over as if they were on their way",
        (
            "scheduler.planner:_loads",
            "if not count or not _finds_room(replica, seq, cached):\n        return False",
            "if not count or not _finds_room(replica, seq, cached):\n        return bool(count)",
        ),
    ),
    "a line held up by an adapter": Fault(
        "nobody begins who came after those whose adapter is not there yet",
        ("scheduler.planner:_candidates", "digest)\n            continue", "digest)\n            return"),
    ),
    "priority ignored": Fault(
        "requests wait in the order in which they came, whatever their priority",
        ("scheduler.intake:take_in", 'books.config.scheduling_policy == "priority"', "False"),
    ),
    "an account not closed": Fault(
        "requests that have ended count against their key's limit",
        ("scheduler.accounts:Accounts.leave", "account.open -= 1", "pass"),
    ),
    "Retry-After without tokens": Fault(
        "a request refused for the tokens that wait is told to come back as if it were for one place",
        (
            "scheduler.queue:WaitingQueue.retry_after",
            "if self.max_tokens is not None and self.fresh_requests:",
            "if False:",
        ),
    ),
    # -- the front side
    "an attempt not raised": Fault(
        "a request is sent again as the attempt that was lost",
        ("client.request:OpenRequest.lost", "self.attempt += 1", "pass"),
    ),
    "a lower attempt taken": Fault(
        "a Submit replaces what is there, whichever attempt it is",
        ("scheduler.intake:take_in", "if message.attempt <= earlier.attempt:", "if False:"),
    ),
    "an abort of an earlier attempt": Fault(
        "an Abort ends the present attempt, whichever it was meant for",
        ("scheduler.core:Scheduler.abort", " and attempt >= request.attempt", ""),
    ),
    "an abort that overtakes": Fault(
        "a request whose prompt is still being prepared is submitted although it was aborted",
        (
            "detokenizer.core:DetokenizerCore._drop",
            "if self.requests.get(request.uid) is request:",
            "if self.requests.get(request.uid) is request and request.submitted:",
        ),
    ),
    "undelivered tokens kept": Fault(
        "a request goes on although tokens of it did not reach its detokenizer",
        (
            "scheduler.membership:Membership.undelivered",
            "if isinstance(message, TokenBatch | PromptLogprobs | BeamTokens):",
            "if False:",
        ),
    ),
    "a client that is gone": Fault(
        "a detokenizer keeps the requests of a client that it cannot reach",
        ("detokenizer.core:DetokenizerCore.undelivered", "self._lose_engine(engine)", "pass"),
    ),
    "a standstill held against others": Fault(
        "a process that stood still holds the others to the time in which it could not hear them",
        ("proto.standstill:Standstill.notice", "if now - before <= self._limit:", "if True:"),
    ),
    "Unknown never sent": Fault(
        "a detokenizer that asks is not told what the scheduler lacks",
        ("scheduler.core:Scheduler.open", "if gone:", "if False:"),
    ),
    "a beam search unanswered": Fault(
        "a beam search whose question was lost with a connection waits for the answer",
        ("scheduler.books:Books._drop_unanswered", "and seq.asked", "and False"),
    ),
    "a lost owner kept": Fault(
        "the requests of a detokenizer that did not come back are kept",
        ("scheduler.books:Books.forget_owner", "self.drop(request)", "pass"),
    ),
    "a scheduler's killer unknown": Fault(
        "the request that ended the scheduler is not written down",
        ("scheduler.membership:Membership._submit", "self.blame.begin(message.uid)", "pass"),
    ),
    "an epoch of the past": Fault(
        "a scheduler believes its clock, though the one before had a later epoch",
        ("scheduler.main:next_epoch", "epoch = max(epoch, int(kept) + 1)", "pass"),
    ),
    "the old identity": Fault(
        "a client's connection to a detokenizer is made again under the identity of the one that was lost",
        ("client.core:EngineCore._connect", "self._link_count += 1", "self._link_count = 1"),
    ),
    "text sent again": Fault(
        "a request that is sent again does not say how much text its client has",
        ("client.generation:OpenGeneration.again", "text_sent=child.chars", "text_sent=0"),
    ),
    "tokens forgotten over a resume": Fault(
        "a request that is sent again says nothing of the tokens that its client has",
        ("client.generation:OpenGeneration.again", "ids=i32(child.tokens)", "ids=b''"),
    ),
    "a stop string forgotten": Fault(
        "a child that is resumed looks for no stop string",
        (
            "detokenizer.tokenize:Preparer._open",
            "sequence = TextSequence(stream(), stops,",
            "sequence = TextSequence(stream(), None,",
        ),
    ),
    "half a stop string forgotten": Fault(
        "a child that is resumed looks for stop strings in what comes from then on only",
        (
            "detokenizer.tokenize:Preparer._open",
            "if news.finish == Finish.NONE:",
            "if news.finish == Finish.NONE:\n            sequence._watch = stops and type(sequence._watch)(stops)",
        ),
    ),
    "a silent detokenizer kept": Fault(
        "a client waits for a detokenizer that sends nothing",
        ("client.core:EngineCore.heartbeat", "if link.ready and now - link.heard > SILENCE_S:", "if False:"),
    ),
    "a new scheduler overlooked": Fault(
        "a client does not send again what was with the scheduler before",
        ("client.core:EngineCore._on_peers", "restarted = 0 < self._epoch < peers.epoch", "restarted = False"),
    ),
    "the supervisor leaves": Fault(
        "a process that was killed is not started again",
        (
            "client.supervisor.decision:decide",
            "return Restart(min(longest, FIRST_PAUSE_S * 2 ** (quick - 1)) if quick else 0.0)",
            "return Restart(1e9)",
        ),
    ),
    "a detokenizer's Reconcile lost": Fault(
        "a detokenizer never says what it believes to be with the scheduler",
        ("detokenizer.core:DetokenizerCore._reconcile", "self._put(SCHEDULER, Reconcile(", "bool(Reconcile("),
    ),
    "an Engine's Reconcile lost": Fault(
        "a client never says what it believes to be with a detokenizer",
        ("client.core:EngineCore.heartbeat", "self._put(link.identity, m.Reconcile(", "bool(m.Reconcile("),
    ),
    "the first attempt's number": Fault(
        "a request that is sent again says that it is its first attempt",
        ("client.request:OpenRequest.again", "attempt=self.attempt", "attempt=self.message.attempt"),
    ),
    "an Abort not sent": Fault(
        "a detokenizer is not told that nobody wants a request any more",
        ("client.core:EngineCore.finish", "if link is not None and tell:", "if False:"),
    ),
    "an Abort not passed on": Fault(
        "the scheduler is not told that nobody wants a request any more",
        ("detokenizer.core:DetokenizerCore._drop", "if request.submitted:", "if False:"),
    ),
    # -- what is done twice, too late, or beyond a limit
    "a listed request dropped": Fault(
        "a detokenizer drops the requests that its client lists, and says that it does not know them",
        (
            "detokenizer.core:DetokenizerCore._compare",
            "r.attempt > listed.get(r.uid, -1)",
            "r.attempt >= listed.get(r.uid, -1)",
        ),
    ),
    "the requests of others dropped": Fault(
        "what one detokenizer does not list is dropped, whosever it is",
        (
            "scheduler.core:Scheduler.open",
            "for request in self.owned_by(owner):",
            "for request in list(self.requests.values()):",
        ),
    ),
    "one request too many of a key": Fault(
        "an API key may have one request more open than its limit",
        ("scheduler.accounts:Accounts.full", "account.open < self.limit", "account.open <= self.limit"),
    ),
    "load refuses what has run": Fault(
        "a request that is sent again is refused where the line is full",
        ("scheduler.intake:take_in", "if not message.attempt:", "if True:"),
    ),
    "no patience with what was lost": Fault(
        "a request that is sent again waits for a detokenizer no longer than a new one",
        (
            "client.core:EngineCore._check_waiting",
            "NO_DETOKENIZER_RESUMED_S if request.attempt else NO_DETOKENIZER_S",
            "NO_DETOKENIZER_S",
        ),
    ),
    "a deadline kept": Fault(
        "a request that runs is still held to the time that it may wait",
        ("scheduler.books:Books._has_started", "self._deadlines.pop(request.uid, None)", "pass"),
    ),
    "min_tokens forgotten over a resume": Fault(
        "stop strings end a child that is resumed before its min_tokens",
        (
            "detokenizer.tokenize:Preparer._open",
            "stops, resume.text_sent, params.min_tokens)",
            "stops, resume.text_sent)",
        ),
    ),
    "a child's seed by its place": Fault(
        "of children that are resumed those after one that had ended draw as if they were that one",
        (
            "scheduler.intake:_sequences",
            "Sequence(request, child.index, outputs,",
            "Sequence(request, child.index if len(message.children) == n else len(sequences), outputs,",
        ),
    ),
    "the times of the last attempt": Fault(
        "a request's time in line is that of its last attempt",
        ("client.request:OpenRequest.start", "if self.metrics.first_scheduled_time is None:", "if True:"),
    ),
    "a place lost over a resume": Fault(
        "a request that is sent again stands in line behind those that came after it",
        (
            "client.request:OpenRequest.again",
            "attempt=self.attempt,",
            "attempt=self.attempt, arrival=self.message.arrival + 3600.0 * self.attempt,",
        ),
    ),
    "an end of quarantine forgotten": Fault(
        "a detokenizer prepares nothing after a request in quarantine",
        ("detokenizer.core:DetokenizerCore._settle", "self._alone = None", "pass"),
    ),
    "no process killed for its silence": Fault(
        "the supervisor waits for a process that stands still for good",
        ("client.supervisor.watch:Watch._check_silence", "if self.silence(place) > SILENCE_S", "if False"),
    ),
    "a worker that has left": Fault(
        "a worker that was drained is started again",
        ("client.supervisor.decision:decide", 'if last.code == 0 and service == "gpu_worker":', "if False:"),
    ),
}
"""By name."""
