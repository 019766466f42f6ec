"""Structural tags: free text in which what stands between certain marks has a form. As a grammar in Lark's notation.

The format is that of vLLM and xgrammar, as JSON: ``{"type": "structural_tag", "format": {...}}``, or the older one with
``structures`` and ``triggers``. Of formats there are const_string, any_text, regex, json_schema, sequence, or,
tag, triggered_tags and tags_with_separator. quire's own: ``thought`` of
triggered_tags, ``{"begin": ..., "end": ...}``, is text before them in which no trigger counts, where the text begins
with ``begin``, and which may never end; and ``"special_tokens": true`` beside ``format`` has marks that are special
tokens of the model written as such, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 20
"""Formats within formats."""


class FormatError(ValueError):
    """A structural tag that cannot be read. One line, for the client."""


_MARK = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])")
"""How the texts of special tokens look."""


def lark_of(text: str, schema: Callable[[Any, bool], str], special: Callable[[str], int | None]) -> str:
    """The grammar of the structural tag ``text``. ``schema`` gives the text of a JSON schema as the grammar is to have
    it; its second argument tells whether it must be honoured exactly. ``special`` gives the id of the special token
    with a text, None where there is none. Raises FormatError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the structural tag is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise FormatError("a structural tag must be an object.")
    marks = special if given.get("special_tokens") is True else lambda _: None
    return _Writer(schema, marks).grammar(_older(given) if "structures" in given else given.get("format"))


def _older(given: dict[str, Any]) -> dict[str, Any]:
    """The format of the older form: every structure is a tag that a trigger begins."""
    tags = [
        {**each, "content": {"type": "json_schema", "json_schema": each.get("schema")}}
        if isinstance(each, dict)
        else each
        for each in _list(given, "structures")
    ]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


class _Writer:
    def __init__(self, schema: Callable[[Any, bool], str], special: Callable[[str], int | None]):
        self._schema, self._special = schema, special
        self._rules: list[str] = []

    def grammar(self, format: Any) -> str:
        start = self._of(format, 0)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/", ""])

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _of(self, format: Any, depth: int) -> str:
        """The name of the rule of one format."""
        if not isinstance(format, dict) or depth > MAX_DEPTH:
            raise FormatError(f"a format must be an object with a type, at most {MAX_DEPTH} within one another.")
        match format.get("type"):
            case "const_string":
                return self._rule(_text(format, "value"))
            case "any_text":
                return self._rule("TEXT")
            case "regex":
                return self._rule(f"/{_pattern(format)}/")
            case "json_schema":
                return self._rule("%json " + self._schema(format.get("json_schema"), format.get("strict") is not False))
            case "sequence":
                return self._rule(" ".join(self._of(each, depth + 1) for each in _list(format, "elements")))
            case "or":
                return self._rule(" | ".join(self._of(each, depth + 1) for each in _list(format, "elements")))
            case "tag":
                return self._rule(self._tag(format, self._literal(_string(format, "begin")), depth))
            case "triggered_tags":
                return self._triggered(format, depth)
            case "tags_with_separator":
                return self._separated(format, depth)
        raise FormatError(f"a format of type {format.get('type')!r:.80} is not supported.")

    def _tag(self, tag: Any, begin: str, depth: int) -> str:
        content = tag.get("content")
        end = _string(tag, "end")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return f"{begin} {self._upto(end)}"
        return f"{begin} {self._of(content, depth + 1)} {self._literal(end)}"

    def _literal(self, text: str) -> str:
        """A text; what of it is a special token may be written as that, or spelled out."""
        parts = [(each, self._special(each) if _MARK.fullmatch(each) else None) for each in _MARK.split(text) if each]
        if all(token is None for _, token in parts):
            return json.dumps(text)
        said = [json.dumps(each) if token is None else f"({json.dumps(each)} | <[{token}]>)" for each, token in parts]
        return " ".join(said)

    def _upto(self, mark: str, text: str = "TEXT") -> str:
        """The name of the rule of text up to the first ``mark``, and that."""
        spelled = self._rule(f"{text} {json.dumps(mark)}", "[lazy]")
        token = self._special(mark)
        return spelled if token is None else self._rule(f"{spelled} | {text}? <[{token}]>")

    def _triggered(self, format: dict[str, Any], depth: int) -> str:
        """Text, and in it tags, each from its trigger on; a trigger is part of no other text."""
        triggers = _list(format, "triggers")
        bodies: dict[str, list[str]] = {}
        for tag in _tags(format):
            begin = tag["begin"]
            trigger = next(
                (each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None
            )
            if trigger is None:
                raise FormatError(f"no trigger begins the tag {begin!r:.80}.")
            rest = self._literal(begin[len(trigger) :])
            bodies.setdefault(trigger, []).append(self._rule(self._tag(tag, rest, depth)))
        some, once, least = self._tagged(bodies, "TEXT"), format.get("stop_after_first"), format.get("at_least_one")
        thought = format.get("thought")
        if thought is None:
            if once:
                return self._rule(some if least else f"{some} | TEXT")
            return self._rule(f"{some}{'+' if least else '*'} TEXT")
        if not isinstance(thought, dict) or not _string(thought, "end") or least:
            raise FormatError("thought must be an object with begin and end, and goes with no at_least_one.")
        begin, after = _string(thought, "begin"), self._rule(f"{some} | TEXT" if once else f"{some}* TEXT")
        return self._rule(self._thought(begin, thought["end"], after, bodies, once))

    def _tagged(self, bodies: dict[str, list[str]], text: str) -> str:
        """``text`` up to a trigger, and a tag of it."""
        groups = [self._rule(f"{self._upto(trigger, text)} ({' | '.join(rules)})") for trigger, rules in bodies.items()]
        return f"({' | '.join(groups)})"

    def _thought(self, begin: str, end: str, after: str, bodies: dict[str, list[str]], once: Any) -> str:
        """A thought and ``after``, or a text without one. The lexer must see from the first character on which it is:
        so one rule has all of the thought, and the other texts do not begin as it does."""
        token = self._special(begin or "<think>")  # which may stand there even where it need not
        opened = "" if token is None else f"<[{token}]> {self._upto(end)} {after} | <[{token}]> TEXT | "
        if not begin:
            return f"{opened}{self._upto(end)} {after} | TEXT"
        self._rules.append(f"OPENED: /\\s*{_escaped(begin)}(.|\\n)*/")
        self._rules.append("UNOPENED: TEXT & ~OPENED")
        first = self._tagged(bodies, "UNOPENED")
        return f"{opened}{self._upto(end, 'OPENED')} {after} | {first}{'' if once else f' {after}'} | TEXT"

    def _separated(self, format: dict[str, Any], depth: int) -> str:
        tags = [self._rule(self._tag(tag, self._literal(tag["begin"]), depth)) for tag in _tags(format)]
        some = self._rule(" | ".join(tags))
        separator = self._literal(_string(format, "separator"))
        body = some if format.get("stop_after_first") else f"{some} ({separator} {some})*"
        return self._rule(body if format.get("at_least_one") else f"({body})?")


def _tags(format: dict[str, Any]) -> list[dict[str, Any]]:
    tags = _list(format, "tags")
    if not all(isinstance(tag, dict) and isinstance(tag.get("begin"), str) for tag in tags):
        raise FormatError("each of tags must be an object with begin, content and end.")
    return tags


def _list(format: dict[str, Any], name: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise FormatError(f"{name} must be a list that is not empty.")
    return value


def _pattern(format: dict[str, Any]) -> str:
    """A regular expression as the grammar writes it, between slashes and on one line."""
    pattern = json.loads(_text(format, "pattern"))
    if not pattern:
        raise FormatError("pattern must be a regular expression that is not empty.")
    slashes = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.S)
    return slashes.replace("\n", r"\n").replace("\r", r"\r")


def _escaped(text: str) -> str:
    """A text within a regular expression of the grammar."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _string(format: dict[str, Any], name: str) -> str:
    value = format.get(name, "")
    if not isinstance(value, str):
        raise FormatError(f"{name} must be a string, got {value!r:.80}.")
    return value


def _text(format: dict[str, Any], name: str) -> str:
    """A text as a literal of the grammar."""
    return json.dumps(_string(format, name))
