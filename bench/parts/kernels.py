"""Every CPU kernel: GB/s and GFLOP/s beside this machine's own read bandwidth and product peak, and torch's time.

Products have the shapes of bench/models.py's models. Weights, and keys and values, are taken in turns from more memory
than the caches hold, as a model's layers are. ``least_us`` is the best of many calls: what the kernel takes when
nothing else is running.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..ceilings import ceilings
from ..models import SHAPES
from ..report import BenchError, Report

KINDS = ("linear", "attention", "elementwise")
ROTATED = 128 * 2**20
"""Bytes that weights and caches are spread over."""
TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "int8", "int4": "int8"}
"""The product that each type of weight ends in, of `ceilings`; of CODED it is float32's."""
CODED = {"gptq3": 3, "gptq4": 4, "gptq8": 8, "nf4": 4, "fp8": 8, "q4_k": 4}
"""Bits of the codes of quantized checkpoints, of which the sizes are random: gptqN has groups of 128 with zeros."""
BLOCK = 16


@dataclass
class Case:
    """One kernel at one size: what it reads and writes (bytes), its additions and products, and how to call it."""

    labels: dict[str, Any]
    bytes: float
    operations: float
    kind: str
    native: Callable[[], object]
    others: dict[str, Callable[[], object]] = field(default_factory=dict)  # what does the same, by name
    streamed: bool = True  # what it reads comes from memory, and not from a cache


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which kernels at which sizes."""
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["small-llama", "half-b-qwen2"])
    parser.add_argument("--types", nargs="+", choices=[*TYPES, *CODED], default=list(TYPES), help="of weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--milliseconds", type=float, default=150.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=1)


def measure(report: Report, args: argparse.Namespace) -> None:
    """A sample for each kernel, size and repeat. Raises BenchError where the kernels were not compiled."""
    limits = ceilings(args.threads)
    with report.sample(threads=args.threads) as values:
        values |= limits
    import torch

    from quire.gpu_worker.kernels.cpu.library import library

    if (native := library()) is None:
        raise BenchError("no native CPU kernels: install a C compiler and quire again, or unset QUIRE_CPU_KERNELS.")
    torch.set_num_threads(args.threads)
    cases = {"linear": linear_cases, "attention": attention_cases, "elementwise": elementwise_cases}
    with torch.inference_mode():
        for repeat in range(args.repeats):
            for case in itertools.chain.from_iterable(cases[kind](args) for kind in args.kinds):
                with report.sample(**case.labels, instructions=native.name, repeat=repeat) as values:
                    values |= timed(case, args.milliseconds / 1000, limits)


def timed(case: Case, seconds: float, limits: dict[str, float]) -> dict[str, Any]:
    """Microseconds of a call, by turns with the others, and the shares of the ceilings that the best one reaches."""
    least, middle = turns([case.native, *case.others.values()], seconds)
    speed, rate = case.bytes / least[0] / 1e9, case.operations / least[0] / 1e9
    values = {"least_us": 1e6 * least[0], "median_us": 1e6 * middle[0], "gb_per_s": speed}
    if case.streamed:
        values["of_read_bandwidth"] = speed / limits["read_gb_per_s"]
    if rate:
        values["gflop_per_s"] = rate
        if peak := limits.get(f"peak_{case.kind}_gflop_per_s"):
            values["of_peak"] = rate / peak
    for name, theirs in zip(case.others, least[1:], strict=True):
        values |= {f"{name}_least_us": 1e6 * theirs, f"times_{name}": theirs / least[0]}
    return values


def turns(calls: list[Callable[[], object]], seconds: float) -> tuple[list[float], list[float]]:
    """Best and median seconds of each call, one after the other until ``seconds`` are over, and five times at least."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds * len(calls)
    while len(times[0]) < 5 or time.perf_counter() < end:
        for call, found in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
    return [min(found) for found in times], [sorted(found)[len(found) // 2] for found in times]


def products(name: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a model's matrices, as the worker fuses them."""
    shape = SHAPES[name]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    return {
        "qkv": (hidden + 2 * head * shape["num_key_value_heads"], hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (shape["vocab_size"], hidden),
    }


def linear_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Products of rows with packed weights; the others' are of the same type, or of float32 for integers."""
    import torch

    from quire.gpu_worker.kernels.cpu.linear import multiply

    for model, name in itertools.product(args.models, args.types):
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        for matrix, (outputs, inputs) in products(model).items():
            size = outputs * inputs * (CODED[name] / 8 if name in CODED else WEIGHT_BYTES[name])
            copies = math.ceil(ROTATED / size)
            plain = torch.randn(outputs, inputs, dtype=dtype) * 0.02
            packed = itertools.cycle(packed_copies(plain, name, copies))
            made = {} if name in CODED else other_products(plain, copies)
            others = {other: itertools.cycle(runs) for other, runs in made.items()}
            for rows in args.rows:
                x = torch.randn(rows, inputs, dtype=dtype)
                out = torch.empty(rows, outputs, dtype=dtype)
                yield Case(
                    {"kernel": "linear", "model": model, "matrix": matrix, "type": name, "rows": rows},
                    size + x.nbytes + out.nbytes, 2.0 * rows * outputs * inputs, TYPES.get(name, "f32"),
                    lambda: multiply(x, next(packed), out),  # noqa: B023
                    {other: lambda runs=runs: next(runs)(x, None) for other, runs in others.items()},  # noqa: B023
                )  # fmt: skip


WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128}


def other_products(matrix: Any, copies: int) -> dict[str, list[Any]]:
    """The same product by torch's operator and by its libraries' packed weights, ``copies`` of each."""
    import torch

    from quire.gpu_worker.layers.formats.dense import DENSE
    from quire.gpu_worker.layers.linear import weight_of

    names = {"torch": "plain", "onednn": "onednn"}
    if matrix.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        del names["onednn"]
    if matrix.dtype == torch.float32 and torch.backends.mkl.is_available():
        names["mkl"] = "mkl"
    return {
        name: [DENSE[kind].linear({"weight": own}, weight_of(own)) for own in [matrix.clone() for _ in range(copies)]]
        for name, kind in names.items()
    }


def packed_copies(matrix: Any, name: str, copies: int) -> list[Any]:
    """A matrix in the kernels' panels, as weights of a type, so many times."""
    from quire.gpu_worker.kernels.cpu.codes import pack_codes
    from quire.gpu_worker.kernels.cpu.library import BF16, F32, I4, I8
    from quire.gpu_worker.kernels.cpu.linear import pack

    if name in CODED:
        codes = random_codes(name, *matrix.shape)  # once: it takes much longer than packing
        return [pack_codes(codes) for _ in range(copies)]
    kind = {"float32": F32, "bfloat16": BF16, "int8": I8, "int4": I4}[name]
    return [pack(matrix, kind) for _ in range(copies)]


def random_codes(name: str, outputs: int, inputs: int) -> Any:
    """Codes as one of CODED has them, of random values."""
    import torch

    from quire.gpu_worker.kernels.codes import Codes, PerGroup
    from quire.gpu_worker.kernels.codes import pack as planes_of

    bits, group = CODED[name], {"nf4": 64, "q4_k": 32}.get(name, 128)
    groups = -(-inputs // group)
    planes = planes_of(torch.randint(0, 119, (outputs, inputs), dtype=torch.uint8) & ((1 << bits) - 1), bits)
    codes = Codes(planes, bits, inputs, group, PerGroup((torch.rand(outputs, groups) * 0.01).half()))
    fine = torch.randint(0, 1 << min(bits, 6), (outputs, groups), dtype=torch.uint8)
    if name == "q4_k":
        two = PerGroup((torch.rand(outputs, -(-groups // 8)) * 0.01).half(), fine, 8)
        return replace(codes, scales=two, mins=two)
    if name == "nf4":
        return replace(codes, table=torch.linspace(-1, 1, 16))
    if name == "fp8":
        return replace(codes, table=torch.arange(256).byte().view(torch.float8_e4m3fn).float())
    return replace(codes, zeros=fine)


def attention_cases(args: argparse.Namespace) -> Iterator[Case]:
    """One layer's attention to pages in place: decodes of several rows, and prefills; and writing to the pages.

    torch's time is of its own attention to keys and values that lie ready, without pages.
    """
    import torch
    import torch.nn.functional as F

    from quire.gpu_worker.kernels.attention import Scores
    from quire.gpu_worker.kernels.cpu.attention import paged_attention

    shapes = [(rows, 1, context) for rows in args.rows if rows <= 64 for context in (200, 1024)]
    shapes += [(1, length, length) for length in (256, 1024)]
    for model, name in itertools.product(args.models, args.types):
        if name not in ("float32", "bfloat16"):
            continue
        shape, dtype = SHAPES[model], getattr(torch, name)
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dim = shape["hidden_size"] // heads
        for rows, queries, context in shapes:
            batch, blocks = step_batch(rows, queries, context)
            size = 2 * rows * context * kv_heads * dim * dtype.itemsize
            caches = itertools.cycle(
                [
                    native_cache(kv_heads, blocks, dim, dtype)
                    for _ in range(math.ceil(ROTATED / size) if rows < 8 else 2)
                ]
            )
            q = torch.randn(rows * queries, heads, dim, dtype=dtype)
            dense_q = q.view(rows, queries, heads, dim).transpose(1, 2)
            k, v = (torch.randn(rows, heads, context, dim, dtype=dtype) for _ in range(2))
            seen = rows * (context if queries == 1 else context * (context + 1) / 2)
            yield Case(
                {"kernel": "attention", "model": model, "type": name, "rows": rows, "queries": queries,
                 "context": context},
                size + 2 * q.nbytes, 4.0 * seen * heads * dim, TYPES[name],
                lambda: paged_attention(q, *next(caches), batch, Scores(dim**-0.5)),  # noqa: B023
                {"torch": lambda: F.scaled_dot_product_attention(dense_q, k, v, is_causal=queries > 1)},  # noqa: B023
            )  # fmt: skip


def native_cache(heads: int, blocks: int, dim: int, dtype: Any) -> tuple[Any, Any]:
    """Keys and values of one layer in the kernels' layout."""
    import torch

    keys = torch.randn(heads, blocks, dim, BLOCK).to(dtype).permute(1, 3, 0, 2)
    values = torch.randn(heads, blocks, BLOCK, dim).to(dtype).permute(1, 2, 0, 3)
    return keys, values


def step_batch(rows: int, queries: int, context: int) -> tuple[Any, int]:
    """A step in which the last ``queries`` of ``context`` tokens of each row are computed, its pages shuffled; and the
    number of blocks that the cache needs."""
    import torch

    from quire.gpu_worker.batch import StepBatch

    width = -(-context // BLOCK)
    tables = torch.randperm(rows * width).view(rows, width).int()
    position = torch.arange(context - queries, context)
    starts = list(range(0, rows * queries + 1, queries))
    batch = StepBatch(
        token_ids=torch.zeros(rows * queries, dtype=torch.int64), positions=position.repeat(rows),
        slots=(tables[:, position // BLOCK].long() * BLOCK + position % BLOCK).flatten(),
        query_starts=torch.tensor(starts).int(), context_lens=torch.full((rows,), context).int(), block_tables=tables,
        num_decodes=rows if queries == 1 else 0, max_query_len=queries, max_context_len=context, block_size=BLOCK,
        host_query_starts=starts, host_context_lens=[context] * rows,
    )  # fmt: skip
    return batch, rows * width


def elementwise_cases(args: argparse.Namespace) -> Iterator[Case]:
    """What is done to one row at a time, by one thread. The rows are long, so that the call itself is a small part."""
    from ctypes import c_float, c_int32, c_void_p

    import torch
    import torch.nn.functional as F

    from quire.gpu_worker.kernels.cpu.library import BF16, F32, library

    native = library()
    assert native is not None
    size = 16_384
    x, y, out = (torch.randn(size) for _ in range(3))
    table = torch.randn(64, size).bfloat16()
    a, b, c = x.data_ptr(), y.data_ptr(), out.data_ptr()
    activate = native.function("activate", c_int32, c_void_p, c_void_p, c_int32)
    gate = native.function("gate", c_int32, c_void_p, c_void_p, c_void_p, c_int32)
    embed = native.function("embed", c_int32, c_void_p, c_float, c_void_p, c_int32)
    add = native.function("add", c_void_p, c_float, c_void_p, c_int32)
    for name, moved, call, twin in (
        ("silu", 2, lambda: activate(0, a, c, size), lambda: F.silu(x)),
        ("gelu", 2, lambda: activate(1, a, c, size), lambda: F.gelu(x)),
        ("silu(gate) * up", 3, lambda: gate(0, a, b, c, size), lambda: F.silu(x) * y),
        ("embed", 2, lambda: embed(F32, a, 1.0, c, size), lambda: x.clone()),
        ("embed, bfloat16", 1.5, lambda: embed(BF16, table.data_ptr(), 1.0, c, size), lambda: table[0].float()),
        ("add", 3, lambda: add(a, 0.5, c, size), lambda: y.add(x, alpha=0.5)),
    ):
        yield Case(
            {"kernel": name, "size": size}, moved * 4.0 * size, 0.0, "f32", call, {"torch": twin}, streamed=False
        )
    yield norm_case(native, size)


def norm_case(native: Any, size: int) -> Case:
    """RMSNorm of one row."""
    from ctypes import POINTER, Structure, byref, c_float, c_int32, c_void_p

    import torch
    import torch.nn.functional as F

    class Norm(Structure):
        """kernels.h's q_norm."""

        _fields_ = (("kind", c_int32), ("size", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p))

    x, weight, out = (torch.randn(size) for _ in range(3))
    how = Norm(0, size, 1e-6, weight.data_ptr(), None)
    norm = native.function("norm", POINTER(Norm), c_void_p, c_void_p)
    return Case(
        {"kernel": "rms_norm", "size": size}, 12.0 * size, 0.0, "f32",
        lambda: norm(byref(how), x.data_ptr(), out.data_ptr()), {"torch": lambda: F.rms_norm(x, (size,), weight, 1e-6)},
        streamed=False,
    )  # fmt: skip
