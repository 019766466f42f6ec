"""What a recording says in place of prompts, outputs, text and API keys.

The scheduler looks at a token for three reasons: whether it is in the vocabulary, whether it ends its sequence, and for
the hash of a block. So a recording says what was found there and holds no token: hashes are in it as they are, a token
that ended its sequence is a number that ends it again, and any other is 0. A beam search's candidates also compete,
token against token where they are equally likely: their numbers keep that order.
"""

from __future__ import annotations

import functools
import math
import os
from array import array
from hashlib import blake2b
from operator import attrgetter
from types import NoneType
from typing import Any, get_args

from msgspec.structs import asdict, fields, replace

from ..proto.codec import BadFrame, encode, from_f32, from_i32, i32
from ..proto.hashing import HASH_SIZE
from ..proto.messages import Child, Logprobs, Move, SlotFailed, StepPlan, StepResult, Submit
from ..proto.params import MAX_BEAMS, RequestOutputKind, SamplingParams
from ..proto.work import Generate, Pool, ThinkingGenerate, Work, adapter_of, thought_end, with_adapter
from .columns import Columns, StopIds
from .replica import Replica
from .request import Request, Sequence
from .snapshot import Attributes

_HARMLESS = frozenset((bool, int, float, NoneType, RequestOutputKind))
_NONE, _EOS, _STOP = range(3)
_RANKS = 3
"""A token of rank r of a beam's best is written as 3r, 3r + 1 (an EOS) or 3r + 2 (a stop id); any other has rank 0."""
_texts = attrgetter(
    *(field.name for field in fields(SamplingParams) if not _HARMLESS.issuperset(get_args(field.type) or (field.type,)))
)
"""The parameters that may hold text, or tokens."""
_ALL_EOS = list(range(_EOS, _RANKS * 2 * MAX_BEAMS, _RANKS))
_ALL_STOPS = list(range(_STOP, _RANKS * 2 * MAX_BEAMS, _RANKS))


class Keys:
    """API keys by other names, the same for the same key in one recording and meaningless outside of it."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self.alias = functools.lru_cache(1024)(self._alias)

    def _alias(self, key: str) -> str:
        """In place of ``key``."""
        return key and "key-" + blake2b(key.encode(), key=self._secret, digest_size=6).hexdigest()

    def hide(self, obj: Any, attributes: Attributes) -> Attributes:
        """A snapshot's: of objects that are kept as they are, but for their keys."""
        hidden = dict(attributes)
        for name in ("account", "key"):
            if isinstance(value := attributes.get(name), str):
                hidden[name] = self.alias(value)
        for name in ("_accounts", "_lines"):
            if isinstance(value := attributes.get(name), dict):
                hidden[name] = {self.alias(key): of_key for key, of_key in value.items()}
        return hidden


# -- requests


def submit(message: Submit, hashes: bytes, key: str, sound: bool) -> Submit:
    """A request without its tokens, its text and its key. Its ids are the prompt's size in bytes, below 0 where the
    request is not ``sound``; ``given`` makes one of it that the scheduler treats as the first."""
    size = (len(message.ids) if sound else -len(message.ids)).to_bytes(4, "little", signed=True)
    children = message.children and [_child(child, message.work) for child in message.children]
    return Submit(
        message.uid, message.attempt, size, hashes, work(message.work), message.arrival, children, key,
        message.priority, message.losses, message.prompt_logprobs_from,
    )  # fmt: skip


def given(message: Submit) -> Submit:
    """What ``submit`` made, to be taken in."""
    (size,) = from_i32(message.ids)
    return replace(message, ids=bytes(size) if size >= 0 else b"\xff" * -size)


def is_sound(message: Submit, vocab_size: int) -> bool:
    """All of a request's ids are in the vocabulary, and its root is one."""
    asked, words = message.work, []
    columns = [message.ids, *(child.ids for child in message.children)]
    if isinstance(asked, Generate):
        columns.append(asked.suppressed_ids)
        words = asked.bad_words
        if isinstance(asked, ThinkingGenerate):
            words = [*words, thought_end(asked) or []]
    try:
        ids = [from_i32(column) for column in columns] + words
    except BadFrame:
        return False
    fits = len(message.root) == HASH_SIZE
    return fits and all(words) and all(0 <= min(found) <= max(found) < (vocab_size or 2**31) for found in ids if found)


def work(asked: Work) -> Work:
    """What a request asks for, without tokens and text."""
    return with_adapter(_bare(asked), adapter_of(asked))


def _bare(asked: Work) -> Work:
    if isinstance(asked, Pool):
        return Pool(asked.params, None, asked.token_type_start)
    params, ranks = asked.params, _ranks(asked.params)
    if any(_texts(params)):
        named = asdict(params).items()
        kept = {name: value for name, value in named if type(value) in _HARMLESS or name == "early_stopping"}
        stops = _ALL_STOPS[:ranks] if params.stop_token_ids else []
        params = SamplingParams(**kept, stop=["x"] * len(params.stop or ()), stop_token_ids=stops)
    return Generate(params, asked.seed, _ALL_EOS[:ranks] if asked.eos else [])


def _ranks(params: SamplingParams) -> int:
    return 2 * params.width if params.use_beam_search else 1


def _child(child: Child, asked: Work) -> Child:
    """Nothing of its outputs but whether they had ended."""
    if len(child.ids) < 4 or len(child.ids) % 4 or not isinstance(asked, Generate):
        return Child(child.index, bytes(len(child.ids)))
    last = int.from_bytes(child.ids[-4:], "little")
    kind = _kind(last, asked.eos, asked.params.stop_token_ids or ())
    return Child(child.index, bytes(len(child.ids) - 4) + i32([kind]))


def _kind(token: int, eos: Any, stops: Any) -> int:
    return _EOS if token in eos else _STOP if token in stops else _NONE


# -- results


def result(message: StepResult, sequences: list[Sequence]) -> StepResult:
    """A step's result, given whose each slot is, where there is more in it than tokens."""
    counts = from_i32(message.counts) or [1] * len(sequences)
    of_each = [seq for seq, count in zip(sequences, counts, strict=True) for _ in range(count)]
    pairs = zip(of_each, from_i32(message.tokens), strict=True)
    records = [_blank(len(record.ranks) // 4) for record in message.logprobs]
    for at, slot in enumerate(from_i32(message.logprob_slots)):
        if sequences[slot].width > 1:
            records[at] = _scores(message.logprobs[at], sequences[slot].request)
    return replace(
        message,
        tokens=i32([_kind(token, seq.request.eos, seq.stops) for seq, token in pairs]),
        logprobs=records,
        prompts=[replace(piece, logprobs=_blank(len(piece.logprobs.ranks) // 4)) for piece in message.prompts],
        failed=[SlotFailed(failed.slot, failed.status, "", None, failed.corrupted) for failed in message.failed],
        pooled=[replace(found, data=bytes(4 * max(found.rows, 1))) for found in message.pooled],
    )


def _blank(tokens: int) -> Logprobs:
    """A record of so many tokens: the scheduler does not look into it, and hands it on."""
    return Logprobs(bytes(4 * tokens), bytes(4 * tokens), bytes(4 * tokens))


def _scores(record: Logprobs, request: Request) -> Logprobs:
    """A beam's best tokens, by numbers."""
    size, count = len(record.ids), _ranks(request.params)
    ids, values = from_i32(record.ids)[1 : 1 + count], from_f32(record.values)[1 : 1 + count]
    likely = [-math.inf if math.isnan(value) else value for value in values]
    numbers = [0] * len(ids)
    for rank, place in enumerate(sorted(range(len(ids)), key=lambda place: (-likely[place], ids[place]))):
        numbers[place] = _RANKS * rank + _kind(ids[place], request.eos, request.stops)
    kept = bytes(4) + record.values[4 : 4 + 4 * len(ids)]
    return Logprobs(i32([0, *numbers]).ljust(size, b"\0"), kept.ljust(size, b"\0"), bytes(len(record.ranks)))


# -- what is there, in a snapshot between two turns


def state(obj: Any, attributes: Attributes) -> Attributes:
    """An object's attributes, or a message's fields, without tokens and text."""
    if isinstance(obj, Logprobs):
        return {"ids": bytes(len(obj.ids)), "values": bytes(len(obj.values)), "texts": [], "raw": {}}
    if isinstance(obj, Request):
        bare = work(obj.work)
        now = {
            **attributes,
            **_ends(bare),
            "prompt": bytes(len(obj.prompt)),
            "root": bytes(len(obj.root)),
            "work": bare,
        }
        return now | {"params": bare.params} if isinstance(bare, Generate) else now
    if isinstance(obj, Sequence):
        outputs = array("i", bytes(4 * len(attributes["_outputs"])))
        now = {**attributes, "_outputs": outputs, "stops": _stops(obj)}
        if "candidates" in now:
            eos, stops = obj.request.eos, obj.stops
            now["candidates"] = [c._replace(token=_kind(c.token, eos, stops)) for c in now["candidates"]]
        return now
    if isinstance(obj, Columns):
        kept = [[bytes(len(block)) for block in blocks] for blocks in obj.kept]
        return {**attributes, "kept": kept, "drawn": obj.drawn * 0, "_drawn_since": []}
    if isinstance(obj, Replica):
        return {**attributes, "stop_ids": StopIds(obj.vocab_size, map(_stops, obj.sequences()))}
    kind = type(obj).__name__
    if kind == "Node":
        return {**attributes, "token": 0, "ids": bytes(len(obj.ids)), "values": bytes(len(obj.values))}
    return {**attributes, "ids": [0] * len(obj.ids)} if kind == "Scores" else attributes


def _ends(bare: Work) -> dict[str, frozenset[int]]:
    """The sets of a request that ``work`` was made for."""
    eos = frozenset[int](bare.eos) if isinstance(bare, Generate) else frozenset[int]()
    return {"eos": eos, "stops": eos.union(bare.params.stop_token_ids or ()) if isinstance(bare, Generate) else eos}


def _stops(seq: Sequence) -> frozenset[int]:
    return _ends(work(seq.request.work))["stops"]


# -- what goes out


def visible(plan: StepPlan | Move) -> bytes:
    """As much of a plan as is the same when all that comes in is redacted."""
    if isinstance(plan, Move) or (not plan.admits and not plan.append_tokens):
        return encode(plan)
    admits = [
        (a.row, a.uid, a.index, len(a.ids), a.prompt_len, a.prompt_logprobs_from, a.adapter_slot) for a in plan.admits
    ]
    return encode((replace(plan, admits=[], append_tokens=bytes(len(plan.append_tokens))), admits))
