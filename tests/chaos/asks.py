"""The requests of a storm, what came of one in a form that does not depend on the way it took, and how two compare.

Tokens, texts and finishes must be the same to the last one. Log-probabilities may differ by float32's rounding: what
was decoded one by one before a loss is computed as one chunk after it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.client.results import ChildOutput, TokenLogprobs
from quire.proto.messages import Finish
from quire.proto.params import SamplingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Adapter
from quire.scheduler.fake.fake_model import expected_tokens, tag

TOLERANCE = 2e-3
"""Of a log-probability."""

VOCAB = 2048

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "json schema": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}},
    "regex": {"temperature": 1.0, "structured_outputs": {"regex": "[a-z ]{40,60}"}},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "stop strings": {"temperature": 1.0, "stop": ["he", ". ", "qu"], "min_tokens": 6},
    "n = 2": {"temperature": 1.0, "n": 2},
    "best_of": {"temperature": 1.0, "n": 2, "best_of": 3},
    "beams": {"temperature": 0.0, "use_beam_search": True, "n": 2, "best_of": 2, "max_tokens": 10},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1},
    "masks": {"temperature": 1.0, "logit_bias": {"5": 2.0, "9": -3.0}, "bad_words": ["the", " and"], "min_tokens": 12},
}

WORDS = ["once", "upon", "a", "time", "the", "capital", "of", "France", "is", "not", "far", "people", "tell", "stories"]


@dataclass
class Ask:
    """One request. ``fields`` are those of POST /v1/completions, but for the prompt and the ``adapter``'s name."""

    name: str
    kind: str
    prompt: str | list[int]
    fields: dict[str, Any]
    adapter: Adapter | None = None

    @property
    def held(self) -> bool:
        """Nothing is shown before its end."""
        return self.kind in ("best_of", "beams")

    @property
    def streams(self) -> bool:
        """HTTP can stream it."""
        return not self.held and self.kind != "prompt_logprobs"

    def body(self) -> dict[str, Any]:
        """For POST /v1/completions."""
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": self.streams}
        model = {"model": self.adapter.name} if self.adapter is not None else {}
        return {"prompt": self.prompt, **model, **self.fields, **extra}

    def params(self) -> SamplingParams:
        """For Engine."""
        fields = dict(self.fields)
        if (form := fields.pop("structured_outputs", None)) is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**form)
        if (bias := fields.pop("logit_bias", None)) is not None:
            fields["logit_bias"] = {int(token): value for token, value in bias.items()}
        return SamplingParams(**fields)

    def prompt_field(self) -> dict[str, Any]:
        """The prompt and the adapter, as Engine.submit takes them."""
        return {"prompt" if isinstance(self.prompt, str) else "ids": self.prompt, "adapter": self.adapter}


def make_asks(count: int, rng: random.Random, longest: int, adapters: Sequence[Adapter] = ()) -> list[Ask]:
    """``count`` requests of all kinds in turn, outputs of at most ``longest`` tokens. Where there are ``adapters``, one
    of ten requests has none, and the others have them in turn."""
    asks = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        fields = {"seed": rng.randrange(2**32), "max_tokens": rng.randrange(longest // 3, longest), **KINDS[kind]}
        fields["ignore_eos"] = rng.random() < 0.5
        prompt: str | list[int]
        if rng.random() < 0.5:
            prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 40)))
        else:
            prompt = [rng.randrange(5, VOCAB) for _ in range(rng.randrange(2, 90))]
        if kind == "json schema":
            fields["ignore_eos"] = False
        adapter = adapters[number % len(adapters)] if adapters and number % 10 else None
        asks.append(Ask(f"{kind} {number}", kind, prompt, fields, adapter))
    return asks


# ---------------------------------------------------------------- outcomes

Score = tuple[float, list[float]]
"""Of one token: its own log-probability, and those of the likeliest, falling."""


@dataclass
class One:
    """What came of one child."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop: int | str | None = None
    scores: list[Score] = field(default_factory=list)


@dataclass
class Outcome:
    """What came of a request."""

    children: list[One]
    prompt: list[Score | None] | None = None

    @property
    def count(self) -> int:
        """Output tokens."""
        return sum(len(child.tokens) for child in self.children)


def from_engine(children: Iterable[ChildOutput], prompt: list[TokenLogprobs | None] | None, ask: Ask) -> Outcome:
    """Of a finished RequestStream."""
    finishes = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}
    wanted = ask.fields.get("logprobs")
    out = []
    for child in children:
        scores = [] if wanted is None else [_score(entry, wanted) for entry in child.logprobs]
        text = "".join(child.parts)
        out.append(One(child.tokens, text, finishes.get(child.finish), child.stop_reason, scores))
    count = ask.fields.get("prompt_logprobs")
    found = [entry and _score(entry, count) for entry in prompt] if prompt and count is not None else None
    return Outcome(out, found)


def _score(entry: TokenLogprobs, k: int) -> Score:
    return entry.values[0], sorted(entry.values[1 : k + 1], reverse=True)


class FromHttp:
    """Puts an answer together from the objects of a completion, streamed or whole."""

    def __init__(self, ask: Ask):
        self.outcome = Outcome([One() for _ in range(ask.fields.get("n", 1))])
        self._ask = ask
        self.error: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> bool:
        """One object; True where new tokens came with it."""
        if "error" in event:
            self.error = event["error"]
            return False
        new = False
        for choice in event["choices"]:
            child = self.outcome.children[choice["index"]]
            child.text += choice.get("text") or ""
            tokens = choice.get("token_ids") or []
            new = new or bool(tokens)
            child.tokens += tokens
            if choice.get("finish_reason") is not None:
                if child.finish is not None:
                    raise AssertionError(f"choice {choice['index']} ended twice")
                child.finish, child.stop = choice["finish_reason"], choice.get("stop_reason")
            self._take_logprobs(child, choice)
        return new

    def _take_logprobs(self, child: One, choice: dict[str, Any]) -> None:
        if (logprobs := choice.get("logprobs")) is not None:
            k = self._ask.fields["logprobs"]
            for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
                # The token itself is listed beside the k likeliest where it is none of them.
                child.scores.append((value, sorted(top.values(), reverse=True)[:k]))
        if (found := choice.get("prompt_logprobs")) is not None:
            k = self._ask.fields["prompt_logprobs"]
            ids = choice["prompt_token_ids"]
            self.outcome.prompt = [
                None if entry is None else
                (entry[str(token)]["logprob"], sorted((e["logprob"] for e in entry.values()), reverse=True)[:k])
                for token, entry in zip(ids, found, strict=True)
            ]  # fmt: skip


def difference(got: Outcome, wanted: Outcome) -> str | None:
    """In words, the first difference; None where they are the same."""
    if len(got.children) != len(wanted.children):
        return f"{len(got.children)} children in place of {len(wanted.children)}"
    for index, (a, b) in enumerate(zip(got.children, wanted.children, strict=True)):
        for what in ("tokens", "text", "finish", "stop"):
            mine, theirs = getattr(a, what), getattr(b, what)
            if mine != theirs:
                at = next((i for i, (x, y) in enumerate(zip(mine or "", theirs or "", strict=False)) if x != y), None) \
                    if what in ("tokens", "text") else None  # fmt: skip
                sizes = f" ({len(mine)} and {len(theirs)} long, first at {at})" if what in ("tokens", "text") else ""
                return f"child {index}: {what} differ{sizes}: {mine!r} in place of {theirs!r}"
        if (found := _apart(a.scores, b.scores)) is not None:
            return f"child {index}: logprobs: {found}"
    if (got.prompt is None) != (wanted.prompt is None):
        return "prompt logprobs are missing, or were not asked for"
    if (found := _apart(got.prompt or [], wanted.prompt or [])) is not None:
        return f"prompt logprobs: {found}"
    return None


def _apart(got: list[Any], wanted: list[Any]) -> str | None:
    if len(got) != len(wanted):
        return f"{len(got)} in place of {len(wanted)}"
    for at, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if (a is None) != (b is None):
            return f"at {at}: {a} in place of {b}"
        if a is None:
            continue
        mine, theirs = [a[0], *a[1]], [b[0], *b[1]]
        if len(mine) != len(theirs) or any(
            not math.isclose(x, y, rel_tol=0, abs_tol=TOLERANCE) for x, y in zip(mine, theirs, strict=True)
        ):
            return f"at {at}: {a} in place of {b}"
    return None


def against_oracle(ask: Ask, prompt: list[int], outcome: Outcome, vocab: int = VOCAB) -> str | None:
    """What is wrong with an outcome of the fake worker, whose tokens are known beforehand; None for nothing.

    Which children best_of returns is not known here, and beams are tested elsewhere.
    """
    if ask.held:
        return None
    for index, child in enumerate(outcome.children):
        own = tag(ask.adapter.digest) if ask.adapter is not None else 0
        drawn = expected_tokens(prompt, (ask.fields["seed"] + index) % 2**64, len(child.tokens), vocab, own)
        if child.tokens != drawn:
            return f"child {index}: {child.tokens} in place of {drawn}"
        if child.finish == "length" and len(child.tokens) != ask.fields["max_tokens"]:
            return f"child {index}: {len(child.tokens)} of {ask.fields['max_tokens']} tokens and finish 'length'"
    return None


def is_json(outcome: Outcome) -> bool:
    """Whether each text that ended by itself is JSON."""
    for child in outcome.children:
        if child.finish == "stop":
            try:
                json.loads(child.text)
            except ValueError:
                return False
    return True
