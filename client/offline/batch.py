"""Run a batch of prompts to the end: what stands between LLM and Engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ...proto.checkpoint.pooler_config import pooler_of
from ...proto.config import EngineArgs
from ...proto.flag_words import structured_rules
from ...proto.messages import Finish, Stats
from ...proto.params import SamplingParams
from ...proto.pooling import PoolingParams
from ...proto.wire.sockets import load_keys
from ...proto.work import Adapter
from ..adapter_folders import AdapterFolders
from ..background import EngineThread
from ..engine import Engine
from ..results import ChildOutput, RequestError
from ..stream import RequestStream
from ..supervisor.launch import POLL_S, LaunchError, Supervisor
from ..traced import traces_of
from .checks import Limits
from .defaults import default_sampling
from .flat import FlatLogprobs
from .metrics import Metric, Recorder
from .outputs import CompletionOutput, Logprob, PoolingOutput, PoolingRequestOutput, RequestOutput, to_dict
from .prompts import Input

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 1.0
"""Pause before a prompt that was refused for load is sent again, where the refusal names none."""

_FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}
_CLOSED = "this LLM has been closed."
_ELSEWHERE = "this process is a fork of the one in which this LLM lives; make another here, or use threads."
_STATS_S = 10.0  # for the scheduler to answer: here nobody's probe waits for it


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a batch, with the seed it has unless its parameters name one."""

    number: int  # its place among the prompts
    request_id: str
    given: Input
    params: SamplingParams
    seed: int
    priority: int
    lora_request: Any = None  # as it was given
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class PoolJob:
    """One prompt of a batch that is pooled."""

    number: int  # its place among the prompts
    request_id: str
    given: Input
    params: PoolingParams
    adapter: Adapter | None = None


AnyJob = Job | PoolJob
AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]


class Offline:
    """The processes and the Engine behind an LLM; holds no reference to it, so that it can be collected."""

    def __init__(self, args: EngineArgs, tokenizer: Any):
        self.supervisor = Supervisor(args)
        config = self.supervisor.config
        self.pooler = pooler_of(config, self.supervisor.args)
        self.defaults = default_sampling(config.generation, args.generation_config, args.override_generation_config)
        if "max_tokens" in self.defaults:
            self.defaults["max_tokens"] = min(self.defaults["max_tokens"], config.max_model_len)
        self.limits = Limits(
            config, args.max_logprobs, args.logits_processor or [], not args.skip_tokenizer_init,
            rules=structured_rules(args), reasoning=args.reasoning_parser,
        )  # fmt: skip
        self.adapters = AdapterFolders(args.max_lora_rank, args.download_dir) if args.enable_lora else None
        self._recorder = Recorder((self.supervisor.args.served_model_name or [""])[0])
        self._gate = threading.Lock()  # held throughout a change of the tokenizer
        self._busy = self._tokenizers = 0
        self._stop = threading.Event()
        self._dead: str | None = None
        self._thread: EngineThread | None = None
        self.window = min(2 * args.max_num_seqs * args.data_parallel_size, args.max_num_queued_reqs)
        try:
            if tokenizer is not None:
                self.supervisor.args.tokenizer = self._save(tokenizer)
            self.supervisor.start()
            names = self.supervisor.args.served_model_name or [""]  # as its processes are told
            traces = traces_of(args.otlp_traces_endpoint, "llm", names[0])
            thread = self._thread = EngineThread(self.supervisor.address, load_keys(args.keys), traces)
            self.supervisor.wait_ready(is_ready=lambda: thread.engine.ready)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._supervise, name="quire-supervisor", daemon=True).start()

    def _save(self, tokenizer: Any) -> str:
        self._tokenizers += 1
        folder = f"{self.supervisor.make_run_dir()}/tokenizer-{self._tokenizers}"
        tokenizer.save_pretrained(folder)
        return folder

    def _supervise(self) -> None:
        try:
            self.supervisor.supervise(self._stop)
        except LaunchError as error:
            log.error("%s", error)
            self._dead = str(error)
            if self._thread is not None:
                self._thread.call(self._thread.engine.fail_all, RequestError(500, str(error)))

    def close(self) -> None:
        """End everything. Idempotent."""
        self._stop.set()
        self._dead = self._dead or _CLOSED
        if self._thread is not None:
            self._thread.close()
        self.supervisor.close()

    def _alive(self) -> EngineThread:
        if self._dead is not None or self._thread is None:
            raise RuntimeError(self._dead or _CLOSED)
        if not self._thread.alive:
            raise RuntimeError(_ELSEWHERE)
        return self._thread

    def stats(self) -> Stats:
        """The scheduler's counters and gauges. RuntimeError once closed, TimeoutError where it does not answer."""
        thread = self._alive()
        return thread.run(thread.engine.stats(_STATS_S)).result()

    def metrics(self) -> list[Metric]:
        """Those, and what requests took so far. RuntimeError once closed."""
        thread = self._alive()

        async def metrics() -> list[Metric]:
            return self._recorder.metrics(await thread.engine.stats(_STATS_S))

        return thread.run(metrics()).result()

    def sleep(self, level: int, mode: str) -> None:
        """Have the workers sleep. ValueError where a value is wrong, RuntimeError once closed."""
        thread = self._alive()
        self._wait(thread.run(thread.engine.sleep(level, mode)))

    def wake_up(self, tags: list[str]) -> None:
        """Wake them. ValueError where a value is wrong, RuntimeError once closed."""
        thread = self._alive()
        self._wait(thread.run(thread.engine.wake_up(tags)))

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks. ValueError while blocks are in use, RuntimeError once closed."""
        thread = self._alive()
        self._wait(thread.run(thread.engine.reset_prefix_cache()))

    def profile(self, on: bool) -> None:
        """Begin or end a profile. ValueError where there is no folder for it, RuntimeError once closed."""
        thread = self._alive()
        self._wait(thread.run(thread.engine.profile(on)))

    def _wait(self, answer: concurrent.futures.Future[T]) -> T:
        """Its result; RuntimeError where everything ends before it comes. Whoever does not wait for it any more has not
        asked for it."""
        try:
            while True:
                try:
                    return answer.result(POLL_S)
                except TimeoutError:
                    self._alive()
                except RequestError as error:
                    raise ValueError(error.message) from None
        finally:
            answer.cancel()  # of no effect where it is there

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Encode and decode with another tokenizer from now on. RuntimeError while anything runs."""
        with self._gate:
            thread = self._alive()
            if self._busy:
                raise RuntimeError("the tokenizer cannot be changed while generate, chat or beam_search is running.")
            old = thread.engine.detokenizers
            self.supervisor.set_tokenizer(self._save(tokenizer))
            # A tokenizer that cannot be loaded ends everything, and says why.
            self._wait(thread.run(thread.engine.wait_ready(None, without=old)))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._gate:
            self._busy += 1
        try:
            yield
        finally:
            with self._gate:
                self._busy -= 1

    def run(self, jobs: list[Job], progress: Progress, limit: int | None = None) -> list[RequestOutput]:
        """Run all jobs, a bounded number at a time. KeyboardInterrupt aborts what is open and is raised again."""
        return self._run_all(self._generate, jobs, progress, min(self.window, limit or self.window))

    def pool(self, jobs: list[PoolJob], progress: Progress) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The same for prompts that are pooled."""
        return self._run_all(self._pool, jobs, progress, self.window)

    def _run_all(self, one: Any, jobs: Sequence[AnyJob], progress: Progress, window: int) -> list[Any]:
        with self._counted():
            thread = self._alive()
            done: queue.SimpleQueue[AnyOutput | None] = queue.SimpleQueue()
            future = thread.run(_lanes(lambda job: self._again(one, thread.engine, job), jobs, done.put, window))
            future.add_done_callback(lambda _: done.put(None))
            try:
                while (output := done.get()) is not None:
                    progress.add(output)
                return future.result()
            except concurrent.futures.CancelledError:
                raise RuntimeError(self._dead or _CLOSED) from None
            except RequestError as error:
                kind = ValueError if 400 <= error.status < 500 else RuntimeError
                raise kind(error.message) from None
            finally:
                future.cancel()

    async def _again(self, one: Any, engine: Engine, job: AnyJob) -> AnyOutput:
        """Run a job, again each time that it is refused for load."""
        while True:
            try:
                output = await one(engine, job)
                self._recorder.add(output)
                return output
            except RequestError as error:
                if error.status != 429:
                    raise
                await asyncio.sleep(error.retry_after or RETRY_S)

    async def _generate(self, engine: Engine, job: Job) -> RequestOutput:
        stream = engine.submit(
            **job.given.asked(), params=job.params, seed=job.seed, priority=job.priority, adapter=job.adapter
        )
        try:
            await stream.collect()
            return _output(job, stream)
        finally:
            stream.abort()

    async def _pool(self, engine: Engine, job: PoolJob) -> PoolingRequestOutput[PoolingOutput]:
        pooled = await engine.pool(**job.given.asked(), params=job.params, adapter=job.adapter)
        return PoolingRequestOutput(
            job.request_id, PoolingOutput(pooled.data), pooled.prompt_ids, pooled.num_cached_tokens
        )


async def _lanes(
    one: Callable[[AnyJob], Awaitable[AnyOutput]], jobs: Sequence[AnyJob], done: Callable[[AnyOutput], None],
    window: int,
) -> list[AnyOutput]:  # fmt: skip
    """All jobs' outputs in order, ``window`` of them at a time; the first failure ends the others and is raised."""
    outputs: dict[int, AnyOutput] = {}
    waiting = iter(jobs)

    async def lane() -> None:
        for job in waiting:
            output = outputs[job.number] = await one(job)
            done(output)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(window, len(jobs))):
                group.create_task(lane())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [outputs[job.number] for job in jobs]


def _output(job: Job, stream: RequestStream) -> RequestOutput:
    prompt, k = stream.accepted, job.params.prompt_logprobs
    logprobs: list[Any] | None = None
    if stream.prompt_logprobs is not None and k is not None:
        logprobs = _form(job, (None if each is None else to_dict(each, k) for each in stream.prompt_logprobs))
    return RequestOutput(
        request_id=job.request_id,
        prompt=job.given.text if job.given.text is not None or prompt is None else prompt.prompt,
        prompt_token_ids=prompt.prompt_ids if prompt is not None else [],
        prompt_logprobs=logprobs,
        outputs=[_completion(index, child, job) for index, child in enumerate(stream.children)],
        metrics=stream.metrics,
        num_cached_tokens=stream.cached_tokens,
        lora_request=job.lora_request,
    )


def _form(job: Job, logprobs: Iterable[dict[int, Logprob] | None]) -> Any:
    """Logprobs as a list, or in the flat form where the request asks for it."""
    return FlatLogprobs.of(logprobs) if job.params.flat_logprobs else list(logprobs)


def _completion(index: int, child: ChildOutput, job: Job) -> CompletionOutput:
    k = job.params.logprobs
    return CompletionOutput(
        index=index, text="".join(child.parts), token_ids=child.tokens, cumulative_logprob=child.cumulative,
        logprobs=None if k is None else _form(job, (to_dict(each, k) for each in child.logprobs)),
        finish_reason=_FINISH_REASONS.get(child.finish), stop_reason=child.stop_reason,
    )  # fmt: skip


class Progress:
    """The bar "Processed prompts" with the rates so far in tokens a second."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]):
        self._bar: Any = None
        self._read = self._written = 0
        if use_tqdm:
            from tqdm import tqdm  # type: ignore[import-untyped]

            make: Any = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._rates(0.0))

    def _rates(self, elapsed: float) -> str:
        read, written = (x / elapsed if elapsed else 0.0 for x in (self._read, self._written))
        return f"est. speed input: {read:.2f} toks/s, output: {written:.2f} toks/s"

    def add(self, output: AnyOutput) -> None:
        """One more is done."""
        if self._bar is None:
            return
        self._read += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._written += sum(len(each.token_ids) for each in output.outputs)
        self._bar.postfix = self._rates(self._bar.format_dict["elapsed"])
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
