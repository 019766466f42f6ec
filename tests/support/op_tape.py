"""A CUDA graph for the host: records what torch is asked for, and does it again on the same tensors.

As on a GPU, a replay knows nothing of the Python around it: what a step reads must be in tensors that stay, and a value
that the host looks at while recording is refused.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HOST_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}  # and tolist, which no mode sees
_running: list["Tape"] = []


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


class Tape(TorchDispatchMode):
    """What is asked for while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def __enter__(self) -> Any:
        _running.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _running.remove(self)
        super().__exit__(*error)

    @torch.inference_mode()
    def replay(self) -> None:
        """Everything again, into the tensors that came of it."""
        for func, args, kwargs, out in self.calls:
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as one operation of a tape, whatever it does: a kernel."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            out = function(*args, **kwargs)
        if _running:
            _running[-1].calls.append((function, args, kwargs, out))
        return out

    return call


class TapeRecorder:
    """``graphs.Recorder`` with tapes. ``replayed`` has the sizes of what was replayed, once for each piece."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.recorded: list[tuple[int, int]] = []  # tokens, pieces

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        (replay,), hidden = self.pieces(lambda cut: step())
        return replay, hidden

    def pieces(self, step: Callable[..., torch.Tensor]) -> tuple[list[Callable[[], object]], torch.Tensor]:
        step(lambda: None)
        tapes = [Tape()]
        tapes[0].__enter__()

        def cut() -> None:
            tapes[-1].__exit__(None, None, None)
            tapes.append(Tape())
            tapes[-1].__enter__()

        try:
            hidden = step(cut)
        finally:
            tapes[-1].__exit__(None, None, None)
        self.recorded.append((len(hidden), len(tapes)))
        return [self._told(tape.replay, len(hidden)) for tape in tapes], hidden

    def _told(self, replay: Callable[[], object], size: int) -> Callable[[], object]:
        def told() -> None:
            self.replayed.append(size)
            replay()

        return told
