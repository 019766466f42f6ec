"""What this machine can do at most: bytes read from memory, and products, a second.

`peak.c` does both in registers and plain loops, compiled here for this processor; the threads are Python's, which
ctypes lets run at the same time. Without a compiler torch's own sum and product stand in, which reach less.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).with_name("peak.c")
TYPES = ("f32", "bf16", "int8")
OPERATIONS = {"f32": 2 * 16 * 12, "bf16": 2 * 32 * 12, "int8": 2 * 64 * 12}
"""Operations of one turn of peak.c's loops: an addition and a product each."""
BYTES = 2**28
"""What each thread reads; far more than any cache holds."""
REPEATS = 7


def ceilings(threads: int) -> dict[str, float]:
    """``read_gb_per_s`` and ``peak_TYPE_gflop_per_s`` of ``threads`` threads, the best of several runs. A type that the
    processor does not multiply is left out."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        library = compile_peak(Path(folder))
        if library is None:
            return torch_ceilings(threads)
        found = {"read_gb_per_s": read_bandwidth(library, threads) / 1e9}
        for name in TYPES:
            if speed := peak(library, name, threads):
                found[f"peak_{name}_gflop_per_s"] = speed / 1e9
        return found


def compile_peak(folder: Path) -> ctypes.CDLL | None:
    """peak.c as a library; None where there is no compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("no C compiler: the ceilings are torch's, which are lower", file=sys.stderr)
        return None
    target = folder / "peak.so"
    command = [
        compiler,
        "-O3",
        "-march=native",
        "-ffp-contract=fast",
        "-shared",
        "-fPIC",
        str(SOURCE),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target))
    library.read_bytes.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    library.read_bytes.restype = ctypes.c_int64
    for name in TYPES:
        function = getattr(library, f"multiply_{name}")
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_float
    return library


def read_bandwidth(library: ctypes.CDLL, threads: int) -> float:
    """Bytes a second that ``threads`` threads read, each from its own part of memory."""
    area = mmap.mmap(-1, BYTES * threads)
    for page in range(0, len(area), mmap.PAGESIZE):
        area[page] = 1  # or every page were the system's one page of zeros
    first = ctypes.c_char.from_buffer(area)
    start = ctypes.addressof(first)
    seconds = quickest(threads, lambda at: library.read_bytes(start + at * BYTES, BYTES, 1))
    del first
    area.close()
    return BYTES * threads / seconds


def peak(library: ctypes.CDLL, name: str, threads: int) -> float:
    """Operations a second in ``name``; 0 where the processor cannot."""
    multiply, turns = getattr(library, f"multiply_{name}"), 10_000_000
    if multiply(1) < 0:
        return 0.0
    seconds = quickest(threads, lambda at: multiply(turns))
    return OPERATIONS[name] * turns * threads / seconds


def quickest(threads: int, work: Callable[[int], object]) -> float:
    """Seconds until all threads have done ``work``, in the best of several runs."""
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            best = min(best, time.perf_counter() - began)
    return best


def torch_ceilings(threads: int) -> dict[str, float]:
    """The same by torch: the sum of a large tensor, and products of square matrices."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(BYTES // 4)
    found = {"read_gb_per_s": BYTES / quickest(1, lambda _: data.sum()) / 1e9}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        x = torch.ones(2048, 2048, dtype=dtype)
        found[f"peak_{name}_gflop_per_s"] = 2 * 2048**3 / quickest(1, lambda _, x=x: x @ x) / 1e9
    return found
