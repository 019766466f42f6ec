"""StructuredOutputsParams: the form that an output must have. Names are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_CHARACTERS = 2**18
"""Characters that a schema, pattern, grammar or list of choices may have."""

RULES = ("disable_any_whitespace", "disable_additional_properties", "allow_additional_properties", "whitespace_pattern")
"""What is said of JSON besides its schema."""

SWITCHES = RULES[:-1]
"""Those that are on or off, which an operator may turn on for requests that do not say."""

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of an output; exactly one of the first five, or ``structural_tag``, is given.

    Args:
        json: a JSON schema, as an object or as text.
        regex: a regular expression that the whole output must match.
        choice: strings of which the output is one.
        grammar: a context-free grammar in Lark's or in GBNF's notation.
        json_object: any JSON object.
        disable_any_whitespace: JSON in its shortest form, with no blanks or line breaks.
        disable_additional_properties: objects have no properties but those their schema names, and those of its
            patterns. Where ``properties`` is all that a schema says, that is so anyway.
        allow_additional_properties: objects may have others where their schema does not speak of them.
        whitespace_pattern: regular expression of what may stand between the parts of JSON (default: a blank, or a line
            break and at most 40 blanks).
        structural_tag: JSON text of free text with parts that have a form (`proto/grammars/structural_tags.py`).

    Raises:
        ValueError: none or several are given, or one has the wrong type.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    allow_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        if isinstance(self.choice, tuple):
            self.choice = list(self.choice)
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(_FORMS)}; got {' and '.join(given) or 'none'}."
            )
        self._check_types()

    def _check_types(self) -> None:
        if self.json is not None and not isinstance(self.json, (str, dict, bool)):
            raise ValueError(f"structured_outputs.json must be a JSON schema, got {type(self.json).__name__}.")
        for name in ("regex", "grammar", "whitespace_pattern", "structural_tag"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name} must be a string that is not empty, got {value!r:.80}.")
        if self.choice is not None:
            sound = isinstance(self.choice, list) and all(isinstance(each, str) and each for each in self.choice)
            if not sound or not self.choice:
                raise ValueError("structured_outputs.choice must be a list of strings, none empty, at least one.")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"structured_outputs.{name} must be true or false, got {getattr(self, name)!r:.80}.")
        if self.disable_additional_properties and self.allow_additional_properties:
            raise ValueError(
                "structured_outputs has disable_additional_properties and allow_additional_properties; leave one out."
            )
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(f"structured_outputs.json_object must be true, got {self.json_object!r:.80}.")
        size = sum(map(len, self.choice or ()))
        texts = (self.json, self.regex, self.grammar, self.whitespace_pattern, self.structural_tag)
        size += sum(len(text) for text in texts if isinstance(text, str))
        if isinstance(self.json, dict):
            try:
                size += len(msgspec.json.encode(self.json))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"structured_outputs.json must be a JSON schema: {error}.") from None
        if size > MAX_CHARACTERS:
            raise ValueError(f"structured_outputs has {size} characters, over the limit of {MAX_CHARACTERS}.")


def by_rules(form: StructuredOutputsParams | None, rules: dict[str, bool]) -> None:
    """Have a form follow an operator's rules, switches by name, where the request says nothing of its own."""
    if form is None or not rules:
        return
    says_others = form.disable_additional_properties or form.allow_additional_properties
    for name in rules:
        if not (says_others if name.endswith("additional_properties") else form.whitespace_pattern):
            setattr(form, name, True)


class GuidedDecodingParams(StructuredOutputsParams, kw_only=True, omit_defaults=True):
    """vLLM's older name. ``backend`` chose one of its several, ``disable_fallback`` that and no other; here is one."""

    backend: str | None = None
    disable_fallback: bool = False

    def plain(self) -> StructuredOutputsParams:
        """The same under the newer name."""
        return StructuredOutputsParams(
            **{name: getattr(self, name) for name in StructuredOutputsParams.__struct_fields__}
        )
