"""Models to measure with: real shapes, weights of noise, and a tokenizer trained on text that every machine has.

    python -m bench.models --out FOLDER [NAME ...]

Nothing is downloaded. Each is a complete Hugging Face folder that quire, vLLM and transformers load alike. What such a
model writes is noise, too; its speed is a real model's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .report import BenchError

FOLDER = Path(os.environ.get("QUIRE_BENCH_MODELS", Path.home() / ".cache" / "quire-bench"))
"""Where models are looked for by name. The environment variable QUIRE_BENCH_MODELS names another folder."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD_ID, EOS_ID = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-llama": {  # 5M parameters
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 688, "vocab_size": 4096, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **COMMON,
    },
    "small-llama": {  # 125M
        "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32_000, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **COMMON,
    },
    "half-b-qwen2": {  # 0.5B: Qwen2.5-0.5B's shape
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151_936, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **COMMON,
    },
}  # fmt: skip
MOST_TOKENS = 32_000
"""Entries of the largest tokenizer: local text holds no more. A larger vocabulary's other ids have no text."""
PROMPT_IDS = (3, 4000)


def find_model(name: str, folder: Path = FOLDER) -> Path:
    """The folder of a model given by path or by name. Raises BenchError where there is none."""
    for path in (Path(name), folder / name):
        if (path / "config.json").is_file():
            return path.resolve()
    raise BenchError(
        f"no model {name!r}, neither as a folder nor in {folder}; make {', '.join(SHAPES)} with "
        f"`python -m bench.models --out {folder}`, or set QUIRE_BENCH_MODELS."
    )


def prompt_ids(folder: Path) -> tuple[int, int]:
    """The range of token ids that prompts are made of: ordinary ones of the smallest model, or of this one if it is
    smaller still."""
    vocabulary = json.loads((folder / "config.json").read_text()).get("vocab_size", PROMPT_IDS[1])
    return PROMPT_IDS[0], min(PROMPT_IDS[1], vocabulary)


def make_model(name: str, folder: Path) -> None:
    """Write one model in bfloat16: matrices from a normal distribution of deviation 0.02, norms 1, biases 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if key.endswith("bias") else 1.0)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder / name)
    make_tokenizer(min(shape["vocab_size"], MOST_TOKENS), folder / name)


def make_tokenizer(entries: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer and write it. Raises BenchError where the local text is too short."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(local_text(), trainer)
    if tokenizer.get_vocab_size() < entries:
        raise BenchError(f"the text here yields {tokenizer.get_vocab_size()} tokens of {entries}; use a full Python.")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[EOS_ID], pad_token=SPECIAL[PAD_ID], chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)


def local_text(limit: int = 24_000_000) -> Iterator[str]:
    """The source of Python's standard library, up to ``limit`` characters."""
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue
        text = path.read_text("utf-8", errors="ignore")
        total += len(text)
        if total > limit:
            return
        yield text


def main() -> int:
    """Make the models that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SHAPES), metavar="NAME", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder that holds them (default: %(default)s)")
    args = parser.parse_args()
    for name in args.names:
        if name not in SHAPES:
            parser.error(f"unknown model {name!r}; there are {', '.join(SHAPES)}")
        if (args.out / name / "tokenizer.json").exists():  # written last
            print(f"{name} is there already")
            continue
        make_model(name, args.out)
        print(f"{name} written to {args.out / name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
