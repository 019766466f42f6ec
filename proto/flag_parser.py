"""The command line's own parser, how it reads numbers, and what it says of what it cannot read."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from .config_error import ConfigError, together

_SCALES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_OF_JSON = re.compile(
    r"(--[a-z][\w-]*-(?:config|overrides|scaling|kwargs|prompt)|-O|-cc|-sc|-ac)\.([\w.+-]+)(?:=(.*))?", re.S
)
"""``--hf-overrides.rope.factor=2``: a key of a flag that is a JSON object."""


def human_int(text: str) -> int:
    """``32k`` is 32,000 and ``32K`` is 32,768, as in vLLM; plain digits are themselves."""
    try:
        if text and text[-1] in _SCALES:
            return int(float(text[:-1]) * _SCALES[text[-1]])
        return int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 32k or 32K") from None


def human_length(text: str) -> int:
    """A ``human_int``, or -1 for ``auto``."""
    return -1 if text == "auto" else human_int(text)


def port_number(text: str) -> int:
    """A port; its range is checked with the other values."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, which is a number from 0 to 65535") from None


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean X?`` for a name that is not among ``names``; empty where none is like it."""
    known = sorted(set(names))
    begin = [each for each in known if each.startswith(name)][:3] if len(name.strip("-")) > 2 else []
    if not (found := begin or difflib.get_close_matches(name, known, n=1, cutoff=0.7)):
        return ""
    return f"; did you mean {' or '.join(found)}?"


class FlagParser(argparse.ArgumentParser):
    """A parser that takes ``--max_num_seqs`` for ``--max-num-seqs`` and ``--json-flag.key value`` for a JSON object, as
    vLLM's does, takes no flag by its first letters, and says in one line all that is wrong. So do its subcommands."""

    foreign: Mapping[str, str] = {}
    """Flags of other servers, and what to write in place of each."""

    def __init__(self, *args: Any, **options: Any):
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)
        self.refusals: list[str] = []
        """What actions refuse of values that can be read: one ConfigError tells all."""
        self._faults: list[str] = []

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The same as argparse's, but that the command whose arguments are not known is the one that says so."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        given = [*self._switches(_joined([_dashed(word) for word in given[:end]])), *given[end:]]
        self.refusals, self._faults = [], []
        if self._subparsers is not None:
            return super().parse_known_args(given, namespace)
        told = self._look_over([word for word in given[:end] if word.startswith("-")])
        found, unknown = super().parse_known_args(given, namespace)
        if unknown and not told:
            self._faults.append(self._unknown(unknown))
        if self._faults:
            self._end()
        if self.refusals:
            raise ConfigError(together(self.refusals))
        return found, unknown

    def _look_over(self, words: list[str]) -> bool:
        """Note flags that do not exist; whether there are any. Those of other servers end the process: what is behind
        them would be read as something else, as ``-ngl 99`` is a ``-n`` here."""
        flags = dict.fromkeys(word.partition("=")[0] for word in words)
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        wrong = [flag for flag in unknown if flag.startswith("--") and flag not in ("--", *self.foreign)]
        if wrong:
            self._faults.append(self._unknown(wrong))
        if told := [f"{flag} is not a flag here: {self.foreign[flag]}" for flag in unknown if flag in self.foreign]:
            self._faults[:0] = told
            self._end()
        return bool(wrong)

    def _end(self) -> NoReturn:
        """End this process with all that was found."""
        faults, self._faults = self._faults + self.refusals, []
        self.error(together(faults))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The same as argparse's, but that what cannot be read is noted, to be told with the rest."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            self._faults.append(str(error))
            return _UNREAD

    def _switches(self, words: list[str]) -> list[str]:
        """The words, with a switch and its value (``--flag=false``, ``--flag False``) as ``--no-flag``, as vLLM had it
        once."""
        out: list[str] = []
        for word in words:
            if out and word.lower() in ("true", "false") and self._is_switch(out[-1]):
                word = f"{out.pop()}={word}"
            out.append(self._switched(word))
        return out

    def _is_switch(self, flag: str) -> bool:
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs == 0

    def _switched(self, word: str) -> str:
        flag, _, value = word.partition("=")
        if not self._is_switch(flag) or value.lower() not in ("true", "false"):
            return word
        off = flag.startswith("--no-") != (value.lower() == "false")
        return f"--{'no-' if off else ''}{flag.removeprefix('--').removeprefix('no-')}"

    def _unknown(self, words: list[str]) -> str:
        """What is wrong with words that nothing takes. A value may be a key, so none is shown beside its flag."""
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        hints = [nearest(flag, self._option_string_actions) for flag in flags]
        return f"unrecognized arguments: {' '.join(flags or words)}{''.join(hints)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """The same as argparse's, with the nearest of what there is. What is no choice is noted, to be told with the
        rest."""
        if value is _UNREAD:
            return
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            if isinstance(action, argparse._SubParsersAction):
                raise
            self._faults.append(str(error))

    def error(self, message: str) -> NoReturn:
        """End this process with one line and code 2; the whole usage would be a page."""
        if self._faults:
            message, self._faults = together([*self._faults, message]), []
        places = [
            f"[{name}]" if action.nargs == "?" else name
            for action in self._get_positional_actions()
            if (name := str(action.metavar or action.dest).upper())
        ]  # fmt: skip
        usage = " ".join([self.prog, *places, "[--FLAG VALUE ...]"])
        self.exit(
            2, f"{self.prog}: error: {message.rstrip('.')}; usage: {usage}; `{self.prog} --help` lists what there is.\n"
        )


_UNREAD = object()
"""The value of a flag whose text could not be read."""


def _dashed(word: str) -> str:
    flag = re.split("[=.]", word, maxsplit=1)[0]
    return flag.replace("_", "-") + word[len(flag) :] if flag.startswith("--") else word


def _joined(words: list[str]) -> list[str]:
    """The words, with the keys of each JSON flag (``--flag.key value``, ``--flag.list+ value``) made one object."""
    out: list[str] = []
    made: dict[str, dict[str, Any]] = {}
    at = 0
    while at < len(words):
        matched = _OF_JSON.fullmatch(words[at])
        at += 1
        if matched is None:
            out.append(words[at - 1])
            continue
        name, path, value = matched.groups()
        if value is None:
            value, at = (words[at], at + 1) if at < len(words) and not words[at].startswith("--") else ("true", at)
        if name not in made:
            made[name] = {}
            out.append(name)
        _put(made[name], path.split("."), _value(value))
    return [f"{word}={json.dumps(made[word])}" if word in made else word for word in out]


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = target.setdefault(key, {})
        target[key] = target = inner if isinstance(inner, dict) else {}
    key = path[-1]
    if key.endswith("+"):
        more = value.split(",") if isinstance(value, str) else [value]
        target[key[:-1]] = [*target.get(key[:-1], []), *(_value(each) for each in more)]
    else:
        target[key] = value


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


class Several(argparse.Action):
    """A flag that takes one value or more, each time it is given. Where the namespace has a list ``several``, the flag
    and its values are added to it when they are more than one: the last may have been meant for something else."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if len(values) > 1 and hasattr(namespace, "several"):
            namespace.several = [*namespace.several, (option_string, values)]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *values])
