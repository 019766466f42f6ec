"""The decoder by itself, over a hand-made paged cache; ``test_families`` has every family through the real runner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paged_runner
import pytest
import tiny_gpt
import tiny_models
import tiny_moe
import torch
from paged_runner import CPU, PagedRunner, Row, load

from quire.gpu_worker.batch import StepBatch
from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import ModelConfig


@torch.no_grad()
def expected_logits(reference, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [T, vocab] of one sequence."""
    return reference(torch.tensor([tokens])).logits[0]


def test_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    """The same decode alone and among others; wide enough that products are packed and heads folded."""
    torch.set_num_threads(1)
    hf = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
    }  # fmt: skip
    runner = PagedRunner(load_model(ModelConfig("", hf, 512, 300), torch.float32, CPU, "dummy"), blocks=200)
    rows = [Row(prompt) for prompt in tiny_models.random_prompts(12, seed=1, shortest=2, longest=90)]
    for row in rows:
        runner.step([(row, len(row.tokens) - 1)])
    together = runner.step([(row, 1) for row in rows])
    for row in rows:
        row.computed -= 1
    alone = torch.cat([runner.step([(row, 1)]) for row in rows])
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=0)


@torch.no_grad()
def test_longrope_past_the_original_length(tmp_path: Path) -> None:
    """With max_model_len past the original length every sequence has the long factors, as long ones have there."""
    torch.set_num_threads(1)
    folder = tiny_models.make("phi3-longrope", tmp_path, seed=4)
    (tokens,) = tiny_models.random_prompts(1, seed=2, shortest=300, longest=300)
    row, runner = Row(tokens), PagedRunner(load(folder, 512))
    got = torch.cat([runner.step([(row, 100)]) for _ in range(3)])
    want = expected_logits(tiny_models.reference(folder), tokens)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_dynamic_rope_grows_past_the_trained_length(tmp_path: Path) -> None:
    """transformers, decoding token by token with its cache past max_position_embeddings, gives the same logits."""
    torch.set_num_threads(1)
    folder = tiny_models.make("llama-dynamic", tmp_path, seed=4, max_position_embeddings=40)
    reference = tiny_models.reference(folder)
    (tokens,) = tiny_models.random_prompts(1, seed=2, shortest=70, longest=70)
    row, runner = Row(tokens), PagedRunner(load(folder))
    first = reference(torch.tensor([tokens[:38]]), use_cache=True)
    want, cache = [first.logits[0]], first.past_key_values
    for at in range(38, 70):
        out = reference(
            torch.tensor([tokens[at : at + 1]]),
            past_key_values=cache,
            position_ids=torch.tensor([[at]]),
            use_cache=True,
        )
        want.append(out.logits[0])
    got = torch.cat([runner.step([(row, n)]) for n in (38, *[1] * 32)])
    torch.testing.assert_close(got, torch.cat(want), atol=1e-4, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("heads", "same", "other"), [(8, 257, 300), (9, 1, 40)])
def test_falcons_alibi_is_rounded_in_transformers_alone(heads: int, same: int, other: int, tmp_path: Path) -> None:
    """docs/models.md says from which length; with up to eight heads the slopes are powers of two."""
    torch.set_num_threads(1)
    kind, values = tiny_gpt.ROWS["falcon-rw"][:2]
    size = {"hidden_size": 8 * heads, "num_attention_heads": heads}
    folder = tiny_models.write(kind, tmp_path, 1, {**values, **size})
    (tokens,) = tiny_models.random_prompts(1, seed=2, shortest=300, longest=300)
    got = PagedRunner(load(folder, 512)).step([(Row(tokens[:other]), other)])
    want = expected_logits(tiny_models.reference(folder, "sdpa"), tokens[:other])
    torch.testing.assert_close(got[:same], want[:same], atol=1e-4, rtol=1e-5)
    assert (got[-1] - want[-1]).abs().max() > 1e-3


KERNELS = """
import sys, pathlib, torch
sys.path.insert(0, sys.argv[1])
import paged_runner as t
from quire.gpu_worker.layers import dispatch
for folder in sys.argv[2:]:
    model = t.load(pathlib.Path(folder))
    results = []
    for use in (False, True):
        dispatch.use_kernels = lambda x, use=use: use
        runner, rows = t.PagedRunner(model, 16), [t.Row(list(range(n))) for n in (9, 12)]
        results.append(torch.cat([runner.step([(rows[0], 8), (rows[1], 12)]), runner.step([(rows[0], 1)])]))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)
    print("same", flush=True)
"""


@pytest.mark.slow
def test_the_gpu_path_under_the_interpreter(tmp_path: Path) -> None:
    """The decoder's kernels, interpreted on the CPU, give what its CPU path gives, for every knob of attention."""
    names = ("qwen3", "gemma", "bloom", "gptj", "cohere-plus", "opt-350m", "gpt-oss")
    folders = []
    for name in names:
        kind, values, *_ = {**tiny_models.ROWS, **tiny_gpt.ROWS, **tiny_moe.ROWS}[name]
        folders.append(str(tiny_models.write(kind, tmp_path / name, 3, {**values, "num_hidden_layers": 1})))
    command = [sys.executable, "-c", KERNELS, str(Path(paged_runner.__file__).parent), *folders]
    # Experts that are packed for a CPU have no grouped product.
    env = {**os.environ, "TRITON_INTERPRET": "1", "QUIRE_CPU_KERNELS": "off"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout.split() == ["same"] * len(names), done.stderr


def test_wanted_outputs_are_the_same_bits_as_among_all(tmp_path: Path) -> None:
    """The last layer may compute only the tokens that are sampled; their keys and values are written all the same."""
    model = load(tiny_models.make("llama", tmp_path, seed=1))
    prompts = tiny_models.random_prompts(3, seed=2, shortest=20, longest=40)
    whole, some = PagedRunner(model), PagedRunner(model)
    forward, wanted = model.forward, torch.tensor([0, 7, 7, 30])

    def only_wanted(batch: StepBatch, kv: Any) -> torch.Tensor:
        batch.outputs = wanted
        return forward(batch, kv)

    want = whole.step([(Row(list(prompt)), len(prompt)) for prompt in prompts])
    some.model = type("Partial", (), {"forward": staticmethod(only_wanted), "logits": staticmethod(model.logits)})
    got = some.step([(Row(list(prompt)), len(prompt)) for prompt in prompts])
    assert torch.equal(got, want[wanted])
    assert all(torch.equal(a, b) for a, b in zip(whole.k + whole.v, some.k + some.v, strict=True))
    wanted = torch.tensor([], dtype=torch.int64)
    assert some.step([(Row(list(prompts[0])), len(prompts[0]))]).shape[0] == 0
