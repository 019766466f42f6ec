"""The model that simulated clusters serve: a vocabulary of 48 tokens, and no weights.

It is small because the fake worker makes a distribution over all of it for each token with logprobs. Its tokenizer is
of the byte-level kind, and it has bytes that are half a character, a token of several letters and special ones, so that
text is held back and stop strings are found across tokens.
"""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.detokenizer.tokenize import Preparer
from quire.detokenizer.tokenizer import TextTokenizer
from quire.proto.checkpoint.model_config import ModelConfig
from quire.proto.checkpoint.pooler_config import PoolerConfig

SPECIALS = ["<s>", "</s>", "<|end|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?"
_BYTES = ["Ġ", "Ċ", "Ã", "©", "¨", "ð", "Ł", "ĺ", "Ģ"]  # space, newline; parts of é, è and 😀, as byte-level names them
_MERGES = [("a", "b"), ("Ġ", "t"), ("t", "h"), ("th", "e"), ("Ã", "©"), ("i", "n")]
VOCAB = [*SPECIALS, *LETTERS, *_BYTES, *("".join(pair) for pair in _MERGES)]
BOS, EOS, END = range(3)
"""``EOS`` is the tokenizer's, ``END`` is another token that ends a reply, by the model's config."""
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@cache
def tokenizer() -> TextTokenizer:
    """The same one for all simulated processes: it keeps nothing of a request."""
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(VOCAB)}, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return TextTokenizer(
        lambda text, special: backend.encode(text, add_special_tokens=special).ids,
        lambda ids, skip, spaces=True: backend.decode(ids, skip_special_tokens=skip),
        backend, {"bos_token": "<s>", "eos_token": "</s>"}, backend.token_to_id, {"default": TEMPLATE},
        backend.id_to_token,
    )  # fmt: skip


@cache
def preparer(max_model_len: int, pools: bool = False, whole: bool = False) -> Preparer:
    """What a detokenizer of this model loads."""
    config = ModelConfig("", {"architectures": ["ToyForCausalLM"]}, max_model_len, len(VOCAB), [EOS, END])
    pooler = None
    if pools:
        pooler = PoolerConfig("ToyModel", "embed", "MEAN", False, False, "identity", 64, whole=whole)
    return Preparer(tokenizer(), config, 20, pooler)
