"""A Tokenize message to everything that follows from it: ids, resolved parameters, hashes, decoding state.

Pure and thread-safe: it runs in a worker thread and touches nothing shared but tables that only grow.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from ..proto.checkpoint.model_config import ModelConfig
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.checks import check_ids, check_params, check_prompt, check_text, tokens_kept
from ..proto.codec import BadFrame, from_i32
from ..proto.errors import Refused
from ..proto.hashing import hash_blocks, root_of
from ..proto.messages import Child, Finish, Tokenize
from ..proto.params import ParamError, SamplingParams
from ..proto.thinking import Marks
from ..proto.work import Embeds, Generate, Pool, Text, Work, adapter_of, embeds_of, with_adapter, with_embeds
from . import pooling
from .bad_words import BadWords
from .beams import BeamTexts
from .begins import Begins
from .checks import suppressed_ids
from .detokenize import Stream, Streams
from .infill import MARKS, filler_of, infill_ids
from .logprobs import TokenTexts
from .sequence import News, TextSequence, first_finish
from .specials import Plain, Specials, specials_of
from .stops import StopSet
from .template import ChatTemplate
from .thoughts import Thoughts
from .tokenizer import TextTokenizer

_TAIL_MARGIN = 4096
"""Characters kept before the part of a text that truncation keeps, so that its tokens are those of the whole text."""


class Source(NamedTuple):
    """A prompt's text, and what encodes it: ``shown``, by ``tokenizer``, with special tokens around it or not."""

    text: str
    shown: str
    tokenizer: TextTokenizer
    special: bool


@dataclass
class Prepared:
    """A request ready to run. ``replayed`` holds text, or the finish, that resumed children are owed."""

    ids: bytes  # i32
    prompt: str | None
    root: bytes  # of the chain of hashes
    hashes: bytes
    block_size: int
    work: Work | Text  # resolved
    sequences: dict[int, TextSequence] = field(default_factory=dict)
    children: list[Child] = field(default_factory=list)
    replayed: list[tuple[int, int, News]] = field(default_factory=list)  # index, offset, news
    beams: BeamTexts | None = None


class Preparer:
    """What every request of this process shares."""

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        model: ModelConfig,
        max_logprobs: int = 20,
        pooler: PoolerConfig | None = None,
        marks: Marks | None = None,
        special_in_content: bool = False,
    ):
        """No tokenizer: prompts are ids, and there is no text (``--skip-tokenizer-init``). With a ``pooler`` nothing is
        generated. ``marks`` are those of the model's thoughts, where they are known. With ``special_in_content``,
        special tokens that messages hold are special tokens.

        The primary EOS is the tokenizer's, or else the first of the model's: it ends a sequence with no stop reason.
        Their others are added to ``stop_token_ids``, as in vLLM, and are named as the reason.
        """
        self.tokenizer, self.model, self.max_logprobs, self.pooler = tokenizer, model, max_logprobs, pooler
        self.template = ChatTemplate({}, {}) if tokenizer is None else _template(tokenizer, special_in_content)
        self._plain: tuple[Specials, Plain] | None = None
        self.begins = Begins(tokenizer)
        self.thoughts = Thoughts(tokenizer, marks)
        self.streams = Streams(tokenizer) if tokenizer else None
        self.texts = TokenTexts(self.streams.piece) if self.streams else None
        self.bad_words = BadWords(tokenizer, self.streams.quick_piece) if tokenizer and self.streams else None
        first = [] if tokenizer is None or tokenizer.eos_id is None else [tokenizer.eos_id]
        more = [*(tokenizer.end_ids if tokenizer else ()), *model.eos_token_ids]
        every = [token for token in dict.fromkeys([*first, *more]) if 0 <= token < model.vocab_size]
        self.eos, self.more_eos = every[:1], every[1:]

    def prepare(self, message: Tokenize, block_size: int, max_model_len: int) -> Prepared:
        """Render, encode, check and resolve; ``message.work.params`` are resolved in place.

        ``prompt`` of the result is the text given or rendered; with ``echo`` it is the text of the ids that are run,
        where truncation left only some, or where ids were given: all of them, special tokens too, so that the text is
        that of the tokens whose logprobs are shown beside it. Raises Refused with the field at fault.
        """
        try:
            if isinstance(message.work, Text):
                try:
                    return self._prepare_text(message, message.work)
                except (Refused, ParamError):
                    raise
                except Exception as error:  # `tokenizers` raises plain Exception
                    raise Refused(f"the text cannot be encoded: {error}"[:300], "prompt") from error
            if isinstance(message.work, Pool):
                return self._prepare_pooling(message, message.work, block_size, max_model_len)
            return self._prepare(message, message.work, block_size, max_model_len)
        except ParamError as error:
            raise Refused(str(error), error.param) from error

    def _prepare(self, message: Tokenize, asked: Generate, block_size: int, max_model_len: int) -> Prepared:
        params = asked.params
        if (pooler := self.pooler) is not None:
            raise Refused(
                f"this server pools with {self.model.architecture} (tasks {list(pooler.tasks)}) and does not generate; "
                "start one with --runner generate."
            )
        check_params(params, self.model, max_model_len, self.max_logprobs)
        check_text(params, self.tokenizer is not None)
        tail = params.truncation_side != "right"
        prompt, ids, cut = self._ids(message, max_model_len, tokens_kept(params, max_model_len), tail)
        check_prompt(ids, self.model, max_model_len)
        if message.echo and (prompt is None or cut) and self.tokenizer is not None:
            prompt = self.tokenizer.decode(ids, params.skip_special_tokens and prompt is not None)
        self._resolve(params, max_model_len - len(ids))
        suppressed, words = suppressed_ids(params, [*self.eos, *self.more_eos]), []
        if params.bad_words and self.bad_words is not None:
            words = self.bad_words.forms(params.bad_words, self.model.vocab_size)
        self.thoughts.place(params, prompt, ids)
        work = Generate(params, asked.seed, [] if params.ignore_eos else self.eos, suppressed, words)
        work = self.thoughts.held(work, message, prompt, ids, self.model.vocab_size)
        if (embeds := embeds_of(asked)) is not None:
            work = with_embeds(work, _checked(embeds, len(ids), params))
        prepared = _prepared(message, ids, prompt, block_size, asked, work)
        self._open(message, ids, prepared, work)
        return prepared

    def _prepare_pooling(self, message: Tokenize, asked: Pool, block_size: int, max_model_len: int) -> Prepared:
        if (pooler := self.pooler) is None:
            raise Refused(
                f"this server generates with {self.model.architecture} and does not pool; start one with --runner "
                "pooling."
            )
        params = pooler.resolve(asked.params)
        keep = pooling.tokens_kept(params, max_model_len)
        source = self._source(message)
        prompt: str | None = None
        if isinstance(source, list):
            encoded = pooling.Encoded(pooling.cut(source, keep, params.truncation_side or "right"), -1)
        else:
            prompt, shown, tokenizer, special = source
            texts = [shown] if asked.pair is None else [shown, asked.pair]
            side = params.truncation_side or "right"
            texts = [self._bounded(each, max_model_len, tokenizer, keep, side == "left") for each in texts]
            texts = [each.lower() for each in texts] if pooler.lower else texts
            encoded = pooling.encode(tokenizer, texts, special, keep, side, params.max_tokens_per_doc)
        pooling.check(encoded, params, pooler, self.model, max_model_len)
        work = Pool(params, token_type_start=encoded.token_type_start)
        return _prepared(message, encoded.ids, prompt, block_size, asked, work)

    def _prepare_text(self, message: Tokenize, asked: Text) -> Prepared:
        """Ids of a text, or the text of ids. No length is refused: who asks wants to learn it."""
        if (tokenizer := self.tokenizer) is None:
            raise Refused("this server has no tokenizer (--skip-tokenizer-init), so it knows nothing of texts.")
        source = [] if asked.parts is not None or asked.infill is not None else self._source(message)
        text: str | None = None
        ends: list[int] = []
        if asked.infill is not None:
            filler = filler_of(tokenizer)
            ids, ends = (
                infill_ids(filler, tokenizer, self.plain, asked.infill),
                filler.ends if filler is not None else [],
            )
        elif isinstance(source, list):
            ids = [*source, *_of_parts(tokenizer, self, asked, message.add_special_tokens)]
            if ids:
                check_ids(ids, self.model)
            text = tokenizer.decode(ids, False) if message.echo else None
        else:
            text = source.text
            if source.shown is text:
                ids = _of_parts(tokenizer, self, Text([text], plain=asked.plain), source.special)
            else:
                ids = source.tokenizer.encode(source.shown, source.special)
        work = msgspec.structs.replace(asked, parts=None, infill=None, ends=ends)
        if asked.pieces and self.streams is not None:
            names = [tokenizer.piece(token) for token in ids]
            told = [self.streams.piece(token) for token in ids]
            texts = [each if isinstance(each, bytes) else each.encode() for each in told]
            work = msgspec.structs.replace(work, names=names, texts=texts)
        return Prepared(array("i", ids).tobytes(), text, b"", b"", 0, work)

    def plain(self, text: str) -> list[int]:
        """The ids of a text in which the name of a special token, or of a mark of what is filled in, is text as any
        other, with nothing added around them. Raises Refused where there is no such form."""
        return self._marks_as_text.encode(text, False)

    @cached_property
    def _marks_as_text(self) -> Plain:
        tokenizer = self.tokenizer
        assert tokenizer is not None
        specials, _ = specials_of(tokenizer)
        return Plain(tokenizer, Specials(specials.texts | MARKS, specials.folds))

    def _resolve(self, params: SamplingParams, room: int) -> None:
        """``max_tokens`` and logprobs as numbers that fit; the model's further EOS ids among the stop ids."""
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name)) is not None:
                setattr(params, name, self.model.vocab_size if asked == -1 else min(asked, self.model.vocab_size))
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > params.max_tokens:
            raise Refused(
                f"min_tokens must be less than or equal to max_tokens={params.max_tokens} (what the model's context "
                f"leaves beside the prompt), got {params.min_tokens}.",
                "min_tokens",
            )
        if self.more_eos and not params.ignore_eos:
            params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or ()), *self.more_eos]))

    # -- prompt

    def _ids(
        self, message: Tokenize, max_model_len: int, keep: int | None, tail: bool
    ) -> tuple[str | None, list[int], bool]:
        """The prompt's text where there is one, its ids, and whether truncation has cut them (to their ``tail``)."""
        source = self._source(message)
        if isinstance(source, list):
            return None, *_kept(source, keep, tail)
        text, shown, tokenizer, special = source
        if not text:
            return text, [], False
        shown = self._bounded(shown, max_model_len, tokenizer, keep, tail)
        try:
            return text, *_encode_kept(tokenizer, shown, special, keep, tail)
        except Refused:
            raise
        except Exception as error:  # `tokenizers` raises plain Exception
            raise Refused(f"the prompt cannot be encoded: {error}"[:300], "prompt") from error

    def _source(self, message: Tokenize) -> list[int] | Source:
        """The ids given, or the text given or rendered."""
        given = [message.prompt is not None, message.ids is not None, message.messages is not None]
        if sum(given) != 1:
            raise Refused("exactly one of a prompt, token ids and messages must be given.", "prompt")
        if message.ids is not None:
            try:
                return from_i32(message.ids)
            except BadFrame as error:
                raise Refused(f"prompt token ids: {error}", "prompt") from error
        if self.tokenizer is None:
            raise Refused(
                "this server has no tokenizer (--skip-tokenizer-init); give the prompt as token ids.",
                "prompt" if message.messages is None else "messages",
            )
        if message.messages is not None:
            special = bool((message.template or {}).get("add_special_tokens"))
            chat = self.template.render(message.messages, message.template)
            if chat.spelled is None:
                text = str(chat)
                return Source(text, text, self.tokenizer, special)
            return Source(str(chat), chat.spelled, self._encoder(self.tokenizer, chat.marks), special)
        text = message.prompt or ""
        return Source(
            text, self.begins.once(text, message.add_special_tokens), self.tokenizer, message.add_special_tokens
        )

    def _encoder(self, tokenizer: TextTokenizer, marks: Specials) -> Plain:
        """What encodes chats whose messages hold what looks like marks; the last one is kept."""
        kept = self._plain
        if kept is None or kept[0].texts != marks.texts:
            kept = self._plain = marks, Plain(tokenizer, marks)
        return kept[1]

    def _bounded(
        self, text: str, max_model_len: int, tokenizer: TextTokenizer, keep: int | None, tail: bool = True
    ) -> str:
        """Refuse a text that cannot fit without encoding it; cut one of which only the end will be kept, or without
        ``tail`` the beginning."""
        if len(text) <= max_model_len or (longest := tokenizer.longest) is None:
            return text
        if keep is not None:
            most = keep * longest + _TAIL_MARGIN
            return text[-most:] if tail else text[:most]
        if len(text) > max_model_len * longest:
            raise Refused(
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
                f"{len(text)} characters (more than {max_model_len * longest} characters, which is the upper bound "
                f"for {max_model_len} input tokens). Please reduce the length of the input prompt.",
                "input_text",
            )
        return text

    # -- children

    def _open(self, message: Tokenize, ids: list[int], prepared: Prepared, work: Generate) -> None:
        """Decoding state of each child; what a resumed child already has is decoded again here."""
        params = work.params
        stops = StopSet([*params.stop], params.include_stop_str_in_output) if params.stop else None

        def stream() -> Stream | None:
            if self.streams is None or not params.detokenize:
                return None
            return self.streams.open(ids, params.skip_special_tokens, params.spaces_between_special_tokens)

        if not message.resume or params.use_beam_search:  # a beam search starts again whole
            for index in range(params.n):
                prepared.sequences[index] = TextSequence(stream(), stops, 0, params.min_tokens)
            if params.use_beam_search and stops is not None and (root := stream()) is not None:
                prepared.beams = BeamTexts(root, stops, params.min_tokens)
            return
        for resume in message.resume:
            try:
                outputs = from_i32(resume.ids)
            except BadFrame as error:
                raise Refused(f"resumed token ids: {error}", status=500) from error
            sequence = TextSequence(stream(), stops, resume.text_sent, params.min_tokens)
            used, finish, stop_id = first_finish(
                outputs, work.eos, params.stop_token_ids or (), params.max_tokens or 0, params.min_tokens
            )
            news = sequence.advance(outputs[:used], finish, stop_id, params.include_stop_str_in_output)
            if news.text or sequence.done:
                prepared.replayed.append((resume.index, len(outputs), news))
            if news.finish == Finish.NONE:
                prepared.sequences[resume.index] = sequence
                prepared.children.append(Child(resume.index, resume.ids))


def _template(tokenizer: TextTokenizer, special_in_content: bool) -> ChatTemplate:
    if special_in_content:
        return ChatTemplate(tokenizer.templates, tokenizer.special)
    specials, others = specials_of(tokenizer)
    return ChatTemplate(tokenizer.templates, tokenizer.special, specials, others)


def _prepared(
    message: Tokenize, ids: list[int], prompt: str | None, block_size: int, asked: Work, resolved: Work
) -> Prepared:
    packed = array("i", ids).tobytes()
    adapter = adapter_of(asked)
    work = with_adapter(resolved, adapter)
    embeds = embeds_of(asked)
    root = root_of(
        message.cache_salt, adapter.digest if adapter is not None else b"", embeds.digest if embeds is not None else b""
    )
    return Prepared(packed, prompt, root, b"".join(hash_blocks(packed, block_size, root)), block_size, work)


def _checked(embeds: Embeds, count: int, params: SamplingParams) -> Embeds:
    """The embeddings of a prompt of ``count`` tokens. Raises Refused."""
    if embeds.count != count or embeds.first:
        raise Refused(f"{count} token ids stand for {embeds.count} embeddings.", "prompt_embeds")
    for name in ("prompt_logprobs", "thinking_token_budget", "truncate_prompt_tokens"):
        if getattr(params, name) is not None:
            raise Refused(f"{name} needs a prompt of tokens, and this one is made of prompt_embeds.", name)
    return embeds


def _of_parts(tokenizer: TextTokenizer, preparer: Preparer, asked: Text, special: bool) -> list[int]:
    """The ids of texts and ids in turn. What is added around a prompt is added around a text that comes first."""
    ids: list[int] = []
    for n, part in enumerate(asked.parts or ()):
        added = special and n == 0
        if isinstance(part, int):
            ids.append(part)
        elif asked.plain:
            ids += [*(tokenizer.begin if added else ()), *preparer.plain(part)]
        else:
            ids += tokenizer.encode(preparer.begins.once(part, added), added)
    return ids


def _encode_kept(
    tokenizer: TextTokenizer, text: str, special: bool, keep: int | None, tail: bool
) -> tuple[list[int], bool]:
    """A text's ids, of which truncation leaves the last ``keep`` (the first without ``tail``) with the special ones
    around them: without its first token many a model talks nonsense. And whether there were more."""
    ids = tokenizer.encode(text, special)
    if keep is None or len(ids) <= keep or not special:
        return _kept(ids, keep, tail)
    own = tokenizer.encode(text, False)
    added = len(ids) - len(own)
    before = next((n for n in range(added + 1) if ids[n : n + len(own)] == own), None)
    if before is None or not 0 < added < keep:
        return _kept(ids, keep, tail)
    return [*ids[:before], *_kept(own, keep - added, tail)[0], *ids[before + len(own) :]], True


def _kept(ids: list[int], keep: int | None, tail: bool) -> tuple[list[int], bool]:
    """The last ``keep`` ids, or without ``tail`` the first, and whether there were more."""
    if keep is None or len(ids) <= keep:
        return ids, False
    return (ids[-keep:] if tail else ids[:keep]), True
