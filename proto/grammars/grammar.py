"""Structured outputs as llguidance's grammars: what the check of a request and the matchers of a worker share.

A grammar is honoured exactly or refused. llguidance refuses the keywords it lacks (its ``lenient`` mode is off, also
where a schema asks for it); what it accepts but cannot promise is refused or narrowed here:

- escapes of the form ``\\uXXXX`` are not generated, for a property named by another spelling of its name would escape
  its own schema; control characters that have no other escape are then refused in constants, and `grammar_strings`
  keeps them out of patterns;
- dates are those of the calendar, and seconds go up to 59;
- JSON's parts are set apart by one blank, or by a line break and at most 40 blanks, unless ``whitespace_pattern`` says
  otherwise: where any number of them is allowed, a model can write them for ever;
- a bound that excludes 0 excludes what is closer to it than 1e-9 too, for llguidance takes some such ranges to hold 0;
- ``oneOf`` of branches that exclude each other is taken as the ``anyOf`` that it is (`grammar_unions`);
- objects are closed, and patterns of names that leave none dropped (`grammar_objects`);
- ``minProperties`` cannot be counted where names may repeat, so only one property beyond the required ones can be
  asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from ..checkpoint.model_config import ModelConfig
from ..config import ConfigError
from ..structured import StructuredOutputsParams
from .grammar_objects import closed, has_inner_id, is_empty_string, with_patterns, without_empty
from .grammar_strings import lost_character, narrow_strings
from .grammar_unions import exclusive
from .structural_tags import FormatError, lark_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 100_000
"""States of a grammar's lexer, which are made as they are met; about 0.4 kB each, shared by a grammar's matchers."""

MAX_MESSAGE = 300
_WHITESPACE = r" |\r?\n[ \t]{0,40}"
_LEAST = 1e-9
_MOST_BEYOND = 1 << 20  # ids past the model's vocabulary that a tokenizer may have; none of them can be drawn
_ESCAPES = 'nrbtf\\"'
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NOTHING = {
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},), "minProperties": (0,),
    "not": (False,), "propertyNames": (True, {}), "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}  # fmt: skip
"""Keywords that llguidance lacks, or has only in part, by the values that demand nothing."""

_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
NO_TOKEN = "no token of the model's vocabulary can go on as the grammar demands."
_MARKER = b"\xff"
"""What stands before a special token that a grammar names, among the bytes that it forces."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
            "additional_special_tokens", "extra_special_tokens")  # fmt: skip


class GrammarError(ValueError):
    """A grammar that cannot be honoured. One line, for the client."""

    def __init__(self, message: str):
        line = " ".join(message.split())
        super().__init__(line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…")


# ---------------------------------------------------------------- from parameters to a grammar


def spec_key(spec: StructuredOutputsParams) -> bytes:
    """16 bytes that equal grammars have in common."""
    return blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()


def grammar_of(spec: StructuredOutputsParams, table: LLTokenizer | None = None) -> str:
    """llguidance's form of ``spec``, where a structural tag may name special tokens of ``table``. It is only written
    here; ``start_matcher`` compiles it. Raises GrammarError."""
    from llguidance import LLMatcher

    try:
        if spec.json is not None:
            return _json_grammar(spec, _schema(spec.json, spec))
        if spec.json_object:
            return _json_grammar(spec, {"type": "object"})
        if spec.regex is not None:
            return LLMatcher.grammar_from_regex(spec.regex)
        if spec.choice is not None:
            return LLMatcher.grammar_from_lark(_choices(spec.choice))
        if spec.structural_tag is not None:
            return LLMatcher.grammar_from_lark(
                lark_of(spec.structural_tag, partial(_embedded, spec), partial(_special, table))
            )
        return LLMatcher.grammar_from_lark(_lark(spec.grammar or ""))
    except RecursionError:
        raise GrammarError("it is nested too deeply.") from None
    except FormatError as error:
        raise GrammarError(str(error)) from None


def _schema(schema: Any, spec: StructuredOutputsParams) -> dict[str, Any]:
    """The schema as an object, checked, and with the properties that objects may have."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise GrammarError(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("the schema false permits no output.")
    if not isinstance(schema, dict):
        raise GrammarError(f"a schema must be an object, got {type(schema).__name__}.")
    # An $id within may have pointers count from elsewhere than the document: then none is looked up here.
    whole = not has_inner_id(schema)
    if whole and not spec.allow_additional_properties:
        schema = closed(schema)
    return _walk(schema, spec.disable_additional_properties, schema if whole else {})


def _walk(schema: Any, close: bool, root: dict[str, Any]) -> Any:
    """A copy of ``schema`` in which, with ``close``, objects have the properties they name and no others.

    ``root``: where pointers such as ``#/$defs/a`` are looked up.
    """
    if not isinstance(schema, dict):
        return schema
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        raise GrammarError(
            f"minProperties={least} cannot be honoured with {named} required properties, because names may repeat; "
            f"name the properties in required, or lower it to at most {named + 1}."
        )
    for key in ("const", "enum"):
        if (lost := lost_character(schema.get(key))) is not None:
            raise GrammarError(
                f"{key} has the control character U+{ord(lost):04X}, which is not written; leave it out."
            )
    if is_empty_string(schema):
        return False
    schema = with_patterns(schema)
    out = {key: value for key, value in schema.items() if value not in _NOTHING.get(key, ())}
    if (left := without_empty(schema)) is not None:
        out["patternProperties"] = left
    if close and ("properties" in schema or "patternProperties" in schema):
        out.setdefault("additionalProperties", False)
    for key in _ONE:
        if isinstance(out.get(key), dict):
            out[key] = _walk(schema[key], close, root)
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            out[key] = [_walk(each, close, root) for each in schema[key]]
    for key in _MAPS:
        if isinstance(out.get(key), dict):
            out[key] = {name: _walk(each, close, root) for name, each in out[key].items()}
    if schema.get("type") != "integer":
        _narrow(schema, out)
    narrow_strings(schema, out)
    if "oneOf" in out and "anyOf" not in out and exclusive(schema["oneOf"], root):
        out["anyOf"] = out.pop("oneOf")
    return out


def _narrow(schema: dict[str, Any], out: dict[str, Any]) -> None:
    """Move whole exclusive bounds inwards by ``_LEAST`` where llguidance may let them through: at 0, and in ranges
    narrower than 1."""
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if _is_number(schema.get(key))]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if _is_number(schema.get(key))]
    narrow = bool(lows and highs and max(lows) < min(highs) < max(lows) + 1)
    for open_bound, bound, least in (
        ("exclusiveMinimum", "minimum", _LEAST),
        ("exclusiveMaximum", "maximum", -_LEAST),
    ):
        limit = schema.get(bound) if schema.get(open_bound) is True else schema.get(open_bound)  # True: draft 4
        if _is_number(limit) and (limit == 0 or (narrow and limit == int(limit))):
            out[open_bound] = limit + least


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _options(spec: StructuredOutputsParams) -> Any:
    """llguidance's options of JSON."""
    options: Any = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": _ESCAPES}
    if spec.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = spec.whitespace_pattern or _WHITESPACE
    return options


def _embedded(spec: StructuredOutputsParams, schema: Any, exact: bool) -> str:
    """A schema that stands within a grammar. One that need not be honoured exactly, and cannot be, is any object."""
    try:
        own = _schema(schema, spec)
        if not exact:
            validate(_json_grammar(spec, own))
    except GrammarError:
        if exact:
            raise
        own = {"type": "object"}
    return msgspec.json.encode({**own, "x-guidance": _options(spec)}).decode()


def _special(table: LLTokenizer | None, text: str) -> int | None:
    """The id of the special token with this text; None where there is none, and for EOS."""
    ids = [] if table is None else table.tokenize_str(text)
    if table is None or len(ids) != 1 or ids[0] == table.eos_token or not table.is_special_token(ids[0]):
        return None
    return ids[0]


def _json_grammar(spec: StructuredOutputsParams, schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    options = _options(spec)
    try:
        return LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=options)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise GrammarError(str(error)) from None


def _choices(choices: Iterable[str]) -> str:
    """One terminal of all choices: alternatives of the parser are limited in number, those of the lexer are not."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


def _lark(text: str) -> str:
    """Lark as it is; GBNF (rules written with ``::=``) converted."""
    if re.search(r"(?m)^[ \t]*[\w-]+[ \t]*::=", text) is None:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", _unescape, text))
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - the converter raises plain Exception for a fault of the text
        raise GrammarError(f"the GBNF grammar cannot be read: {error}") from None


def _unescape(found: re.Match[str]) -> str:
    """``\\uXXXX`` as the character or as ``\\xXX``; the converter would cut its zeros off."""
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise GrammarError(f"the GBNF grammar has {found[0]}, which is no character.")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


# ---------------------------------------------------------------- tokens


def token_table(folder: str, model: ModelConfig) -> LLTokenizer:
    """The bytes of every token, and which ones end an output: the model's EOS ids and the tokenizer's.

    It takes about a second and 130 MB for a vocabulary of 150,000, and the interpreter stands still meanwhile; three
    seconds, two of them in Python, where the vocabulary is not in a tokenizer.json.
    Ids up to the model's vocab_size that the tokenizer lacks are allowed nowhere. Raises ConfigError.
    """
    from llguidance import LLTokenizer

    path = Path(folder) / "tokenizer.json"
    source = path if path.exists() else path.parent
    try:
        raw, names, ends = _tokenizer_json(path) if source is path else _own_tokenizer(source)
        text, eos, size = _marked(raw, names, ends, model.eos_token_ids)
        if size > model.vocab_size + _MOST_BEYOND:  # the table has an entry for every id up to the largest
            raise ConfigError(
                f"structured outputs cannot use {source}: it has a token of id {size - 1} and the model's "
                f"vocab_size is {model.vocab_size}; correct the id, or download the file again."
            )
        return LLTokenizer(text, n_vocab=max(size, model.vocab_size), eos_token=eos)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, LookupError, msgspec.MsgspecError) as error:
        raise ConfigError(f"structured outputs cannot use {source}: {error!r}") from None


def _tokenizer_json(path: Path) -> tuple[bytes, set[str], list[str]]:
    """tokenizer.json, the texts of the special tokens that the files beside it name, and those that end an output."""
    names, end = _special_names(path.parent)
    return path.read_bytes(), names, [end]


def _own_tokenizer(folder: Path) -> tuple[bytes, set[str], list[str]]:
    """The same of a folder with another vocabulary file."""
    from ..checkpoint.tokenizers_own import own_tokenizer  # only such folders need it

    own = own_tokenizer(folder)
    if own is None:
        raise ConfigError(
            f"structured outputs need a tokenizer.json, which {folder} lacks; save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    return own.backend.to_str().encode(), set(), own.all_ends


def _marked(raw: bytes, names: set[str], ends: list[str], eos: list[int]) -> tuple[str, list[int], int]:
    """tokenizer.json with every special and every EOS token marked as special; the EOS ids it has; its number of ids.

    A token that is not marked counts as text: a grammar that permits "</s>" as text would permit the end in its midst.
    """
    data = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    parts = msgspec.json.decode(data["model"], type=dict[str, msgspec.Raw])
    vocab = msgspec.json.decode(parts["vocab"])
    if isinstance(vocab, list):  # Unigram: pieces with their scores, by id
        vocab = {piece[0]: i for i, piece in enumerate(vocab)}
    added: list[dict[str, Any]] = msgspec.json.decode(data.get("added_tokens", msgspec.Raw(b"[]"))) or []
    ids = {**vocab, **{token["content"]: token["id"] for token in added}}
    known = set(ids.values())
    eos = [i for i in dict.fromkeys([*eos, *(ids.get(end, -1) for end in ends)]) if i in known]
    if not eos:
        raise ValueError("it has none of the model's EOS tokens, and names none of its own; no output could end.")
    for token in added:
        token["special"] = token.get("special") or token["content"] in names or token["id"] in eos
    listed = {token["content"] for token in added}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added += [
        {"id": i, "content": name, **plain}
        for name, i in vocab.items()
        if (i in eos or name in names) and name not in listed
    ]
    data["added_tokens"] = msgspec.Raw(msgspec.json.encode(added))
    _spell_alike(data)
    return msgspec.json.encode(data).decode(), eos, max(known) + 1


def _spell_alike(data: dict[str, msgspec.Raw]) -> None:
    """Have llguidance read and spell text as it stands: it spells out what a grammar leaves no choice about.

    With a blank put before it, that would be text that the grammar does not allow. Metaspace, which llguidance does
    not know as a decoder, is said in the parts that it knows.
    """
    first = msgspec.json.decode(data.get("pre_tokenizer", msgspec.Raw(b"null"))) or {}
    steps = first.get("pretokenizers", [first])
    if any(step.get("add_prefix_space") for step in steps if step.get("type") == "ByteLevel"):
        for step in steps:
            if step.get("type") == "ByteLevel":
                step["add_prefix_space"] = False
        data["pre_tokenizer"] = msgspec.Raw(msgspec.json.encode(first))
    decoder = msgspec.json.decode(data.get("decoder", msgspec.Raw(b"null"))) or {}
    if decoder.get("type") == "Metaspace":
        blank = {"type": "Replace", "pattern": {"String": decoder.get("replacement", "▁")}, "content": " "}
        parts = {"type": "Sequence", "decoders": [blank, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        data["decoder"] = msgspec.Raw(msgspec.json.encode(parts))


def _special_names(folder: Path) -> tuple[set[str], str]:
    """The texts of the special tokens that the files beside tokenizer.json name, and that of EOS."""
    names: set[str] = set()
    end = ""
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            config = msgspec.json.decode((folder / file).read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            continue
        for key in _SPECIAL:
            value = config.get(key)
            values = value if isinstance(value, list) else [value]
            if isinstance(value, dict) and "content" not in value:
                values = list(value.values())
            texts = [each.get("content") if isinstance(each, dict) else each for each in values]
            names.update(text for text in texts if isinstance(text, str) and text)
            if key == "eos_token" and texts and isinstance(texts[0], str):
                end = texts[0]
    return names, end


# ---------------------------------------------------------------- matchers


def start_matcher(table: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher before the first token, with the limits that bind every step. Raises GrammarError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(table, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise GrammarError(fault(matcher))
    return matcher


def validate(grammar: str) -> None:
    """Compile a grammar with no tokens, as far as that goes. Raises GrammarError."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    if failed:
        raise GrammarError(messages[0])


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def spelled(table: LLTokenizer, matcher: LLMatcher, token: int) -> int | None:
    """``token`` of the matcher's mask, or the one that should be there; None where the vocabulary has none.

    llguidance has the tokenizer spell out what a grammar leaves no choice about, and that may spell something else: it
    reads "</s>" as the special token, and may compose accents. Then the longest token that the text begins with is it.
    """
    if not table.is_special_token(token) and matcher.validate_tokens([token]):
        return token
    forced = matcher.compute_ff_bytes()
    if not forced or forced.startswith(_MARKER):
        return token
    first = table.greedy_tokenize(forced.decode("utf-8", "ignore"))[:1]
    return first[0] if matcher.validate_tokens(first) else None


def fault(matcher: LLMatcher) -> str:
    """Why the matcher is in its error state, in llguidance's words, one line."""
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtensionBias"):
        return NO_TOKEN
    return str(GrammarError(text or matcher.stop_reason()))
