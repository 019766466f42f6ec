"""Run a batch of prompts to the end: what stands between LLM and Engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..proto.config import EngineArgs
from ..proto.messages import Finish, Stats
from ..proto.params import SamplingParams
from ..proto.sockets import load_keys
from .background import EngineThread
from .engine import Engine
from .launch import LaunchError, Stack
from .outputs import CompletionOutput, RequestOutput
from .prompts import Input
from .stream import RequestError, RequestStream

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a prompt that was refused for load is sent again, where the refusal names none."""

_FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}
_CLOSED = "this LLM has been closed."


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a batch, with the seed it has unless its parameters name one."""

    number: int  # its place among the prompts
    request_id: str
    given: Input
    params: SamplingParams
    seed: int
    priority: int


class Offline:
    """The processes and the Engine behind an LLM; holds no reference to it, so that it can be collected."""

    def __init__(self, args: EngineArgs, tokenizer: Any):
        self.stack = Stack(args)
        self._stop = threading.Event()
        self._dead: str | None = None
        self._thread: EngineThread | None = None
        self.window = min(2 * args.max_num_seqs * args.data_parallel_size, args.max_num_queued_reqs)
        try:
            if tokenizer is not None:
                folder = self.stack.make_run_dir() + "/tokenizer"
                tokenizer.save_pretrained(folder)
                self.stack.args.tokenizer = folder
            self.stack.start()
            thread = self._thread = EngineThread(self.stack.address, load_keys(args.keys))
            self.stack.wait_ready(is_ready=lambda: thread.engine.ready)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._supervise, name="quire-supervisor", daemon=True).start()

    def _supervise(self) -> None:
        try:
            self.stack.supervise(self._stop)
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
        self.stack.close()

    def stats(self) -> Stats:
        """The scheduler's counters and gauges. RuntimeError once closed."""
        if self._dead is not None or self._thread is None:
            raise RuntimeError(self._dead or _CLOSED)
        return self._thread.run(self._thread.engine.stats()).result()

    def run(self, jobs: list[Job], progress: Progress) -> list[RequestOutput]:
        """Run all jobs, a bounded number at a time. KeyboardInterrupt aborts what is open and is raised again."""
        if self._dead is not None or self._thread is None:
            raise RuntimeError(self._dead or _CLOSED)
        done: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()
        future = self._thread.run(self._run(self._thread.engine, jobs, done.put))
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

    async def _run(self, engine: Engine, jobs: list[Job], done: Callable[[RequestOutput], None]) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        waiting = iter(jobs)

        async def lane() -> None:
            for job in waiting:
                output = outputs[job.number] = await self._one(engine, job)
                done(output)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.window, len(jobs))):
                    group.create_task(lane())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [outputs[job.number] for job in jobs]

    async def _one(self, engine: Engine, job: Job) -> RequestOutput:
        given = job.given
        while True:
            stream = engine.submit(
                prompt=given.text if given.ids is None else None, ids=given.ids, messages=given.messages,
                params=job.params, template=given.template, seed=job.seed, priority=job.priority,
            )  # fmt: skip
            try:
                await stream.collect()
                return _output(job, stream)
            except RequestError as error:
                if error.status != 429:
                    raise
                await asyncio.sleep(error.retry_after or RETRY_S)
            finally:
                stream.abort()


def _output(job: Job, stream: RequestStream) -> RequestOutput:
    prompt = stream.accepted
    return RequestOutput(
        request_id=job.request_id,
        prompt=job.given.text if job.given.text is not None or prompt is None else prompt.prompt,
        prompt_token_ids=prompt.prompt_ids if prompt is not None else [],
        outputs=[
            CompletionOutput(
                index=index, text="".join(child.parts), token_ids=child.tokens,
                finish_reason=_FINISH_REASONS.get(child.finish), stop_reason=child.stop_reason,
            )
            for index, child in enumerate(stream.children)
        ],
        metrics=stream.metrics,
        num_cached_tokens=stream.cached_tokens,
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

    def add(self, output: RequestOutput) -> None:
        """One more is done."""
        if self._bar is None:
            return
        self._read += len(output.prompt_token_ids)
        self._written += sum(len(each.token_ids) for each in output.outputs)
        self._bar.postfix = self._rates(self._bar.format_dict["elapsed"])
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
