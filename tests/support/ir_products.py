"""Finds 32-bit products that feed a pointer and can pass 2^31, in Triton's own IR (ttir) as text.

Every integer gets bounds: constants and ranges have theirs, arguments and what is loaded through them have those of
a table, by name, and anything else may be any number of its type. A product, a shift or a sum of two bounded
numbers in 32 bits that can leave [-2^31, 2^31) is reported if it is part of an offset of ``tt.addptr``, whatever is
done to it on the way (widened too: by then it has wrapped). What is loaded is not followed to its address.

An argument that is not in the table, times anything but 1, is thus reported: make the product 64 bits, as
``tl.program_id(0).to(tl.int64)`` does, or say in the table how large it can be. Of a product whose factors have bounds
that no table can give (a result of a search), the place itself can be given one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
RESULTS = re.compile(r"((?:%[\w.$-]+(?::\d+)?(?:, )?)+) = ")
OP = re.compile(r'"?([a-z_]+\.[\w.]+)"?')
ELEMENT = re.compile(r"(?:x|<|^|\s)i(\d+)(?=[>,)\s]|$)")


class Bounds(NamedTuple):
    """Lowest and highest, both inclusive."""

    low: int
    high: int

    def join(self, other: Bounds) -> Bounds:
        return Bounds(min(self.low, other.low), max(self.high, other.high))


def any_of(bits: int) -> Bounds:
    """Every number of a type."""
    return Bounds(0, 1) if bits == 1 else Bounds(-(1 << bits - 1), (1 << bits - 1) - 1)


@dataclass
class Op:
    """One operation, and the regions inside it."""

    name: str
    results: list[str]
    operands: list[str]
    text: str
    loc: str
    regions: list[list[Op]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """A number of 32 bits in an offset that may need more."""

    kernel: str
    op: str
    bounds: Bounds
    place: str  # file:line

    def __str__(self) -> str:
        most = max(self.bounds, key=abs)
        return f"{self.kernel}: {self.op} at {self.place} can reach {most} in 32 bits and feeds a pointer"


def parse(ir: str) -> tuple[str, list[tuple[str, str]], list[Op], dict[str, str]]:
    """The kernel's name, its arguments (name, type), its operations, and places by the name of a location."""
    locations = dict(re.findall(r"^(#loc\d*) = (loc\(.*\))$", ir, re.M))
    head = re.search(r"tt\.func public @(\w+)\((.*)\) attributes|tt\.func public @(\w+)\((.*)\) \{", ir)
    if head is None:
        raise ValueError("No kernel in this IR.")
    name, inside = head[1] or head[3], head[2] or head[4]
    arguments = re.findall(r"(%[\w.$-]+): (!tt\.ptr<[^>]*>|[\w.<>!]+)", inside)
    body: list[Op] = []
    open_regions = [body]
    owners: list[Op] = []
    for line in ir[head.end() :].splitlines():
        text, _, loc = line.strip().partition(" loc(")
        if text.startswith("}"):
            if not owners:
                break
            open_regions.pop()
            if text in ("} else {", "} do {"):
                owners[-1].regions.append([])
                owners[-1].arguments.append([])
                open_regions.append(owners[-1].regions[-1])
                continue
            ended = owners.pop()
            ended.text += " " + text
            ended.loc = ended.loc or loc
            continue
        if text.startswith("^"):
            if owners:
                owners[-1].arguments[-1] += VALUE.findall(line.split("//")[0])
            continue
        op = _op(text, loc)
        if op is None:
            continue
        open_regions[-1].append(op)
        if text.endswith("{"):
            op.regions.append([])
            op.arguments.append([])
            owners.append(op)
            open_regions.append(op.regions[-1])
    return name, arguments, body, locations


def _op(text: str, loc: str) -> Op | None:
    results: list[str] = []
    rest = text
    if found := RESULTS.match(text):
        for one in found[1].split(", "):
            stem, _, count = one.partition(":")
            results += [f"{stem}#{i}" for i in range(int(count))] if count else [stem]
        rest = text[found.end() :]
    named = OP.match(rest)
    if named is None:
        return None
    return Op(named[1], results, VALUE.findall(rest), rest, loc.rstrip(")").split(")")[0])


class Reader:
    """The bounds of every value of one kernel, and what feeds its pointers."""

    def __init__(
        self, ir: str, parameters: list[str], largest: dict[str, int],
        assumed: Callable[[str], int | None] = lambda place: None,
    ):  # fmt: skip
        """``largest`` by argument, or kernel.argument; ``assumed`` bounds the products of a place (file:line)."""
        self.kernel, arguments, self.body, self.locations = parse(ir)
        self.largest, self.assumed = largest, assumed
        self.bounds: dict[str, Bounds] = {}
        self.roots: dict[str, str] = {}  # pointer -> the argument that it comes from
        self.sources: dict[str, set[str]] = {}  # integer -> integers that it is made of
        self.offsets: set[str] = set()
        self.passed: dict[str, Finding] = {}
        for (value, kind), name in zip(arguments, parameters, strict=True):
            if kind.startswith("!tt.ptr"):
                self.roots[value] = name
            elif kind.startswith("i"):
                self.bounds[value] = self._of_name(name, int(kind[1:]))

    def findings(self) -> list[Finding]:
        """What can pass and feeds a pointer, by place."""
        self._block(self.body)
        reached, waiting = set(), list(self.offsets)
        while waiting:
            if (value := waiting.pop()) not in reached:
                reached.add(value)
                waiting += self.sources.get(value, ())
        return sorted({f for value, f in self.passed.items() if value in reached}, key=lambda f: f.place)

    def _of_name(self, name: str, bits: int) -> Bounds:
        most = self.largest.get(f"{self.kernel}.{name}", self.largest.get(name))
        return any_of(bits) if most is None else Bounds(min(0, most), most)

    def _block(self, ops: list[Op]) -> list[str]:
        """Bounds of a block's values; what its last operation hands on."""
        last: list[str] = []
        for op in ops:
            if op.name in ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return"):
                last = op.operands[1:] if op.name == "scf.condition" else op.operands
            elif op.regions:
                self._nested(op)
            else:
                self._one(op)
        return last

    def _set(self, value: str, bounds: Bounds, *sources: str) -> None:
        self.bounds[value] = bounds
        self.sources.setdefault(value, set()).update(sources)

    def _alias(self, value: str, source: str) -> None:
        """``value`` may be ``source``."""
        if source in self.roots:
            self.roots[value] = self.roots[source]
        if source in self.bounds:
            known = self.bounds.get(value)
            self._set(value, self.bounds[source] if known is None else known.join(self.bounds[source]), source)

    def _nested(self, op: Op) -> None:
        if op.name == "scf.if":
            for region in op.regions:
                for result, given in zip(op.results, self._block(region), strict=False):
                    self._alias(result, given)
        elif op.name in ("scf.for", "scf.while"):
            self._loop(op)
        else:  # a reduction or a scan: of sums nothing is known, else it is one of the elements
            adds = any(inner.name == "arith.addi" for region in op.regions for inner in region)
            for result, given in zip(op.results, op.operands, strict=False):
                if given in self.bounds:
                    self._set(result, any_of(32) if adds else self.bounds[given], given)

    def _loop(self, op: Op) -> None:
        pairs = re.findall(rf"({VALUE.pattern}) = ({VALUE.pattern})", op.text)
        if op.name == "scf.for":
            (variable, low), *pairs = pairs
            high = re.search(rf" to ({VALUE.pattern})", op.text)[1]
            at = self.bounds[low].join(self.bounds[high])
            self._set(variable, at, low, high)
        for inner, first in pairs:
            self._alias(inner, first)
        for turn in range(3):
            before = [self.bounds.get(inner) for inner, _ in pairs]
            handed = self._block(op.regions[0])
            if op.name == "scf.while":
                for inner, given in zip(op.arguments[1], handed, strict=False):
                    self._alias(inner, given)
                after, handed = handed, self._block(op.regions[1])
            else:
                after = handed
            for (inner, _), given in zip(pairs, handed, strict=False):
                self._alias(inner, given)
                if turn == 1 and inner in self.bounds and self.bounds[inner] != before[pairs.index((inner, _))]:
                    self.bounds[inner] = any_of(64 if "i64" in op.text else 32)  # it grows from turn to turn
        for result, given in zip(op.results, after, strict=False):
            self._alias(result, given)
        if op.name == "scf.for":
            for result, (_, first) in zip(op.results, pairs, strict=False):
                self._alias(result, first)

    def _one(self, op: Op) -> None:
        if not op.results:
            return
        result, of = op.results[0], [self.bounds.get(name) for name in op.operands]
        if op.name == "tt.addptr":
            self.offsets.add(op.operands[1])
            self._alias(result, op.operands[0])
        elif op.name == "tt.load":
            found = re.search(r"!tt\.ptr<i(\d+)", op.text)
            if found:
                self._set(result, self._of_name(self.roots.get(op.operands[0], "?"), int(found[1])))
        elif op.name in ALIKE:
            self._alias(result, op.operands[0])
        elif op.name == "arith.select":
            for given in op.operands[1:]:
                self._alias(result, given)
        elif (made := self._made(op, of)) is not None:
            self._limit(op, result, made, of)

    def _made(self, op: Op, of: list[Bounds | None]) -> Bounds | None:
        """The bounds of an operation's result, were it of any width; None for what is no integer."""
        if op.name == "arith.constant":
            found = re.search(r"(?:dense<|constant )(-?\d+|true|false)>? *:", op.text)
            if found is None or "x f" in op.text or not ELEMENT.search(op.text):
                return None
            number = {"true": 1, "false": 0}.get(found[1])
            return Bounds(*[int(found[1]) if number is None else number] * 2)
        if op.name == "tt.get_program_id":
            axis = op.text.split()[1]
            return self._of_name(f"program {axis}", 32)
        if op.name == "tt.get_num_programs":
            return self._of_name(f"program {op.text.split()[1]}", 32)
        if op.name == "tt.make_range":
            return Bounds(0, int(re.search(r"end = (\d+)", op.text)[1]) - 1)
        if op.name in ARITHMETIC and all(of):
            return ARITHMETIC[op.name](*of)
        bits = _bits(op.text)
        return any_of(bits) if bits else None

    def _limit(self, op: Op, result: str, made: Bounds, of: list[Bounds | None]) -> None:
        """Keep the bounds within the type, and note what had to be."""
        bits = _bits(op.text) or 64
        limit = any_of(bits)
        known = all(b is not None and b.low != any_of(32).low and b.high != any_of(32).high for b in of)
        if op.name == "arith.muli" and (most := self.assumed(self._place(op.loc))) is not None:
            made = Bounds(-most, most)
        self.passed.pop(result, None)  # what an earlier turn of a loop found, with other bounds
        if bits == 32 and (made.low < limit.low or made.high > limit.high):
            if op.name in ("arith.muli", "arith.shli") or (op.name in ("arith.addi", "arith.subi") and known):
                self.passed[result] = Finding(self.kernel, op.name, made, self._place(op.loc))
            made = limit
        followed = [] if op.name == "arith.cmpi" else op.operands
        self._set(result, made, *followed)

    def _place(self, loc: str) -> str:
        """``file:line`` of a location: of the innermost call that is in a kernel's file."""
        places, waiting = [], [loc]
        while waiting and len(places) < 50:
            one = waiting.pop(0)
            places += [f"{path.rpartition('/')[2]}:{line}" for path, line in re.findall(r'"([^"]+)":(\d+)', one)]
            waiting = [self.locations.get(name, "") for name in re.findall(r"#loc\d*", one)] + waiting
        return next((place for place in places if "_jit.py:" in place), places[0] if places else "?")


def _bits(text: str) -> int | None:
    """The width of an operation's integer result; None where it is none."""
    tail = text.rpartition(" to ")[2] if " to " in text else text.rpartition(" -> ")[2]
    tail = tail.rpartition(" : ")[2]
    found = ELEMENT.search(tail)
    return int(found[1]) if found else None


def _corners(first: Bounds, second: Bounds) -> list[int]:
    return [a * b for a in first for b in second]


def _product(first: Bounds, second: Bounds) -> Bounds:
    corners = _corners(first, second)
    return Bounds(min(corners), max(corners))


def _quotient(first: Bounds, second: Bounds) -> Bounds:
    if second.low < 1:
        return Bounds(-max(map(abs, first)), max(map(abs, first)))
    corners = [int(a / b) if abs(a) < 2**52 else a // b for a in first for b in second]
    return Bounds(min(corners), max(corners))


def _rest(first: Bounds, second: Bounds) -> Bounds:
    most = max(map(abs, second)) - 1
    return Bounds(0 if first.low >= 0 else -most, min(most, first.high) if first.low >= 0 else most)


def _both(first: Bounds, second: Bounds) -> Bounds:
    if first.low >= 0 or second.low >= 0:
        return Bounds(0, min(b.high for b in (first, second) if b.low >= 0))
    return any_of(64)


def _shift(first: Bounds, second: Bounds) -> Bounds:
    if not 0 <= second.low <= second.high < 63:
        return any_of(64)
    return _product(first, Bounds(1 << second.low, 1 << second.high))


ALIKE = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.unsplat", "arith.extsi",
         "arith.extui", "tt.bitcast")  # fmt: skip
"""Operations whose result has its operand's bounds."""

ARITHMETIC = {
    "arith.muli": _product,
    "arith.shli": _shift,
    "arith.addi": lambda a, b: Bounds(a.low + b.low, a.high + b.high),
    "arith.subi": lambda a, b: Bounds(a.low - b.high, a.high - b.low),
    "arith.divsi": _quotient,
    "arith.divui": _quotient,
    "arith.remsi": _rest,
    "arith.remui": _rest,
    "arith.andi": _both,
    "arith.minsi": lambda a, b: Bounds(min(a.low, b.low), min(a.high, b.high)),
    "arith.maxsi": lambda a, b: Bounds(max(a.low, b.low), max(a.high, b.high)),
    "arith.trunci": lambda a: a,
}
