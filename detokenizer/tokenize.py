"""A Tokenize message to everything that follows from it: ids, resolved parameters, hashes, decoding state.

Pure and thread-safe: it runs in a worker thread and touches nothing shared but tables that only grow.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..proto.codec import BadFrame, from_i32
from ..proto.hashing import hash_blocks
from ..proto.messages import Child, Finish, Tokenize
from ..proto.model_config import ModelConfig
from .detokenize import Streams
from .errors import Refused
from .sequence import News, TextSequence, first_finish
from .stops import StopSet
from .template import ChatTemplate
from .tokenizer import TextTokenizer

MAX_STOP_CHARACTERS = 4096
"""Characters all stop strings of a request may have together."""

_TAIL_MARGIN = 4096
"""Characters kept before the part of a text that truncation keeps, so that its tokens are those of the whole text."""


@dataclass
class Prepared:
    """A request ready to run. ``finished`` holds resumed children whose finish was lost on its way."""

    ids: bytes  # i32
    prompt: str | None
    hashes: bytes
    block_size: int
    eos: list[int]
    sequences: dict[int, TextSequence]
    children: list[Child] = field(default_factory=list)
    replayed: list[tuple[int, int, News]] = field(default_factory=list)  # index, offset, news


class Preparer:
    """What every request of this process shares."""

    def __init__(self, tokenizer: TextTokenizer, model: ModelConfig):
        self.tokenizer, self.model = tokenizer, model
        self.template = ChatTemplate(tokenizer.templates, tokenizer.special)
        self.streams = Streams(tokenizer)
        eos = [*model.eos_token_ids, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
        self.eos = list(dict.fromkeys(eos))

    def prepare(self, message: Tokenize, block_size: int, max_model_len: int) -> Prepared:
        """Render, encode, check and resolve. ``message.params.max_tokens`` is a number afterwards.

        Raises Refused with the field at fault.
        """
        params = message.params
        if params.max_tokens is not None and params.max_tokens > max_model_len:
            raise Refused(
                f"max_tokens={params.max_tokens} cannot be greater than max_model_len={max_model_len}. "
                "Please request fewer output tokens.",
                "max_tokens",
            )
        if sum(len(string) for string in params.stop or ()) > MAX_STOP_CHARACTERS:
            raise Refused(f"stop strings have more than {MAX_STOP_CHARACTERS} characters together.", "stop")
        prompt, ids = self._ids(message, max_model_len)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        self._check(ids, max_model_len)
        if message.echo and prompt is None:
            prompt = self.tokenizer.decode(ids, params.skip_special_tokens)
        room = max_model_len - len(ids)
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        packed = array("i", ids).tobytes()
        prepared = Prepared(
            ids=packed,
            prompt=prompt,
            hashes=b"".join(hash_blocks(packed, block_size)),
            block_size=block_size,
            eos=[] if params.ignore_eos else self.eos,
            sequences={},
        )
        self._open(message, ids, prepared)
        return prepared

    # -- prompt

    def _ids(self, message: Tokenize, max_model_len: int) -> tuple[str | None, list[int]]:
        given = [message.prompt is not None, message.ids is not None, message.messages is not None]
        if sum(given) != 1:
            raise Refused("exactly one of a prompt, token ids and messages must be given.", "prompt")
        if message.ids is not None:
            try:
                ids = from_i32(message.ids)
            except BadFrame as error:
                raise Refused(f"prompt token ids: {error}", "prompt") from error
            return None, ids
        if message.messages is not None:
            text, special = self.template.render(message.messages, message.template), False
        else:
            text, special = message.prompt or "", message.add_special_tokens
        if not text:
            return text, []
        shown = self._bounded(text, max_model_len, message.params.truncate_prompt_tokens)
        try:
            return text, self.tokenizer.encode(shown, special)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise Refused(f"the prompt cannot be encoded: {error}"[:300], "prompt") from error

    def _bounded(self, text: str, max_model_len: int, truncate: int | None) -> str:
        """Refuse a text that cannot fit without encoding it; cut one of which only the end will be kept."""
        if len(text) <= max_model_len or (longest := self.tokenizer.longest) is None:
            return text
        if truncate is not None:
            return text[-(truncate * longest + _TAIL_MARGIN) :]
        if len(text) > max_model_len * longest:
            raise Refused(
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
                f"{len(text)} characters (more than {max_model_len * longest} characters, which is the upper bound "
                f"for {max_model_len} input tokens). Please reduce the length of the input prompt.",
                "input_text",
            )
        return text

    def _check(self, ids: list[int], max_model_len: int) -> None:
        if not ids:
            raise Refused("prompt must not be empty: it encodes to no tokens.", "prompt")
        if len(ids) >= max_model_len:
            room = "exceeds this limit even without any" if len(ids) > max_model_len else "leaves no room for"
            raise Refused(
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
                f"{len(ids)} input tokens, which {room} output tokens. Please reduce the length of the input prompt.",
                "input_tokens",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.model.vocab_size:
            raise Refused(
                f"Token id {low if low < 0 else high} is out of vocabulary (0 to {self.model.vocab_size - 1}).",
                "prompt",
            )

    # -- children

    def _open(self, message: Tokenize, ids: list[int], prepared: Prepared) -> None:
        """Decoding state of each child; what a resumed child already has is decoded again here."""
        params = message.params
        stops = StopSet([*params.stop], params.include_stop_str_in_output) if params.stop else None
        if not message.resume:
            for index in range(params.n):
                stream = self.streams.open(ids, params.skip_special_tokens)
                prepared.sequences[index] = TextSequence(stream, stops)
            return
        for resume in message.resume:
            try:
                outputs = from_i32(resume.ids)
            except BadFrame as error:
                raise Refused(f"resumed token ids: {error}", status=500) from error
            stream = self.streams.open(ids, params.skip_special_tokens)
            sequence = TextSequence(stream, stops, resume.text_sent)
            most = params.max_tokens or 0
            used, finish, stop_id = first_finish(outputs, prepared.eos, params.stop_token_ids or (), most)
            news = sequence.advance(outputs[:used], finish, stop_id, params.include_stop_str_in_output)
            if news.text or sequence.done:
                prepared.replayed.append((resume.index, len(outputs), news))
            if news.finish == Finish.NONE:
                prepared.sequences[resume.index] = sequence
                prepared.children.append(Child(resume.index, resume.ids))
