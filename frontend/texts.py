"""Text and tokens with nothing run: /tokenize and /detokenize in the words of vLLM and of llama.cpp, /apply-template,
and /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from aiohttp import web

from ..client.results import Told
from ..proto.checkpoint.chat_templates import templates_of, tokenizer_config
from ..proto.work import Text
from .calls import json_body
from .errors import ApiError
from .front import FRONT, Front
from .parsing import Request, kind_of
from .prompts import check_ids
from .schema import ChatRequest
from .shapes import MESSAGE, TOOL, Shape
from .tool_choice import tools_of


class TokenizeRequest(Request, kw_only=True):
    """POST /tokenize: ``prompt`` or ``messages`` as vLLM is asked, or ``content`` as llama.cpp is."""

    not_yet: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
    }  # fmt: skip

    inside: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE, "tools": TOOL}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    content: Any = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    def check(self) -> None:
        given = [name for name in ("prompt", "messages", "content") if getattr(self, name) is not None]
        if len(given) != 1:
            told = f"got {' and '.join(given)}" if given else "got none"
            raise ApiError(
                400, f"one of prompt, messages (vLLM) and content (llama.cpp) must be given, {told}.", "prompt"
            )

    def chat(self) -> ChatRequest:
        """The conversation, as a chat has it. Raises ApiError."""
        return ChatRequest(
            messages=self.messages, add_special_tokens=self.add_special_tokens, tools=self.tools,
            add_generation_prompt=self.add_generation_prompt, continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )  # fmt: skip


class DetokenizeRequest(Request, kw_only=True):
    """POST /detokenize, which vLLM and llama.cpp ask alike."""

    model: str | None = None
    tokens: list[Any] | None = None


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text or a conversation, however long it is."""
    front = request.app[FRONT]
    body = await front.read(request, TokenizeRequest)
    await front.find_model(request, body.model)
    await front.wait_ready(sized=True)
    if body.content is not None:
        return await _content(front, body)
    work = Text(pieces=bool(body.return_token_strs))
    if body.messages is not None:
        chat = body.chat()
        told = await rendered(front, chat, work)
    else:
        told = await front.engine.text(
            work, prompt=body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    return json_body(
        {
            "count": len(told.ids),
            "max_model_len": front.engine.max_model_len,
            "tokens": told.ids,
            "token_strs": told.work.names if body.return_token_strs else None,
        }
    )


async def rendered(front: Front, chat: ChatRequest, work: Text) -> Told:
    """A conversation through the chat template, and its ids. Raises RequestError."""
    if chat.tools:
        tools_of(chat.tools)  # which raises where one of them is none
    return await front.engine.text(work, messages=chat.conversation(), template=front.template(chat.template()))


async def _content(front: Front, body: TokenizeRequest) -> web.Response:
    """llama.cpp's answer."""
    parts = parts_of([body.content] if isinstance(body.content, str) else body.content, "content")
    work = Text(parts, plain=body.parse_special is False, pieces=bool(body.with_pieces))
    told = await front.engine.text(work, add_special_tokens=bool(body.add_special))
    if not body.with_pieces:
        return json_body({"tokens": told.ids})
    return await asyncio.to_thread(_with_pieces, told)  # there may be millions, and streams do not wait for them


def _with_pieces(told: Told) -> web.Response:
    pieces = [{"id": id, "piece": _piece(text)} for id, text in zip(told.ids, told.work.texts, strict=True)]
    return json_body({"tokens": pieces})


def _piece(text: bytes) -> str | list[int]:
    """A text, or the bytes of what is none."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def parts_of(given: Any, name: str) -> list[str | int]:
    """Texts and token ids in turn, as llama.cpp takes prompts. Raises ApiError."""
    if not isinstance(given, list):
        raise ApiError(400, f"{name} must be a string or a list of strings and token ids, got {kind_of(given)}.", name)
    if odd := [part for part in given if type(part) not in (str, int)]:
        raise ApiError(400, f"{name} must hold strings and token ids, got {kind_of(odd[0])}.", name)
    check_ids([part for part in given if isinstance(part, int)], name, name)
    return given


async def detokenize(request: web.Request) -> web.Response:
    """The text of ids, special tokens too: ``prompt`` as vLLM calls it, and ``content`` as llama.cpp does."""
    front = request.app[FRONT]
    body = await front.read(request, DetokenizeRequest)
    await front.find_model(request, body.model)
    if body.tokens is None:
        raise ApiError(400, "tokens must be given: a list of token ids.", "tokens")
    if odd := [token for token in body.tokens if type(token) is not int]:
        raise ApiError(400, f"tokens must hold integers (token ids), got {kind_of(odd[0])}.", "tokens")
    check_ids(body.tokens, "tokens", "tokens")
    await front.wait_ready()
    told = await front.engine.text(Text(), ids=body.tokens)
    return json_body({"prompt": told.text, "content": told.text})


async def apply_template(request: web.Request) -> web.Response:
    """A conversation as the text that the model would be given."""
    front = request.app[FRONT]
    body = await front.read(request, ChatRequest)
    await front.find_model(request, body.model)
    await front.wait_ready()
    told = await rendered(front, body, Text())
    return json_body({"prompt": told.text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """tokenizer_config.json, with the chat template that is used. Not without --enable-tokenizer-info-endpoint."""
    settings = request.app[FRONT].settings
    if settings.tokenizer is None:
        raise ApiError(404, "there is no /tokenizer_info here; start the server with --enable-tokenizer-info-endpoint.")
    return json_body(await asyncio.to_thread(info_of, *settings.tokenizer))


def info_of(folder: Path, chat_template: str | None) -> dict[str, Any]:
    """What a tokenizer's folder says, with the chat template that is used. Raises ConfigError."""
    config = tokenizer_config(folder)
    templates = templates_of(folder, config, chat_template)
    info = {name: value for name, value in config.items() if name not in ("name_or_path", "auto_map")}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **info, "chat_template": templates.get("default")}
