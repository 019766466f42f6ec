"""What `quire doctor` looks at on this machine. Each function gives findings and changes nothing."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..gpu_worker.memory import GIB, memory_limits
from ..proto.version import __version__
from .workers import serving_folders

OK, WARN, FAIL = "ok", "warn", "fail"
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pyzmq", "msgspec", "aiohttp",
          "numpy", "llguidance", "jinja2", "prometheus_client")  # fmt: skip
FASTER = ("triton", "uvloop")
FEW_FILES = 4096
SMALL_SHM = 256 * 2**20
OLD_KEY_DAYS = 365
PROBE_SECONDS = 120
HUB_SECONDS = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``state`` is ok, warn or fail, and ``remedy`` is empty where it is ok."""

    section: str
    name: str
    state: str
    found: str
    remedy: str = ""


def packages() -> Iterator[Finding]:
    """Python, quire and the packages that it needs."""
    old = sys.version_info < (3, 11)
    yield Finding(
        "Versions", "python", FAIL if old else OK, platform.python_version(), "use 3.11 or newer" if old else ""
    )
    yield Finding("Versions", "quire", OK, __version__)
    for name in NEEDED + FASTER:
        try:
            yield Finding("Versions", name, OK, version(name))
        except PackageNotFoundError:
            state = FAIL if name in NEEDED else WARN
            yield Finding("Versions", name, state, "not installed", f"pip install {name}")


# ---------------------------------------------------------------- devices


def probe(folder: str | None) -> dict[str, Any]:
    """What ``gpu_worker.inspect_device`` says; "error" where it says nothing."""
    command = [sys.executable, "-m", "quire.gpu_worker.inspect_device", *([] if folder is None else [folder])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_SECONDS} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": (done.stderr.strip().splitlines() or [str(error)])[-1] if "done" in locals() else str(error)}


def devices(told: dict[str, Any]) -> Iterator[Finding]:
    """GPUs, their driver, the processor and its kernels."""
    if "error" in told:
        yield Finding("Devices", "torch", FAIL, told["error"], "pip install torch, or repair the environment")
        return
    yield _driver(told)
    for number, gpu in enumerate(told["gpus"]):
        size = f"{gpu['name']}, {gpu['free'] / GIB:.1f} of {gpu['total'] / GIB:.1f} GiB free"
        if "error" in gpu:
            yield Finding("Devices", f"GPU {number}", FAIL, size, gpu["error"])
            continue
        flash = "FlashAttention may be asked for" if not gpu["flash"] else "no FlashAttention"
        state = OK if gpu["free"] > gpu["total"] / 2 else WARN
        remedy = "" if state == OK else "others use its memory: nvidia-smi names them; or --gpu-memory-utilization"
        yield Finding("Devices", f"GPU {number}", state, f"{size}; attention by Triton, {flash}", remedy)
    yield from _processor(told["cpu"], bool(told["gpus"]))


def _driver(told: dict[str, Any]) -> Finding:
    """Whether the driver and torch agree on what GPUs there are."""
    smi = shutil.which("nvidia-smi")
    listed = ""
    if smi is not None:
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
            listed = done.stdout.strip() if done.returncode == 0 else ""
        except (OSError, subprocess.TimeoutExpired):
            pass
    built = f"torch {told['torch']} for {told['built_for']}"
    if not listed:
        return Finding("Devices", "driver", OK, f"no NVIDIA driver answers; {built}")
    driver = f"NVIDIA {listed.splitlines()[0]}; {built}"
    if told["gpus"]:
        return Finding("Devices", "driver", OK, driver)
    return Finding("Devices", "driver", FAIL, f"{driver}, which sees none of its GPUs",
                   "install a torch made for this driver's CUDA, or --device cpu")  # fmt: skip


def _processor(cpu: dict[str, Any], gpus: bool) -> Iterator[Finding]:
    sets = ", ".join(cpu["sets"]) or "no vector instructions that are used"
    yield Finding("Devices", "processor", OK, f"{platform.machine()}, {os.cpu_count()} cores: {sets}")
    if "error" in cpu:
        yield Finding("Devices", "CPU kernels", FAIL, cpu["error"], "unset QUIRE_CPU_KERNELS")
    elif cpu["kernels"]:
        yield Finding("Devices", "CPU kernels", OK, f"native, for {cpu['kernels']}")
    else:
        why = cpu["why"] or "QUIRE_CPU_KERNELS=off"
        remedy = "unset QUIRE_CPU_KERNELS" if not cpu["why"] else "install a C compiler (cc) and quire again"
        yield Finding("Devices", "CPU kernels", OK if gpus else WARN, f"none: {why}", "" if gpus else remedy)
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    state = WARN if compiler is None and gpus else OK
    yield Finding(
        "Devices", "C compiler", state, compiler or "none", "Triton needs one: install gcc" if state == WARN else ""
    )


# ---------------------------------------------------------------- the system


def system() -> Iterator[Finding]:
    """Memory, /dev/shm and limits."""
    free, source = min(memory_limits())
    low = free < GIB
    yield Finding("System", "memory", WARN if low else OK, f"{free / GIB:.1f} GiB free ({source})",
                  "end other programs, or raise the container's limit" if low else "")  # fmt: skip
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        low = shm.free < SMALL_SHM
        size = f"{shm.free / GIB:.2f} of {shm.total / GIB:.2f} GiB free"
        yield Finding("System", "/dev/shm", WARN if low else OK, size,
                      "docker run --shm-size 1g, or --ipc host" if low else "")  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < FEW_FILES
    yield Finding("System", "open files", WARN if few else OK, f"{soft} of at most {hard}",
                  f"each stream takes one: ulimit -n {FEW_FILES} or more" if few else "")  # fmt: skip
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("System", "locked memory", OK, "no limit" if locked < 0 else f"{locked / 2**20:.0f} MiB")


def ports(wanted: int) -> Iterator[Finding]:
    """Whether the port is free, and which servers of this user run."""
    folders = serving_folders()
    yield Finding("Network", "servers", OK, ", ".join(folders) or "none of this user runs")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("0.0.0.0", wanted))
            yield Finding("Network", f"port {wanted}", OK, "free")
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = f"quire serve --port {wanted + 1 if wanted < 65535 else 0}" if taken else "use a port above 1023"
            yield Finding("Network", f"port {wanted}", WARN, "taken" if taken else str(error.strerror), remedy)


def hub() -> Iterator[Finding]:
    """Whether models can be fetched, and where they are kept."""
    base = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or base / "hub")
    place = next(each for each in (cache, *cache.parents) if each.exists())
    models = len(list(cache.glob("models--*")))
    free = shutil.disk_usage(place).free
    writable = os.access(place, os.W_OK)
    state = FAIL if not writable else WARN if free < 5 * GIB else OK
    remedy = {
        OK: "",
        WARN: "free some, or name a larger disk with HF_HOME",
        FAIL: "name a folder of yours with HF_HOME",
    }
    yield Finding("Hub", "cache", state, f"{cache}, {models} models, {free / GIB:.0f} GiB free", remedy[state])
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        yield Finding("Hub", "hub", OK, "not asked (HF_HUB_OFFLINE)")
        return
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    url = re.sub(r"//[^/]*@", "//", url)  # a password is told to nobody: what this prints is sent with reports of bugs
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_SECONDS):
            yield Finding("Hub", "hub", OK, f"{url} answers")
    except urllib.error.HTTPError as error:
        yield Finding("Hub", "hub", OK, f"{url} answers ({error.code})")
    except (OSError, ValueError) as error:
        yield Finding("Hub", "hub", WARN, f"{url}: {getattr(error, 'reason', error)}",
                      "name a local folder, or set HF_HUB_OFFLINE=1 to use the cache without asking")  # fmt: skip


def keys(paths: list[tuple[str, str | None]]) -> Iterator[Finding]:
    """Modes and ages of key files, given as (flag, file)."""
    for flag, path in paths:
        if path is None:
            continue
        try:
            info = os.stat(path)
        except OSError as error:
            yield Finding(
                "Keys", flag, FAIL, f"{path}: {error.strerror}", "make it with quire keygen, or correct the path"
            )
            continue
        days, mode = int((time.time() - info.st_mtime) // 86400), stat.S_IMODE(info.st_mode)
        found = f"{path}, mode {mode:04o}, {days} days old"
        if mode & 0o077:
            yield Finding("Keys", flag, FAIL, f"{found}: others may read or write it", f"chmod 600 {path}")
        elif days > OLD_KEY_DAYS:
            yield Finding("Keys", flag, WARN, found, "make new ones with quire keygen")
        else:
            yield Finding("Keys", flag, OK, found)
