"""What a recording says in place of prompts, outputs and API keys.

The scheduler looks at a token for two reasons: whether it ends its sequence, and for the hash of a block. So a token
becomes 0, or, where it ends its sequence, a number that stands for it in this request alone; hashes are recorded as
they are. With these in place of the tokens the scheduler does the same as before. A beam search's candidates also
compete, token against token where they are equally likely: their order is kept.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import FieldInfo

from ..proto.codec import from_f32, from_i32, i32
from ..proto.hashing import hash_blocks
from ..proto.messages import Logprobs, SlotFailed, StepFailed, StepPlan, StepResult, Submit, TokenBatch
from ..proto.params import SamplingParams
from ..proto.structured import StructuredOutputsParams
from .request import Request, Sequence
from .snapshot import Attributes

BAD_ID = 2**31 - 1
"""Stands for an id that no vocabulary has."""
_STOPS = ("eos", "stops", "stop_token_ids")
_WORDS = ("task", "pooling", "early_stopping")
"""Fields whose text is one of a few words."""


class Keys:
    """API keys by other names, the same for the same key in one recording and meaningless outside of it."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def alias(self, key: str) -> str:
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


class Ends:
    """The tokens that end one request's sequences, by number. ``room`` numbers between two of them are free."""

    def __init__(self, stops: Iterable[int], width: int):
        self.room = 2 * width + 1 if width > 1 else 1
        self._numbers = {token: self.room * (at + 1) for at, token in enumerate(sorted(set(stops)))}

    def __getitem__(self, token: int) -> int:
        return self._numbers.get(token, 0)

    def __contains__(self, token: int) -> bool:
        return token in self._numbers


def ends_of(request: Request) -> Ends:
    """Those of a request that the scheduler has."""
    return Ends(request.stops, _width(getattr(request, "params", None)))


def _width(params: SamplingParams | None) -> int:
    return params.width if params is not None and params.use_beam_search else 1


# -- what comes in


def submit(message: Submit, block_size: int, vocab_size: int) -> Submit:
    """A request without its tokens and its text. The hashes of its prompt's blocks are made where they are missing."""
    parts = list(_inside(message))
    params = next((part for part in parts if isinstance(part, SamplingParams)), None)
    stops = (token for part in parts for name in _STOPS for token in getattr(part, name, None) or ())
    hashes = message.hashes
    if not hashes and len(message.ids) % 4 == 0:
        hashes = b"".join(hash_blocks(message.ids, block_size))
    blank = _blank(message, Ends(stops, _width(params)), vocab_size)
    return msgspec.structs.replace(blank, hashes=hashes, key=message.key)


def ends_in(message: Submit) -> set[bytes]:
    """The tokens that end its sequences, each as int32."""
    return {i32([token]) for part in _inside(message) for name in _STOPS for token in getattr(part, name, None) or ()}


def ends_of_all(requests: Iterable[Request]) -> set[bytes]:
    """The same of all of these."""
    return {i32([token]) for request in requests for token in request.stops}


def replace_key(message: Submit, key: str) -> Submit:
    """With another name for its API key."""
    return message if message.key == key else msgspec.structs.replace(message, key=key)


def _inside(struct: Any) -> Iterator[Any]:
    """``struct`` and the structs in it."""
    yield struct
    for name in struct.__struct_fields__:
        if isinstance(value := getattr(struct, name), msgspec.Struct):
            yield from _inside(value)


def _blank(struct: Any, ends: Ends, vocab_size: int) -> Any:
    """Numbers stay; tokens become what stands for them, and text goes."""
    now: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(struct)):
        name, value = field.name, getattr(struct, field.name)
        if isinstance(value, bool | int | float) or (name in _WORDS and isinstance(value, str)):
            continue
        if isinstance(value, bytes):
            now[name] = _ids(value, ends, vocab_size)
        elif isinstance(value, msgspec.Struct) and not isinstance(value, StructuredOutputsParams):
            now[name] = _blank(value, ends, vocab_size)
        elif isinstance(value, list) and value:
            now[name] = _blank_list(field, value, ends, vocab_size)
        elif isinstance(value, str):
            now[name] = ""
        elif value:
            now[name] = field.default
    return msgspec.structs.replace(struct, **now)


def _blank_list(field: FieldInfo, items: list[Any], ends: Ends, vocab_size: int) -> Any:
    if isinstance(items[0], msgspec.Struct):
        return [_blank(item, ends, vocab_size) for item in items]
    if isinstance(items[0], list):
        return [[0] * len(item) for item in items]
    if field.name in _STOPS:
        return [ends[token] for token in items]
    if field.name == "stop":
        return ["x"] * len(items)
    return [] if field.default is msgspec.NODEFAULT else field.default


def _ids(column: bytes, ends: Ends, vocab_size: int) -> bytes:
    """Each id by what stands for it; what is in no vocabulary stays so."""
    if len(column) % 4:
        return bytes(len(column))
    limit = vocab_size or 2**31
    return i32(ends[token] if 0 <= token < limit else -1 if token < 0 else BAD_ID
               for token in from_i32(column))  # fmt: skip


def result(message: StepResult, sequences: list[Sequence], vocab_size: int) -> StepResult:
    """A step's result, given whose each slot is."""
    ends = {seq.request: ends_of(seq.request) for seq in sequences}
    fits = len(message.tokens) == 4 * len(sequences)
    masked = bytes(len(message.tokens))
    if fits:
        pairs = zip(sequences, from_i32(message.tokens), strict=True)
        masked = b"".join(_ids(i32([token]), ends[seq.request], vocab_size) for seq, token in pairs)
    records = [logprobs(record) for record in message.logprobs]
    if fits and len(message.logprob_slots) == 4 * len(records):
        for at, slot in enumerate(from_i32(message.logprob_slots)):
            seq = sequences[slot] if 0 <= slot < len(sequences) else None
            if seq is not None and _width(getattr(seq.request, "params", None)) > 1:
                records[at] = _scores(message.logprobs[at], ends[seq.request], seq.width, vocab_size)
    return msgspec.structs.replace(
        message,
        tokens=masked,
        logprobs=records,
        prompts=[msgspec.structs.replace(piece, logprobs=logprobs(piece.logprobs)) for piece in message.prompts],
        failed=[SlotFailed(failed.slot, failed.status, "") for failed in message.failed],
        pooled=[msgspec.structs.replace(found, data=bytes(len(found.data))) for found in message.pooled],
    )


def logprobs(record: Logprobs) -> Logprobs:
    """A record of the same size."""
    return Logprobs(bytes(len(record.ids)), bytes(len(record.values)), bytes(len(record.ranks)))


def _scores(record: Logprobs, ends: Ends, width: int, vocab_size: int) -> Logprobs:
    """A beam's best tokens. Those that are equally likely are sorted, and get numbers that rise as they did."""
    if len(record.ids) != len(record.values) or len(record.ids) % 4:
        return logprobs(record)
    ids, values = from_i32(record.ids)[1 : 1 + 2 * width], from_f32(record.values)[1 : 1 + 2 * width]
    numbers: dict[int, int] = {}
    free: dict[int, int] = {}
    kept: list[int] = []
    for _, tied in groupby(zip(values, ids, strict=True), key=lambda pair: pair[0]):
        below = 0
        for token in sorted(token for _, token in tied):
            if token in ends:
                below = numbers[token] = ends[token]
            elif not 0 <= token < vocab_size:
                numbers[token] = -1 if token < 0 else BAD_ID
            elif token not in numbers:
                numbers[token] = free.get(below, below + bool(below))
                free[below] = numbers[token] + 1
            kept.append(numbers[token])
    new_ids, new_values = i32([0, *kept]), bytes(4) + record.values[4 : 4 + 4 * len(kept)]
    size = len(record.ids)
    return Logprobs(new_ids.ljust(size, b"\0"), new_values.ljust(size, b"\0"), bytes(len(record.ranks)))


def failed(message: StepFailed) -> StepFailed:
    """Without what the exception said."""
    return msgspec.structs.replace(message, error="")


# -- what is there, in a snapshot


def state(obj: Any, attributes: Attributes) -> Attributes:
    """An object's attributes, or a message's fields, without tokens and text."""
    if isinstance(obj, Logprobs):
        return {"ids": bytes(len(obj.ids)), "values": bytes(len(obj.values)), "texts": [], "raw": {}}
    if isinstance(obj, Request):
        ends, now = ends_of(obj), dict(attributes)
        for name, value in attributes.items():
            if isinstance(value, bytes):
                now[name] = bytes(len(value))
            elif isinstance(value, msgspec.Struct):
                now[name] = _blank(value, ends, 0)
            elif name in _STOPS:
                now[name] = frozenset(ends[token] for token in value)
        return now
    if isinstance(obj, Sequence):
        ends, now = ends_of(obj.request), dict(attributes)
        now["outputs"] = array("i", [ends[token] for token in obj.outputs])
        now["stops"] = frozenset(ends[token] for token in obj.stops)
        if "candidates" in now:
            now["candidates"] = [c._replace(token=ends[c.token]) for c in now["candidates"]]
        return now
    kind = type(obj).__name__
    if kind == "Node":
        return {**attributes, "token": 0, "ids": bytes(len(obj.ids)), "values": bytes(len(obj.values))}
    if kind == "Scores":
        return {**attributes, "ids": [0] * len(obj.ids)}
    if kind == "TokenSink":
        return {**attributes, "tokens": [0] * len(obj.tokens)}
    return attributes


# -- what goes out: as much of it as is the same when all that comes in is redacted


def visible(message: Any) -> bytes:
    """What of a plan, or of a message to the front side, follows from what is recorded."""
    if isinstance(message, TokenBatch):
        parts = (message.uids, message.indexes, message.offsets, message.counts, message.finishes, message.started_uids)
        return b"".join(parts) + message.started_cached
    if isinstance(message, StepPlan) and (message.admits or message.append_tokens):
        admits = [(a.row, a.uid, a.index, len(a.ids), a.prompt_len, a.prompt_logprobs_from) for a in message.admits]
        bare = msgspec.structs.replace(message, admits=[], append_tokens=bytes(len(message.append_tokens)))
        return msgspec.msgpack.encode((bare, admits))
    if isinstance(message, StepPlan):
        return msgspec.msgpack.encode(message)
    return msgspec.msgpack.encode(_shape(message))


def _shape(value: Any) -> Any:
    """Numbers, and how many bytes there are."""
    if isinstance(value, msgspec.Struct):
        return [type(value).__name__, *(_shape(getattr(value, name)) for name in value.__struct_fields__)]
    if isinstance(value, list | tuple):
        return [_shape(item) for item in value]
    if isinstance(value, bytes):
        return len(value)
    return value if isinstance(value, bool | int | float) else None
