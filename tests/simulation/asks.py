"""What users of a simulated cluster want: requests of every kind, as plain data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from quire.proto.params import SamplingParams
from quire.proto.pooling import PoolingParams
from quire.proto.structured import StructuredOutputsParams
from quire.proto.work import Adapter
from quire.scheduler.fake.fake_worker import BAD

from . import toy

A = toy.PIECES.index(b"a")


class Ask(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request, and how its client behaves. The default of each field is its plainest value.

    The prompt is ``text`` where there is some, else ``ids``; ``chat``: the text is what a user says. ``pair`` is the
    second text of a pair that is pooled. Times are virtual seconds: ``abort_at`` counts from ``when``, ``arrival`` from
    1970 as Engine.submit takes it. ``abort_after``: the client leaves with so many events.
    """

    name: str
    when: float = 0.0
    frontend: int = 0
    ids: list[int] = msgspec.field(default_factory=lambda: [A])
    text: str = ""
    chat: bool = False
    pair: str | None = None
    add_special_tokens: bool = True
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    pooling: PoolingParams | None = None
    key: str = ""
    priority: int = 0
    arrival: float = 0.0
    salt: str = ""
    adapter: str = ""  # its name; see ``adapter_named``
    seed: int | None = None
    echo: bool = False
    abort_at: float | None = None
    abort_after: int = -1
    reads: int = 1  # of so many turns of its frontend's loop that have news it looks at the last
    quiet: bool = False  # it waits for the end only
    poison: str = ""  # the kind of process that dies of it


def adapter_named(name: str) -> Adapter:
    """The adapter of this name. What a worker does with it is in its path (``fake_worker.BAD``)."""
    return Adapter(name, f"/{name}", blake2b(name.encode(), digest_size=16).digest())


def draw_adapters(rng: random.Random, shape: Any, asks: list[Ask]) -> None:
    """Give most of ``asks`` an adapter, of more than there are slots."""
    names = [f"adapter{number}" for number in range(rng.choice([1, 2, 3]) * shape.adapter_slots)]
    names += [BAD] if rng.random() < 0.2 else []
    for ask in asks:
        if rng.random() < 0.7:
            ask.adapter = rng.choice(names)


def draw_asks(
    rng: random.Random,
    shape: Any,
    overload: bool = False,
    poison: frozenset[str] = frozenset(),
    count: int = 0,
    habits: Mapping[str, Any] | None = None,
) -> list[Ask]:
    """Some requests, or ``count``. ``overload``: many at once; ``poison``: one for each of these kinds of process;
    ``habits`` that are not left to chance, by their names in ``_Drawer``."""
    drawer = _Drawer(rng, shape)
    for name, value in (habits or {}).items():
        setattr(drawer, name, value)
    count = count or (rng.choice([12, 20, 30]) if overload else rng.choice([1, 2, 3, 4, 6, 8, 12]))
    asks = [drawer.ask(f"ask{number}", overload) for number in range(count)]
    for kind in sorted(poison):
        victim = rng.choice([ask for ask in asks if not ask.poison] or asks)
        victim.poison = kind
    return asks


class _Drawer:
    """The habits of one cluster's users: which features they use, and what their prompts share."""

    def __init__(self, rng: random.Random, shape: Any):
        self.rng, self.shape = rng, shape
        self.longest = shape.max_model_len
        self.prefixes = [self._ids(rng.randint(1, 2 * self.longest // 3)) for _ in range(2)]
        self.keys = rng.choice([[""], [""], ["k1"], ["k1", "k2"], ["", "k1", "k2", "k3"]])
        self.salts = rng.choice([[""], [""], ["", "s1"], ["s1", "s2"]])
        self.rich = rng.choice([0.0, 0.1, 0.3, 0.6])  # how often each feature is asked for
        self.hurry = rng.choice([0.0, 0.0, 0.1, 0.4])  # how often a client leaves
        self.beams = rng.choice([0.0, 0.1, 0.3])
        self.odd = rng.choice([0.0, 0.0, 0.1])  # how often a request cannot be served
        self.span = rng.choice([0.0, 0.1, 1.0, 6.0])  # seconds in which they come
        self.length = rng.choice([4, 12, 40])
        self.prompts = [0, 1, 2, 5, 9, 20]  # tokens of them that are not shared
        self.texts = 0.3  # how often a prompt is a text
        self.arrival = 0.0

    def ask(self, name: str, overload: bool) -> Ask:
        """One request."""
        rng = self.rng
        ask = Ask(name=name, when=round(rng.uniform(0, self.span / 10 if overload else self.span), 4))
        ask.frontend = rng.randrange(self.shape.frontends)
        ask.key, ask.salt = rng.choice(self.keys), rng.choice(self.salts)
        if self.shape.pools:
            self._pool(ask)
        else:
            self._generate(ask)
        if self.shape.policy == "priority" and self._now_and_then():
            ask.priority = rng.choice([-1, 1, 2])
        if rng.random() < 0.2:  # it comes in one call with others
            self.arrival = self.arrival or 1e9 + ask.when
            ask.arrival = self.arrival
        self._behave(ask)
        if rng.random() < self.odd:
            self._spoil(ask)
        return ask

    def _now_and_then(self) -> bool:
        return self.rng.random() < self.rich

    # -- prompts

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(toy.VOCAB) for _ in range(count)]

    def _prompt(self, ask: Ask) -> None:
        rng = self.rng
        room = max(1, self._most())
        if rng.random() < self.texts:
            ask.text = self._text(rng.randint(1, max(1, min(30, room // 2))))
            ask.chat = ask.pooling is None and rng.random() < 0.1
            ask.add_special_tokens = rng.random() < 0.7
            return
        shared = rng.choice([[], *self.prefixes])[: rng.randint(0, room)]
        own = self._ids(rng.choice(self.prompts))
        ask.ids = [*shared, *own][:room] or [A]

    def _text(self, count: int) -> str:
        return "".join(self.rng.choice(toy.LETTERS + "é") for _ in range(count))

    def _most(self) -> int:
        """Prompt tokens that leave room for some output, and can be run here."""
        shape = self.shape
        blocks = min(worker.blocks for worker in shape.workers) * shape.block_size
        most = min(self.longest - 2, blocks - 2)
        return most if shape.chunked and not shape.whole else min(most, shape.budget)

    # -- what is asked for

    def _pool(self, ask: Ask) -> None:
        rng = self.rng
        tasks = [None, "embed", "token_embed"] if self.shape.pools == "embed" else [None, "classify", "score"]
        task = rng.choice(tasks)
        ask.pooling = PoolingParams(
            task=task, skip_reading_prefix_cache=True if self._now_and_then() else None,
            truncate_prompt_tokens=rng.choice([-1, 7]) if self._now_and_then() else None,
            dimensions=4 if task == "embed" and self._now_and_then() else None,
        )  # fmt: skip
        if task in ("embed", "classify") and self._now_and_then():
            ask.pooling.pooling = rng.choice(["CLS", "LAST", "MEAN"])
        self._prompt(ask)
        if ask.text and task == "score":
            ask.text, ask.pair = ask.text[:4], self._text(3)
            ask.add_special_tokens = True
            ask.pooling.truncate_prompt_tokens = None

    def _generate(self, ask: Ask) -> None:
        rng, shape = self.rng, self.shape
        self._prompt(ask)
        fields: dict[str, Any] = {"max_tokens": rng.randint(1, min(self.length, self.longest))}
        if self._now_and_then():
            fields["ignore_eos"] = True
        if self._now_and_then():
            fields["stop_token_ids"] = sorted({rng.randrange(toy.VOCAB) for _ in range(rng.randint(1, 3))})
        if self._now_and_then():
            fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
        if self._now_and_then():
            fields["logprobs"] = rng.choice([0, 1, 3])
        if self._now_and_then():
            fields["prompt_logprobs"] = rng.choice([0, 1, 2])
        if self._now_and_then():
            fields["skip_special_tokens"] = False
        if self._now_and_then():
            fields["skip_reading_prefix_cache"] = True
        if self._now_and_then():
            self._stop(fields)
        if rng.random() < self.beams and shape.rows > 1:
            self._search(fields)
        elif self._now_and_then():
            fields["n"] = rng.choice([2, 2, 3, 5])
            if rng.random() < 0.3:
                fields["best_of"] = fields["n"] + rng.randint(1, 2)
        if self._now_and_then() and "stop" not in fields:
            fields["detokenize"] = False
        if self._now_and_then():
            fields["truncate_prompt_tokens"] = rng.choice([-1, 1, 2, 9])
        if self._now_and_then():
            fields["bad_words"] = ["ab"]
        if self._now_and_then():  # checked before it is let in; the fake worker draws what it likes
            fields["structured_outputs"] = StructuredOutputsParams(regex="[ab]+")
        ask.seed = rng.getrandbits(64) if rng.random() < 0.5 else None
        if ask.seed is not None and rng.random() < 0.5:
            fields["seed"], ask.seed = ask.seed, None
        ask.echo = self._now_and_then()
        ask.params = SamplingParams(**fields)

    def _stop(self, fields: dict[str, Any]) -> None:
        """Stop strings that begin, end and lie within one another."""
        rng = self.rng
        some = [
            "a",
            "ab",
            "abc",
            "bc",
            "b.",
            "aa",
            "aab",
            "é",
            "éa",
            "c a",
            "</s>",
            "d e",
            ".",
            " a b",
            "你",
            "\n",
            "ca",
        ]
        fields["stop"] = rng.sample(some, rng.choice([1, 1, 2, 4]))
        fields["include_stop_str_in_output"] = rng.random() < 0.4

    def _search(self, fields: dict[str, Any]) -> None:
        rng = self.rng
        width = rng.randint(2, min(4, self.shape.rows))
        fields["n"] = rng.randint(1, width)
        if fields["n"] < width:
            fields["best_of"] = width
        most = max(1, min(fields["max_tokens"], 8))
        fields.update(
            use_beam_search=True, temperature=0.0, max_tokens=most, min_tokens=min(fields.get("min_tokens", 0), most),
            early_stopping=rng.choice([True, False, "never"]), length_penalty=rng.choice([-1.0, 0.0, 1.0, 3.0]),
        )  # fmt: skip

    # -- how clients are

    def _behave(self, ask: Ask) -> None:
        rng = self.rng
        ask.quiet = ask.pooling is None and self._now_and_then()
        ask.reads = rng.choice([1, 1, 1, 3])
        if rng.random() >= self.hurry:
            return
        kind = rng.choice(["at once", "at", "after"])
        if kind == "after" and not ask.quiet:
            ask.abort_after = rng.choice([1, 2, 5])
        else:
            ask.abort_at = 0.0 if kind == "at once" else round(rng.choice([0.01, 0.1, 2.0]) * rng.random(), 5)

    def _spoil(self, ask: Ask) -> None:
        """Make it one that cannot be served."""
        rng, shape = self.rng, self.shape
        kind = rng.choice(["empty", "unknown id", "too long", "no room", "logprobs", "other kind", "wide", "blocks"])
        ask.text, ask.pair, ask.chat = "", None, False
        if kind == "empty":
            ask.ids = []
        elif kind == "unknown id":
            ask.ids = [toy.VOCAB]
        elif kind == "too long":
            ask.ids = self._ids(self.longest + rng.choice([1, 9]))
        elif kind == "no room":
            ask.ids = self._ids(self.longest)
        elif kind == "other kind":
            ask.pooling = None if shape.pools else PoolingParams(task="embed")
        elif kind == "logprobs" and not shape.pools:
            ask.params = SamplingParams(logprobs=-1)
        elif kind == "wide" and not shape.pools:
            ask.params = SamplingParams(use_beam_search=True, temperature=0.0, n=shape.rows + 1)
        elif not shape.pools:
            ask.params = SamplingParams(max_tokens=None)
