"""The tokenizer in a GGUF file as a `tokenizers.Tokenizer`: byte-level BPE ("gpt2") or SentencePiece's ("llama").

Keys are llama.cpp's. What the vocabulary does not say, how a text is cut into words, has a name in
``tokenizer.ggml.pre``; here are the regular expressions of those names, as the models' own tokenizer.json have them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ..config import ConfigError
from . import tokenizers_sentencepiece as sentencepiece
from .gguf import read_gguf
from .gguf_config import CONTROL, Keys
from .tokenizers_tiktoken import DIGITS, TRIPLES

log = logging.getLogger(__name__)

_USER_DEFINED = 4
_MOST_CHARACTERS = 1024
"""Of a token. The time to find what a SentencePiece token is made of grows with the square of it."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Words:
    """How a text is cut: by each of ``patterns`` in turn. ``whole``: words in the vocabulary are not merged together;
    ``compose``: texts are brought to NFC first; ``bos``: whether prompts begin with BOS where the file does not say."""

    patterns: tuple[str, ...]
    whole: bool = False
    compose: bool = False
    bos: bool = False


_PLAIN = _Words((_GPT2,))
_LLAMA3 = _Words((TRIPLES,), whole=True, bos=True)
_QWEN2 = _Words((DIGITS,), compose=True)
_STARCODER = _Words((r"\p{N}", _GPT2))
_WORDS = {
    "default": _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN, "phi-2": _PLAIN, "olmo": _PLAIN, "mpt": _PLAIN, "jais": _PLAIN, "jina-es": _PLAIN,
    "llama-bpe": _LLAMA3, "llama-v3": _LLAMA3, "llama3": _LLAMA3, "falcon3": _LLAMA3, "smaug-bpe": _Words((TRIPLES,)),
    "dbrx": _Words((TRIPLES,)), "glm4": _Words((TRIPLES,)), "chatglm-bpe": _Words((TRIPLES,)),
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "stablelm2": _Words((DIGITS,)), "megrez": _QWEN2,
    "starcoder": _STARCODER, "refact": _STARCODER, "command-r": _STARCODER, "smollm": _STARCODER,
    "codeshell": _STARCODER, "tekken": _Words((_TEKKEN,), whole=True, bos=True),
}  # fmt: skip


@dataclass
class Made:
    """A tokenizer. ``config`` is what tokenizer_config.json would say; ``ends`` are tokens that end a reply besides
    eos_token; ``templates`` chat templates by name."""

    backend: Tokenizer
    config: dict[str, Any]
    templates: dict[str, str]
    ends: list[str] = field(default_factory=list)


def gguf_tokenizer(file: Path) -> Made:
    """The tokenizer of the model whose (first) file is ``file``. Raises ConfigError."""
    keys = Keys(read_gguf(file))
    tokens = keys.tokens
    kind = keys.text("tokenizer.ggml.model", "")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ConfigError(
            f"{file}: tokenizer.ggml.model must be 'gpt2' or 'llama', with tokens, got {kind!r} with {len(tokens)} "
            "tokens; name the model's Hugging Face folder with --tokenizer."
        )
    long = next((i for i, text in enumerate(tokens) if len(text) > _MOST_CHARACTERS), None)
    if long is not None:
        raise ConfigError(
            f"{file}: key 'tokenizer.ggml.tokens' has a token of {len(tokens[long])} characters (id {long}), more than "
            f"{_MOST_CHARACTERS}; download it again."
        )
    types = keys.numbers("tokenizer.ggml.token_type", len(tokens), int) or [1] * len(tokens)
    backend, bos = _bytes(keys, tokens, types) if kind == "gpt2" else _pieces(keys, tokens, types)
    named = {name: i for name, key in _NAMES.items() if (i := keys.token(key)) is not None}
    _surround(keys, backend, named, bos)
    config: dict[str, Any] = {name: tokens[i] for name, i in named.items()}
    config["additional_special_tokens"] = [tokens[i] for i, type in enumerate(types) if type == CONTROL]
    ends = [tokens[i] for i in keys.ends() if i != named.get("eos_token")]
    return Made(backend, config, _templates(keys), ends)


_NAMES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "mask_token": "mask",
}  # fmt: skip


def _bytes(keys: Keys, tokens: list[str], types: Any) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether BOS is put before a prompt by default."""
    name, file = keys.text("tokenizer.ggml.pre", ""), keys.gguf.file
    if not name:  # as files from before April 2024 are
        name = "default"
        log.warning(
            "%s has no tokenizer.ggml.pre, so texts are cut into words as by %r, which may give other tokens than "
            "the model was trained on; convert it again, or name the model's Hugging Face folder with --tokenizer.",
            file, name,
        )  # fmt: skip
    if name not in _WORDS:
        raise ConfigError(
            f"{file}: tokenizer.ggml.pre {name!r} is not supported; name the model's Hugging Face folder with "
            "--tokenizer."
        )
    words = _WORDS[name]
    merges = [tuple(each.split(" ")) for each in keys.texts("tokenizer.ggml.merges")]
    odd = next((n for n, each in enumerate(merges) if len(each) != 2), None)
    if odd is not None:
        raise ConfigError(f"{file}: key 'tokenizer.ggml.merges' has no pair at {odd}; download it again.")
    vocab = {text: i for i, text in reversed(list(enumerate(tokens)))}
    try:
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=words.whole))  # type: ignore[arg-type]
    except Exception as error:  # `tokenizers` raises plain Exception for any fault
        raise ConfigError(f"{file}: key 'tokenizer.ggml.merges': {_line(error)}; download it again.") from error
    if words.compose:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=bool(keys.flag("add_space_prefix", False)), use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_USER_DEFINED, False), (CONTROL, True)):
        added = [
            AddedToken(text, special=special, normalized=False)
            for i, text in enumerate(tokens) if types[i] == kind and text
        ]  # fmt: skip
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    return backend, words.bos


def _pieces(keys: Keys, tokens: list[str], types: Any) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, and whether BOS is put before a prompt by default."""
    scores = keys.numbers("tokenizer.ggml.scores", len(tokens), float) or [0.0] * len(tokens)
    unknown = keys.token("unknown")
    pieces: list[tuple[str, float, int]] = []
    seen: set[str] = set()
    for i, (text, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        pieces.append((f"[{text}#{i}]" if text in seen else text, score, kind))
        seen.add(text)
    model = sentencepiece.Pieces(
        pieces, byte_fallback=sentencepiece.BYTE in types, unk_id=unknown or 0,
        add_dummy_prefix=keys.flag("add_space_prefix", True),
        remove_extra_whitespaces=keys.flag("remove_extra_whitespaces", False),
    )  # fmt: skip
    try:
        return sentencepiece.build(model, {}), True
    except Exception as error:  # `tokenizers` raises plain Exception for any fault
        raise ConfigError(
            f"{keys.gguf.file}: key 'tokenizer.ggml.tokens': {_line(error)}; download it again."
        ) from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _surround(keys: Keys, backend: Tokenizer, named: dict[str, int], bos: bool) -> None:
    """Put BOS before prompts and EOS behind them, where the file says so."""
    around = {
        name: [text] if keys.flag(f"add_{name}", default) and (text := keys.tokens[named[name]]) else []
        for name, default in (("bos_token", bos), ("eos_token", False)) if name in named
    }  # fmt: skip
    before, after = around.get("bos_token", []), around.get("eos_token", [])
    if before or after:
        ids = {keys.tokens[named[name]]: named[name] for name, texts in around.items() if texts}
        backend.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=[*ids.items()])


def _templates(keys: Keys) -> dict[str, str]:
    found = {}
    if "tokenizer.chat_template" in keys.gguf.metadata:
        found["default"] = keys.text("tokenizer.chat_template")
    start = "tokenizer.chat_template."
    for key in keys.gguf.metadata:
        if key.startswith(start):
            found[key.removeprefix(start)] = keys.text(key)
    return found
