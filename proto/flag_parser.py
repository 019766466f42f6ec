"""The command line's own parser, and how it reads numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


def human_int(text: str) -> int:
    """``32k`` is 32,000 and ``32K`` is 32,768, as in vLLM; plain digits are themselves."""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    try:
        if text and text[-1] in scale:
            return int(float(text[:-1]) * scale[text[-1]])
        return int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 32k or 32K") from None


def human_length(text: str) -> int:
    """A ``human_int``, or -1 for ``auto``."""
    return -1 if text == "auto" else human_int(text)


class FlagParser(argparse.ArgumentParser):
    """A parser that takes ``--max_num_seqs`` for ``--max-num-seqs``, as vLLM's does, and says in one line what is
    wrong. So do its subcommands."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The same as argparse's."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        return super().parse_known_args([*map(_dashed, given[:end]), *given[end:]], namespace)

    def error(self, message: str) -> NoReturn:
        """End this process with one line and code 2; the usage would be a page."""
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}; `{self.prog} --help` lists what there is.\n")


def _dashed(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


class Several(argparse.Action):
    """A flag that takes one value or more, each time it is given. Where the namespace has a list ``several``, the flag
    and its values are added to it when they are more than one: the last may have been meant for something else."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if len(values) > 1 and hasattr(namespace, "several"):
            namespace.several = [*namespace.several, (option_string, values)]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *values])
