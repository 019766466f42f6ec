"""How the suite is run: by a few processes that take whole files, each with one thread for its own tensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
SLOW_FOLDERS = {"stack", "chaos", "fuzz", "netns", "compose"}
PROCESSES = 3  # on two cores: tests of real processes often wait

# A suite that passed passes again, on a machine that is busier too.
settings.register_profile(
    "quire", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quire")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What ``-n auto`` is here. A few named files are run as they come, and so is all on a machine with a GPU: each
    server that a test starts wants most of its memory."""
    several = any(Path(arg.partition("::")[0]).is_dir() for arg in config.args)
    alone = Path("/dev/nvidiactl").exists() or (os.cpu_count() or 1) < 2
    return PROCESSES if several and not alone else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``-m "not slow"`` is what one runs while working; what starts whole stacks, and storms of them, is not in it."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Models of tests are tiny, and threads that wait for each other would only take turns with what else runs."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What ``tests/scheduler/test_transcripts.py`` and ``tests/gpu_worker/test_fake_cuda.py`` take."""
    parser.addoption("--rewrite-transcripts", action="store_true", help="write the scheduler's transcripts anew")
    parser.addoption("--rewrite-launches", action="store_true", help="write anew what steps ask of a GPU, in numbers")
