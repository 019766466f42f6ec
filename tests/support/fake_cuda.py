"""A CUDA device that is not there: the worker's code for a GPU runs on it, and what it asks of the device is looked at.

Within ``with FakeCuda() as device:`` a tensor of device cuda is a ``CudaTensor``. It has the shape, type, strides and
device of a real one and no values: operations run on torch's meta device. ``values=True`` gives it memory on the host
too. Then an operation waits in its stream and runs on a CPU when ``choose`` lets it, Triton's kernels in the
interpreter (import ``kernel_device`` first), so that a step's results can be compared, in any legal order of streams.

``device.step()`` is for what a worker does again and again. Within it ``Violation`` is raised where the host would
wait for the device without a plan for it: it reads a value (``.item()``, ``.tolist()``, ``bool(tensor)``, ``.cpu()``),
needs one to know a shape (``nonzero``, an index that is a mask), or copies to or from memory that is not pinned.
Everywhere these are violations: an operation on tensors of both devices, a launch with a tensor of the host or with
strides that the kernel is not told of, and in the capture of a graph any copy of the host's, wait or pinned allocation.
A graph that is replayed after memory was freed that it reads is one too.

What is done is noted: ``device.take()`` gives the notes since the last time.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from fake_streams import Choose, Event, Stream, Streams, Work, at_once
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
Op = torch._ops.OpOverload


class Violation(AssertionError):
    """What must not be done, or not within a step."""


class Note(NamedTuple):
    """One thing that was asked of the device."""

    kind: str  # triton, torch, h2d, d2h, wait, pin, replay
    name: str
    where: str  # what ``device.at`` was told


class Memory:
    """An allocation: who uses it beside the stream that it was made on. It is free when no tensor holds it."""

    def __init__(self, stream: Stream, size: int, captured: bool):
        self.stream, self.size, self.captured = stream, size, captured
        self.users: list[Stream] = []


class CudaTensor(torch.Tensor):
    """A tensor of the device. ``meta`` has its shape, ``held`` its values or None, ``memory`` what both lie in."""

    meta: torch.Tensor
    held: torch.Tensor | None
    memory: Memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta: torch.Tensor, held: torch.Tensor | None, memory: Memory) -> CudaTensor:
        with torch.inference_mode(meta.is_inference()):  # what is a view of tensors from outside is none of inference
            made = torch.Tensor._make_wrapper_subclass(
                cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
                device=CUDA,
            )  # fmt: skip
        made.meta, made.held, made.memory = meta, held, memory
        return made

    def __init__(self, *args: Any):
        pass

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.dtype}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Violation(f"{func} where the device is no more")


# A value must be known before the shape of the result is.
_SHAPED_BY_VALUES = {
    "nonzero", "nonzero_static", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "repeat_interleave", "equal", "is_nonzero", "_local_scalar_dense", "item", "allclose", "histc",
}  # fmt: skip
_SILENT = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "record_stream"}
"""Operations that launch nothing, beside views."""
_NEVER_CUT = {"scaled_dot_product_attention"}
"""Composite operations that are one launch, or another few on each card."""


class FakeCuda(TorchDispatchMode):
    """One device. ``properties`` is what torch says of it; ``notes`` what was asked of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would import its compiler to be told so, which takes seconds."""
        return False

    def __init__(
        self,
        values: bool = False,
        choose: Choose = at_once,
        total: int = 80 << 30,
        capability: tuple[int, int] = (9, 0),
    ):
        super().__init__()
        self.values, self.total, self.capability = values, total, capability
        self.streams = Streams(choose, self._waits)
        self.notes: list[Note] = []
        self.where = ""
        self.strict = self.planned = False
        self.capturing: Graph | None = None
        self.allocated = self.peak = 0
        self.graphs: list[Graph] = []
        self._pinned: dict[int, torch.UntypedStorage | None] = {}  # by address; what torch did not allocate: None
        self._exit = ExitStack()
        self.properties = SimpleNamespace(
            name="a device that is not there", major=capability[0], minor=capability[1], multi_processor_count=132,
            total_memory=total, shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472,
            regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, warp_size=32, L2_cache_size=50 << 20,
        )  # fmt: skip

    # ------------------------------------------------------------ for tests

    @contextmanager
    def step(self) -> Iterator[None]:
        """Nothing in here may wait for the device."""
        before, self.strict = self.strict, True
        try:
            yield
        finally:
            self.strict = before

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """What is noted in here is of ``where``."""
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def take(self) -> list[Note]:
        """The notes since the last time."""
        notes, self.notes = self.notes, []
        return notes

    def note(self, kind: str, name: str) -> None:
        self.notes.append(Note(kind, name, self.where))

    # ------------------------------------------------------------ what torch would do

    def __enter__(self) -> FakeCuda:
        self._exit.enter_context(_guard())
        # torch.tensor(.., device=..) copies to the device where the mode sees it.
        torch._C._set_only_lift_cpu_tensors(True)
        self._exit.callback(torch._C._set_only_lift_cpu_tensors, False)
        for target, name, stand_in in _stand_ins(self):
            self._exit.enter_context(mock.patch.object(target, name, stand_in))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._exit.close()

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = _flat((args, kwargs))
        ours = any(isinstance(each, CudaTensor) for each in given)
        if not ours and not any(isinstance(each, torch.device) and each.type == "cuda" for each in given):
            return self._on_host(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name not in _NEVER_CUT and _composite(func):
            super().__enter__()
            try:
                made = func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
            if made is not NotImplemented:
                return made
        if name == "_to_copy":
            return self._to_copy(func, args[0], kwargs)
        if name == "copy_" and not (isinstance(args[0], CudaTensor) and isinstance(args[1], CudaTensor)):
            return self._copy(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        if name == "_local_scalar_dense" and self.values and not self.strict and self.capturing is None:
            self.streams.finish()
            return args[0].held.item()
        self._check(name, args, given)
        if func.namespace not in ("aten", "prims") and not self.values:
            # Nothing but its result is known of what a library adds: the tensor that it is given for that.
            self.note("torch", name.replace("::", " "))
            return [each for each in given if isinstance(each, CudaTensor)][-1]
        return self._run(func, name, args, kwargs)

    def _on_host(self, func: Op, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return self.pinned(args[0].clone())
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        pin = kwargs.pop("pin_memory", None)
        made = func(*args, **kwargs)
        return self.pinned(made, fill=True) if pin else made

    def pinned(self, tensor: torch.Tensor, fill: bool = False) -> torch.Tensor:
        """``tensor``, in memory that counts as pinned."""
        if self.capturing is not None:
            raise Violation(f"pinned memory of {tensor.nbytes} bytes is allocated while a graph is captured")
        self.note("pin", "pinned memory")
        if fill:
            _poison(tensor) if self.values else tensor.zero_()
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def register(self, address: int, size: int, flags: int) -> int:
        """In the place of cudaHostRegister."""
        self.note("pin", "host memory registered")
        self._pinned[address] = None
        return 0

    def unregister(self, address: int) -> int:
        """In the place of cudaHostUnregister."""
        self.note("pin", "host memory unregistered")
        del self._pinned[address]
        return 0

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._pinned

    def _check(self, name: str, args: Any, given: list[Any]) -> None:
        """Raises Violation for an operation that no step may hold."""
        if name in _SHAPED_BY_VALUES:
            raise Violation(f"{name} has the host wait for a value of the device")
        if name in ("index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"):
            for index in args[1]:
                if isinstance(index, torch.Tensor) and not isinstance(index, CudaTensor):
                    raise Violation(f"{name} by an index on the host, which is copied from memory that is not pinned")
                if index is not None and index.dtype in (torch.bool, torch.uint8) and not (
                    "put" in name and len(args[1]) == 1 and args[2].numel() == 1
                ):  # fmt: skip
                    raise Violation(f"{name} by a mask has the host wait for the number of its ones")
        for each in given:
            if isinstance(each, torch.Tensor) and not isinstance(each, CudaTensor) and each.dim():
                raise Violation(f"{name} of tensors on the device and on the host, {each.dtype} {tuple(each.shape)}")

    def _waits(self, what: str) -> None:
        if self.capturing is not None:
            raise Violation(f"{what} while a graph is captured")
        self.note("wait", what)

    # ------------------------------------------------------------ copies

    def _to_copy(self, func: Op, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        device = kwargs.get("device")
        to = source.device if device is None else torch.device(device)
        if to.type == source.device.type:
            kwargs["device"] = None
            return self._run(func, "_to_copy", (source,), kwargs)
        made = torch.empty_strided(
            source.shape, source.stride(), dtype=kwargs.get("dtype") or source.dtype, device="cpu"
        ) if to.type == "cpu" else self._made(func, (source.to("meta"),), {**kwargs, "device": "meta"})  # fmt: skip
        if made.dtype != source.dtype and self.strict:
            raise Violation(f"a copy from {source.dtype} to {made.dtype} between host and device")
        return self._copy(made, source, kwargs.get("non_blocking", False))

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """``to`` after ``source`` is, or will be, copied into it; one of them is on the host."""
        down = isinstance(source, CudaTensor)
        kind, host = ("d2h", to) if down else ("h2d", source)
        if self.capturing is not None:
            raise Violation(f"a copy between host and device ({kind}) while a graph is captured")
        asynchronous = non_blocking and self.is_pinned(host)
        if self.strict and not self.planned and not asynchronous:
            why = "memory that is not pinned" if non_blocking else "a copy that is not non_blocking"
            raise Violation(f"{kind} of {host.nbytes} bytes, {host.dtype} {tuple(host.shape)}: {why}")
        self.note(kind, "asynchronous" if asynchronous else "the host waits")
        if down:
            torch.empty_like(to, device="meta").copy_(source.meta)
            real = source.held
            if real is not None:
                self._add(lambda: to.copy_(real), (source,))
        else:
            assert isinstance(to, CudaTensor)
            to.meta.copy_(torch.empty_like(source, device="meta"))
            real = to.held
            if real is not None:
                self._add(lambda: real.copy_(source), (to,))
        if self.values and not asynchronous:
            self.streams.until(lambda: not self.streams.current.queue)
        return to

    # ------------------------------------------------------------ operations

    def _run(self, func: Op, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of the device: its shape at once, its values when its stream is so far."""
        if "generator" in kwargs:
            kwargs["generator"] = None
        if kwargs.pop("pin_memory", None):
            raise Violation(f"{name}: pinned memory of the device")
        ours = [each for each in _flat((args, kwargs)) if isinstance(each, CudaTensor)]
        meta_args, meta_kwargs = _mapped((args, kwargs), lambda each: each.meta)
        if "device" in kwargs:
            meta_kwargs["device"] = None if kwargs["device"] is None else "meta"
        made = func(*meta_args, **meta_kwargs)
        several = isinstance(made, (tuple, list))
        flat = list(made) if several else [made]
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not view and name not in _SILENT:
            self.note("torch", name)
        reals: list[Any] = [None] * len(flat)
        real_args, real_kwargs = _mapped((args, kwargs), lambda each: each.held)
        if "device" in kwargs:
            real_kwargs["device"] = None if kwargs["device"] is None else "cpu"
        compute = functools.partial(func, *real_args, **real_kwargs)
        if self.values and (view or name == "_unsafe_view"):
            found = compute()
            reals = list(found) if several else [found]
        out, fresh = [], []
        known = {id(each.meta): each for each in ours}
        memory_of = {each.meta.untyped_storage()._cdata: each.memory for each in ours}
        for index, (meta, real) in enumerate(zip(flat, reals, strict=True)):
            if not isinstance(meta, torch.Tensor) or id(meta) in known:
                out.append(known.get(id(meta), meta))
                continue
            memory = memory_of.get(meta.untyped_storage()._cdata)
            made_here = self._tensor(meta) if memory is None else CudaTensor(meta, real, memory)
            if memory is None:
                fresh.append((index, made_here))
            out.append(made_here)
        if self.values and not view and name not in _SILENT:
            self._compute(compute, [(index, each.held) for index, each in fresh], [*ours, *(each for _, each in fresh)])
        elif self.capturing is not None:
            self.capturing.uses(ours)
        return type(made)(out) if several else out[0]

    def _compute(
        self, compute: Callable[[], Any], fresh: list[tuple[int, torch.Tensor | None]], ours: list[CudaTensor]
    ) -> None:
        def run() -> None:
            found = compute()
            for index, into in fresh:
                assert into is not None
                into.copy_(found[index] if isinstance(found, (tuple, list)) else found)

        self._add(run, ours)

    def _made(self, func: Op, args: Any, kwargs: dict[str, Any]) -> CudaTensor:
        """A new tensor of the shape that ``func`` gives on meta tensors."""
        return self._tensor(func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"}))

    def _tensor(self, meta: torch.Tensor) -> CudaTensor:
        """New memory, which holds what somebody left there."""
        size = -(-meta.untyped_storage().nbytes() // 512) * 512
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        real = None
        if self.values:
            with _disable_current_modes():
                real = _poison(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype))
        memory = Memory(self.streams.current, size, self.capturing is not None)
        weakref.finalize(memory, self._freed, real, size, memory.stream, memory.users, memory.captured).atexit = False
        return CudaTensor(meta, real, memory)

    def _freed(self, real: torch.Tensor | None, size: int, stream: Stream, users: list[Stream], captured: bool) -> None:
        """The memory is another's from now on, whose first work comes after what its stream has now, and after what
        the streams have that ``record_stream`` named."""
        self.allocated -= size
        if real is None or captured or self.capturing is not None:
            return
        marks = [user.add() for user in users]
        for mark in marks:
            stream.add(after=mark)
        stream.add(lambda: _poison(real))

    def _add(self, run: Callable[[], object], ours: Any) -> None:
        """Work for the current stream, or for the graph that is captured."""

        def quietly() -> None:
            with _disable_current_modes(), torch.inference_mode():
                run()

        if self.capturing is not None:
            self.capturing.work.append(quietly)
            self.capturing.uses(ours)
        else:
            self.streams.current.add(quietly)

    # ------------------------------------------------------------ Triton

    def launch(self, interpret: Callable[..., None], kernel: Any, args: Any, grid: Any, named: dict[str, Any]) -> None:
        """In the place of a kernel's ``run``."""
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        name = kernel.fn.__name__
        check_launch(name, given)
        types = " ".join(f"{key}:{_short(each.dtype)}" for key, each in given.items() if isinstance(each, torch.Tensor))
        self.note("triton", f"{name}({types})")
        ours = [each for each in given.values() if isinstance(each, CudaTensor)]
        if self.values:
            real = {key: each.held if isinstance(each, CudaTensor) else each for key, each in given.items()}
            run = functools.partial(interpret, kernel, grid=grid, warmup=False, **real)
            self._add(run, ours)
        elif self.capturing is not None:
            self.capturing.uses(ours)


def check_launch(name: str, given: dict[str, Any]) -> None:
    """Raises Violation for a tensor of the host, or of strides that are neither contiguous nor among the arguments."""
    told = {each for each in given.values() if isinstance(each, int) and not isinstance(each, bool)}
    for key, each in given.items():
        if not isinstance(each, torch.Tensor):
            continue
        if not isinstance(each, CudaTensor):
            raise Violation(f"{name} is launched with {key} on the host")
        expected = 1
        for size, stride in zip(reversed(each.shape), reversed(each.stride()), strict=True):
            if size > 1 and stride != expected and stride not in told:
                raise Violation(
                    f"{name} is launched with {key} {tuple(each.shape)} of strides {each.stride()}, and {stride} is "
                    "not among its arguments"
                )
            expected = size * (stride if size > 1 else expected)


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self, device: FakeCuda, keep_graph: bool = False):
        self.device, self.work = device, list[Callable[[], object]]()
        self.notes: list[Note] = []
        self._uses: dict[int, weakref.ref[Memory]] = {}
        device.graphs.append(self)

    def uses(self, ours: list[CudaTensor]) -> None:
        """What it reads or writes has to be there when it is replayed."""
        for each in ours:
            if not each.memory.captured:
                self._uses[id(each.memory)] = weakref.ref(each.memory)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        device = self.device
        if device.streams.current is device.streams.default or device.capturing is not None:
            raise Violation("a graph is captured on the default stream, or within another")
        device.streams.finish()
        device.capturing, self._first, self._stream = self, len(device.notes), device.streams.current

    def capture_end(self) -> None:
        device = self.device
        if device.capturing is not self or device.streams.current is not self._stream:
            raise Violation("a capture ends that did not begin here")
        device.capturing = None
        self.notes = device.notes[self._first :]
        if any(stream.queue for stream in device.streams.all):
            raise Violation("work was enqueued past the graph that is captured")

    def replay(self) -> None:
        if self.device.capturing is not None:
            raise Violation("a graph is replayed while one is captured")
        if any(memory() is None for memory in self._uses.values()):
            raise Violation("a graph is replayed after memory was freed that it uses")
        self.device.note("replay", "graph")
        if self.work:
            self.device.streams.current.add(lambda: [work() for work in self.work])

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self.work.clear()


class _Capture:
    """In the place of torch.cuda.graph."""

    def __init__(self, device: FakeCuda, graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any):
        self._streams, self._graph, self._stream = device.streams, graph, stream

    def __enter__(self) -> None:
        self._before = self._streams.current
        self._streams.current = self._stream or Stream(self._streams)
        self._graph.capture_begin()

    def __exit__(self, *exc: Any) -> None:
        if exc[0] is None:
            self._graph.capture_end()
        self._graph.device.capturing = None
        self._streams.current = self._before


class _Within:
    """In the place of torch.cuda.stream."""

    def __init__(self, streams: Streams, stream: Stream | None):
        self._streams, self._stream = streams, stream

    def __enter__(self) -> None:
        self._before = self._streams.current
        if self._stream is not None and self._stream.streams is not self._streams:
            raise Violation("a stream of a device that was there before: something keeps it")
        self._streams.current = self._stream or self._before

    def __exit__(self, *exc: Any) -> None:
        self._streams.current = self._before


@contextmanager
def _guard() -> Iterator[None]:
    """A build of torch without CUDA has nothing that switches between its devices, which an index asks for: the guard
    of meta tensors, which does nothing, stands in."""
    torch._C._ensureCUDADeviceGuardSet()  # of a build with CUDA
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before = guards[cuda]
    guards[cuda] = before or guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


def _stand_ins(device: FakeCuda) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while the device is there: whose, name, by what."""
    streams, cuda = device.streams, torch.cuda
    for module, name in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction")):
        kind = getattr(__import__(module, fromlist=[name]), name)
        interpret = kind.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, _run: Any = interpret, **named: Any) -> None:
            device.launch(_run, kernel, args, grid, named)

        yield kind, "run", run

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(tensor, CudaTensor)
        tensor.memory.users.append(stream)

    def synchronize(where: object = None) -> None:
        device._waits("synchronize")
        if device.strict:
            raise Violation("the host waits for the whole device")
        streams.finish()

    real_generator = torch.Generator

    class Generator:
        def __new__(cls, where: object = "cpu") -> Any:
            return real_generator("cpu")

    yield torch.Tensor, "record_stream", record_stream
    yield torch, "Generator", Generator
    yield from ((cuda, name, stand_in) for name, stand_in in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda where: None,
        "get_device_name": lambda where=None: device.properties.name,
        "get_device_properties": lambda where=None: device.properties,
        "get_device_capability": lambda where=None: device.capability,
        "Stream": lambda where=None, priority=0, **_: Stream(streams),
        "Event": lambda enable_timing=False, blocking=False, **_: Event(streams),
        "current_stream": lambda where=None: streams.current,
        "default_stream": lambda where=None: streams.default,
        "stream": lambda stream: _Within(streams, stream),
        "synchronize": synchronize,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=device.register, cudaHostUnregister=device.unregister),
        "CUDAGraph": functools.partial(Graph, device),
        "graph": functools.partial(_Capture, device),
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda where=None: (device.total - device.allocated, device.total),
        "memory_allocated": lambda where=None: device.allocated,
        "memory_reserved": lambda where=None: device.allocated,
        "max_memory_allocated": lambda where=None: device.peak,
        "max_memory_reserved": lambda where=None: device.peak,
        "reset_peak_memory_stats": lambda where=None: setattr(device, "peak", device.allocated),
    }.items())  # fmt: skip


def _flat(value: Any) -> list[Any]:
    """What tuples, lists and dicts in ``value`` hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for each in value for leaf in _flat(each)]


def _mapped(value: Any, change: Callable[[CudaTensor], Any]) -> Any:
    """``value`` with each tensor of the device changed."""
    if isinstance(value, CudaTensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return type(value)(_mapped(each, change) for each in value) if type(value) in (tuple, list) else value


@functools.cache
def _composite(func: Op) -> bool:
    """Whether torch makes it of other operations on every device."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """What was in the memory before: nothing that anybody may use."""
    with _disable_current_modes(), torch.inference_mode():
        if not tensor.is_floating_point():
            return tensor.fill_(-77 if tensor.dtype.is_signed else 178 if tensor.dtype == torch.uint8 else 1)
        return tensor.fill_(math.nan)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")


__all__ = ["CUDA", "CudaTensor", "Event", "FakeCuda", "Graph", "Note", "Stream", "Violation", "Work"]
