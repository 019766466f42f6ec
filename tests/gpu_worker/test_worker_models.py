"""The runner with real models: greedy tokens equal transformers', however the steps are cut."""

import random

import pytest
import tiny_models
import torch
from worker_toys import CPU, GREEDY, Hand, told, unpack

from quire.gpu_worker.models.loader import load_model
from quire.proto.checkpoint.model_config import load_model_config
from quire.proto.params import SamplingParams

torch.set_num_threads(1)
ROWS = 10
NEW = 10


@pytest.fixture(scope="module", params=["mistral-window", "qwen3"])
def pair(request, tmp_path_factory):
    """(our model, transformers' tokens by prompt, its logits of the first prompt) of one tiny checkpoint."""
    folder = tiny_models.make(request.param, tmp_path_factory.mktemp("model") / request.param)
    reference = tiny_models.reference(folder)
    # Of a seed by which no two logits that a rank or a token depends on are nearer than 6e-5, ten times what is lost.
    prompts = tiny_models.random_prompts(ROWS + 4, seed=23, longest=70)
    with torch.inference_mode():
        wanted = [
            reference.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=NEW,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]  # fmt: skip
        logits = reference(torch.tensor([prompts[0]])).logits[0]
    model = load_model(load_model_config(str(folder)), torch.float32, CPU)
    return model, list(zip(prompts, wanted, strict=True)), logits


def hand_of(model, **limits):
    limits = {"rows": ROWS, "length": 128, "block_size": 16, "blocks": 96, "max_tokens": 256, **limits}
    return Hand(model, vocab=tiny_models.VOCAB, **limits)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [24, 256])
def test_mixed_steps_equal_transformers(pair, budget):
    """Decodes first, then chunks of what the budget leaves; rows are given up and taken again as sequences end."""
    model, cases, _ = pair
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
    model, cases, _ = pair
    hand, rng = hand_of(model), random.Random(5)
    for ids, wanted in cases[:6]:
        cut = rng.randrange(1, NEW)
        assert hand.generate(0, ids, cut) == wanted[:cut]
        hand.drop(0)
        assert hand.generate(7, ids + wanted[:cut], NEW - cut, chunk=rng.choice((5, 64))) == wanted[cut:]
        hand.drop(7)


def test_seeded_draws_do_not_depend_on_batch_or_chunks(pair):
    model, cases, _ = pair
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


@pytest.mark.slow
def test_logprobs_are_the_same_alone_batched_chunked_and_resumed(pair):
    """Of each token drawn, and of the prompt, to 1e-5; the prompt's are transformers'."""
    model, cases, logits = pair
    params = SamplingParams(temperature=1.0, top_k=50, logprobs=3, prompt_logprobs=2, frequency_penalty=0.5)

    def collect(hand, rows, new, chunk, got):
        """Run ``rows`` to ``new`` tokens; got[row] = (tokens, their logprobs, prompt's by position)."""
        while min(len(got[row][0]) for row in rows) < new:
            chunks = [(row, min(chunk, hand.lengths[row] - hand.done[row])) for row in rows]
            order = [row for row, _ in sorted(chunks, key=lambda each: each[1] != 1)]
            drawn = hand.run(*chunks)
            for token, record, row in zip(drawn.values(), hand.result.logprobs, drawn, strict=True):
                got[row][0].append(token)
                got[row][1].extend(unpack(record, 3))
            for each in hand.result.prompts:
                for offset, entry in enumerate(unpack(each.logprobs, 2)):
                    got[order[each.at]][2][each.start + offset] = entry
        return got

    def same(got, wanted):
        assert got[0] == wanted[0] and got[2].keys() == wanted[2].keys()
        for mine, its in (*zip(got[1], wanted[1], strict=True), *((got[2][at], wanted[2][at]) for at in wanted[2])):
            assert (mine[0], mine[2]) == (its[0], its[2])
            assert mine[1] == pytest.approx(its[1], abs=1e-5)

    alone = {}
    for row, (ids, _) in enumerate(cases[:6]):
        hand = hand_of(model)
        hand.admit(0, ids, params=params, seed=row, prompt_logprobs_from=1)
        alone[row] = collect(hand, [0], 4, 100, {0: ([], [], {})})[0]
        tokens = alone[row][0]
        hand = hand_of(model)
        hand.admit(3, ids + tokens[:2], params=params, seed=row, prompt_len=len(ids), prompt_logprobs_from=1)
        again = collect(hand, [3], 2, 7, {3: ([], [], {})})[3]
        same(again, (tokens[2:4], alone[row][1][2:4], alone[row][2]))
    hand, got = hand_of(model), {row: ([], [], {}) for row in alone}
    for row in alone:
        hand.admit(row, cases[row][0], params=params, seed=row, prompt_logprobs_from=1)
    collect(hand, list(alone), 4, 9, got)
    for row, wanted in alone.items():
        same((got[row][0][:4], got[row][1][:4], got[row][2]), wanted)

    ids = cases[0][0]
    for at, (entry, values, rank) in alone[0][2].items():
        wanted = told(logits[at - 1], ids[at], 2)
        assert (entry[0], rank) == (wanted[0][0], wanted[2])
        assert values == pytest.approx(wanted[1], abs=1e-4)
    assert sorted(alone[0][2]) == list(range(1, len(ids)))
