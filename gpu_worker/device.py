"""Which device computes, and with how many threads. Nothing here imports torch before it is needed.

Between parallel regions OpenMP's threads spin before they sleep, by default for milliseconds, which takes the cores
from everybody else: ``early.py`` sets its environment. Measured on two cores with six busy
processes beside, a decode step of 32 rows of a wide 6-layer model: 180 ms when threads sleep at once, 240 ms with
2,000 turns of spinning, 440 ms with 200,000; one thread takes 256 ms. A small model (4 layers of 256) is three times
slower with two threads than with one.

The native kernels have threads of their own (``kernels/cpu/src/team.c``), as many, which spin for microseconds alone.
Even so a small model had better leave the other core to the other processes: where they kept two cores busy, the median
decode step of one row of 5 million parameters in bfloat16 took 0.27 ms with one thread and 1.2 ms with two (the fastest
0.16 and 0.11 ms). A prompt's prefill is another matter: 256 of its tokens, from the 1,000th on, took 17 ms with one
thread and 10 with two where the other core was free, so longer steps take all threads (``choose_long_steps``). Nobody
waits for a thread that has no core (``team.c``): with 8 requests at once of that model, steps of 80 tokens and more on
two threads gave 1.08 times the tokens a second of steps of 300 and more in bfloat16, and with 32 in float32 1.04 times.
Without HTTP the other core is free for most of the time: there 64, 32 and 16 sequences at once of that model got 1.23,
1.18 and 1.09 times as many tokens a second with two threads in float32, and 1.10, 1.12 and 1.04 times in bfloat16; 32
of 2.4 million parameters, whose steps are shorter, 0.93 times.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..proto.checkpoint.model_config import ModelConfig
from ..proto.config import ConfigError
from ..proto.process import FEW_BESIDE, LOCAL_WORKERS

if TYPE_CHECKING:
    import torch

SMALL_MODEL = 30_000_000
"""Parameters below which a decode is so short that a second thread costs more in waking than it saves."""
LONG_STEP, LONG_STEP_ALONE = 400_000_000, 150_000_000
"""Parameters times tokens from which on a step of a small model, most with a prompt, is worth all threads even so; the
same for each thread more without a frontend beside, where two are worth it for 30 rows of 5 million parameters."""


def usable_cores() -> int:
    """Physical cores this process may use: its affinity, less hyperthreads, within the cgroup's quota.

    Workers started together share them evenly.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in cpus}
    quota = _cgroup_quota()
    share = int(os.environ.get(LOCAL_WORKERS, "1"))
    return max(1, min(len(cores), int(quota) if quota else len(cores)) // max(1, share))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _cgroup_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def parameter_estimate(config: ModelConfig) -> int:
    """About how many parameters a decoder of this config.json has."""
    hf = config.hf

    def number(name: str, default: int) -> int:
        value = hf.get(name)
        return value if isinstance(value, int) else default

    hidden = number("hidden_size", 1024)
    heads = number("num_attention_heads", 16)
    head_dim = number("head_dim", hidden // max(1, heads))
    attention = hidden * head_dim * 2 * (heads + number("num_key_value_heads", heads))
    mlp = 3 * hidden * number("intermediate_size", 4 * hidden)
    return config.vocab_size * hidden + number("num_hidden_layers", 16) * (attention + mlp)


def choose_threads(asked: int | None, cores: int, parameters: int) -> int:
    """Compute threads on a CPU: those asked for, or OMP_NUM_THREADS, or one for a small model; else every core up to
    two, then all but one for the others' work.

    The scheduler, the detokenizer and the frontend together need a few per cent of a core while a large model
    computes, so on two cores a large model is faster with both.
    """
    if asked is not None:
        return asked
    if (told := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(told) > 0:
        return int(told)
    if parameters < SMALL_MODEL:
        return 1
    return cores if cores <= 2 else cores - 1


class LongSteps(NamedTuple):
    """Steps of at least ``tokens`` tokens take ``threads`` threads, and shorter ones take one."""

    tokens: int
    threads: int


def choose_long_steps(asked: int | None, cores: int, parameters: int) -> LongSteps | None:
    """Which steps of a small model take as many threads as a large model's; None where all take the same number."""
    threads = choose_threads(asked, cores, SMALL_MODEL)
    if threads == choose_threads(asked, cores, parameters):
        return None
    least = min(LONG_STEP_ALONE * (threads - 1), LONG_STEP) if os.environ.get(FEW_BESIDE) else LONG_STEP
    return LongSteps(-(-least // parameters), threads)


def choose_device(name: str) -> torch.device:
    """``auto``: the first CUDA device, or the CPU where there is none. Raises ConfigError."""
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda but torch sees no CUDA device; use --device=cpu or fix the driver.")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device, threads: int) -> str:
    """One phrase for logs and Hello."""
    if device.type == "cpu":
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    import torch

    return f"{device} {torch.cuda.get_device_name(device)}"
