"""The experts' kernels compile for a GPU, where there is none. As a script: compile them and say how."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other kernel tests compile them")
def test_experts_compile(tmp_path):
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    support = str(Path(__file__).parents[1] / "support")
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": support}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=280, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    products = [line for line in done.stdout.splitlines() if line.startswith("grouped_kernel")]
    assert len(products) == 6, done.stdout
    assert not any("products -" in line or "async copies 0" in line for line in products), done.stdout


def main():
    """A decode and a prefill step in two bytes a value, with whole tiles and without; one step in float32."""
    from kernel_compile import compile_launch
    from triton.runtime.jit import JITFunction

    from quire.gpu_worker.kernels.moe_routing import route
    from quire.gpu_worker.layers.formats.dense import PLAIN
    from quire.gpu_worker.layers.linear import ExpertLinear, weight_of
    from quire.gpu_worker.layers.moe import Experts, experts_grouped
    from quire.gpu_worker.spec import MoESpec

    JITFunction.run = compile_launch
    bf16, half = torch.bfloat16, torch.float16
    for tokens, experts, hidden, width, bias, activation, dtype in (
        (8, 8, 4096, 768, False, "silu", bf16),
        (1024, 8, 2880, 1440, True, "swiglu_oai", half),
        (8, 4, 72, 40, False, "gelu", torch.float32),
    ):
        gate_up, down = (
            torch.empty(experts, 2 * width, hidden, dtype=dtype),
            torch.empty(experts, hidden, width, dtype=dtype),
        )
        biases = (gate_up[..., 0].contiguous(), down[..., 0].contiguous()) if bias else (None, None)
        linears = (
            ExpertLinear(PLAIN, {"weight": matrices}, weight_of(matrices), shift)
            for matrices, shift in zip((gate_up, down), biases, strict=True)
        )
        held = Experts(*linears, activation=activation)
        experts_grouped(
            torch.empty(tokens, hidden, dtype=dtype),
            torch.empty(tokens, 2),
            torch.zeros(tokens, 2, dtype=torch.int64),
            held,
        )
    logits = torch.empty(8, 256, dtype=bf16)
    for spec in (
        MoESpec(128, 8, 1, renormalise=True),
        MoESpec(60, 4, 1, "topk_softmax"),
        MoESpec(256, 8, 1, "sigmoid", renormalise=True, groups=8, topk_groups=4),
    ):
        route(logits[:, : spec.experts], spec, torch.empty(256) if spec.groups else None)


if __name__ == "__main__":
    main()
