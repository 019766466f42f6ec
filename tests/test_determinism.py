"""A seeded request draws the same tokens alone, in a batch, after preemption, cached, and however it is chunked."""

import random

import pytest

from quire import LLM, SamplingParams

PROMPTS = [
    "The capital of France is", "Once upon a time there was a", "Hello, my name is", "One, two, three,",
    "The future of AI is", "San Francisco is a",
]  # fmt: skip


def ask(seed):
    return SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=seed, max_tokens=48, ignore_eos=True)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone():
    """Each prompt by itself, one after the other, with everything at its default."""
    with LLM() as llm:
        return [tokens(llm.generate(p, ask(100 + i), use_tqdm=False))[0] for i, p in enumerate(PROMPTS)]


VARIANTS = {
    "batch of 32": {},
    "no prefix caching": {"enable_prefix_caching": False},
    "chunks of 8": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "no chunked prefill": {"enable_chunked_prefill": False},
    "blocks of 8": {"block_size": 8},
    # 14 blocks hold three whole sequences at most, so a batch of 32 preempts again and again.
    "preempted": {"num_gpu_blocks_override": 14, "max_model_len": 200},
    "two workers": {"data_parallel_size": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_seeded_tokens_do_not_change(alone, variant):
    rng = random.Random(variant)
    order = [i % len(PROMPTS) for i in range(32)]
    rng.shuffle(order)
    with LLM(**VARIANTS[variant]) as llm:
        got = tokens(llm.generate([PROMPTS[i] for i in order], [ask(100 + i) for i in order], use_tqdm=False))
        if variant == "preempted":
            assert llm.stats().preemptions > 0
    assert got == [alone[i] for i in order]


def test_child_i_of_n_draws_with_seed_plus_i(alone):
    with LLM() as llm:
        params = ask(100)
        params.n = 3
        children = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs
        singles = [tokens(llm.generate(PROMPTS[0], ask(100 + i), use_tqdm=False))[0] for i in range(3)]
    assert [child.token_ids for child in children] == singles
    assert singles[0] == alone[0]
