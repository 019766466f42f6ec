"""Beam search through the real stack.

Against transformers' ``generate(num_beams=...)``: 50 prompts, widths 2, 4 and 8, without an end-of-sequence token.
There the semantics agree: every hypothesis ends at the length limit, so both search by cumulative log-probability. They
differ

- in the score: transformers divides by the generated length to the power of length_penalty, quire (as vLLM) by prompt
  plus output length, less one where the last token is EOS;
- in who may end: of the 2 * width candidates of a step, transformers lets only the first ``width`` end with EOS, quire
  (as vLLM's V0) all; and in when the search stops.

So with an EOS the comparison is with V0's rules written out here over transformers' log-probabilities.
"""

import math

import pytest
import tiny_models
import torch

from quire import LLM, SamplingParams

EOS = 256
LENGTH = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.make("llama", tmp_path_factory.mktemp("beams") / "model", seed=21)


@pytest.fixture(scope="module")
def model(folder):
    torch.set_num_threads(1)
    return tiny_models.reference(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32", max_model_len=128, max_num_seqs=64) as made:
        yield made


def beams(width, **fields):
    return SamplingParams(**{"use_beam_search": True, "n": width, "temperature": 0, "max_tokens": LENGTH, **fields})


# By these seeds no two totals between which a choice lies are nearer than 2e-4, in any step.
@pytest.mark.parametrize(("width", "seed"), [(2, 2), (4, 4), (8, 16)])
def test_same_sequences_and_scores_as_transformers(llm, model, width, seed):
    prompts = [prompt[:12] for prompt in tiny_models.random_prompts(50, seed=seed, shortest=12)]
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=LENGTH, length_penalty=1.0, early_stopping=False, eos_token_id=None, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    expected = found.sequences[:, 12:].view(50, width, LENGTH).tolist()
    totals = (found.sequences_scores * LENGTH).view(50, width).tolist()
    for penalty in (0.0, 1.0, 2.0, -1.0):
        outputs = llm.generate(
            prompt_token_ids=prompts, sampling_params=beams(width, length_penalty=penalty, ignore_eos=True),
            use_tqdm=False,
        )  # fmt: skip
        for number, output in enumerate(outputs):
            got = [(each.token_ids, each.cumulative_logprob) for each in output.outputs]
            assert [tokens for tokens, _ in got] == expected[number], (penalty, number)
            assert [total for _, total in got] == pytest.approx(totals[number], abs=1e-4)
            assert {each.finish_reason for each in output.outputs} == {"length"}


def search(model, prompt, params, width, max_len):
    """V0's beam search, beam by beam, with transformers' log-probabilities: [(tokens, cumulative)] best first."""

    def score(tokens, total, length=None):
        size = len(prompt) + len(tokens) - (bool(tokens) and tokens[-1] == EOS and not params.ignore_eos)
        return total / ((length or size) ** params.length_penalty)

    live, done = [([], 0.0)], []
    while live:
        batch = torch.tensor([prompt + tokens for tokens, _ in live])
        with torch.inference_mode():
            rows = torch.log_softmax(model(batch).logits[:, -1].float(), -1)
        rows = rows + torch.tensor([[total] for _, total in live])
        values, places = rows.flatten().topk(2 * width)
        children = [
            (live[place // rows.shape[1]][0] + [place % rows.shape[1]], value)
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
        ]
        ended = [
            child
            for child in children
            if child[0][-1] == EOS or child[0][-1] in params.stop_token_ids or len(child[0]) >= params.max_tokens
        ]
        done = sorted(done + ended, key=lambda child: -score(*child))[:width]
        live = [child for child in children if child not in ended][:width]
        if not live or len(done) < width:
            continue
        if params.early_stopping is True:
            break
        best = live[0]
        if params.early_stopping == "never" and params.length_penalty > 0:
            reach = score(*best, length=max(len(prompt) + params.max_tokens, max_len))
        else:
            reach = score(*best)
        if score(*done[-1]) >= reach:
            break
    return done


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("width", [2, 4])
def test_ends_as_v0_does(llm, model, width, early):
    prompts = tiny_models.random_prompts(12, seed=5, shortest=4, longest=20)
    stops = list(range(0, 256, 6))  # so that many hypotheses end early
    wanted = [
        beams(width, length_penalty=penalty, early_stopping=early, stop_token_ids=stops)
        for penalty, _ in zip([0.0, 1.0, 2.0, -0.5] * 3, prompts, strict=True)
    ]
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=wanted, use_tqdm=False)
    lengths = set()
    for prompt, params, output in zip(prompts, wanted, outputs, strict=True):
        expected = search(model, prompt, params, width, 128)
        got = [(each.token_ids, each.cumulative_logprob) for each in output.outputs]
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        assert [total for _, total in got] == pytest.approx([total for _, total in expected], abs=1e-4)
        lengths.update(len(tokens) for tokens, _ in got)
    assert len(lengths) > 3, "the hypotheses were meant to end at different lengths"


def test_fewer_returned_than_searched(llm):
    prompt = tiny_models.random_prompts(1, seed=9)
    wide = llm.generate(prompt_token_ids=prompt, sampling_params=beams(4), use_tqdm=False)[0]
    narrow = llm.generate(prompt_token_ids=prompt, sampling_params=beams(2, best_of=4), use_tqdm=False)[0]
    assert [each.token_ids for each in narrow.outputs] == [each.token_ids for each in wide.outputs[:2]]
    assert math.isfinite(narrow.outputs[0].cumulative_logprob)


def test_beams_preempted_and_among_others_change_nothing(folder, llm):
    prompts = tiny_models.random_prompts(12, seed=13, shortest=20, longest=60)
    params = [
        SamplingParams(seed=i, max_tokens=66, ignore_eos=True) if i < 8 else beams(4) for i in range(len(prompts))
    ]
    expected = [
        llm.generate(prompt_token_ids=[prompt], sampling_params=each, use_tqdm=False)[0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    with LLM(
        str(folder), dtype="float32", max_model_len=128, max_num_seqs=12, max_num_batched_tokens=32,
        num_gpu_blocks_override=24,
    ) as small:  # fmt: skip
        got = small.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        assert small.stats().preemptions > 0
    for one, other in zip(got, expected, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
