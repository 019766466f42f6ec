"""What only the model and its tokenizer can check or resolve, each Refused by field, value and limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import TextTokenizer, load_tokenizer
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.checks import MAX_BAD_CHARACTERS
from quire.proto.codec import from_i32, i32
from quire.proto.errors import Refused
from quire.proto.messages import Finish, Resume, Tokenize
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Generate

MODEL = Path(__file__).resolve().parents[2] / "demo_model"
TOKENIZER = load_tokenizer(str(MODEL))
VOCAB = 5000
EOS = TOKENIZER.eos_id or 0
OTHER_EOS = [7, 9]


def preparer(tokenizer: TextTokenizer | None = TOKENIZER, max_logprobs: int = 20, **fields: Any) -> Preparer:
    fields = {"eos_token_ids": [*OTHER_EOS, EOS], **fields}
    return Preparer(tokenizer, ModelConfig("", {}, 64, VOCAB, **fields), max_logprobs)


SHARED = preparer()


def ask(sampling: dict[str, Any], **fields: Any) -> Tokenize:
    if not {"prompt", "ids", "messages"} & set(fields):
        fields["ids"] = i32([40, 41, 42, 43])
    return Tokenize(uid=1, attempt=1, work=Generate(SamplingParams(**sampling), 0), arrival=0.0, **fields)


def refusal(sampling: dict[str, Any], with_preparer: Preparer = SHARED, **fields: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        with_preparer.prepare(ask(sampling, **fields), 16, 64)
    assert refused.value.status == 400
    return refused.value


def resolved(sampling: dict[str, Any], with_preparer: Preparer = SHARED, **fields: Any) -> SamplingParams:
    message = ask(sampling, **fields)
    with_preparer.prepare(message, 16, 64)
    return message.work.params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", lambda token: [3, token]),
        ("allowed_token_ids", lambda token: [3, token]),
        ("logit_bias", lambda token: {3: 1.0, token: -1.0}),
    ],
)
def test_ids_are_held_to_the_vocabulary(name: str, value: Any) -> None:
    assert getattr(resolved({name: value(VOCAB - 1)}), name)
    refused = refusal({name: value(VOCAB)})
    assert refused.param == name
    assert refused.message == f"{name} contains the token id 5000, which is out of vocabulary (0 to 4999)."


@pytest.mark.parametrize(("name", "what"), [("logprobs", "sample"), ("prompt_logprobs", "prompt")])
def test_logprobs_are_held_to_max_logprobs(name: str, what: str) -> None:
    held = ((20, 20, 20), (0, 0, 0), (None, 20, None), (5, -1, 5), (-1, -1, VOCAB), (-1, VOCAB, VOCAB))
    for given, most, kept in (*held, (2 * VOCAB, 3 * VOCAB, VOCAB)):
        assert getattr(resolved({name: given}, preparer(max_logprobs=most)), name) == kept
    for given, most, shown in ((21, 20, 21), (1, 0, 1), (-1, 20, VOCAB), (-1, VOCAB - 1, VOCAB), (VOCAB + 1, -1, 5001)):
        refused = refusal({name: given}, preparer(max_logprobs=most))
        limit = VOCAB if most == -1 else most
        assert refused.param == name
        start = f"Requested {what} logprobs of {shown}, which is greater than max allowed: {limit}"
        assert refused.message.startswith(start)


def test_truncation_keeps_the_last_tokens() -> None:
    ids = list(range(10, 110))
    run = lambda keep, **more: from_i32(  # noqa: E731
        SHARED.prepare(ask({"truncate_prompt_tokens": keep, **more}, ids=i32(ids)), 16, 64).ids
    )
    assert run(1) == ids[-1:] and run(63) == ids[-63:]
    assert run(5, truncation_side="right") == ids[:5] and run(5, truncation_side="left") == ids[-5:]
    assert run(-1) == ids[-63:]  # one token of output at least
    assert run(-1, min_tokens=10, max_tokens=10) == ids[-54:]
    assert refusal({"truncate_prompt_tokens": 64}, ids=i32(ids)).param == "input_tokens"
    refused = refusal({"truncate_prompt_tokens": 65})
    assert refused.param == "truncate_prompt_tokens"
    assert "truncate_prompt_tokens=65 cannot be greater than max_model_len=64" in refused.message
    assert resolved({"truncate_prompt_tokens": 64}).truncate_prompt_tokens == 64  # a short prompt is not cut


def test_echo_is_the_text_of_what_is_run() -> None:
    ids = TOKENIZER.encode("The capital of France is Paris.", True)
    text = "The capital of France is Paris."

    def prompt(keep: int | None, echo: bool = True, **fields: Any) -> str | None:
        return SHARED.prepare(ask({"truncate_prompt_tokens": keep}, echo=echo, **fields), 16, 64).prompt

    assert prompt(None, prompt=text) == prompt(len(ids), prompt=text) == prompt(None, ids=i32(ids)) == text
    assert prompt(4, prompt=text) == prompt(4, ids=i32(ids)) == TOKENIZER.decode(ids[-4:], True) != text
    assert prompt(4, echo=False, prompt=text) == text and prompt(4, echo=False, ids=i32(ids)) is None
    special = [SHARED.eos[0], *ids]
    assert prompt(None, ids=i32(special)) == TOKENIZER.decode(special, False) != text


def test_min_tokens_must_fit() -> None:
    assert resolved({"min_tokens": 60, "max_tokens": None}).max_tokens == 60
    refused = refusal({"min_tokens": 61, "max_tokens": None})
    assert (refused.param, "max_tokens=60" in refused.message, "got 61" in refused.message) == (
        "min_tokens",
        True,
        True,
    )


# ---------------------------------------------------------------- EOS


def test_one_eos_is_primary_and_the_others_are_stop_ids() -> None:
    message = ask({"stop_token_ids": [5, 7]})
    prepared = SHARED.prepare(message, 16, 64)
    assert prepared.work.eos == [EOS] and message.work.params.stop_token_ids == [5, 7, 9]
    SHARED.prepare(message, 16, 64)  # what Engine submits again is resolved already
    assert message.work.params.stop_token_ids == [5, 7, 9]
    ignoring = ask({"stop_token_ids": [5], "ignore_eos": True})
    assert SHARED.prepare(ignoring, 16, 64).work.eos == [] and ignoring.work.params.stop_token_ids == [5]
    without = preparer(TextTokenizer(TOKENIZER.encode, TOKENIZER.decode, TOKENIZER.backend, {}, lambda text: None, {}))
    assert (without.eos, without.more_eos) == ([7], [9, EOS])
    assert preparer(eos_token_ids=[VOCAB, 3]).more_eos == [3]  # none that cannot be drawn


def test_suppressed_ids_are_all_that_could_end_a_sequence() -> None:
    def suppressed(**sampling: Any) -> list[int]:
        return from_i32(SHARED.prepare(ask(sampling), 16, 64).work.suppressed_ids)

    assert suppressed() == suppressed(stop_token_ids=[5]) == []
    assert sorted(suppressed(min_tokens=1)) == sorted([EOS, 7, 9])
    assert sorted(suppressed(min_tokens=2, ignore_eos=True, stop_token_ids=[5, 7])) == sorted([EOS, 5, 7, 9])
    assert suppressed(min_tokens=1, allowed_token_ids=[EOS, 8])
    refused = refusal({"min_tokens": 1, "allowed_token_ids": [EOS, 5], "stop_token_ids": [5]})
    assert refused.param == "allowed_token_ids" and "min_tokens=1" in refused.message


def test_resumed_children_end_by_a_secondary_eos_with_its_id_and_not_before_min_tokens() -> None:
    resumes = [Resume(0, i32([40, 9]), 0), Resume(1, i32([40, EOS]), 0), Resume(2, i32([40]), 0)]
    prepared = SHARED.prepare(ask({"n": 3}, resume=resumes), 16, 64)
    ended = {index: (news.finish, news.reason) for index, _, news in prepared.replayed if news.finish}
    assert ended == {0: (Finish.STOP, 9), 1: (Finish.STOP, None)}
    prepared = SHARED.prepare(ask({"n": 3, "min_tokens": 3}, resume=resumes), 16, 64)
    assert [child.index for child in prepared.children] == [0, 1, 2]


# ---------------------------------------------------------------- bad words


def test_bad_words_go_with_the_request() -> None:
    prepared = SHARED.prepare(ask({"bad_words": ["a"]}, ids=i32([40])), 16, 64)
    assert (
        TOKENIZER.encode("a", False) in prepared.work.bad_words
        and TOKENIZER.encode(" a", False) in prepared.work.bad_words
    )
    assert SHARED.prepare(ask({}), 16, 64).work.bad_words == []
    refused = refusal({"bad_words": ["ok", "Paris"]}, Preparer(TOKENIZER, ModelConfig("", {}, 64, 50)))
    assert refused.param == "bad_words" and "out of vocabulary (0 to 49)" in refused.message
    refused = refusal({"bad_words": ["x" * (MAX_BAD_CHARACTERS + 1)]})
    assert refused.param == "bad_words" and str(MAX_BAD_CHARACTERS) in refused.message


# ---------------------------------------------------------------- no tokenizer, no text


def test_without_a_tokenizer_prompts_are_ids() -> None:
    bare = preparer(None)
    assert (bare.eos, bare.more_eos) == ([7], [9, EOS])
    message = ask({"min_tokens": 2, "logprobs": 3, "detokenize": True}, echo=True)
    prepared = bare.prepare(message, 16, 64)
    assert (
        prepared.prompt is None
        and prepared.work.eos == [7]
        and sorted(from_i32(prepared.work.suppressed_ids)) == sorted([7, 9, EOS])
    )
    news = prepared.sequences[0].advance([40, 7], Finish.STOP, -1, False)
    assert (news.text, news.used, news.length) == ("", 2, 2)
    assert bare.texts is None
    for fields, param in (({"prompt": "a"}, "prompt"), ({"messages": [{"role": "user", "content": "a"}]}, "messages")):
        refused = refusal({}, bare, **fields)
        assert refused.param == param and "--skip-tokenizer-init" in refused.message
    for name in ("stop", "bad_words"):
        refused = refusal({name: ["a"]}, bare)
        assert refused.param == name and "skip_tokenizer_init" in refused.message
    refused = refusal({"structured_outputs": StructuredOutputsParams(regex="a")}, bare)
    assert refused.param == "structured_outputs"
    assert refused.message == "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'"


def test_detokenize_false_does_no_text_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SHARED.streams, "open", None)  # would raise
    resumes = [Resume(0, i32([40, 41]), 0), Resume(1, i32([40, EOS]), 0)]
    prepared = SHARED.prepare(ask({"detokenize": False, "n": 2}, resume=resumes), 16, 64)
    assert [(index, news.text, news.finish) for index, _, news in prepared.replayed] == [(1, "", Finish.STOP)]
    news = prepared.sequences[0].advance([40, 41, 5], Finish.STOP, 5, False)
    assert news == ("", 3, Finish.STOP, 5, 5)


def test_a_beam_search_starts_again_whole() -> None:
    sampling = {"n": 2, "best_of": 4, "use_beam_search": True, "temperature": 0.0}
    resumes = [Resume(0, i32([40, 41]), 0)]
    prepared = SHARED.prepare(ask({**sampling, "stop": ["x"]}, resume=resumes), 16, 64)
    assert list(prepared.sequences) == [0, 1] and prepared.children == [] and prepared.beams is not None
    assert SHARED.prepare(ask(sampling), 16, 64).beams is None
