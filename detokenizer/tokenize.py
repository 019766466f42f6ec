"""A Tokenize message to everything that follows from it: ids, resolved parameters, hashes, decoding state.

Pure and thread-safe: it runs in a worker thread and touches nothing shared but tables that only grow.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..proto.checkpoint.model_config import ModelConfig
from ..proto.checkpoint.pooler_config import PoolerConfig
from ..proto.checks import check_params, check_prompt, check_text, tokens_kept
from ..proto.codec import BadFrame, from_i32
from ..proto.errors import Refused
from ..proto.hashing import hash_blocks, root_of
from ..proto.messages import Child, Finish, Tokenize
from ..proto.params import ParamError, SamplingParams
from ..proto.work import Generate, Pool, Work, adapter_of, with_adapter
from . import pooling
from .bad_words import BadWords
from .beams import BeamTexts
from .checks import suppressed_ids
from .detokenize import Stream, Streams
from .logprobs import TokenTexts
from .sequence import News, TextSequence, first_finish
from .stops import StopSet
from .template import ChatTemplate
from .tokenizer import TextTokenizer

_TAIL_MARGIN = 4096
"""Characters kept before the part of a text that truncation keeps, so that its tokens are those of the whole text."""


@dataclass
class Prepared:
    """A request ready to run. ``replayed`` holds text, or the finish, that resumed children are owed."""

    ids: bytes  # i32
    prompt: str | None
    root: bytes  # of the chain of hashes
    hashes: bytes
    block_size: int
    work: Work  # resolved
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
    ):
        """No tokenizer: prompts are ids, and there is no text (``--skip-tokenizer-init``). With a ``pooler`` nothing is
        generated.

        The primary EOS is the tokenizer's, or else the first of the model's: it ends a sequence with no stop reason.
        Their others are added to ``stop_token_ids``, as in vLLM, and are named as the reason.
        """
        self.tokenizer, self.model, self.max_logprobs, self.pooler = tokenizer, model, max_logprobs, pooler
        self.template = ChatTemplate(tokenizer.templates, tokenizer.special) if tokenizer else ChatTemplate({}, {})
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
        prompt, ids, cut = self._ids(message, max_model_len, tokens_kept(params, max_model_len))
        check_prompt(ids, self.model, max_model_len)
        if message.echo and (prompt is None or cut) and self.tokenizer is not None:
            prompt = self.tokenizer.decode(ids, params.skip_special_tokens and prompt is not None)
        self._resolve(params, max_model_len - len(ids))
        suppressed, words = suppressed_ids(params, [*self.eos, *self.more_eos]), []
        if params.bad_words and self.bad_words is not None:
            words = self.bad_words.forms(params.bad_words, self.model.vocab_size)
        work = Generate(params, asked.seed, [] if params.ignore_eos else self.eos, suppressed, words)
        prepared = _prepared(message, ids, prompt, block_size, work)
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
            encoded = pooling.Encoded(source[:keep], -1)
        else:
            prompt, tokenizer, special = source
            texts = [prompt] if asked.pair is None else [prompt, asked.pair]
            texts = [self._bounded(each, max_model_len, tokenizer, keep, tail=False) for each in texts]
            encoded = pooling.encode(
                tokenizer, [each.lower() for each in texts] if pooler.lower else texts, special, keep
            )
        pooling.check(encoded, params, pooler, self.model, max_model_len)
        work = Pool(params, token_type_start=encoded.token_type_start)
        return _prepared(message, encoded.ids, prompt, block_size, work)

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

    def _ids(self, message: Tokenize, max_model_len: int, keep: int | None) -> tuple[str | None, list[int], bool]:
        """The prompt's text where there is one, its ids, and whether truncation has cut them."""
        source = self._source(message)
        if isinstance(source, list):
            return None, *_last(source, keep)
        text, tokenizer, special = source
        if not text:
            return text, [], False
        shown = self._bounded(text, max_model_len, tokenizer, keep)
        try:
            return text, *_encode_end(tokenizer, shown, special, keep)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise Refused(f"the prompt cannot be encoded: {error}"[:300], "prompt") from error

    def _source(self, message: Tokenize) -> list[int] | tuple[str, TextTokenizer, bool]:
        """The ids given, or the text given or rendered with what encodes it and whether special tokens are added."""
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
            return self.template.render(message.messages, message.template), self.tokenizer, special
        return message.prompt or "", self.tokenizer, message.add_special_tokens

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


def _prepared(message: Tokenize, ids: list[int], prompt: str | None, block_size: int, resolved: Work) -> Prepared:
    packed = array("i", ids).tobytes()
    adapter = adapter_of(message.work)
    work = with_adapter(resolved, adapter)
    root = root_of(message.cache_salt, adapter.digest if adapter is not None else b"")
    return Prepared(packed, prompt, root, b"".join(hash_blocks(packed, block_size, root)), block_size, work)


def _encode_end(tokenizer: TextTokenizer, text: str, special: bool, keep: int | None) -> tuple[list[int], bool]:
    """A text's ids, of which truncation leaves the last ``keep`` with the special ones around them: without its first
    token many a model talks nonsense. And whether there were more."""
    ids = tokenizer.encode(text, special)
    if keep is None or len(ids) <= keep or not special:
        return _last(ids, keep)
    own = tokenizer.encode(text, False)
    added = len(ids) - len(own)
    before = next((n for n in range(added + 1) if ids[n : n + len(own)] == own), None)
    if before is None or not 0 < added < keep:
        return _last(ids, keep)
    return [*ids[:before], *own[added - keep :], *ids[before + len(own) :]], True


def _last(ids: list[int], keep: int | None) -> tuple[list[int], bool]:
    """The last ``keep`` ids, and whether there were more."""
    return (ids, False) if keep is None or len(ids) <= keep else (ids[-keep:], True)
