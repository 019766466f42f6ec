"""Each family through the real processes: 64 random prompts at once, chunked, cached and preempted.

Greedy tokens must be transformers' own, in float32. Logits are compared in ``test_models.py``.
"""

import pytest
import tiny_models
import torch

from quire import LLM, SamplingParams

FAMILIES = ["llama", "mistral-window", "qwen2", "qwen3", "gemma", "phi3-partial-window"]
MAX_TOKENS = 24


def greedy(model, prompt):
    """transformers' greedy tokens of one prompt, with nothing around it."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        # The mask is given: transformers would guess it from the padding id, which a random prompt may hold.
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers_own(family, tmp_path):
    folder = tiny_models.make(family, tmp_path / "model", seed=5)
    prompts = tiny_models.random_prompts(60, seed=6)
    prompts += [prompts[0] * 3 + p for p in prompts[1:5]]  # equal prefixes, for the prefix cache
    with LLM(
        str(folder),
        dtype="float32",
        max_model_len=448,
        # 40 blocks hold a handful of the 64; chunks of 48 tokens split most prompts.
        num_gpu_blocks_override=40,
        max_num_batched_tokens=48,
        max_num_seqs=32,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        stats = llm.stats()
        again = llm.generate(prompt_token_ids=prompts[-1:], sampling_params=params, use_tqdm=False)
    assert stats.preemptions > 0, "too many blocks: nothing was preempted"
    assert stats.prefix_hits > 0
    torch.set_num_threads(1)
    model = tiny_models.reference(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt), (len(prompt), output.request_id)
    assert again[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids
