"""What a recording says in place of prompts, outputs and API keys.

The scheduler looks at a token for two reasons: whether it ends its sequence, and for the hash of a block. So a token
becomes 0, or, where it ends somebody's sequence, a number that stands for it; hashes are recorded as
they are. With these in place of the tokens the scheduler does the same as before. A beam search's candidates also
compete, token against token where they are equally likely: their order is kept.
"""

from __future__ import annotations

import functools
import os
import typing
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import astuple

from ..proto.codec import from_f32, from_i32, i32
from ..proto.hashing import hash_blocks, root_of
from ..proto.messages import Logprobs, SlotFailed, StepFailed, StepPlan, StepResult, Submit, TokenBatch
from ..proto.params import RequestOutputKind, SamplingParams
from ..proto.structured import StructuredOutputsParams
from .request import Request, Sequence
from .snapshot import Attributes

BAD_ID = 2**31 - 1
"""Stands for an id that no vocabulary has."""
_STOPS = ("eos", "stops", "stop_token_ids")
_HARMLESS = frozenset((bool, int, float, RequestOutputKind))
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
    """The tokens that end one request's sequences, by number: those of ``known``, which is added to. A beam search of
    ``width`` has numbers of its own, in the tokens' order and with room for its candidates between them."""

    def __init__(self, stops: Iterable[int], width: int, known: dict[int, int]):
        if width > 1:
            room = 2 * width + 1
            self._numbers = {token: room * (at + 1) for at, token in enumerate(sorted(set(stops)))}
        else:
            self._numbers = {token: known.setdefault(token, len(known) + 1) for token in stops}

    def __getitem__(self, token: int) -> int:
        return self._numbers.get(token, 0)

    def __contains__(self, token: int) -> bool:
        return token in self._numbers


def ends_of(request: Request, known: dict[int, int]) -> Ends:
    """Those of a request that the scheduler has."""
    return Ends(request.stops, _width(getattr(request, "params", None)), known)


def _width(params: SamplingParams | None) -> int:
    return params.width if params is not None and params.use_beam_search else 1


# -- what comes in


def submit(message: Submit, block_size: int, vocab_size: int, known: dict[int, int], key: str) -> Any:
    """A request without its tokens, its text and its key, as what encodes to the same message. The hashes of its
    prompt's blocks are made where they are missing."""
    stops: list[int] = []
    params = _look(message, stops)
    hashes = message.hashes
    if not hashes and len(message.ids) % 4 == 0:
        hashes = b"".join(hash_blocks(message.ids, block_size, root_of(message.cache_salt)))
    ends = Ends(stops, _width(params), known)
    plain = _plain(message, ends, vocab_size, {"hashes": hashes, "key": key})
    if not message.hashes:
        plain[1 + message.__struct_fields__.index("hashes")] = hashes
    return plain


def replace_key(message: Submit, key: str) -> Submit:
    """With another name for its API key."""
    return message if message.key == key else msgspec.structs.replace(message, key=key)


def _look(struct: Any, stops: list[int]) -> SamplingParams | None:
    """The sampling parameters in a struct; tokens that end sequences are added to ``stops``."""
    _, _, _, lists, inner = _shape_of(struct.__class__)
    for name in lists:
        stops += getattr(struct, name) or ()
    found = struct if isinstance(struct, SamplingParams) else None
    for name in inner:
        if isinstance(value := getattr(struct, name), msgspec.Struct):
            found = _look(value, stops) or found
    return found


@functools.cache
def _shape_of(cls: type) -> tuple[tuple[str, ...], tuple[Any, ...], Any, list[str], list[str]]:
    """Names and defaults of its fields, its configuration, and which fields are stop ids, and which may be structs."""
    found = msgspec.structs.fields(cls)
    defaults = [[] if field.default is msgspec.NODEFAULT else field.default for field in found]
    inner = [field.name for field in found if any(isinstance(kind, type) and issubclass(kind, msgspec.Struct)
             for kind in (field.type, *typing.get_args(field.type)))]  # fmt: skip
    names = tuple(field.name for field in found)
    return names, tuple(defaults), cls.__struct_config__, [n for n in names if n in _STOPS], inner  # type: ignore[attr-defined]


def _plain(struct: Any, ends: Ends, vocab_size: int, given: Attributes) -> Any:
    """Numbers stay; tokens become what stands for them, and text goes."""
    values = astuple(struct)
    if _HARMLESS.issuperset(map(type, filter(None, values))):
        return struct
    names, defaults, config, _, _ = _shape_of(struct.__class__)
    hidden = [
        value if not value or type(value) in _HARMLESS
        else given[name] if name in given else _hide(name, value, default, ends, vocab_size)
        for name, value, default in zip(names, values, defaults, strict=True)
    ]  # fmt: skip
    if config.array_like:
        return [config.tag, *hidden] if config.tag is not None else hidden
    left = {name: value for name, value, default in zip(names, hidden, defaults, strict=True) if value != default}
    return {config.tag_field: config.tag, **left} if config.tag is not None else left


def _hide(name: str, value: Any, default: Any, ends: Ends, vocab_size: int) -> Any:
    if name in _WORDS:
        return value
    if isinstance(value, bytes):
        return _ids(value, ends, vocab_size)
    if isinstance(value, StructuredOutputsParams):
        return None
    if isinstance(value, msgspec.Struct):
        return _plain(value, ends, vocab_size, {})
    if isinstance(value, str):
        return ""
    if not isinstance(value, list) or not value:
        return default if value else value
    if isinstance(value[0], msgspec.Struct):
        return [_plain(item, ends, vocab_size, {}) for item in value]
    if isinstance(value[0], list):
        return [[0] * len(item) for item in value]
    if name in _STOPS:
        return [ends[token] for token in value]
    return ["x"] * len(value) if name == "stop" else default


def _ids(column: bytes, ends: Ends, vocab_size: int) -> bytes:
    """Nothing of tokens but whether all are in the vocabulary, and whether the last one ends its sequence."""
    if not column or len(column) % 4:
        return bytes(len(column))
    if max(memoryview(column).cast("I")) >= (vocab_size or 2**31):  # or below 0
        return i32([-1 if min(from_i32(column)) < 0 else BAD_ID]) * (len(column) // 4)
    return bytes(len(column) - 4) + i32([ends[int.from_bytes(column[-4:], "little")]])


def result(message: StepResult, sequences: list[Sequence], vocab_size: int, known: dict[int, int]) -> StepResult:
    """A step's result, given whose each slot is."""
    ends = {seq.request: ends_of(seq.request, known) for seq in sequences}
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


def state(obj: Any, attributes: Attributes, known: dict[int, int]) -> Attributes:
    """An object's attributes, or a message's fields, without tokens and text."""
    if isinstance(obj, Logprobs):
        return {"ids": bytes(len(obj.ids)), "values": bytes(len(obj.values)), "texts": [], "raw": {}}
    if isinstance(obj, Request):
        ends, now = ends_of(obj, known), dict(attributes)
        for name, value in attributes.items():
            if isinstance(value, bytes):
                now[name] = bytes(len(value))
            elif isinstance(value, msgspec.Struct):
                now[name] = msgspec.convert(_plain(value, ends, 0, {}), type(value))
            elif name in _STOPS:
                now[name] = frozenset(ends[token] for token in value)
        return now
    if isinstance(obj, Sequence):
        ends, now = ends_of(obj.request, known), dict(attributes)
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
