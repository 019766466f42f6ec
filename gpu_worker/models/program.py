"""A decoder's step on a CPU as one call of C, which runs the operations that ``program_builder.py`` writes."""

from __future__ import annotations

from ctypes import byref
from typing import TypeGuard

import numpy as np
import torch

from ..device import LongSteps
from ..kernels.cpu import program as native
from ..kernels.cpu.attention import native_layout
from ..kv_cache import KVCache
from ..spec import WHOLE
from .decoder import Decoder
from .model import Model
from .program_builder import Builder


def program_of(
    model: Model, kv: KVCache, tokens: torch.Tensor, tables: torch.Tensor, outputs: int, long: LongSteps | None = None,
    taps: tuple[int, ...] = (),
) -> Program | None:  # fmt: skip
    """The ``Program`` of ``model``, or None where torch runs its steps."""
    if not runs_natively(model, kv):
        return None
    return Program(model, kv, tokens, tables, outputs, long, taps=taps)


def runs_natively(model: Model, kv: KVCache) -> TypeGuard[Decoder]:
    """Whether C can run ``model``: not on a GPU, without the native kernels, as one of several processes, or where it
    is no ``Decoder``."""
    if not isinstance(model, Decoder) or model.group.shard != WHOLE:
        return False
    return all(native_layout(k, v) for k, v in zip(kv.k, kv.v, strict=True))


class Program:
    """The step of ``model`` on rows of token ids and block tables that stay where they are.

    Args:
        kv: the cache that it reads and writes.
        tokens: int32 [rows, length], each row's token ids.
        tables: int32 [rows, blocks], each row's block table.
        outputs: most rows whose logits are computed at a time.
        long: which steps take more threads than one; None: all take torch's number.
        beside: a program of the same process, whose team of threads this one uses too.
        taps: layers before each of which a step's hidden states are kept, for ``tapped``.

    What the methods give is theirs, and valid until the next call. Not thread-safe.
    """

    def __init__(
        self, model: Decoder, kv: KVCache, tokens: torch.Tensor, tables: torch.Tensor, outputs: int,
        long: LongSteps | None = None, beside: Program | None = None, taps: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        spec, self._taps = model.whole, taps
        vocabulary = spec.vocab_size if spec.outputs < 0 else spec.outputs
        # Pages that the system provides on first touch: most steps have few outputs.
        self._logits = torch.from_numpy(np.zeros((outputs, vocabulary), np.float32))
        self._builder = builder = self._write(model, kv, max(native.PASS, outputs))
        self.calls = builder.calls
        """Operations that torch does, each with its function of the number of rows."""
        self._error: BaseException | None = None
        callback = native.CALLBACK(self._call)
        for operation, _ in self.calls:
            operation.call = callback
        result = builder.result
        parts = native.Parts(
            block_size=kv.block_size, outputs=max(native.PASS, outputs), result=result.buffer,
            hidden_size=result.width, tokens=tokens.data_ptr(), tables=tables.data_ptr(),
            token_stride=tokens.stride(0), table_stride=tables.stride(0), together=long.tokens if long else 0,
        )  # fmt: skip
        threads = long.threads if long else torch.get_num_threads()
        self._keep = (callback, kv, tokens, tables)
        self._add_to(parts)
        sections = builder.body, builder.tail, builder.head
        self._program: native.NativeProgram = native.NativeProgram(
            parts, *sections, threads, beside._program if beside else None
        )
        self.threads_of = self._program.threads_of
        self.address, self.result = self._program.address, result
        """For calls of C that run it beside others, between ``begin`` and ``check``; hidden states of the outputs of
        the step that was last, in their order, where logits were wanted."""
        self._columns = [np.zeros(len(tokens), np.int64) for _ in range(3)]
        self._outputs = np.zeros(outputs, np.int64)
        self._outputs_at = self._outputs.ctypes.data  # numpy takes a microsecond to say
        self._step = native.Step()
        self._step.row, self._step.start, self._step.count = (column.ctypes.data for column in self._columns)
        self.nanoseconds: np.ndarray | None = None
        """int64, one for each of native.KINDS: set it, and each step adds what its operations took."""

    def _write(self, model: Decoder, kv: KVCache, outputs: int) -> Builder:
        """The operations; ``self._logits`` is what the head fills."""
        return Builder(model, kv, outputs, self._logits, self._taps)

    def _add_to(self, parts: native.Parts) -> None:
        """What else there is to say of the program, before it is made."""

    def logits(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, outputs: np.ndarray) -> torch.Tensor:
        """Run a step, and give logits float32 [S, vocabulary].

        Args:
            rows, starts, counts: int64 [R]: ``counts`` tokens of each row, from position ``starts`` on.
            outputs: int64 [S], tokens of the step in any order.
        """
        count = len(outputs)
        self._outputs[:count] = outputs
        self._step.output, self._step.outputs, self._step.hidden = self._outputs_at, count, None
        self._run(rows, starts, counts)
        return self._logits[:count]

    def room_of_logits(self, rows: int) -> np.ndarray:
        """Where ``logits`` puts those of the first ``rows`` outputs, float32 [rows, vocabulary]."""
        return self._logits.numpy()[:rows]

    def hidden(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, outputs: np.ndarray) -> torch.Tensor:
        """Run a step, and give hidden states float32 [S, hidden] of ``outputs``, which ascend."""
        hidden = torch.empty(len(outputs), self._builder.result.width)
        self._step.output, self._step.outputs = outputs.ctypes.data, len(outputs)
        self._step.hidden, self._step.hidden_stride = hidden.data_ptr(), hidden.stride(0)
        self._run(rows, starts, counts)
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocabulary] of hidden states [S, hidden] that ``hidden`` gave; S is ``outputs`` at most."""
        self._builder.result.rows(len(hidden)).copy_(hidden)
        self.check(self._program.run_head(len(hidden), self._profile()))
        return self._logits[: len(hidden)]

    def tapped(self) -> torch.Tensor:
        """Hidden states float32 [T, taps * hidden] of the last step's tokens, those before each of ``taps`` side by
        side; asked once."""
        joined = torch.cat([torch.cat(passes) for passes in self._builder.tapped], -1)
        self._forget()
        return joined

    def _forget(self) -> None:
        for passes in self._builder.tapped:
            passes.clear()

    def _run(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        step, count = self._step, len(rows)
        self.begin()
        for column, values in zip(self._columns, (rows, starts, counts), strict=True):
            column[:count] = values
        step.rows, step.nanoseconds = count, self._profile()
        self.check(self._program.run(byref(step)))

    def begin(self) -> None:
        """A step begins."""
        if self._taps:
            self._forget()

    def _profile(self) -> int | None:
        return None if self.nanoseconds is None else self.nanoseconds.ctypes.data

    def _call(self, number: int, rows: int) -> int:
        """What an operation asks of torch. An exception cannot pass through C: it waits until the step has ended."""
        try:
            self.calls[number][1](rows)
        except BaseException as error:  # noqa: BLE001
            self._error = error
            return 1
        return 0

    def check(self, failed: int) -> None:
        """Raise what a call raised in the step that has ended, which returned ``failed``."""
        error, self._error = self._error, None
        if failed and error is not None:
            raise error
