"""Small faults for ``python -m bench mutants``: a comparison turned round, a condition left out, a number one more.

``mutants_of`` lists those of a file; ``Mutant.code`` compiles the file with one of them in it. Left alone is what
people read or the type checker does (messages, logging, annotations), and checks of what is so anyway
(``check_integrity``, ``strict`` of ``zip``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ORDER: dict[type, tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type, type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LEFT_ALONE = {"check_integrity", "check_look_ahead", "_check_free_list", "__repr__"}
TEXT = (ast.JoinedStr, ast.List, ast.Tuple)


@dataclass
class Mutant:
    """One fault. ``lines`` are those of the statement, or of its head: a test that runs none of them cannot see it."""

    file: Path
    where: str
    """The class and function that it is in."""
    line: int
    lines: range
    what: str
    number: int
    """Of the faults in this place that read alike: with ``where`` and ``what`` its name, whatever moves in the file."""
    function: tuple[str, int] | None
    """Qualified name and first line of the outermost function that it is in; None where it runs at import."""
    swap: tuple[Any, str, int | None, Any]
    tree: ast.Module

    @property
    def name(self) -> str:
        """What is the same as long as the code is."""
        return f"{self.where}: {self.what}" + (f" ({self.number + 1})" if self.number else "")

    def code(self) -> CodeType:
        """The whole file, with the fault."""
        holder, field, at, new = self.swap
        old = getattr(holder, field)
        if at is None:
            setattr(holder, field, new)
        else:
            setattr(holder, field, [*old[:at], new, *old[at + 1 :]])
        try:
            return compile(ast.fix_missing_locations(self.tree), str(self.file), "exec")
        finally:
            setattr(holder, field, old)


def mutants_of(file: Path) -> list[Mutant]:
    """All faults of a file, first to last."""
    tree = ast.parse(file.read_text("utf-8"))
    found: list[Mutant] = []
    alike: dict[tuple[str, str], int] = {}
    for holder, field, at, new, place in _Walk().of(tree):
        old = getattr(holder, field)
        old = old if at is None else old[at]
        what = f"{_text(old, holder)}  ->  {_text(new, holder)}"
        number = alike[place.where, what] = alike.get((place.where, what), -1) + 1
        swap = (holder, field, at, new)
        line = getattr(old, "lineno", getattr(holder, "lineno", place.lines.start))
        found.append(Mutant(file, place.where, line, place.lines, what, number, place.function, swap, tree))
    return sorted(found, key=lambda mutant: mutant.line)


def _text(node: Any, holder: ast.AST) -> str:
    if isinstance(node, ast.cmpop | ast.operator):
        return type(node).__name__ + " in " + " ".join(ast.unparse(holder).split())
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else text[:97] + "..."


@dataclass
class _Place:
    where: str
    function: tuple[str, int] | None
    lines: range


_Change = tuple[Any, str, int | None, Any, _Place]


class _Walk:
    """Goes through a tree, and remembers where it is."""

    def of(self, tree: ast.Module) -> Iterator[_Change]:
        yield from self._body(tree, _Place("(module)", None, range(0)))

    def _body(self, owner: ast.AST, place: _Place) -> Iterator[_Change]:
        for field in ("body", "orelse", "finalbody", "handlers"):
            for at, statement in enumerate(getattr(owner, field, [])):
                if isinstance(statement, ast.ExceptHandler):
                    yield from self._body(statement, place)
                else:
                    yield from self._statement(owner, field, at, statement, place)

    def _statement(self, owner: ast.AST, field: str, at: int, node: ast.stmt, place: _Place) -> Iterator[_Change]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._function(node, place)
            return
        if isinstance(node, ast.ClassDef):
            where = node.name if place.where == "(module)" else f"{place.where}.{node.name}"
            yield from self._body(node, _Place(where, place.function, range(0)))
            return
        if _left_alone(node):
            return
        inner = getattr(node, "body", None)
        end = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
        here = _Place(place.where, place.function, range(node.lineno, max(end, node.lineno) + 1))
        if _may_go(node):
            yield owner, field, at, ast.copy_location(ast.Pass(), node), here
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield node, "value", None, ast.Constant(None), here
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            yield node, "op", None, ARITHMETIC[type(node.op)](), here
        if not isinstance(node, ast.Raise):
            yield from self._expressions(node, here)
        yield from self._body(node, place)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, place: _Place) -> Iterator[_Change]:
        if node.name in LEFT_ALONE:
            return
        where = node.name if place.where == "(module)" else f"{place.where}.{node.name}"
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        outer = place.function or (where, first)
        head = _Place(where, place.function, range(node.lineno, node.lineno + 1))
        for field in ("defaults", "kw_defaults"):
            for at, value in enumerate(getattr(node.args, field)):
                if value is not None:
                    yield from self._expression(node.args, field, at, value, head)
        yield from self._body(node, _Place(where, outer, range(0)))

    def _expressions(self, node: ast.AST, place: _Place) -> Iterator[_Change]:
        """Those right below a statement or another expression."""
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for at, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(one, ast.expr | ast.comprehension | ast.keyword | ast.withitem | ast.arguments):
                    yield from self._expression(node, field, at, one, place)
                elif isinstance(one, ast.match_case):
                    yield from self._body(one, place)

    def _expression(
        self, holder: ast.AST, field: str, at: int | None, node: ast.AST, place: _Place
    ) -> Iterator[_Change]:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg == "strict"):
            return
        variants = [*_variants(node), *(() if place.function else _shorter(node))]
        for new in variants:
            yield holder, field, at, ast.copy_location(new, node), place
        test = field in ("test", "ifs")
        if test and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield holder, field, at, ast.copy_location(ast.UnaryOp(ast.Not(), node), node), place
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _of_text(node):
            yield node, "op", None, ARITHMETIC[type(node.op)](), place
        if isinstance(node, ast.Compare):
            for number, op in enumerate(node.ops):
                for other in ORDER[type(op)]:
                    yield node, "ops", number, other(), place
        yield from self._expressions(node, place)


def _variants(node: ast.AST) -> Iterator[ast.expr]:
    """What may stand in an expression's place."""
    if isinstance(node, ast.BoolOp):
        for at in range(len(node.values)):
            rest = [*node.values[:at], *node.values[at + 1 :]]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield ast.Call(ast.Name(CALLS[node.func.id], ast.Load()), node.args, node.keywords)


def _shorter(node: ast.AST) -> Iterator[ast.expr]:
    """A table of the module without one of its entries."""
    if isinstance(node, ast.Dict):
        for at in range(len(node.keys)):
            yield ast.Dict(node.keys[:at] + node.keys[at + 1 :], node.values[:at] + node.values[at + 1 :])
    elif isinstance(node, ast.Tuple | ast.Set) and isinstance(getattr(node, "ctx", None), ast.Load | None):
        for at in range(len(node.elts)):
            rest = node.elts[:at] + node.elts[at + 1 :]
            yield ast.Tuple(rest, ast.Load()) if isinstance(node, ast.Tuple) else ast.Set(rest)


def _left_alone(node: ast.stmt) -> bool:
    """Imports, docstrings, logging, names for the type checker."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.Expr):
        called = node.value.func if isinstance(node.value, ast.Call) else None
        logs = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "log"
        return logs or isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):  # as in Outgoing = list[tuple[str, Any]]
        return isinstance(node.value.value, ast.Name) and node.value.value.id in ("dict", "list", "tuple")
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id in ("__slots__", "__all__") for target in node.targets
    )


def _may_go(node: ast.stmt) -> bool:
    """A statement that others do not need in order to run at all."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name) for target in node.targets)
    if isinstance(node, ast.Return):
        return node.value is None
    if isinstance(node, ast.AnnAssign):
        return False
    return isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Continue | ast.Break | ast.Raise)


def _of_text(node: ast.BinOp) -> bool:
    """Text or lists are joined: with a minus it is an error at once, and says nothing about the tests."""
    sides = (node.left, node.right)
    return any(isinstance(s, TEXT) or (isinstance(s, ast.Constant) and isinstance(s.value, str | bytes)) for s in sides)
