"""Families through the real processes: random prompts all at once, chunked, cached and preempted.

Greedy tokens must be transformers' own, in float32. ``test_families.py`` has every family, in one process.
"""

import pytest
import tiny_models
import torch

from quire import LLM, SamplingParams

FAMILIES = ["llama", "mistral-window", "qwen3"]
MAX_TOKENS = 40


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers_own(family, tmp_path):
    folder = tiny_models.make(family, tmp_path / "model", seed=5)
    prompts = tiny_models.random_prompts(28, seed=6)
    prompts += [prompts[0] * 3 + p for p in prompts[1:5]]  # equal prefixes, for the prefix cache
    with LLM(
        str(folder),
        dtype="float32",
        max_model_len=384,
        # 24 blocks hold a handful of the 32; chunks of 48 tokens split most prompts.
        num_gpu_blocks_override=24,
        max_num_batched_tokens=48,
        max_num_seqs=32,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        stats = llm.stats()
        again = llm.generate(prompt_token_ids=prompts[-1:], sampling_params=params, use_tqdm=False)
    assert stats.preemptions > 0, "too many blocks: nothing was preempted"
    assert stats.prefix_hits > 0
    tokens = [output.outputs[0].token_ids for output in outputs]
    # Causal models do not see what is behind a token: one pass gives what decoding token by token would.
    whole = [prompt + output for prompt, output in zip(prompts, tokens, strict=True)]
    ids = torch.tensor([row + [0] * (max(map(len, whole)) - len(row)) for row in whole])
    with torch.inference_mode():
        best = tiny_models.reference(folder)(ids).logits.argmax(-1)
    for prompt, output, row in zip(prompts, tokens, best, strict=True):
        assert output == row[len(prompt) - 1 :][:MAX_TOKENS].tolist(), len(prompt)
    assert again[0].outputs[0].token_ids == tokens[-1]
