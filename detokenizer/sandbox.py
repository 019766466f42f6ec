"""The sandbox that chat templates run in: jinja's immutable one, with limits on time and on the sizes of what is made.

A template comes with the model and may be careless or hostile; the messages come from anybody. Every call, filter,
product, sum of texts and turn of a loop passes through here. What one operation makes is bounded before it is made
where its size can be known, and counted afterwards.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from ..proto.errors import Refused

MAX_RENDERED = 16 * 2**20
"""Characters a rendered chat may have, and characters or items that one operation may make."""
MAX_MADE = 32
"""Times MAX_RENDERED: what all operations of one rendering may make together."""
MAX_SECONDS = 5.0
"""Processor time one rendering may take."""

_SIZED = (str, list, tuple, bytes)
_LONG_NUMBER = re.compile(r"\d{6}|\*")


class WrongForm(TypeError):
    """Message ``n``'s content was used as a text and is a list of parts, or the other way round."""

    def __init__(self, n: int):
        super().__init__(f"messages[{n}].content is in the other form")
        self.n = n


class Text(str):
    """A message's content as a text: whoever walks over it wants parts."""

    n: int

    def __iter__(self) -> Any:
        raise WrongForm(self.n)


class Parts(list[Any]):
    """A message's content as a list of parts: whoever shows it, or adds to it, wants a text."""

    n: int

    def _is_no_text(self, *_: Any) -> Any:
        raise WrongForm(self.n)

    __str__ = __repr__ = __format__ = _is_no_text
    __add__ = __radd__ = _is_no_text

    def __contains__(self, item: Any) -> bool:
        return self._is_no_text() if isinstance(item, str) else super().__contains__(item)


class _Use(threading.local):
    """What the rendering in this thread has used up."""

    until: float | None = None
    calls: int = 0
    made: int = 0


_use = _Use()


class Limits:
    """``with Limits():`` around a rendering."""

    def __enter__(self) -> None:
        _use.until, _use.made = time.thread_time() + MAX_SECONDS, 0

    def __exit__(self, *_: object) -> None:
        _use.until = None


def _tick() -> None:
    """Called by everything a template does; ends one that runs too long."""
    _use.calls += 1
    if _use.calls & 63 == 0 and _use.until is not None and time.thread_time() > _use.until:
        raise Refused(f"the chat template took longer than {MAX_SECONDS:g} s; shorten the messages.", "messages")


def _made(result: Any) -> Any:
    """Count what an operation has made."""
    if isinstance(result, _SIZED):
        _use.made += len(result)
        if len(result) > MAX_RENDERED or _use.made > MAX_MADE * MAX_RENDERED:
            raise _too_large()
    return result


def _too_large() -> Refused:
    text = f"the chat template makes texts of more than {MAX_RENDERED} characters; shorten the messages."
    return Refused(text, "messages")


def _check_sizes(values: list[Any]) -> None:
    """Before a call: no operation makes more than its numbers times its texts."""
    sizes = sum(len(value) for value in values if isinstance(value, _SIZED))
    most = max((abs(value) for value in values if isinstance(value, int)), default=0)
    if most * max(1, sizes) > MAX_MADE * MAX_RENDERED:
        raise _too_large()


def _check_replaced(text: Any = "", old: Any = "", new: Any = "") -> None:
    if isinstance(text, str) and len(text) + text.count(str(old)) * len(str(new)) > MAX_RENDERED:
        raise _too_large()


def _check_joined(items: Any, between: Any) -> list[Any]:
    listed = list(items)
    if len(listed) * len(str(between)) > MAX_RENDERED:
        raise _too_large()
    return listed


def _check_format(form: Any) -> None:
    """A width stands in the format itself, or is asked for by a star."""
    if isinstance(form, str) and _LONG_NUMBER.search(form):
        raise _too_large()


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the limits; what jinja passes it first (``pass_context`` and its like) stays."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _tick()
        before, given = args[:passed], list(args[passed:])
        _check_sizes([*given, *kwargs.values()])
        match name:
            case "replace":
                _check_replaced(*[*given, *kwargs.values()][:3])
            case "join":
                given[0] = _check_joined(given[0], kwargs.get("d", given[1] if len(given) > 1 else ""))
            case "format":
                _check_format(given[0])
            case "sum" if not isinstance(kwargs.get("start", given[2] if len(given) > 2 else 0), int | float):
                raise Refused("the chat template adds up what is no number.", "messages")
        return _made(function(*before, *given, **kwargs))

    return guarded


def make_sandbox() -> Any:
    """The environment. jinja is imported here, so that a server of completions alone never loads it."""
    import jinja2
    from jinja2 import nodes, pass_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.visitor import NodeTransformer

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})

        def getattr(self, obj: Any, attribute: str) -> Any:
            _tick()
            if type(obj) is Parts and hasattr(str, attribute) and not hasattr(list, attribute):
                raise WrongForm(obj.n)
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            _tick()
            return super().getitem(obj, argument)

        def call(self, *args: Any, **kwargs: Any) -> Any:  # jinja's own: (context, callable, ...)
            _tick()
            function, given = args[1], [*args[2:], *kwargs.values()]
            function = getattr(function, "__wrapped__", function)  # jinja wraps str.format
            of = getattr(function, "__self__", None)
            if isinstance(of, _SIZED):
                _check_sizes([of, *given])
                match function.__name__:
                    case "replace":
                        _check_replaced(of, *given[:2])
                    case "join":
                        args = (*args[:2], _check_joined(given[0], of))
                    case "format" | "format_map":
                        _check_format(of)
            return _made(super().call(*args, **kwargs))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _tick()
            if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
                raise SecurityError("the power is too large")
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    is_repeat = isinstance(many, (str, list, tuple)) and isinstance(times, int)
                    if is_repeat and len(many) * times > MAX_RENDERED:
                        raise SecurityError("the repetition is too long")
            if operator == "%":
                _check_format(left)
            return _made(super().call_binop(context, operator, left, right))

        def parse(self, *args: Any, **kwargs: Any) -> Any:
            return Bounded().visit(super().parse(*args, **kwargs))

    class Bounded(NodeTransformer):
        """Loops count their turns, and ``~`` becomes a filter, which has limits."""

        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            turn = nodes.Filter(nodes.Const(0), "_turn", [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            listed = nodes.List(node.nodes, lineno=node.lineno)
            return nodes.Filter(listed, "_concat", [], [], None, None, lineno=node.lineno)

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here its body is simply shown."""

        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _guard_filter(name, function)
    # With the context they are not constant, so that the compiler leaves them where they are.
    environment.filters["_turn"] = pass_context(lambda context, value: _tick())
    environment.filters["_concat"] = pass_context(lambda context, items: _made("".join(map(str, items))))

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    environment.globals.pop("lipsum", None)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
