"""The machine: what it is, and how busy it was while a figure was taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""Of all that a processor can do, what matters to products. Names as in /proc/cpuinfo."""
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "msgspec", "pyzmq", "aiohttp", "uvloop")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def device() -> dict[str, Any]:
    """The processor with its cores and instruction sets, memory in GiB, and the GPUs if there are any."""
    fields: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Python, quire and the packages that its speed depends on."""
    from quire.proto.version import __version__

    found = {"python": platform.python_version(), "quire": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit; ends in ``-dirty`` where files were changed."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class Watch:
    """How busy the machine is from ``Watch()`` to ``stop()``.

    ``others_pct`` is the share of all cores' time that processes other than this one and its descendants used, and
    ``steal_pct`` what the hypervisor gave to other machines. With either above a few per cent a figure says little.
    """

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._total, self._busy, self._steal = _cpu_times()
        self._own = cpu_seconds(os.getpid())
        self._began = time.monotonic()

    def stop(self) -> dict[str, float]:
        """Load average at the start and at the end, and percentages of all cores' time in between."""
        total, busy, steal = _cpu_times()
        own = cpu_seconds(os.getpid()) - self._own
        whole = max(total - self._total, TICK_S)
        return {
            "seconds": round(time.monotonic() - self._began, 2),
            "load_before": round(self._load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "busy_pct": round(100 * (busy - self._busy) / whole, 1),
            "others_pct": round(max(0.0, 100 * (busy - self._busy - own) / whole), 1),
            "steal_pct": round(100 * (steal - self._steal) / whole, 1),
        }


def cpu_seconds(root: int) -> float:
    """User and system time of a process, its descendants, and those of them that have ended and been waited for."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (stat := _read(f"/proc/{entry}/stat")):
            fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
            parents[int(entry)] = int(fields[1])
            seconds[int(entry)] = sum(map(int, fields[11:15])) * TICK_S
    family = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(seconds.get(pid, 0.0) for pid in family)


def _cpu_times() -> tuple[float, float, float]:
    """Seconds since boot, summed over cores: all, busy (neither idle nor stolen), stolen."""
    values = [int(field) * TICK_S for field in _read("/proc/stat").split("\n", 1)[0].split()[1:9]]
    user, nice, system, idle, iowait, irq, softirq, steal = values
    busy = user + nice + system + irq + softirq
    return busy + idle + iowait + steal, busy, steal


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _read(path: str) -> str:
    """A file of /proc; empty where there is none, or no longer."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
