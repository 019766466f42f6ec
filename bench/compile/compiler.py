"""Compiles the launches for a card that is not there: the part that imports torch and Triton.

``pretend`` shows torch's answers of the card, ``requests`` what would be launched on it, and ``compiled`` makes machine
code of that. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from .cards import CARDS, Card, occupancy
from .launches import LAUNCHES, Launch

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.bool: "i1",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
ALIGNMENT, TWO_GIB = 16, 1 << 31


@dataclass(frozen=True)
class Request:
    """One kernel as a launch asks for it."""

    launch: str
    fn: JITFunction
    source: ASTSource
    options: dict[str, Any]
    grid: tuple[int, ...]
    constants: dict[str, Any]

    @property
    def kernel(self) -> str:
        return self.fn.__name__

    @property
    def module(self) -> str:
        return self.fn.fn.__module__.rpartition(".")[2]

    @property
    def parameters(self) -> list[str]:
        """Names of the values that the machine code takes, in order."""
        return [name for name, kind in self.source.signature.items() if kind != "constexpr"]


class Operators(TorchFunctionMode):
    """x[...] and ~x of CUDA tensors: torch's Python sets the device first, which a build for the CPU cannot."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _view(*args)
        if func is torch.Tensor.__invert__:
            return torch.bitwise_not(*args)
        return func(*args, **(kwargs or {}))


def _view(x: torch.Tensor, index: Any) -> torch.Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - taken)
    dim, tensors = 0, []
    for part in parts:
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
        else:
            tensors += [None] * (dim - len(tensors)) + [part]
        dim += 1
    return torch.ops.aten.index.Tensor(x, tensors) if tensors else x


@contextlib.contextmanager
def pretend(card: Card) -> Iterator[None]:
    """torch says that ``card`` is there, and CUDA tensors can be made, without memory."""
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name, major=major, minor=minor, multi_processor_count=card.processors, total_memory=80 << 30,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=card.shared_program,
        shared_memory_per_multiprocessor=card.shared, warp_size=card.warp_size, L2_cache_size=40 << 20,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=card.warps * card.warp_size,
        gcnArchName=str(card.arch),
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": card.capability, "get_device_name": card.name, "is_bf16_supported": True,
        "is_current_stream_capturing": False,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(Operators())
        stack.enter_context(FakeTensorMode())
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *args, _answer=answer, **named: _answer))
        stack.enter_context(mock.patch.object(torch.version, "hip", "6.4" if card.backend == "hip" else None))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8" if card.backend == "cuda" else None))
        yield


def requests(card: Card, launches: list[Launch] | None = None) -> Iterator[list[Request] | tuple[Launch, Exception]]:
    """What each launch asks for on ``card``: its kernels, or why it failed. Kernels asked for before are left out."""
    seen: set[str] = set()
    with pretend(card):
        for launch in LAUNCHES if launches is None else launches:
            asked: list[Request] = []

            def record(self, *args, grid=None, warmup=False, asked=asked, launch=launch, **named):
                asked.append(_request(self, card, launch.name, grid, args, named))

            with mock.patch.object(JITFunction, "run", record):
                try:
                    launch.run()
                except Exception as error:  # noqa: BLE001 a launch is judged, whatever it raises
                    yield launch, error
                    continue
            new = [one for one in asked if (key := _key(one)) not in seen and not seen.add(key)]
            yield new


def _key(request: Request) -> str:
    source = request.source
    return str((request.module, request.kernel, source.signature, source.constants, source.attrs, request.options))


def _request(
    fn: JITFunction, card: Card, launch: str, grid: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> Request:
    """What JITFunction.run would compile: types, the values that become constants, and what is a multiple of 16."""
    given = {p.name: p.default for p in fn.params if p.has_default}
    given |= dict(zip(fn.arg_names, args, strict=False)) | {k: v for k, v in named.items() if k in fn.arg_names}
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list] = {}
    for i, (name, param) in enumerate(zip(fn.arg_names, fn.params, strict=True)):
        value, free = given[name], not param.do_not_specialize
        if param.is_constexpr or value is None or (free and type(value) is int and value == 1):
            types[name], constants[name] = "constexpr", value
            continue
        types[name], even = _type(value), False
        if isinstance(value, torch.Tensor):
            even = value.storage_offset() * value.element_size() % ALIGNMENT == 0
            even = even and free and not param.do_not_specialize_on_alignment
            if card.backend == "hip" and value.untyped_storage().nbytes() < TWO_GIB:
                attributes[(i,)] = [["tt.pointer_range", 32]]
        elif type(value) is int:
            even = value % ALIGNMENT == 0 and free and not param.do_not_specialize_on_alignment
        if even:
            attributes[(i,)] = [["tt.divisibility", 16], *attributes.get((i,), [])]
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=attributes)
    options = {k: v for k, v in named.items() if k not in fn.arg_names}
    shape = grid(given) if callable(grid) else grid
    return Request(launch, fn, source, options, tuple(shape), constants)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -TWO_GIB <= value < TWO_GIB else "i64"
    return "fp32"


def target_of(card: Card) -> GPUTarget:
    """Triton's name of a card."""
    return GPUTarget(card.backend, card.arch, card.warp_size)


def compiled(request: Request, card: Card) -> dict[str, Any]:
    """A row of the table (``table.Row``)."""
    with _unlinked():
        done = triton.compile(request.source, target=target_of(card), options=request.options)
    meta = done.metadata
    registers, spills = _of_amd(done.asm["amdgcn"]) if card.backend == "hip" else _of_nvidia(done.asm["cubin"])
    held = occupancy(card, registers, meta.shared, meta.num_warps, getattr(meta, "tmem_size", None) or 0)
    return {
        "card": card.target, "launch": request.launch, "kernel": request.kernel, "tile": _tile(request.constants),
        "grid": "x".join(map(str, request.grid)), "warps": meta.num_warps, "stages": meta.num_stages,
        "registers": registers, "spills": spills, "shared": meta.shared, "programs": held.programs,
        "limit": held.limit.replace(" ", "-"), "products": _products(done.asm),
    }  # fmt: skip


@contextlib.contextmanager
def _unlinked() -> Iterator[None]:
    """Of AMD's the assembly is all that is read; Triton 3.4 has no linker of its own, and asks it for its version."""
    backend = backends["amd"].compiler
    with (
        mock.patch.object(backend, "make_hsaco", staticmethod(lambda assembly, metadata, options: b"")),
        mock.patch.object(backend, "hash", lambda self: str(self.target)),
    ):
        yield


def _tile(constants: dict[str, Any]) -> str:
    """``M16,N64,SPLITS8``: the constants that give a tile its shape."""
    shape = {k.removeprefix("BLOCK_"): v for k, v in constants.items() if re.match("BLOCK|SPLIT", k)}
    return ",".join(f"{name}{value}" for name, value in shape.items() if type(value) is int) or "-"


def _products(asm: dict[str, Any]) -> str:
    text = asm.get("ptx") or asm["amdgcn"]
    return next((name for name in ("tcgen05.mma", "wgmma", "mma.sync", "v_mfma") if name in text), "-")


def _of_nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, as the cuobjdump that Triton brings reads them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump names no registers in {text[-200:]!r}.")
    return int(found[1]), int(found[2])


def _of_amd(assembly: str) -> tuple[int, int]:
    """Vector registers of a lane (accumulators included), and bytes of its scratch and spilled registers."""

    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])

    spilled = 4 * (count("vgpr_spill_count") + count("sgpr_spill_count"))
    return count("vgpr_count"), max(count("private_segment_fixed_size"), spilled)


def first_ir(request: Request, card: Card) -> str:
    """The kernel as Triton's own IR (ttir): inlined and folded, not yet laid out for the card."""
    from triton._C.libtriton import ir

    backend = make_backend(target_of(card))
    options = backend.parse_options(dict(request.options))
    context, metadata, stages = ir.context(), {}, {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    given = {
        "target": target_of(card), "options": options, "context": context, "module_map": backend.get_module_map(),
        "codegen_fns": backend.get_codegen_implementation(options),
    }  # fmt: skip
    # Triton's versions differ in what they pass, by these names.
    wanted = inspect.signature(request.source.make_ir).parameters
    module = request.source.make_ir(**{name: given[name] for name in wanted})
    language = getattr(request.source, "language", None)
    backend.add_stages(stages, options, *([language] if language is not None else []))
    return str(stages["ttir"](module, metadata))


def rows(cards: list[Card], only: str, short: bool, done: set[str]) -> Iterator[dict[str, Any]]:
    """A row of each kernel of each wanted launch on each card; of what fails, a dict with its ``error``.

    Before each kernel comes {"begin": its name}; what is in ``done``, by such names, is left out.
    """
    wanted = [one for one in LAUNCHES if one.name.startswith(only) and (one.short or not short)]
    # Of launches that are compiled alike the first has the row, and it is to be the same row for either list.
    launches = sorted(wanted, key=lambda one: not one.short)
    for card in cards:
        _forget()
        for asked in requests(card, launches):
            if isinstance(asked, tuple):
                yield {"card": card.target, "launch": asked[0].name, "kernel": "-", "error": _line(asked[1])}
                continue
            for number, request in enumerate(asked):
                before = sum(one.kernel == request.kernel for one in asked[:number])
                name = request.kernel + (f"-{before + 1}" if before else "")
                begun = f"{card.target} {request.launch} {name}"
                if begun in done:
                    continue
                yield {"begin": begun}
                try:
                    yield compiled(request, card) | {"kernel": name}
                except Exception as error:  # noqa: BLE001 a kernel that does not compile is a result
                    yield {"card": card.target, "launch": request.launch, "kernel": name, "error": _line(error)}


def _forget() -> None:
    """What functions of the worker remember of the card before."""
    for name, module in list(sys.modules.items()):
        if name.startswith("quire.gpu_worker"):
            for function in vars(module).values():
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()


def _line(error: Exception) -> str:
    while error.__cause__ is not None:  # the compiler's errors come wrapped, one for each call
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:] or '-'}"


def main() -> None:
    """``ONLY SHORT CARD…``: print what ``rows`` gives, as JSON after a tab; what is done comes from standard input."""
    only, short, *cards = sys.argv[1:]
    for row in rows([CARDS[card] for card in cards], only, short == "short", set(json.load(sys.stdin))):
        print("\t" + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
