"""The inside of the scheduler: who may write what, and caches that are checked against what they were made of."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable

import pytest
from scheduler_rig import Rig

from quire.scheduler.block_pool import PoolError

SCHEDULER = pathlib.Path(__file__).parents[2] / "scheduler"
STATE = (
    "accounts", "adapter_names", "adapter_slots", "batch", "beam_group", "block_pool", "books", "columns", "draft",
    "draft_room", "outbox", "queue", "replica", "request", "step",
)  # fmt: skip
COLUMNS = (
    "computed", "scheduled", "end", "horizon", "milestone", "tables", "num_blocks", "chains", "drawn", "kept",
    "kept_from", "left_at", "departures",
)  # fmt: skip


def own_attributes(tree: ast.Module) -> set[str]:
    """Attributes of the classes of a file: slots, and what their methods assign to ``self``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__slots__"]:
            names.update(ast.literal_eval(node.value))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


@pytest.mark.parametrize("path", sorted(SCHEDULER.glob("*.py")), ids=lambda path: path.name)
def test_state_is_written_only_in_the_file_that_owns_it(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    others = [own_attributes(ast.parse((SCHEDULER / f"{name}.py").read_text())) for name in STATE]
    foreign = set().union(*others) - own_attributes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            allowed = node.attr not in foreign or ast.unparse(node.value) == "message"
            assert allowed, f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            column = getattr(node.value, "attr", "") in COLUMNS
            assert not column or path.name in ("columns.py", "request.py"), f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("name", "writers"),
    [
        ("horizon", {"Columns.grow", "Columns.look_at", "Columns.expect_end_of_room"}),
        ("milestone", {"Columns.expect_full_block", "Columns.expect_next_blocks"}),
        ("quarantined", {"Replica.update_quarantine"}),
    ],
)
def test_a_look_ahead_cache_is_written_in_few_places(name: str, writers: set[str]) -> None:
    found = set()
    for path in SCHEDULER.glob("*.py"):
        for cls in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]:
            for function in [node for node in cls.body if isinstance(node, ast.FunctionDef)]:
                code = ast.unparse(function)
                if any(change in code for change in (f".{name}.set(", f".{name}.append(", f".{name}.remove(")):
                    found.add(f"{cls.name}.{function.name}")
    assert found == writers


def decoding(rig: Rig) -> list:
    return rig.replica.decoding


def look_at(rig: Rig, name: str, position: int) -> None:
    """Move the first one's next look."""
    seq = decoding(rig)[0]
    getattr(seq.columns, name).set(seq.row, position)


BREAKS: dict[str, Callable[[Rig], None]] = {
    "horizon too far": lambda rig: look_at(rig, "horizon", decoding(rig)[0].horizon + 1),
    "horizon passed": lambda rig: look_at(rig, "horizon", decoding(rig)[0].scheduled - 1),
    "horizon at nothing": lambda rig: look_at(rig, "horizon", decoding(rig)[0].scheduled + 1),
    "block shared": lambda rig: rig.replica.pool.share(decoding(rig)[0].blocks[-1]),
    "milestone too far": lambda rig: look_at(rig, "milestone", decoding(rig)[0].milestone + 1),
    "milestone too near": lambda rig: look_at(rig, "milestone", 0),
    "not in quarantine": lambda rig: decoding(rig)[0].losses.lost(99) or decoding(rig)[0].losses.lost(99),
    "in quarantine for nothing": lambda rig: rig.replica.quarantined.append(decoding(rig)[0]),
    "a stop id nobody looks for": lambda rig: rig.replica.stop_ids.remove(decoding(rig)[0].stops),
    "left out of the steps": lambda rig: rig.replica.going.discard(decoding(rig)[0]),
    "nobody looks for quarantine": lambda rig: [seq.losses.lost(99) for seq in rig.core.queue for _ in range(2)],
    "in two places": lambda rig: rig.core.queue.push(decoding(rig)[0]),
    "at another replica": lambda rig: setattr(decoding(rig)[0], "replica", 7),
}


@pytest.mark.parametrize("name", BREAKS)
def test_check_integrity_recomputes_what_is_cached(name: str) -> None:
    rig = Rig(max_num_seqs=1, max_model_len=64)
    for _ in range(2):
        rig.submit(10, max_tokens=30)
    for _ in range(3):
        rig.step()
    assert len(decoding(rig)) == len(rig.core.queue) == 1
    rig.core.check_integrity()
    BREAKS[name](rig)
    with pytest.raises(PoolError):
        rig.core.check_integrity()


def test_the_horizon_of_a_beam_search_is_where_it_is() -> None:
    rig = Rig()
    rig.submit(10, max_tokens=30, use_beam_search=True, n=2, temperature=0.0)
    rig.step()
    look_at(rig, "horizon", 3)
    with pytest.raises(PoolError, match="horizon of a beam search"):
        rig.core.check_integrity()
