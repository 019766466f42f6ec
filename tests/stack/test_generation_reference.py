"""Every sampling parameter through the real stack, 32 different sets of them in one batch, against plain transformers.

The reference (``sampling_reference.py``) runs each request alone, with transformers' model and logits processors, and
draws with noise of its own making; tokens must be equal, and logprobs to 1e-4.
"""

import random

import pytest
import sampling_reference
import tiny_models
import torch

from quire import LLM, SamplingParams

EOS = 256
WORDS = ["a", "th", "e x", "zz", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.make("llama", tmp_path_factory.mktemp("reference") / "model", seed=11)


@pytest.fixture(scope="module")
def model(folder):
    torch.set_num_threads(1)
    return tiny_models.reference(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32", max_model_len=256, max_logprobs=400) as made:
        yield made


# One feature each; None where a reference of one row needs nothing.
SINGLE = {
    "greedy": {"temperature": 0},
    "plain": {},
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "presence": {"temperature": 0, "presence_penalty": 2.0},
    "presence negative": {"temperature": 0, "presence_penalty": -1.5},
    "frequency": {"temperature": 0, "frequency_penalty": 1.3},
    "repetition": {"temperature": 0, "repetition_penalty": 1.8},
    "repetition below 1": {"temperature": 0, "repetition_penalty": 0.7},
    "bias": {"temperature": 0, "logit_bias": {7: 30.0, 9: 30.5, 11: -100}},
    "allowed": {"allowed_token_ids": list(range(40, 60))},
    "bad words": {"temperature": 0, "bad_words": WORDS},
    "min_tokens": {"min_tokens": 8, "logit_bias": {EOS: 12.0}, "ignore_eos": False},
    "stop ids": {"stop_token_ids": list(range(0, 320, 7)), "min_tokens": 3},
}


def random_set(rng):
    """A set of parameters in which anything may meet anything."""
    fields = {"temperature": rng.choice([0, 0.3, 0.8, 1.0, 1.7]), "max_tokens": 12, "ignore_eos": rng.random() < 0.5}
    options = {
        "top_k": lambda: rng.choice([1, 3, 20, 1000]), "top_p": lambda: rng.choice([0.1, 0.5, 0.9]),
        "min_p": lambda: rng.choice([0.02, 0.3]), "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2), "repetition_penalty": lambda: rng.uniform(0.5, 2.5),
        "logit_bias": lambda: {rng.randrange(320): rng.uniform(-20, 20) for _ in range(9)},
        "allowed_token_ids": lambda: rng.sample(range(320), 60),
        "bad_words": lambda: rng.sample(WORDS, 3), "min_tokens": lambda: rng.randrange(1, 12),
        "stop_token_ids": lambda: rng.sample(range(320), 12),
    }  # fmt: skip
    for name, value in options.items():
        if rng.random() < 0.45:
            fields[name] = value()
    return fields


def bad_word_ids(words):
    """The tests' tokenizer has a token a byte: only the form without a leading space is as long as itself."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [[alphabet.index("Ġ" if char == " " else char) for char in word] for word in words]


def check(llm, model, sets, prompts, logprobs):
    params = [
        SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **fields, "seed": 1000 + i, "logprobs": k})
        for i, (fields, k) in enumerate(zip(sets, logprobs, strict=True))
    ]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    for i, (given, prompt, output) in enumerate(zip(params, prompts, outputs, strict=True)):
        ctx = {"eos": [EOS], "bad_words": bad_word_ids(given.bad_words)}
        tokens, steps = sampling_reference.generate(model, given, prompt, 1000 + i, ctx)
        got = output.outputs[0]
        assert got.token_ids == tokens, (i, sets[i])
        check_logprobs(got, steps, given.logprobs)


def check_logprobs(got, steps, k):
    if k is None:
        assert got.logprobs is None and got.cumulative_logprob is None
        return
    total = 0.0
    for entry, token, logits in zip(got.logprobs, got.token_ids, steps, strict=True):
        expected = torch.log_softmax(logits.float(), -1)
        total += float(expected[token])
        assert entry[token].logprob == pytest.approx(float(expected[token]), abs=1e-4)
        check_rank(entry[token].rank, expected, token)
        best = set(expected.topk(k).indices.tolist()) if k else set()
        assert set(entry) == best | {token}
        for other in best:
            assert entry[other].logprob == pytest.approx(float(expected[other]), abs=1e-4)
    assert got.cumulative_logprob == pytest.approx(total, abs=1e-3)


def check_rank(rank, row, token):
    """1 + the tokens that are more likely; those within float32's rounding may be on either side."""
    assert 1 + int((row > row[token] + 2e-5).sum()) <= rank <= int((row > row[token] - 2e-5).sum())


def test_each_parameter_alone_and_all_in_one_batch(llm, model):
    prompts = tiny_models.random_prompts(len(SINGLE), seed=3, longest=30)
    check(llm, model, list(SINGLE.values()), prompts, [i % 4 - 1 if i % 4 else None for i in range(len(SINGLE))])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_32_mixed_sets_in_one_batch(llm, model, seed):
    rng = random.Random(seed)
    sets = [random_set(rng) for _ in range(32)]
    prompts = tiny_models.random_prompts(32, seed=seed, longest=40)
    check(llm, model, sets, prompts, [rng.choice([None, 0, 1, 5]) for _ in sets])


def test_prompt_logprobs_chunked_and_cached(folder, model):
    prompts = tiny_models.random_prompts(6, seed=8, shortest=30, longest=90)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, logprobs=1)
    with LLM(str(folder), dtype="float32", max_num_batched_tokens=24, max_num_seqs=8, max_model_len=256) as llm:
        llm.generate(prompt_token_ids=prompts, sampling_params=SamplingParams(max_tokens=1), use_tqdm=False)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
        assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
        for place in range(1, len(prompt)):
            entry, row, token = output.prompt_logprobs[place], expected[place - 1], prompt[place]
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
            check_rank(entry[token].rank, row, token)
            assert set(entry) == {*row.topk(3).indices.tolist(), token}
        assert len(output.outputs[0].logprobs) == 2


def test_processed_logprobs(folder, model):
    """That --logprobs-mode arrives; test_sampler_logprobs and test_sampler_mixed have every mode."""
    fields = {"temperature": 0.7, "top_k": 9, "presence_penalty": 1.0, "logit_bias": {5: 3.0}}
    params = SamplingParams(**fields, seed=4, max_tokens=6, logprobs=4, ignore_eos=True)
    prompt = tiny_models.random_prompts(1, seed=4)[0]
    with LLM(str(folder), dtype="float32", max_model_len=256, logprobs_mode="processed_logprobs") as llm:
        got = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)[0].outputs[0]
    tokens, steps = sampling_reference.generate(model, params, prompt, 4, {})
    assert got.token_ids == tokens
    for place, (entry, logits) in enumerate(zip(got.logprobs, steps, strict=True)):
        row = sampling_reference.processed(logits, params, prompt, tokens[:place], {})
        values = torch.log_softmax(sampling_reference.filtered(row, params), -1)
        assert set(values.topk(4).indices.tolist()) <= set(entry)
        for token, seen in entry.items():
            assert seen.logprob == pytest.approx(float(values[token]), abs=2e-4)
