"""Structural tags: free text in which what stands between certain marks has a form. As a grammar in Lark's notation.

The format is that of vLLM and xgrammar, as JSON: ``{"type": "structural_tag", "format": {...}}``, or the older one with
``structures`` and ``triggers``. Of formats there are const_string, any_text, regex, json_schema, sequence, or,
tag, triggered_tags and tags_with_separator. quire's own are:

- ``thought`` of triggered_tags, ``{"begin": ..., "end": ..., "always": ...}``: text before them in which no trigger
  counts, where the text begins with ``begin`` (or ``always``), and which may never end;
- after_thought: its ``content`` with such a ``thought`` before it, which ends; behind it stands the thought's ``then``,
  or line breaks;
- ``"begun": "thought"`` or ``"answer"`` beside ``format``: the prompt has opened the thought or closed it (``placed``);
- ``"special_tokens": true`` there: marks that are special tokens of the model are written as such, too.
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
    return _Writer(schema, marks, given.get("begun")).grammar(
        _older(given) if "structures" in given else given.get("format")
    )


def placed(text: str, tail: str) -> str:
    """The structural tag ``text`` for a prompt that ends with ``tail``, without blanks: the same where that neither
    opens nor closes its thought. What cannot be read stays as it is."""
    try:
        given = json.loads(text)
        thought = given["format"]["thought"]
        begun = {thought["begin"]: "thought", thought["end"]: "answer"}
    except (ValueError, RecursionError, TypeError, KeyError):
        return text
    found = next((what for mark, what in begun.items() if isinstance(mark, str) and mark and tail.endswith(mark)), None)
    return text if found is None else json.dumps({**given, "begun": found}, ensure_ascii=False)


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
    def __init__(self, schema: Callable[[Any, bool], str], special: Callable[[str], int | None], begun: Any):
        self._schema, self._special, self._begun = schema, special, begun
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
                return self._rule(self._literal(_string(format, "value")))
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
            case "after_thought":
                return self._rule(self._after(format, depth))
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
        begin, end, always = self._marks(thought)
        if least:
            raise FormatError("thought goes with no at_least_one.")
        after = self._rule(f"{some} | TEXT" if once else f"{some}* TEXT")
        if self._begun == "answer":
            return after
        return self._rule(self._thought(begin, end, always, after, bodies, once))

    def _marks(self, thought: Any) -> tuple[str, str, bool]:
        """What begins a thought and what ends it, and whether the answer begins within one."""
        if not isinstance(thought, dict) or not _string(thought, "begin") or not _string(thought, "end"):
            raise FormatError("thought must be an object with begin and end.")
        return thought["begin"], thought["end"], thought.get("always") is True or self._begun == "thought"

    def _after(self, format: dict[str, Any], depth: int) -> str:
        """A thought, a gap and the content; without ``always`` the content alone, too."""
        begin, end, always = self._marks(format.get("thought"))
        then = _string(format["thought"], "then")
        content = self._of(format.get("content"), depth + 1)
        if self._begun == "answer":
            return content
        thought = self._rule(f"({self._literal(begin)})? {self._upto(end)}" if always else
                             f"{self._literal(begin)} {self._upto(end)}")  # fmt: skip
        gap = self._literal(then) if then else '("\\n\\n" | "\\n" | "")'
        whole = f"{thought} {gap} {content}"
        return whole if always else f"{whole} | {content}"

    def _tagged(self, bodies: dict[str, list[str]], text: str) -> str:
        """``text`` up to a trigger, and a tag of it."""
        groups = [self._rule(f"{self._upto(trigger, text)} ({' | '.join(rules)})") for trigger, rules in bodies.items()]
        return f"({' | '.join(groups)})"

    def _thought(self, begin: str, end: str, always: bool, after: str, bodies: dict[str, list[str]], once: Any) -> str:
        """A thought and ``after``, or a text without one. The lexer must see from the first character on which it is:
        so one rule has all of the thought, and the other texts do not begin as it does."""
        token = self._special(begin)  # which may stand there even where it need not
        opened = "" if token is None else f"<[{token}]> {self._upto(end)} {after} | <[{token}]> TEXT | "
        if always:
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
