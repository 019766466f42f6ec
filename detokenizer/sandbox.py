"""The sandbox that chat templates run in: jinja's immutable one, with limits on time and on the sizes of what is made.

A template comes with the model and may be careless or hostile; the messages come from anybody. Every call, filter,
product, sum of texts and turn of a loop passes through here. What one operation makes is bounded before it is made
where its size can be known, and counted afterwards. Imported with the first chat, for jinja is not needed before.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2 import utils as jinja_utils
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from ..proto.errors import Refused
from . import template_limits as limits
from .template_limits import (
    SIZED,
    Parts,
    WrongForm,
    check_format,
    check_joined,
    check_replaced,
    check_sizes,
    concat,
    made,
    tick,
)


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the limits; what jinja passes it first (``pass_context`` and its like) stays."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        tick()
        before, given = args[:passed], list(args[passed:])
        check_sizes([*given, *kwargs.values()])
        match name:
            case "replace":
                check_replaced(*[*given, *kwargs.values()][:3])
            case "join":
                given[0] = check_joined(given[0], kwargs.get("d", given[1] if len(given) > 1 else ""))
            case "format":
                check_format(given[0])
            case "sum" if not isinstance(kwargs.get("start", given[2] if len(given) > 2 else 0), int | float):
                raise Refused("the chat template adds up what is no number.", "messages")
        return made(function(*before, *given, **kwargs))

    return guarded


class Bounded(NodeTransformer):
    """Loops count their turns, lists and dicts are weighed, and ``~`` becomes a filter, which has limits."""

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        turn = nodes.Filter(nodes.Const(0), "_turn", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        listed = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(listed, "_concat", [], [], None, None, lineno=node.lineno)

    def visit_Container(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # names that are set
        return nodes.Filter(node, "_made", [], [], None, None, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = visit_Container


class Namespace(jinja_utils.Namespace):
    """Shown without what it holds, which may be others."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is simply shown."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def concat(self, texts: Any) -> str:  # of a block that is kept: set, macro, call, filter
        return concat(texts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        tick()
        if type(obj) is Parts and hasattr(str, attribute) and not hasattr(list, attribute):
            raise WrongForm(obj.n)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        tick()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:  # jinja's own: (context, callable, ...)
        tick()
        function, given = args[1], [*args[2:], *kwargs.values()]
        function = getattr(function, "__wrapped__", function)  # jinja wraps str.format
        of = getattr(function, "__self__", None)
        if isinstance(of, SIZED):
            check_sizes([of, *given])
            match function.__name__:
                case "replace":
                    check_replaced(of, *given[:2])
                case "join":
                    args = (*args[:2], check_joined(given[0], of))
                case "format" | "format_map":
                    check_format(of)
        return made(super().call(*args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        tick()
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise SecurityError("the power is too large")
        if operator == "*":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise SecurityError("the product is too large")
            for many, times in ((left, right), (right, left)):
                is_repeat = isinstance(many, (str, list, tuple)) and isinstance(times, int)
                if is_repeat and len(many) * times > limits.MAX_RENDERED:
                    raise SecurityError("the repetition is too long")
        if operator == "%":
            check_format(left)
        return made(super().call_binop(context, operator, left, right))

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        return Bounded().visit(super().parse(*args, **kwargs))


def make_sandbox() -> Sandbox:
    """The environment of all templates."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _guard_filter(name, function)
    # With the context they are not constant, so that the compiler leaves them where they are.
    environment.filters["_turn"] = pass_context(lambda context, value: tick())
    environment.filters["_made"] = pass_context(lambda context, value: made(value))
    environment.filters["_concat"] = pass_context(lambda context, items: concat(map(str, items)))
    environment.globals.update(
        namespace=Namespace, raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form)
    )
    environment.globals.pop("lipsum", None)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
