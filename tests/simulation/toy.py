"""The model that every simulated cluster serves: a small byte-level vocabulary, and its tokenizer.

Pieces end within characters, within stop strings, and over one another, so that text comes late, stop strings lie
across tokens, and bytes that make no character come by chance. The last ids have no text: a model's vocabulary may be
larger than its tokenizer's.
"""

from __future__ import annotations

from functools import cache, lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import TextTokenizer
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.checkpoint.pooler_config import PoolerConfig
from quire.proto.checkpoint.tokenizers_tiktoken import ALPHABET

SPECIAL = ("<s>", "</s>", "<|end|>", "<|x|>")
EOS, MORE_EOS = 1, [2]
_BYTES = [b"\xc3", b"\xa9", b"\xe4", b"\xbd", b"\xa0", b"\xf0", b"\x9f", b"\x98", b"\x80"]
_CUT = [b"\xa9a", b"a\xc3", b"\xbd\xa0", b"\x9f\x98", b"b\xf0\x9f", b"\x80."]
_WHOLE = ["a", "b", "c", "d", "e", " ", ".", "\n", "ab", "bc", "ca", "abc", "aa", " a", " b", "b.", "d e", "é", "e\n"]
_ADDED = "<plain>"
_NO_TEXT = 3
MAX_LOGPROBS = 20
LETTERS = "abcde .\n"
PIECES: list[bytes] = [
    *(text.encode() for text in SPECIAL), *_BYTES, *_CUT, *(text.encode() for text in _WHOLE), _ADDED.encode(),
    *[b""] * _NO_TEXT,
]  # fmt: skip
"""The bytes that each token adds to a text."""
VOCAB = len(PIECES)
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}.{{ message.content }}\n{% endfor %}a."


def _named(piece: bytes) -> str:
    return "".join(ALPHABET[byte] for byte in piece)


def _backend() -> Tokenizer:
    ordinary = PIECES[len(SPECIAL) : VOCAB - _NO_TEXT - 1]
    names = [*SPECIAL, *map(_named, ordinary)]
    parts = [(b"a", b"b"), (b"b", b"c"), (b"c", b"a"), (b"ab", b"c"), (b"a", b"a"), (b" ", b"a"), (b" ", b"b"),
             (b"\xc3", b"\xa9"), (b"\xbd", b"\xa0"), (b"\x9f", b"\x98")]  # fmt: skip
    merges = [(_named(a), _named(b)) for a, b in parts]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([_ADDED])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s>:0 $B:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return backend


BACKEND = _backend()
TOKENIZER = TextTokenizer(
    lambda text, special: BACKEND.encode(text, add_special_tokens=special).ids,
    lambda ids, skip, spaces=True: BACKEND.decode(ids, skip_special_tokens=skip),
    BACKEND, {"bos_token": "<s>", "eos_token": "</s>"}, BACKEND.token_to_id, {"default": TEMPLATE}, BACKEND.id_to_token,
)  # fmt: skip


@cache
def preparer(max_model_len: int, pools: str = "", whole: bool = False) -> Preparer:
    """What detokenizers share. ``pools``: "" generates, "embed" and "classify" pool; ``whole`` prompts."""
    name = {"": "ToyForCausalLM", "embed": "ToyModel", "classify": "ToyForSequenceClassification"}[pools]
    model = ModelConfig("", {"architectures": [name]}, max_model_len, VOCAB, eos_token_ids=[EOS, *MORE_EOS])
    return Preparer(TOKENIZER, model, MAX_LOGPROBS, pooler(pools, whole) if pools else None)


@cache
def pooler(pools: str, whole: bool) -> PoolerConfig:
    """How the model pools."""
    return PoolerConfig(
        architecture="Toy", convert=pools, pooling="CLS" if whole else "LAST", normalize=True, use_activation=True,
        activation="sigmoid", size=8, labels=("LABEL_0",) if pools == "classify" else (), whole=whole,
    )  # fmt: skip


def text_of(ids: list[int], skip_special: bool) -> str:
    """What a decoder makes of all ids at once: their bytes, those that are no character replaced."""
    data = b"".join(PIECES[token] for token in ids if not (skip_special and token < len(SPECIAL)))
    return data.decode("utf-8", "replace")


@lru_cache(4096)
def ids_of(text: str, special: bool) -> tuple[int, ...]:
    """A text's ids, by the tokenizer itself."""
    return tuple(BACKEND.encode(text, add_special_tokens=special).ids)
