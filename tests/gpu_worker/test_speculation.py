"""A worker that speculates gives what one that does not gives, bit for bit, whatever is drafted."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from paged_runner import load
from speculation_rig import Driven, Guess
from worker_toys import VOCAB, ToyModel

from quire.gpu_worker.sampling.grammar import Grammars
from quire.gpu_worker.speculation.lengths import Costs, Lengths, even_costs, measured_costs
from quire.gpu_worker.speculation.methods import draft_rows
from quire.gpu_worker.speculation.ngram import Ngram, Suffix, occurrences
from quire.gpu_worker.worker import Worker
from quire.proto.checkpoint.model_config import ModelConfig, demo_model_path, load_model_config
from quire.proto.codec import i32
from quire.proto.config import EngineArgs
from quire.proto.speculation import speculative_config
from quire.proto.structured import StructuredOutputsParams

torch.set_num_threads(1)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0, "logprobs": 2},
    "filters": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 0},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
    "children": {"temperature": 1.0, "n": 3},
    "min_tokens": {"temperature": 1.0, "min_tokens": 20, "suppressed_ids": i32(range(60)), "stop_token_ids": [5, 6]},
    "bad words": {"temperature": 0.9, "bad_words": [[7, 8], [9], [3, 4, 5]]},
    "bias": {"temperature": 0.9, "logit_bias": {5: 3.0, 6: -4.0}, "allowed_token_ids": list(range(80))},
    "prompt logprobs": {"temperature": 1.0, "prompt_logprobs": 2, "logprobs": 1},
}


def texts(vocab: int, count: int, length: int = 30) -> list[list[int]]:
    """Prompts that repeat themselves now and then."""
    rng = np.random.default_rng(3)
    words = rng.integers(10, vocab, (6, 4))
    return [words[rng.integers(0, 6, length // 4 + n)].reshape(-1).tolist() for n in range(count)]


def submit_all(driven: Driven, vocab: int, asked: dict[str, dict[str, Any]], tokens: int) -> Driven:
    for uid, (prompt, params) in enumerate(zip(texts(vocab, len(asked)), asked.values(), strict=True), 1):
        driven.submit(uid, prompt, seed=100 * uid, **{"max_tokens": tokens + uid, "ignore_eos": False, **params})
    return driven.run()


def truth_of(driven: Driven, vocab: int, asked: dict[str, dict[str, Any]]) -> dict[tuple[int, ...], list[int]]:
    prompts = texts(vocab, len(asked))
    return {(*prompts[uid - 1], index): tokens for (uid, index), tokens in driven.tokens.items()} and {
        tuple(prompts[uid - 1]): tokens for (uid, index), tokens in driven.tokens.items() if index == 0
    }


@pytest.fixture(scope="module")
def demo() -> Any:
    return load(demo_model_path(), 256)


@pytest.fixture(scope="module")
def toy() -> ToyModel:
    return ToyModel()


PROPOSERS = ("ngram", "suffix", "right", "half", "wrong")


def proposer(name: str, truth: dict[tuple[int, ...], list[int]]) -> Any:
    if name == "ngram":
        return lambda state: Ngram(state, 4, 1, 4)
    if name == "suffix":
        return lambda state: Suffix(state, 4, 24, 2.0, 0.05)
    return partial(Guess, truth=truth, right={"right": 1.0, "half": 0.6, "wrong": 0.0}[name])


@pytest.mark.parametrize("name", ("ngram", "half"))
def test_everything_at_once(toy: ToyModel, name: str) -> None:
    """By torch, with preemption, in one batch."""
    plain = submit_all(Driven(toy, VOCAB), VOCAB, REQUESTS, 24)
    for more in ({}, {"blocks": 24, "adapt": True}, {"budget": 96, "draft_rows": 3}):
        make = proposer(name, truth_of(plain, VOCAB, REQUESTS))
        found = submit_all(Driven(toy, VOCAB, make, **more), VOCAB, REQUESTS, 24)
        assert found.outcome() == plain.outcome()
        assert found.core.stats().draft_tokens and ("blocks" not in more or found.core.preemptions)
    assert len(plain.tokens) == len(REQUESTS) + 2


@pytest.mark.parametrize("name", PROPOSERS)
def test_the_same_bits_by_the_native_program(demo: Any, name: str) -> None:
    """Logprobs are compared to the bit: tokens verified together give the logits of decodes one by one."""
    vocab = demo.spec.vocab_size
    plain = submit_all(Driven(demo, vocab), vocab, REQUESTS, 30)
    assert plain.runner.program is not None
    found = submit_all(Driven(demo, vocab, proposer(name, truth_of(plain, vocab, REQUESTS))), vocab, REQUESTS, 30)
    assert found.outcome() == plain.outcome()
    if name == "right":
        assert found.steps < 0.75 * plain.steps


@pytest.mark.parametrize("name", ("ngram", "right", "half"))
def test_what_is_on_the_host(demo: Any, name: str) -> None:
    """Grammars and logits processors see each token that is kept, once and in order."""
    config = load_model_config(demo_model_path(), 256)
    vocab, args = config.vocab_size, EngineArgs()
    seen: dict[bool, list[list[int]]] = {False: [], True: []}

    def driven(drafts: bool, make: Any = None) -> Driven:
        def watch(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor, extra: Any) -> torch.Tensor:
            seen[drafts].append(list(output_ids))
            logits[len(output_ids) % 7] += 3
            return logits

        rig = Driven(demo, vocab, make, grammars=Grammars(config, args), functions={"watch": watch})
        json = StructuredOutputsParams(json=SCHEMA)
        rig.submit(1, [5, 6, 7], eos=(2,), max_tokens=60, temperature=1.0, structured_outputs=json, logprobs=1)
        rig.submit(2, [5, 6, 8], max_tokens=40, temperature=0.9, logits_processors=["watch"], presence_penalty=0.3)
        choice = StructuredOutputsParams(regex="(ab|cd){3,9}")
        rig.submit(3, [9], eos=(2,), max_tokens=40, temperature=0.7, structured_outputs=choice, n=2)
        return rig.run()

    plain = driven(False)
    truth = {(5, 6, 7): plain.tokens[1, 0], (5, 6, 8): plain.tokens[2, 0], (9,): plain.tokens[3, 0]}
    found = driven(True, proposer(name, truth))
    assert found.outcome() == plain.outcome() and not found.failed
    assert seen[True] == seen[False]
    if name == "right":
        assert found.steps < plain.steps


def test_a_position_that_cannot_be_drawn_fails_as_it_would_alone(toy: ToyModel) -> None:
    def broken(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor, extra: Any) -> torch.Tensor:
        if len(output_ids) == 13:
            raise RuntimeError("out of luck")
        return logits

    asked = {"max_tokens": 30, "temperature": 1.0, "logits_processors": ["broken"]}
    plain = Driven(toy, VOCAB, functions={"broken": broken})
    plain.submit(1, [4, 5], **asked)
    plain.run()
    assert plain.failed and len(plain.tokens[1, 0]) == 13
    free = Driven(toy, VOCAB)
    free.submit(1, [4, 5], **{**asked, "logits_processors": None})
    free.run()
    found = Driven(
        toy, VOCAB, partial(Guess, truth={(4, 5): free.tokens[1, 0]}, right=1.0), functions={"broken": broken}
    )
    found.submit(1, [4, 5], **asked)
    assert found.run().outcome() == plain.outcome()


@pytest.mark.parametrize("asked", [{}, {"frequency_penalty": 0.4}])
def test_a_position_whose_logits_are_not_numbers_fails_as_it_would_alone(demo: Any, asked: dict[str, Any]) -> None:
    def run(make: Any = None) -> Driven:
        driven = Driven(demo, demo.spec.vocab_size, make)
        driven.submit(1, [40, 50, 60], max_tokens=40, temperature=1.0, ignore_eos=True, **asked)
        return driven.run()

    guess = partial(Guess, truth={(40, 50, 60): run().tokens[1, 0]}, right=1.0)
    angles = demo.layers[0].attention.tables[0].numpy()
    kept = angles[22:].copy()
    angles[22:] = np.nan
    try:
        plain, found = run(), run(guess)
    finally:
        angles[22:] = kept
    assert plain.failed and found.outcome() == plain.outcome() and found.steps < plain.steps


def test_there_is_room_for_the_drafts_of_all_rows_and_no_more(toy: ToyModel) -> None:
    used = []
    for many in (None, 10**9):
        text = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "disable_by_batch_size": many})
        args = EngineArgs(speculative_config=None if many is None else text)
        config = ModelConfig(path="", hf={}, max_model_len=256, vocab_size=VOCAB)
        worker = Worker(args, config, toy, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        used.append(worker._measure(8, 3, 64).used)
    assert used[1] - used[0] == 4 * 3 * VOCAB * 4 * 4  # ``step_bytes`` counts four copies of the logits
    speculation = speculative_config(args)
    assert speculation is not None and draft_rows(speculation, "cpu", 3) == 3
    assert draft_rows(msgspec.structs.replace(speculation, disable_by_batch_size=None), "cpu", 30) == 8


# ---------------------------------------------------------------- proposers


def slow_ngram(tokens: list[int], lowest: int, highest: int, most: int) -> list[int]:
    for length in range(min(highest, len(tokens) - 1), lowest - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == suffix:
                return tokens[start + length :][:most]
    return []


def test_ngram_is_the_first_occurrence_of_the_longest_suffix() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        tokens = rng.integers(0, rng.integers(2, 9), rng.integers(1, 40)).astype(np.int32)
        lowest = int(rng.integers(1, 4))
        highest = lowest + int(rng.integers(0, 4))
        ngram = Ngram(None, 5, lowest, highest)  # type: ignore[arg-type]
        assert ngram.of(tokens, 5).tolist() == slow_ngram(tokens.tolist(), lowest, highest, 5)


def test_suffix_votes_and_stops_where_it_is_unlikely() -> None:
    tokens = np.array([1, 2, 3, 9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3], np.int32)
    ends, length = occurrences(tokens, 24)
    assert (ends.tolist(), length) == ([2, 6, 11], 3)
    assert Suffix(None, 9, 24, 1.0, 0.5).of(tokens, 9).tolist() == [4]  # type: ignore[arg-type]
    assert Suffix(None, 9, 24, 1.0, 0.1).of(tokens, 9).tolist() == [4, 5, 1]  # type: ignore[arg-type]
    assert Suffix(None, 9, 24, 0.4, 0.1).of(tokens, 9).tolist() == [4]  # type: ignore[arg-type]
    assert Suffix(None, 9, 24, 1.0, 0.1).of(tokens[:4], 9).tolist() == []  # type: ignore[arg-type]


def test_lengths_follow_acceptance_and_company() -> None:
    lengths, rows, most = Lengths(8, even_costs(0.1, 72)), [0, 1], [8, 8]
    start = lengths.most(rows, most)
    for _ in range(12):
        lengths.learn(0, 4, 4)
        lengths.learn(1, 4, 0)
    good, bad = lengths.most(rows, most)
    assert good == 8 > start[0] > bad == 0
    assert [lengths.most(rows, most)[1] for _ in range(40)].count(1) == 2
    assert max(lengths.most([2, 3, 4, 5, 6, 7], [8] * 6)) < start[0]
    lengths.copy([0], [1])
    assert lengths.most(rows, most)[1] == 8
    lengths.forget(1)
    assert 0 < lengths.most(rows, most)[1] < 8


def test_a_step_of_more_tokens_takes_no_less() -> None:
    costs = measured_costs({1: 1.0, 8: 1.5, 5: 2.0, 9: 3.0}, 1.0, 0.5)
    assert costs.steps[1:] == [1, 1.125, 1.25, 1.375, 1.5, 1.5, 1.5, 1.5, 2]
    assert costs.draft == 0.25
    assert even_costs(0.5, 3).steps[1:] == [1, 1.5, 2]


def test_drafts_are_tried_where_they_pay_for_their_time() -> None:
    """The third token of a step costs as much as two."""
    costs = Costs([0.0, 1.0, 1.0, 3.0, 3.0])
    assert Lengths(2, costs).most([0], [3]) == [1]
    assert Lengths(2, costs._replace(draft=0.8)).most([0], [3]) == [0]
    assert Lengths(2, costs).most([0, 1], [3, 3]) == [0, 0]


def test_a_new_row_is_taken_to_be_like_all_before_it() -> None:
    lengths = Lengths(2, even_costs(0.15, 16))
    assert lengths.most([0], [4]) == [4]
    for _ in range(200):
        lengths.learn(0, 1, 0)
    lengths.forget(1)
    assert lengths.most([1], [4]) == [1]  # it is drafted for at first
    for _ in range(800):
        lengths.learn(0, 4, 4)
    lengths.forget(1)
    assert lengths.most([1], [4]) == [4]


def test_what_was_drawn_without_drafts_is_caught_up_with_where_a_row_goes_on() -> None:
    lengths = Lengths(2, even_costs(0.1, 16), 5)
    lengths.forget(0, 400)  # its prompt
    asked = iter([401, 406, 502, *range(503, 520)])
    drafted = [lengths.most([0], [4], [next(asked)])[0] for _ in range(12)]
    assert drafted == [4, 4, *[0] * 6, 4, 4, 4, 4]  # 96 tokens were drawn in steps of many rows
    assert Lengths(2, even_costs(0.1, 16)).most([0], [4], [900]) == [4]  # what looks up has nothing to compute


@pytest.mark.parametrize(("gap", "waits"), [(17, 1), (100, 6), (1000, 8)])
def test_a_row_waits_for_a_few_steps_however_much_was_drawn_without_it(gap: int, waits: int) -> None:
    lengths = Lengths(1, even_costs(0.1, 16), 5)
    assert not lengths.catching_up(0, 5)
    late = [lengths.catching_up(0, 5 + gap + step) for step in range(12)]
    assert late == [True] * waits + [False] * (12 - waits)
