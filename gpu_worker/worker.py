"""A worker's life under one lease after another: Assign, Loaded, Configure, Ready, then plans in, results out.

The compute thread launches a plan as soon as it is there. On a GPU another thread sleeps until the step's tokens
have arrived and sends them, so that step N + 1 is launched while the GPU runs step N.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..proto.checkpoint.model_config import AUTO_LENGTH, ModelConfig
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.config import ConfigError, EngineArgs
from ..proto.messages import (
    Assign,
    Bye,
    Compiled,
    Configure,
    Drain,
    DropAdapter,
    Forget,
    Give,
    Lease,
    LoadAdapter,
    Loaded,
    Move,
    Profile,
    Ready,
    Rest,
    Rested,
    StepFailed,
    StepPlan,
    Take,
)  # fmt: skip
from ..proto.params import MAX_BEAMS
from ..proto.pooling import PoolingParams
from ..proto.process import resident_bytes, tell_ready
from ..proto.speculation import speculative_config
from ..proto.work import Pool, Work
from . import compilations
from .adapters import Adapters, Read, Told
from .cache_size import blocks_that_fit
from .device import choose_long_steps, parameter_estimate, usable_cores
from .graphs import capture_sizes
from .kv_cache import KVCache
from .link import Arrived, Dismissed, LeaseLost, Leave, Link
from .memory import Budget, available_memory, cpu_budget, cuda_budget, device_used, gib, out_of_memory, step_bytes
from .models.identity import identity_of
from .outcome import ROOM
from .page_moves import PageMoves, Said, pages_of
from .parallel.parallel import Group, Ranks, number_of
from .phase import TRANSITIONS, Phase
from .pooling import Pooler
from .profiler import Profiler
from .rest import Weights
from .results import DeviceFailure, Results
from .runner import PROMPT_SLICE, Runner
from .sampling.followers import Follower, Histories
from .sampling.processors import Function, Processors
from .speculation.loading import Drafts
from .speculation.methods import draft_rows, speculative_runner
from .state import PlanError, RowState, logprob_bytes
from .tiers.keeper import Keeper
from .warmup import every_stage, run_worst_case, warm_up, warm_up_pieces

if TYPE_CHECKING:
    from .models.model import Model
    from .moving import Mover
    from .parallel import group_link
    from .sampling.grammar import Grammars

log = logging.getLogger(__name__)


ANSWER_S = 3.0
"""How much longer than ``drain_timeout`` a worker that wants to leave waits for the scheduler's word."""


class Broken(Exception):
    """A step failed in one process of a replica of several, which are in different places now: all must end."""


class Worker:
    """Serves one loaded model until it is drained, dismissed or interrupted.

    In a replica of several processes each has one of these. The leader's passes on to the ``others`` what the scheduler
    tells it, and answers for all; theirs take the leader for the scheduler.
    """

    def __init__(
        self, args: EngineArgs, config: ModelConfig, model: Model, dtype: torch.dtype, device: torch.device,
        grammars: Grammars | None = None, functions: dict[str, Function] | None = None, group: Group | None = None,
        others: group_link.Leader | None = None, pooler: PoolerConfig | None = None,
        load: Callable[[], Model] | None = None, mover: Mover | None = None, drafts: Drafts | None = None,
    ):  # fmt: skip
        """``load`` reads the model again, after a sleep; ``mover`` exchanges pages with other workers."""
        self._group, self._others = group or Group(), others
        self._args, self._config, self._weights, self._pooler = args, config, Weights(model, load), pooler
        self._dtype, self._device = dtype, device
        self._grammars: Follower[Any] | None = None if grammars is None else Follower(grammars)
        self._processors: Follower[Any] = Follower(Processors(functions or {}))
        if not self._group.leader:
            self._grammars, self._processors = Follower(Histories()), Follower(Histories())
        self._speculation, self._drafts = speculative_config(args), drafts or Drafts()
        self._lease: Lease | None = None
        self._epoch = 0
        self._phase = Phase.UNASSIGNED
        self._next_step = 0
        self._assigned: tuple[int, int, int] | None = None  # block_size, max_num_seqs, max_num_batched_tokens
        self._num_blocks = 0  # that fit
        self._leave_by: float | None = None  # when a worker that asked to leave goes without an answer
        self._state: RowState | None = None
        self._runner: Runner | None = None
        self._adapters: Adapters | None = None
        self._tiers = Keeper(args, config, others)
        number, count = number_of(self._group.shard), self._group.shard.size * self._group.shard.stages
        self._profiler = Profiler(args.profiler_config, number, device)
        self._moves = PageMoves(mover, others, number, count, self._tiers.guard)

    def serve(self, link: Link | group_link.Member) -> None:
        """Until Drain, or until nobody is there to ask. Raises Dismissed on Bye and ConfigError where the model does
        not fit."""
        self._link: Any = link  # either has what is used of it
        self._results = Results(link, threaded=self._device.type != "cpu")
        if (slots := self._model.adapters) is not None:
            self._adapters = Adapters(slots, self._args.max_cpu_loras or slots.count, link, self._others)
        self._results.sent = self._tiers.attach(link)
        self._moves.attach(link)
        if self._device.type == "cuda":
            compilations.watch(self._compiled)
        while True:
            left = None if self._leave_by is None else self._leave_by - time.monotonic()
            if left is not None and left <= 0:
                log.warning("the scheduler has not let go in %g s; leaving", self._args.drain_timeout + ANSWER_S)
                return
            match link.get(left):
                case StepPlan() as plan:
                    self._step(plan)
                case (Take() | Give() | Forget() | Arrived() | Said()) as message:
                    self._moves.handle(message, self._lease, self._kv)
                case Move() as move if move.lease == self._lease:
                    self._tiers.move(move)
                case Assign() as assign:
                    self._open(assign)
                case Profile() as profile if profile.lease == self._lease:
                    self._pass_on(profile)
                    self._profiler.follow(profile, link, self._others)
                case Rest() as rest:
                    self._rest(rest)
                case Configure() as configure:
                    self._configure(configure)
                case LoadAdapter() | DropAdapter() | Read() | Told() as changed if self._adapters is not None:
                    self._adapters.change(changed, self._lease)
                case Leave() if self._leave_by is None:
                    if self._phase is not Phase.READY:  # nothing can run here
                        return
                    log.info("asked to end: draining for at most %g s", self._args.drain_timeout)
                    self._leave_by = time.monotonic() + self._args.drain_timeout + ANSWER_S
                    link.send(Drain("it was asked to end"))
                case LeaseLost() | Bye() if self._leave_by is not None:
                    return  # what ran here goes on elsewhere
                case LeaseLost():
                    self._end_lease()
                case DeviceFailure() as failure if failure.lease == self._lease:
                    self._fail(failure.step, failure.error)
                case Drain(reason=reason):
                    log.info("draining: %s", reason or "the scheduler asks")
                    self._results.drain()
                    return
                case Bye(reason=reason):
                    raise Dismissed(reason, served=self._epoch > 0)

    def finish(self) -> None:
        """The link is closed. What waits to be written to disk is written."""
        self._tiers.drop()

    # ------------------------------------------------------------ leases

    @property
    def _model(self) -> Model:
        return self._weights.model

    @property
    def _kv(self) -> KVCache | None:
        return None if self._runner is None else self._runner.kv

    def _begin(self, message: Assign | Rest, phase: Phase) -> bool:
        """A lease begins; False for one of a scheduler before the one that is there."""
        if message.lease.epoch < self._epoch:
            log.warning("ignoring a lease of epoch %d; %d has begun", message.lease.epoch, self._epoch)
            return False
        self._pass_on(message)
        self._end_lease()
        self._lease, self._epoch = message.lease, message.lease.epoch
        self._enter(phase)
        return True

    def _drop_cache(self) -> None:
        self._runner = None
        self._tiers.drop()

    def _rest(self, rest: Rest) -> None:
        """Give back all memory that Rest asks for. What keeps tensors beside the model lets go of them here."""
        if not self._begin(rest, Phase.RESTING):
            return
        self._drop_cache()
        self._state = self._assigned = None
        self._drafts.put_away(rest.level)
        if self._adapters is not None:
            self._adapters.put_away()
        self._weights.put_away(rest.level)
        self._link.loaded = self._weights.there
        if self._others is not None:
            self._others.collect(Rested, rest.lease)
        self._link.send(Rested(rest.lease))
        log.info("asleep at level %d; %s resident", rest.level, gib(resident_bytes()))

    def _open(self, assign: Assign) -> None:
        if not self._begin(assign, Phase.ASSIGNED):
            return
        self._weights.bring_back()
        self._drafts.bring_back(self._model)
        self._link.loaded = True
        slots = 0 if self._adapters is None else self._adapters.use(self._model)
        wanted = (assign.block_size, assign.max_num_seqs, assign.max_num_batched_tokens)
        if wanted[0] not in (8, 16, 32) or not 1 <= wanted[1] <= wanted[2] < 2**31:  # no scheduler's flags say so
            self._fail(0, PlanError("Assign asks for blocks of {} tokens, {} rows, {} tokens a step".format(*wanted)))
            return
        if wanted != self._assigned:
            self._drop_cache()
            self._state = None  # the old cache is freed before the new one is measured
            try:
                budget = self._measure(*wanted)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                raise ConfigError(
                    f"no memory for {wanted[1]} rows of up to {self._config.max_model_len} tokens and steps of "
                    f"{wanted[2]} ({error}); lower `max_num_seqs`, `max_num_batched_tokens` or `max_model_len`."
                ) from error
            of = self._args, self._config, self._model, self._dtype
            self._num_blocks = blocks_that_fit(*of, budget, assign.max_num_seqs)
            self._assigned = wanted
        if self._others is not None:
            fits = [each.num_blocks for each in self._others.collect(Loaded, assign.lease)]
            self._num_blocks = min(self._num_blocks, *fits)
        if self._args.max_model_len == AUTO_LENGTH:
            self._config.max_model_len = min(self._config.max_model_len, self._num_blocks * assign.block_size)
        sizes = self._num_blocks, self._config.max_model_len, self._config.vocab_size
        pooler = self._pooler
        loaded = Loaded(assign.lease, *sizes, pooler is not None, pooler is not None and pooler.whole)
        if self._speculation is not None and pooler is None:
            loaded.drafts = self._speculation.drafts
            loaded.draft_rows = draft_rows(self._speculation, self._device.type, assign.max_num_seqs)
            loaded.drafts_always = not self._speculation.adapt
        if self._moves.on:
            weights, model = self._weights, self._model
            weights.identity = weights.identity or identity_of(self._args, self._config, model)
            pages = pages_of(model, self._device, assign.block_size, weights.identity, self._group.shard)
            loaded.kv_format, loaded.block_bytes = pages
        loaded.adapter_slots = slots
        self._link.send(loaded)

    def _measure(self, block_size: int, max_rows: int, max_tokens: int) -> Budget:
        spec, length = self._model.spec, self._config.max_model_len
        block_bytes = KVCache.block_bytes(spec, block_size, self._model.cache_dtype)
        block_bytes += self._drafts.block_bytes(block_size)
        vocab = self._config.vocab_size
        rows = RowState.device_bytes(max_rows, length, block_size, vocab)
        if self._device.type == "cpu" and rows > (available := available_memory()):
            raise MemoryError(f"the rows alone take {rows} bytes and {available} are available")
        self._state = RowState(
            max_rows, length, block_size, vocab, self._device, self._args.logprobs_mode, self._grammars,
            self._processors, self._group.leader, self._model.adapters, self._model.given,
        )  # fmt: skip
        most = vocab if self._args.max_logprobs < 0 else min(vocab, max(self._args.max_logprobs, 2 * MAX_BEAMS))
        if self._device.type == "cpu":
            slots = max_rows + PROMPT_SLICE
            if (config := self._speculation) is not None and self._pooler is None:
                slots += config.drafts * draft_rows(config, "cpu", max_rows)
            activations = step_bytes(spec, max_tokens, slots, self._dtype.itemsize)
            activations += rows + logprob_bytes(max_rows, most) + min(logprob_bytes(max_tokens, most), ROOM)
            activations += self._drafts.step_bytes(max_tokens, max_rows)
            activations += 0 if self._adapters is None else self._adapters.to_come
            return cpu_budget(activations, block_bytes, block_size, max_rows * self._state.max_blocks)
        runner = self._runner_of(
            KVCache(spec, 1, block_size, self._model.cache_dtype, self._device), self._state, max_tokens
        )
        warm_up(runner, progress=self._group.leader)  # first, so that what the kernels take on the device counts
        work: Work = every_stage(most)
        if self._pooler is not None:
            work = Pool(PoolingParams(task=f"token_{self._pooler.convert}", pooling="ALL"))

        def graphs() -> int:
            return runner.graph_bytes(self._args.max_seq_len_to_capture, lambda: device_used(self._device))

        budget = cuda_budget(
            lambda: run_worst_case(runner, work), graphs if self._graphs else int, block_bytes, block_size, self._device
        )
        self._state.reset()
        return budget

    def _configure(self, configure: Configure) -> None:
        if configure.lease != self._lease or self._assigned is None or self._state is None:
            return
        if self._phase is Phase.READY:  # rows may hold blocks by now that a smaller cache would not have
            self._fail(0, PlanError("a second Configure came under one lease"))
            return
        if not 1 <= configure.num_blocks <= self._num_blocks:
            error = PlanError(f"Configure asks for {configure.num_blocks} blocks; {self._num_blocks} fit")
            self._fail(0, error)
            return
        self._tiers.expect(configure.lease)
        self._pass_on(configure)
        if self._runner is None or self._runner.kv.num_blocks != configure.num_blocks:
            self._drop_cache()
            try:
                block_size, _, max_tokens = self._assigned
                self._runner = self._prepare(configure.num_blocks, self._state, block_size, max_tokens)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                raise ConfigError(
                    f"no memory for {configure.num_blocks} KV blocks after all ({error}); lower "
                    "`gpu_memory_utilization`, `kv_cache_memory_bytes` or `num_gpu_blocks_override`."
                ) from error
        if self._tiers.wanted:
            self._tiers.offer(self._model, self._runner.kv, configure.lease)
        if self._others is not None:
            self._others.collect(Ready, configure.lease)
        self._enter(Phase.READY)
        self._moves.begin(configure.num_blocks)
        self._next_step = 1
        self._link.last_step = 0
        self._link.send(Ready(configure.lease))
        self._tiers.open(configure.lease)
        tell_ready()
        log.info("ready under lease %d.%d", configure.lease.replica, configure.lease.counter)

    def _prepare(self, num_blocks: int, state: RowState, block_size: int, max_tokens: int) -> Runner:
        kv = KVCache(self._model.spec, num_blocks, block_size, self._model.cache_dtype, self._device)
        kv.reach(0)
        runner = self._runner_of(kv, state, max_tokens)
        if self._graphs:
            runner.capture(self._args.max_seq_len_to_capture, progress=self._group.leader)
            warm_up_pieces(runner)
        return runner

    @property
    def _graphs(self) -> bool:
        """Whether decode steps are replayed as CUDA graphs; hidden states of another stage cannot come into one, and
        those that heads tap would not come out."""
        if self._device.type != "cuda" or self._args.enforce_eager or self._drafts.taps:
            return False
        return self._group.shard.stages == 1 and self._model.capturable and self._pooler is None

    def _compiled(self, kernel: str, seconds: float) -> None:
        """A kernel was compiled; once requests are served, the operator is told."""
        if self._phase is not Phase.READY or self._lease is None:
            return
        log.warning(
            "compiled while serving, which held up every stream for %.1f s (please report it): %s", seconds, kernel
        )
        if self._group.leader:  # the others compile the same
            self._link.send(Compiled(self._lease))

    def _runner_of(self, kv: KVCache, state: RowState, max_tokens: int) -> Runner:
        pooler = None if self._pooler is None else Pooler(self._pooler, self._model)
        long = choose_long_steps(self._args.cpu_threads, usable_cores(), parameter_estimate(self._config))
        if (config := self._speculation) is not None and pooler is None:
            runner: Runner = speculative_runner(
                config, self._model, state, kv, max_tokens, self._drafts.loaded, group=self._group, long=long
            )
        else:
            runner = Runner(self._model, state, kv, max_tokens, pooler, self._group, long)
        args = self._args
        runner.graph_rows = capture_sizes(state.max_rows, args.cudagraph_capture_sizes, args.max_cudagraph_capture_size)
        return runner

    def _pass_on(self, message: Assign | Rest | Configure | StepPlan | Move | Profile) -> None:
        """To the other processes of this replica, before it is done here."""
        if self._others is not None:
            self._others.send(message)

    def _end_lease(self) -> None:
        """Let the device finish what was launched, then forget every row."""
        self._results.drain()
        self._tiers.end_lease()
        if self._phase is not Phase.UNASSIGNED:
            self._enter(Phase.UNASSIGNED)
        self._lease = None
        self._moves.end()
        if self._state is not None:
            self._state.reset()
        if self._adapters is not None:
            self._adapters.forget()

    def _enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self._phase]:
            raise RuntimeError(f"a worker went from {self._phase.name} to {phase.name}, which its table does not have")
        self._phase = phase

    # ------------------------------------------------------------ steps

    def _step(self, plan: StepPlan) -> None:
        lease = self._lease
        if lease is None or plan.lease != lease:
            log.debug("dropped a plan of lease %s", plan.lease)
            return
        self._pass_on(plan)
        try:
            if self._runner is None or self._phase is not Phase.READY:
                raise PlanError(f"step {plan.step} came where Configure was expected")
            if plan.step != self._next_step:
                raise PlanError(f"step {plan.step} came where {self._next_step} was expected")
            if self._tiers.wanted:
                self._tiers.begin(plan)
            outcome = self._runner.launch(plan)
            self._moves.after_step(lease, self._runner.kv)
            if self._group.leader:
                self._results.put(lease, plan.step, outcome)
            self._next_step += 1
        except Exception as error:  # noqa: BLE001  # whatever a step raises ends its lease and no more
            self._fail(plan.step, error)

    def _fail(self, step: int, error: Exception) -> None:
        lease = self._lease
        if lease is None:
            return
        told = f"{type(error).__name__}: {error}"[:2000]
        if isinstance(self._group, Ranks):
            raise Broken(f"step {step} failed: {told}") from error
        log.error("step %d failed: %s", step, error, exc_info=None if isinstance(error, PlanError) else error)
        self._link.send(StepFailed(lease, step, told))
        self._link.renew()
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # raises, and so ends the process, where the device itself is lost
            torch.cuda.empty_cache()
        self._end_lease()
