"""The model's tokenizer as one of transformers, for whoever asks an LLM for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...proto.config import EngineArgs
from ...proto.readable import is_file


def load_tokenizer(args: EngineArgs) -> Any:
    """The tokenizer that ``args`` name by folder, as the detokenizers have it. Importing transformers takes seconds."""
    folder = args.tokenizer or args.model or ""
    if not is_file(Path(folder) / "tokenizer.json") and (made := _own(Path(folder))) is not None:
        return made
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        folder, use_fast=args.tokenizer_mode != "slow", trust_remote_code=args.trust_remote_code
    )


def _own(folder: Path) -> Any:
    """The tokenizer of a folder whose vocabulary transformers cannot read without code of the folder's own, or None."""
    from ...proto.checkpoint.chat_templates import chat_templates
    from ...proto.checkpoint.tokenizer_files import extra_tokens, named_tokens
    from ...proto.checkpoint.tokenizers_own import own_tokenizer

    own = own_tokenizer(folder)
    if own is None:
        return None
    from transformers import PreTrainedTokenizerFast

    templates = own.templates(chat_templates(folder, own.config))
    most = own.config.get("model_max_length")
    made = PreTrainedTokenizerFast(
        tokenizer_object=own.backend,
        extra_special_tokens=extra_tokens(own.config),
        chat_template=templates.get("default") if set(templates) <= {"default"} else templates,
        model_max_length=most if isinstance(most, int) else None,
        **named_tokens(own.config),
    )
    made.name_or_path = str(folder)  # not as an argument, with which transformers asks the hub about it
    return made
