"""Filling in the middle: prompts of the marks that a model was trained with.

A model that can fill in has tokens for it, and its vocabulary tells which: no chat template and no configuration has
them. The texts between the marks are encoded as plain text, so that nobody's code becomes a mark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..proto.errors import Refused
from ..proto.work import Infill
from .tokenizer import TextTokenizer


class Marks(NamedTuple):
    """The names of one family's tokens. Before the code come ``repo`` and, before each file, ``file``, where the model
    has them. ``ends`` end what is filled in, where the vocabulary has them.

    A family without ``middle`` is told the suffix first, and goes on where the prefix ends.
    """

    prefix: str
    suffix: str
    middle: str
    repo: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()


FAMILIES = {
    "Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4": Marks(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|end_of_text|>"),
    ),
    "StarCoder, StarCoder2, Granite Code": Marks(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>",
        ("<|endoftext|>", "<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),
    ),
    "SantaCoder": Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")),
    "CodeLlama": Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    "DeepSeek-Coder": Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "GLM-4.5": Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),
    "Codestral": Marks("[PREFIX]", "[SUFFIX]", ""),
}  # fmt: skip
"""What each family calls its tokens; the first whose tokens are in the vocabulary is the model's."""


MARKS = frozenset(text for marks in FAMILIES.values() for text in (*marks[:5], *marks.ends) if text)
"""All of them: what a client writes is none, whatever its vocabulary calls them."""

Encode = Callable[[str], list[int]]


class Filler(NamedTuple):
    """How one model is asked: its family, and the ids of its marks by name (``Marks``' fields)."""

    family: str
    ids: dict[str, int]
    ends: list[int]


def filler_of(tokenizer: TextTokenizer) -> Filler | None:
    """How the model of this tokenizer is asked to fill in; None where it cannot be."""
    for family, marks in FAMILIES.items():
        named = {"prefix": marks.prefix, "suffix": marks.suffix, "middle": marks.middle}
        ids = {name: tokenizer.token_id(text) for name, text in named.items() if text}
        if None in ids.values():
            continue
        more = {"repo": marks.repo, "file": marks.file}
        ids |= {name: i for name, text in more.items() if text and (i := tokenizer.token_id(text)) is not None}
        ends = [i for text in marks.ends if (i := tokenizer.token_id(text)) is not None]
        return Filler(family, {name: i for name, i in ids.items() if i is not None}, ends)
    return None


def infill_ids(filler: Filler | None, tokenizer: TextTokenizer, plain: Encode, infill: Infill) -> list[int]:
    """The prompt's ids; ``plain`` encodes what stands between the marks, none of which it knows. Raises Refused (400)
    where the model cannot fill in."""
    if filler is None:
        raise Refused(
            "this model's vocabulary has no tokens for filling in the middle, so a suffix means nothing to it; leave "
            "the suffix out, or serve a model that was trained for it (docs/http.md lists the families).",
            "suffix",
        )
    marks = filler.ids
    ids = [*tokenizer.begin]
    if infill.extra and "file" in marks:
        ids += [marks["repo"], *plain("repository\n")] if "repo" in marks else []
        for name, text in infill.extra:
            ids += [marks["file"], *plain(f"{name}\n{text}")]
        ids += [marks["file"], *plain("filename\n")]
    else:
        ids += [token for _, text in infill.extra for token in plain(text)]
    suffix = _inside(tokenizer, plain, infill.suffix)
    if "middle" not in marks:
        return [*ids, marks["suffix"], *suffix, marks["prefix"], *plain(infill.prefix + infill.after)]
    ids += [marks["prefix"], *plain(infill.prefix), marks["suffix"], *suffix, marks["middle"]]
    return [*ids, *_inside(tokenizer, plain, infill.after)]


def _inside(tokenizer: TextTokenizer, plain: Encode, text: str) -> list[int]:
    """The ids of a text that goes on within a line: without the blank that SentencePiece puts before whatever it is
    given first."""
    if not text:
        return []
    ids, before = plain(text), plain("\x00")
    if not before or not (tokenizer.piece(before[0]) or "").startswith("▁"):
        return ids
    behind = plain("\x00" + text)
    return behind[len(before) :] if behind[: len(before)] == before else ids
