"""The runner with real models: greedy tokens equal transformers', however the steps are cut."""

import random

import pytest
import tiny_models
import torch
from worker_toys import CPU, GREEDY, Hand

from quire.gpu_worker.models.loader import load_model
from quire.proto.model_config import load_model_config
from quire.proto.params import SamplingParams

torch.set_num_threads(1)
ROWS = 10
NEW = 10


@pytest.fixture(scope="module", params=["llama", "mistral-window", "gemma", "qwen3"])
def pair(request, tmp_path_factory):
    """(our model, transformers' tokens by prompt) of one tiny checkpoint."""
    folder = tiny_models.make(request.param, tmp_path_factory.mktemp("model") / request.param)
    reference = tiny_models.reference(folder)
    prompts = tiny_models.random_prompts(ROWS + 4, seed=3, longest=70)
    with torch.inference_mode():
        wanted = [
            reference.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=NEW,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]  # fmt: skip
    return load_model(load_model_config(str(folder)), torch.float32, CPU), list(zip(prompts, wanted, strict=True))


def hand_of(model, **limits):
    limits = {"rows": ROWS, "length": 128, "block_size": 16, "blocks": 96, "max_tokens": 256, **limits}
    return Hand(model, vocab=tiny_models.VOCAB, **limits)


@pytest.mark.parametrize("budget", [24, 256])
def test_mixed_steps_equal_transformers(pair, budget):
    """Decodes first, then chunks of what the budget leaves; rows are given up and taken again as sequences end."""
    model, cases = pair
    hand, waiting = hand_of(model, max_tokens=budget), list(enumerate(cases))
    owner, got = {}, [[] for _ in cases]
    while waiting or owner:
        while waiting and len(owner) < ROWS:
            row = next(row for row in range(ROWS) if row not in owner)
            owner[row], (ids, _) = waiting.pop(0)
            hand.admit(row, ids)
        left, chunks = budget, []
        for row in sorted(owner, key=lambda row: hand.lengths[row] - hand.done[row]):
            count = min(left, hand.lengths[row] - hand.done[row])
            if count:
                chunks.append((row, count))
                left -= count
        for row, token in hand.run(*chunks).items():
            got[owner[row]].append(token)
            if len(got[owner[row]]) == NEW:
                del owner[row]
                hand.drop(row)
    assert got == [wanted for _, wanted in cases]


def test_preempted_and_resumed_equals_transformers(pair):
    """A sequence loses its row and blocks at a random moment and is admitted anew with what it had."""
    model, cases = pair
    hand, rng = hand_of(model), random.Random(5)
    for ids, wanted in cases[:6]:
        cut = rng.randrange(1, NEW)
        assert hand.generate(0, ids, cut) == wanted[:cut]
        hand.drop(0)
        assert hand.generate(7, ids + wanted[:cut], NEW - cut, chunk=rng.choice((5, 64))) == wanted[cut:]
        hand.drop(7)


def test_seeded_draws_do_not_depend_on_batch_or_chunks(pair):
    model, cases = pair
    params = [SamplingParams(temperature=1.0), SamplingParams(top_p=0.8, top_k=40), GREEDY]
    alone = []
    for row, (ids, _) in enumerate(cases[:ROWS]):
        alone.append(hand_of(model).generate(row, ids, 6, params=params[row % 3], seed=77 + row, chunk=64))
    hand, got = hand_of(model), [[] for _ in range(ROWS)]
    for row, (ids, _) in enumerate(cases[:ROWS]):
        hand.admit(row, ids, params=params[row % 3], seed=77 + row)
    while min(map(len, got)) < 6:
        chunks = [(row, min(9, hand.lengths[row] - hand.done[row])) for row in range(ROWS)]
        for row, token in hand.run(*chunks).items():
            got[row].append(token)
    assert [tokens[:6] for tokens in got] == alone
