"""Tokenizers whose repositories bring code of their own, made from their vocabulary files instead.

The class that tokenizer_config.json names (or else config.json's architecture) chooses the family; nothing of the
repository is run. What the family's code would do is here as data: the tokens it adds, what it puts before a prompt,
how it writes a chat where the folder has no template, and which tokens end a reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ..config import ConfigError
from ..readable import is_file
from . import tokenizers_chat as chats
from . import tokenizers_sentencepiece as sentencepiece
from . import tokenizers_tiktoken as tiktoken
from .chat_templates import tokenizer_config
from .gguf import gguf_file
from .gguf_tokenizer import gguf_tokenizer
from .model_config import read_json
from .tokenizer_files import content, mark_special

log = logging.getLogger(__name__)

_PADDING = 1024
"""Ids without a token that a vocab_size may count, being rounded up."""


@dataclass
class Own:
    """A tokenizer made here. ``config`` is tokenizer_config.json with what the family's code knows by itself.

    ``template`` is for folders without a chat template; ``ends`` are tokens that end a reply besides eos_token;
    ``spelling``: what chat templates write, and what stands for it here; ``own_templates``: by name, of a GGUF file.
    """

    backend: Tokenizer
    config: dict[str, Any]
    template: str | None = None
    ends: list[str] = field(default_factory=list)
    spelling: tuple[str, str] | None = None
    own_templates: dict[str, str] = field(default_factory=dict)

    @property
    def all_ends(self) -> list[str]:
        """The tokens that end a reply."""
        eos = content(self.config.get("eos_token"))
        return [*([eos] if eos else []), *self.ends]

    def templates(self, given: dict[str, str]) -> dict[str, str]:
        """The chat templates that were ``given``, or else the family's, spelt for this tokenizer."""
        if not given:
            given = self.own_templates if self.template is None else {"default": self.template}
        return given if self.spelling is None else {name: t.replace(*self.spelling) for name, t in given.items()}


@dataclass
class _Folder:
    path: Path
    vocabulary: Path
    config: dict[str, Any]  # tokenizer_config.json over special_tokens_map.json
    model: dict[str, Any]  # config.json

    @property
    def generation(self) -> dict[str, Any]:
        return read_json(self.path / "generation_config.json")

    def called(self, name: str) -> bool:
        """Whether the folder, or the name that its files give it, contains ``name``."""
        names = (self.path.absolute(), self.config.get("name_or_path"), self.model.get("_name_or_path"))
        return any(name in str(each).lower() for each in names)

    def listed(self) -> dict[int, Any]:
        """Tokens that tokenizer_config.json puts at ids of its own choice, as it writes them."""
        tokens = self.config.get("added_tokens_decoder")
        tokens = tokens if isinstance(tokens, dict) else {}
        return {int(i): token for i, token in tokens.items() if str(i).isdecimal() and content(token)}

    def added(self) -> dict[int, str]:
        """Tokens that the JSON files add to the vocabulary, or rename in it, by id."""
        older = read_json(self.path / "added_tokens.json")
        found = {i: text for text, i in older.items() if isinstance(i, int)}
        found |= {i: content(token) or "" for i, token in self.listed().items()}
        return {i: text for i, text in found.items() if 0 <= i < 1 << 31}


def own_tokenizer(path: Path) -> Own | None:
    """The tokenizer of folder ``path``, which has no tokenizer.json; None where no family here fits.

    Raises ConfigError where a file of it is missing or cannot be read, or its vocabulary is another model's.
    ``path`` may be a GGUF file.
    """
    if (gguf := gguf_file(path)) is not None:
        made = gguf_tokenizer(gguf)
        mark_special(made.backend, made.config)
        return Own(made.backend, made.config, ends=made.ends, own_templates=made.templates)
    config = tokenizer_config(path)
    model = read_json(path / "config.json")
    name = config.get("tokenizer_class")
    if not isinstance(name, str):
        name = _OF_ARCHITECTURE.get(str((model.get("architectures") or [""])[0]), "")
    file, load = _FAMILIES.get(name.removesuffix("Fast"), ("", None))
    if load is None:
        return None
    if not is_file(path / file):
        if load in (_llama, _gpt2):  # transformers knows other files of theirs
            return None
        raise ConfigError(f"{path} lacks {file}, the vocabulary of its {name}; download it again.")
    folder = _Folder(path, path / file, config, model)
    own = load(folder)
    mark_special(own.backend, own.config)
    _check_size(folder, own)
    return own


def _check_size(folder: _Folder, own: Own) -> None:
    """Hold the vocabulary to config.json's vocab_size. Added tokens may be beyond it, but not what every prompt has."""
    size = folder.model.get("vocab_size") or folder.model.get("padded_vocab_size")
    if not isinstance(size, int):
        return
    ids = set(own.backend.get_vocab(with_added_tokens=True).values())
    needed = ids - {int(i) for i in own.config["added_tokens_decoder"]}
    last = max(needed.union(own.backend.encode("", add_special_tokens=True).ids))
    if last >= size:
        raise ConfigError(
            f"{folder.vocabulary} has tokens up to id {last}, but config.json's vocab_size is {size}: they are not of "
            "one model; download both again."
        )
    if max(ids) < size - _PADDING:
        log.warning("%s has tokens up to id %d, but config.json's vocab_size is %d: ids beyond have no text; if the "
                    "vocabulary is not whole, download it again", folder.vocabulary, max(ids), size)  # fmt: skip


def _complete(
    folder: _Folder, backend: Tokenizer, added: dict[int, str], named: dict[str, str], before: list[str],
    after: list[str] | None = None,
) -> Own:  # fmt: skip
    """Put tokens around prompts; complete the config with ``named`` tokens and with ``added`` ones, by id."""
    around = [*before, *(after or [])]
    if around:
        ids = {text: backend.token_to_id(text) for text in around}
        if absent := [text for text, i in ids.items() if i is None]:
            raise ConfigError(f"{folder.vocabulary} has no token {absent[0]!r}, which goes around every prompt.")
        backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *(after or [])], special_tokens=[*ids.items()]
        )
    plain = {i for i, token in folder.listed().items() if isinstance(token, dict) and not token.get("special", True)}
    # Not "normalized", whatever the file says: a normaliser's blank would go before the token that is looked for.
    decoder = {str(i): {"content": text, "special": i not in plain, "normalized": False} for i, text in added.items()}
    given = {key: value for key, value in folder.config.items() if value is not None}
    return Own(backend, {**named, **given, "added_tokens_decoder": decoder})


# ---------------------------------------------------------------- SentencePiece


def _llama(
    folder: _Folder, model: sentencepiece.Pieces | None = None, special: dict[int, str] | None = None, bos: bool = True
) -> Own:
    """Llama's, and all whose code is a copy of it: BOS before a prompt unless add_bos_token says otherwise."""
    model = model or sentencepiece.read_pieces(folder.vocabulary)
    added = folder.added() | (special or {})
    backend = sentencepiece.build(model, added, first_only=folder.config.get("legacy") is False)
    named = model.named()

    def wanted(name: str, default: bool) -> list[str]:
        text = content(folder.config.get(name)) or named.get(name)
        return [text] if text and folder.config.get(f"add_{name}", default) else []

    return _complete(folder, backend, added, named, wanted("bos_token", bos), wanted("eos_token", False))


def _baichuan(folder: _Folder) -> Own:
    """generation_config.json of the chat models names the reserved tokens before what users and the model say."""
    model = sentencepiece.read_pieces(folder.vocabulary)
    ids = [folder.generation.get(name) for name in ("user_token_id", "assistant_token_id")]
    roles = {i: model.pieces[i][0] for i in ids if isinstance(i, int) and 0 <= i < len(model.pieces)}
    own = _llama(folder, model, roles)
    if len(roles) == 2:
        user, assistant = roles.values()
        second = folder.model.get("vocab_size") == 125_696  # Baichuan2
        own.template = chats.baichuan(user, assistant, closed=not second)
    return own


def _internlm(folder: _Folder) -> Own:
    own = _llama(folder)
    own.template, own.ends = chats.INTERNLM, ["<eoa>"]
    return own


def _internlm2(folder: _Folder) -> Own:
    own = _llama(folder)
    for start, end in (("<|im_start|>", "<|im_end|>"), ("[UNUSED_TOKEN_146]", "[UNUSED_TOKEN_145]")):
        if own.backend.token_to_id(start) is not None:
            own.template, own.ends = chats.internlm2(start, end), [end]
            break
    return own


def _orion(folder: _Folder) -> Own:
    own = _llama(folder)
    own.template = chats.ORION
    return own


_GLM = ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]


def _chatglm(folder: _Folder) -> Own:
    """ChatGLM2 and 3: special tokens follow the model's pieces; [gMASK] and sop go before every prompt.

    The code calls two of them sop and eop, which as text are parts of words such as people: here they are <sop> and
    <eop>, and templates that write [gMASK]sop are respelt. Those that no prompt needs are not looked for in text.
    """
    model = sentencepiece.read_pieces(folder.vocabulary)
    numbered = dict(enumerate(_GLM, len(model.pieces)))
    added = folder.added() | numbered
    backend = sentencepiece.build(model, added)
    named = model.named()
    named["pad_token"] = named["unk_token"]
    sought = {i: text for i, text in added.items() if text not in ("[MASK]", "[sMASK]", "<eop>")}
    own = _complete(folder, backend, sought, named, ["[gMASK]", "<sop>"])
    extra = own.config.pop("additional_special_tokens", None) or []
    own.config["additional_special_tokens"] = [token for token in extra if content(token) not in ("sop", "eop")]
    own.spelling = ("[gMASK]sop", "[gMASK]<sop>")
    if folder.called("chatglm2"):
        own.template = chats.CHATGLM2
    else:
        own.template, own.ends = chats.CHATGLM3, ["<|user|>", "<|observation|>"]
    return own


# ---------------------------------------------------------------- byte-level


def _gpt2(folder: _Folder) -> Own:
    """GPT-2's two files, as OPT and Aquila have them; BOS before a prompt where add_bos_token says so."""
    vocabulary = folder.path / "vocab.json"
    added = folder.added()
    try:
        vocab, merges = BPE.read_file(str(vocabulary), str(folder.vocabulary))
        backend = Tokenizer(BPE({**vocab, **{text: i for i, text in added.items()}}, merges))
    except Exception as error:  # `tokenizers` raises plain Exception for any fault of the files
        raise ConfigError(f"{vocabulary} and merges.txt cannot be read: {error}; download them again.") from error
    spaced = bool(folder.config.get("add_prefix_space"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    backend.decoder = decoders.ByteLevel()
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    bos = content(folder.config.get("bos_token")) or named["bos_token"]
    return _complete(folder, backend, added, named, [bos] if folder.config.get("add_bos_token") else [])


def _qwen(folder: _Folder) -> Own:
    ranks = tiktoken.read_ranks(folder.vocabulary)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
    added = folder.added() | dict(enumerate(special, max(ranks.values()) + 1))
    backend = tiktoken.build(ranks, added, tiktoken.DIGITS, compose=True)
    chat = folder.generation.get("chat_format") == "chatml"
    own = _complete(folder, backend, added, {"eos_token": "<|im_end|>" if chat else "<|endoftext|>"}, [])
    own.ends = ["<|endoftext|>"]
    own.template = chats.QWEN if chat else None
    return own


def _glm4(folder: _Folder) -> Own:
    """GLM-4 before its native form: a tiktoken file, whose special tokens tokenizer_config.json lists."""
    ranks = tiktoken.read_ranks(folder.vocabulary)
    added = folder.added()
    backend = tiktoken.build(ranks, added, tiktoken.TRIPLES)
    own = _complete(folder, backend, added, {"eos_token": "<|endoftext|>"}, ["[gMASK]", "<sop>"])
    own.template, own.ends = chats.GLM4, ["<|user|>", "<|observation|>"]
    return own


# ---------------------------------------------------------------- who is who

_FAMILIES: dict[str, tuple[str, Callable[[_Folder], Own]]] = {
    "BaiChuanTokenizer": ("tokenizer.model", _baichuan),
    "BaichuanTokenizer": ("tokenizer.model", _baichuan),
    "ChatGLM4Tokenizer": ("tokenizer.model", _glm4),
    "ChatGLMTokenizer": ("tokenizer.model", _chatglm),
    "GPT2Tokenizer": ("merges.txt", _gpt2),
    "InternLM2Tokenizer": ("tokenizer.model", _internlm2),
    "InternLMTokenizer": ("tokenizer.model", _internlm),
    "LlamaTokenizer": ("tokenizer.model", _llama),
    "OrionTokenizer": ("tokenizer.model", _orion),
    "QWenTokenizer": ("qwen.tiktoken", _qwen),
    "YiTokenizer": ("tokenizer.model", partial(_llama, bos=False)),
}
"""Tokenizer class -> its vocabulary file and what reads it."""

_OF_ARCHITECTURE = {
    "AquilaForCausalLM": "GPT2Tokenizer",
    "AquilaModel": "GPT2Tokenizer",
    "BaiChuanForCausalLM": "BaiChuanTokenizer",
    "BaichuanForCausalLM": "BaichuanTokenizer",
    "ChatGLMForConditionalGeneration": "ChatGLMTokenizer",
    "ChatGLMModel": "ChatGLMTokenizer",
    "InternLM2ForCausalLM": "InternLM2Tokenizer",
    "InternLMForCausalLM": "InternLMTokenizer",
    "OPTForCausalLM": "GPT2Tokenizer",
    "OrionForCausalLM": "OrionTokenizer",
    "QWenLMHeadModel": "QWenTokenizer",
}
"""The class of a folder whose files name none."""
