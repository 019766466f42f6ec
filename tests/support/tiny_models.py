"""Tiny random checkpoints of every family, made by transformers, for tests that compare with it.

``ROWS`` names the variants; ``make(row, folder, seed)`` writes a complete model folder (config, safetensors, a
byte-level tokenizer); ``reference(folder)`` is transformers' own model of it. Other ``tiny_*`` modules have further
rows, which ``write`` makes likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB = 320
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 257, "eos_token_id": 256, "pad_token_id": 258, "tie_word_embeddings": False,
}  # fmt: skip


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_SHORT, _LONG = [1.0, 1.1, 1.3, 1.6], [1.5, 2.0, 4.0, 8.0]
_PHI3_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": _SHORT, "long_factor": _LONG,
    "partial_rotary_factor": 1.0,
}  # fmt: skip

# name -> (transformers' class prefix, what differs from BASE)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", _rope("dynamic", factor=4.0)),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama-llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-longrope": (
        "Llama",
        _rope("longrope", short_factor=_SHORT, long_factor=_LONG, original_max_position_embeddings=256, factor=4.0),
    ),
    "llama-bias-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-mha-head16": ("Llama", {"num_key_value_heads": 6, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "phi3-partial-window": (
        "Phi3",
        {"sliding_window": 30, "num_key_value_heads": 6, **_rope("default", partial_rotary_factor=0.5)},
    ),
    "phi3-longrope": ("Phi3", {"rope_parameters": _PHI3_LONG, "original_max_position_embeddings": 256}),
}


def make(row: str, folder: str | Path, seed: int = 0, **changes: Any) -> Path:
    """Write the variant ``row`` to ``folder`` (made if need be), its weights drawn from ``seed``.

    ``changes`` are further values of its config. Weights are larger than at initialisation, so that logits differ
    clearly from token to token; biases and norms are random too.
    """
    kind, values = ROWS[row]
    return write(kind, folder, seed, {**values, **changes})


def write(kind: str | Callable[..., Path], folder: str | Path, seed: int, values: dict[str, Any]) -> Path:
    """Write the row (kind, values) of any table: a class prefix, or a ``make(folder, seed, **values)`` of its own."""
    if callable(kind):
        return kind(Path(folder), seed, **_copy(values))
    return save(kind, folder, seed, **{**BASE, **_copy(values)})


def save(prefix: str, folder: str | Path, seed: int, **values: Any) -> Path:
    """transformers' ``prefix``ForCausalLM with exactly ``values`` as its config."""
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**values)
    name = prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM")
    return save_model(getattr(transformers, name), config, folder, seed, 0.0 if prefix.startswith("Gemma") else 1.0)


def save_model(kind: Any, config: Any, folder: str | Path, seed: int, norm: float = 1.0) -> Path:
    """A model of transformers' class ``kind``, in float32, its weights drawn by ``randomise``."""
    config.dtype = torch.float32
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).float()
        randomise(model, norm)
        model.tie_weights()
    model.save_pretrained(folder, safe_serialization=True)
    save_tokenizer(Path(folder))
    return Path(folder)


@torch.no_grad()
def randomise(model: torch.nn.Module, norm: float = 1.0) -> None:
    """Random values for every parameter; ``norm`` is the centre of the norms' weights."""
    norms = {
        id(parameter)
        for module in model.modules() if "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False) if name == "weight"
    }  # fmt: skip
    for parameter in model.parameters():
        spread = 0.2 if parameter.dim() == 1 or id(parameter) in norms else 0.15
        parameter.normal_(norm if id(parameter) in norms else 0.0, spread)


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    """Deep enough that a config cannot write into the table."""
    return {k: {**v} if isinstance(v, dict) else v for k, v in values.items()}


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and three special tokens; ids up to VOCAB are unused."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>", "<pad>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>", model_max_length=512
    )
    fast.save_pretrained(folder)


def reference(folder: str | Path, attention: str = "eager") -> Any:
    """transformers' model of ``folder``, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def random_prompts(count: int, seed: int, shortest: int = 1, longest: int = 90) -> list[list[int]]:
    """``count`` prompts of random byte ids, lengths spread over the range."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
