"""What a request is to do: ``Generate`` tokens after its prompt, or ``Pool`` the prompt into vectors.

One of the two goes the whole way of a request. Engine sends it in Tokenize as it is asked for; the detokenizer resolves
it and tells Engine in Accepted; Submit, the scheduler's request and the worker's row carry that on as it is. So what a
worker must know of a new parameter is a field here or in its params, and nothing between copies it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from .params import SamplingParams
from .pooling import PoolingParams
from .thinking import Thinking

BACKGROUND = 2**31 - 1
"""The priority of what is to wait for all else (the requests of batches). Every scheduling policy heeds it."""


class Adapter(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A low-rank adapter (LoRA) of the model, as a request carries it. Two of the same ``digest`` are the same.

    A request has all that a worker needs to load it, so nobody on its way has to know the name.
    """

    name: str
    path: str  # of its folder, as workers see it (one folder, mounted alike on every machine)
    digest: bytes  # of its files, 16 bytes; see ``adapter_digest``


class Generate(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=0):
    """Draw tokens. Resolved, ``params.max_tokens`` is a number, and ``params.n`` counts the children that are run
    (best_of of them, where that is asked for), but for a beam search, where it counts those that are returned.
    """

    params: SamplingParams
    seed: int  # a random one where the client gives none; see ``child_seed``
    # What the detokenizer adds:
    eos: list[int] = []  # ids that end a sequence with no stop reason; none with ignore_eos
    suppressed_ids: bytes = b""  # i32, not to be drawn before min_tokens: every EOS and stop id; empty without it
    bad_words: list[list[int]] = []  # token ids of each form of each bad word


class Pool(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=1):
    """Make vectors of the prompt; nothing is drawn, and the request ends with its prompt. Resolved, no field of
    ``params`` but ``dimensions`` is None.
    """

    params: PoolingParams
    pair: str | None = None  # the second text of a pair, whose first is Tokenize's prompt
    # What the detokenizer adds:
    token_type_start: int = -1  # where the tokens of type 1 begin, those of a pair's second text; -1: nowhere


# An adapter is no field of the two above: one that is not used would cost a byte in each of their messages.


class AdaptedGenerate(Generate, frozen=True, tag=2):
    """Generate with an adapter. To a worker it goes as the slot of its own that holds the adapter."""

    adapter: Adapter | None = None
    slot: int = -1


class AdaptedPool(Pool, frozen=True, tag=3):
    """Pool with an adapter."""

    adapter: Adapter | None = None
    slot: int = -1


class ThinkingGenerate(AdaptedGenerate, frozen=True, tag=4):
    """Generate, with an adapter or without, whose thoughts are held to a budget; the detokenizer makes it."""

    thinking: Thinking | None = None


class Embeds(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Embeddings of a prompt's tokens, in place of those of their ids, which then say nothing.

    ``data`` holds [tokens, ``size``] numbers of ``dtype`` (float32, float16, bfloat16), from position ``first`` on, of
    the ``count`` that the prompt has. ``digest`` is 16 bytes, and stands for all of it.
    """

    dtype: str
    size: int
    count: int
    digest: bytes
    data: bytes
    first: int = 0


class EmbeddedGenerate(AdaptedGenerate, frozen=True, tag=6):
    """Generate, with an adapter or without, after a prompt of embeddings."""

    embeds: Embeds | None = None


class Infill(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What stands around the text that a model is to fill in, in the words of its own training. ``extra`` are other
    files, (name, text) each, which come before; ``after`` is how the text in the middle begins."""

    prefix: str
    suffix: str
    extra: list[tuple[str, str]] = []
    after: str = ""


class Text(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=5):
    """Turn text into tokens, or tokens into text. Nothing is run: the detokenizer answers with Accepted, and that is
    the end of the request. With Tokenize's ``echo`` the text of ids is wanted; ``parts`` and ``infill`` stand in place
    of its prompt.
    """

    parts: list[str | int] | None = None  # texts and token ids, one after the other
    infill: Infill | None = None
    plain: bool = False  # a special token's name in the text is text as any other
    pieces: bool = False  # what each token stands for is wanted
    # What the detokenizer adds:
    names: list[str | None] = []  # of each id in the vocabulary
    texts: list[bytes] = []  # what each id adds after other text, in UTF-8; it may be a part of a character
    ends: list[int] = []  # ids that end what is filled in, beside the model's own


Work = Generate | Pool | AdaptedGenerate | AdaptedPool | ThinkingGenerate | EmbeddedGenerate
"""What goes the whole way. ``Text`` goes to the detokenizer and back."""
W = TypeVar("W", Generate, Pool, Work)


def adapter_of(work: Work) -> Adapter | None:
    """The adapter that ``work`` is done with; None for the model itself."""
    return work.adapter if isinstance(work, AdaptedGenerate | AdaptedPool) else None


def with_adapter(work: W, adapter: Adapter | None, slot: int = -1) -> W:
    """The same work done with ``adapter``, or with what is in a worker's ``slot``."""
    if adapter is None and slot < 0:
        return work
    if isinstance(work, ThinkingGenerate | EmbeddedGenerate):
        return msgspec.structs.replace(work, adapter=adapter, slot=slot)
    plain, kind = (Generate, AdaptedGenerate) if isinstance(work, Generate) else (Pool, AdaptedPool)
    made: Any = kind(**{name: getattr(work, name) for name in plain.__struct_fields__}, adapter=adapter, slot=slot)
    return made


def embeds_of(work: Work | Text) -> Embeds | None:
    """The embeddings that ``work``'s prompt is made of; None where it is made of ids."""
    return work.embeds if isinstance(work, EmbeddedGenerate) else None


def with_embeds(work: Generate, embeds: Embeds | None) -> Generate:
    """The same work after a prompt of ``embeds``."""
    if isinstance(work, EmbeddedGenerate):
        return msgspec.structs.replace(work, embeds=embeds)
    if embeds is None:
        return work
    return EmbeddedGenerate(**{name: getattr(work, name) for name in work.__struct_fields__}, embeds=embeds)


def since(work: Work, position: int) -> Work:
    """The same work with none of the embeddings before ``position``, which are not computed any more."""
    if (embeds := embeds_of(work)) is None or position <= embeds.first:
        return work
    each = len(embeds.data) // (embeds.count - embeds.first) if embeds.count > embeds.first else 0
    left = embeds.data[each * (position - embeds.first) :]
    return msgspec.structs.replace(work, embeds=msgspec.structs.replace(embeds, data=left, first=position))


def bytes_of(work: Work | Text) -> int:
    """Roughly the bytes of the texts that stand in ``work`` and not in the prompt."""
    if isinstance(work, Pool):
        return len(work.pair or "")
    if (embeds := embeds_of(work)) is not None:
        return len(embeds.data)
    if not isinstance(work, Text):
        return 0
    size = sum(len(part) if isinstance(part, str) else 8 for part in work.parts or ())
    if (infill := work.infill) is not None:
        size += len(infill.prefix) + len(infill.suffix) + len(infill.after)
        size += sum(len(name) + len(text) for name, text in infill.extra)
    return size


def thought_end(work: Work) -> list[int] | None:
    """The ids that end a thought which is over its budget, none where ``work`` has no budget; None where a budget lacks
    its marks."""
    if not isinstance(work, ThinkingGenerate):
        return []
    thinking = work.thinking
    if thinking is None or not (thinking.end and thinking.starts and thinking.ends):
        return None
    return thinking.end if all(thinking.starts) and all(thinking.ends) else None


def child_seed(seed: int, index: int) -> int:
    """What child ``index`` of a request with ``seed`` draws with."""
    return (seed + index) % 2**64
