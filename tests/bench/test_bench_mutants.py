"""``python -m bench mutants``: which faults it puts into a file, and that each is the file with that fault alone."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from bench.mutations import Mutant, mutants_of  # noqa: E402

SOURCE = '''
"""A module."""
import logging
log = logging.getLogger("x")
LIMIT = 3
TABLE = {"a": 1}
Pair = tuple[int, str]

class Thing:
    """A thing."""

    def __init__(self):
        self.count = 0

    def check_integrity(self):
        if self.count > LIMIT:
            raise ValueError("too many")

    def take(self, number: int = 2) -> bool:
        log.info("takes %d", number + 1)
        if number < LIMIT and not self.count:
            self.count += number
            return True
        raise ValueError(f"{number + 1} too many")
'''


def faults(tmp_path: Path, source: str = SOURCE) -> list[Mutant]:
    file = tmp_path / "module.py"
    file.write_text(source)
    return mutants_of(file)


def test_the_faults_of_a_module(tmp_path: Path) -> None:
    assert [mutant.name for mutant in faults(tmp_path)] == [
        "(module): 3  ->  4",
        "(module): {'a': 1}  ->  {}",
        "(module): 1  ->  2",
        "Thing.__init__: self.count = 0  ->  pass",
        "Thing.__init__: 0  ->  1",
        "Thing.take: 2  ->  3",
        "Thing.take: number < LIMIT and (not self.count)  ->  not self.count",
        "Thing.take: number < LIMIT and (not self.count)  ->  number < LIMIT",
        "Thing.take: Lt in number < LIMIT  ->  LtE in number < LIMIT",
        "Thing.take: Lt in number < LIMIT  ->  GtE in number < LIMIT",
        "Thing.take: not self.count  ->  self.count",
        "Thing.take: self.count += number  ->  pass",
        "Thing.take: Add in self.count += number  ->  Sub in self.count += number",
        "Thing.take: True  ->  False",
        "Thing.take: raise ValueError(f'{number + 1} too many')  ->  pass",
    ]


def test_each_is_the_module_with_one_fault_and_leaves_no_trace(tmp_path: Path) -> None:
    right = outcome(compile(SOURCE, "module", "exec"))
    for mutant in faults(tmp_path):
        assert outcome(mutant.code()) == outcome(mutant.code()) != right
        plain = compile(mutant.tree, "module", "exec")
        assert outcome(plain) == right


def outcome(code: CodeType) -> list[object]:
    """What a module is and does."""
    space: dict[str, Any] = {}
    exec(code, space)
    found = [space["TABLE"]]
    for first in (None, 0, 3, 4):
        thing = space["Thing"]()
        for number in (first, 2):
            try:
                found.append(thing.take() if number is None else thing.take(number))
            except (ValueError, AttributeError) as error:
                found.append(str(error))
            found.append(getattr(thing, "count", None))
    return found


def test_faults_that_read_alike_have_names_of_their_own_and_lines_where_tests_can_see_them(tmp_path: Path) -> None:
    found = faults(tmp_path, "def f(x):\n    if (x >\n            1):\n        return 1 + 1\n    return x\n")
    assert [mutant.name for mutant in found if "1  ->  2" in mutant.name] == [
        "f: 1  ->  2", "f: 1  ->  2 (2)", "f: 1  ->  2 (3)",
    ]  # fmt: skip
    assert [[*mutant.lines] for mutant in found if "1  ->  2" in mutant.name] == [[2, 3], [4], [4]]
    assert {mutant.function for mutant in found} == {("f", 1)}


def test_every_fault_that_no_test_sees_has_its_reason_once_and_in_order() -> None:
    results = json.loads((ROOT / "bench/results/mutants.json").read_text())["modules"]
    survivors = [
        (file, " ".join(one["mutant"].split()))
        for file, module in sorted(results.items())
        for one in sorted(module["survivors"], key=lambda one: one["line"])
    ]
    listed, file = [], ""
    for line in (ROOT / "bench/results/mutants-survivors.md").read_text().splitlines():
        if line.startswith("## "):
            file = line[3:]
        elif row := re.fullmatch(r"\| `(.+?)` \| `(.+)` \| (alike|slower|log|margin|elsewhere)(: .+)? \|", line):
            listed.append((file, f"{row[1]}: {row[2]}".replace("\\|", "|")))
        else:
            assert not line.startswith("| `"), f"no reason: {line}"
    assert listed == survivors
