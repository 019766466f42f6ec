"""Every kernel compiles for a GPU, where there is none: what the interpreter accepts, the compiler may refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other kernel tests compile them")
def test_kernels_compile(tmp_path):
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "support" / "kernel_compile.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) > 12
    products = [line for line in lines if line.startswith("attention_kernel")]
    assert products and not any("products -" in line or "async copies 0" in line for line in products), done.stdout
