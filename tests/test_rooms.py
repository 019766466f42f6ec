"""The house: no circle among modules, imports that go down only, files and functions of a size that one can read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("proto", "scheduler", "gpu_worker", "detokenizer", "client", "frontend", "cli")

MOST_LINES, MOST_FUNCTION_LINES = 450, 60

FLOORS = {
    "proto": [
        "proto",
        "proto.messages proto.checkpoint proto.wire",
        "proto.checks proto.group proto.grammars proto.taking",
    ],
    "scheduler": [
        "scheduler.block_pool scheduler.columns scheduler.logprobs scheduler.blame scheduler.adapter_names "
        "scheduler.tally",
        "scheduler.adapter_slots",
        "scheduler.request scheduler.beam_group scheduler.batch "  # requests
        "scheduler.outbox scheduler.queue scheduler.accounts",
        "scheduler.step scheduler.pace scheduler.tiers scheduler.block_lives scheduler.draft_room "
        "scheduler.draft_worth "  # where they run
        "scheduler.replica",
        "scheduler.placement scheduler.draft scheduler.books scheduler.watch",  # all of the state, and its transitions
        "scheduler.intake scheduler.beams scheduler.planner scheduler.commit "  # what is done with it
        "scheduler.adapters",
        "scheduler.moves",
        "scheduler.core",
        "scheduler.traced",
        "scheduler.worker_phase scheduler.worker scheduler.slumber scheduler.profiling scheduler.offload "
        "scheduler.worker_registry scheduler.operators scheduler.view scheduler.awaited "
        "scheduler.membership",
        "scheduler.inputs scheduler.recording scheduler.redact scheduler.snapshot scheduler.transcript",
        "scheduler.recorder scheduler.replay",
        "scheduler",
        "scheduler.fake",
    ],
    "gpu_worker": [
        "gpu_worker.early gpu_worker.spec gpu_worker.batch gpu_worker.device gpu_worker.transfer gpu_worker.link",
        "gpu_worker.ahead gpu_worker.kernels",
        "gpu_worker.kv_cache",
        "gpu_worker.parallel.parallel gpu_worker.parallel.group_link gpu_worker.parallel.one_shot",
        "gpu_worker.layers.formats",
        "gpu_worker.layers",
        "gpu_worker.lora",
        "gpu_worker.models.families",
        "gpu_worker.models",
        "gpu_worker.sampling",
        "gpu_worker.parallel",
        "gpu_worker",
    ],
    "detokenizer": [
        "detokenizer.tokenizer detokenizer.detokenize detokenizer.stops detokenizer.logprobs "  # text
        "detokenizer.specials detokenizer.template detokenizer.template_limits detokenizer.sandbox "
        "detokenizer.tool_words",
        "detokenizer.bad_words detokenizer.beams detokenizer.begins detokenizer.checks detokenizer.infill "
        "detokenizer.pooling detokenizer.sequence detokenizer.columns detokenizer.request "
        "detokenizer.thoughts",  # requests
        "detokenizer.step detokenizer.tokenize",
        "detokenizer.core",
        "detokenizer.traced",
        "detokenizer",
    ],
    "client": [
        "client.results client.logprobs client.best",
        "client.supervisor.decision",  # the supervisor without processes
        "client.supervisor.place",
        "client.supervisor.watch",
        "client",
        "client.supervisor",
        "client.offline",
    ],
    "frontend": [
        "frontend.tools",
        "frontend",
        "frontend.dialects frontend.responses",
        "frontend.batches",
        "frontend.openapi frontend.page",
        "frontend.app",
        "frontend.main frontend.fake frontend.__main__",
    ],
    "cli": ["cli"],
}
"""Of each service from the ground up: modules, or packages with all that is not named apart. Beside its own floor and
those below, a module may import lower services; which those are is import-linter's to say (pyproject.toml)."""


def names_of(*services: str) -> dict[str, Path]:
    """Module -> file, ``quire.`` left off."""
    found = {}
    for service in services:
        for file in (ROOT / service).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = names_of(*SERVICES)


def imports_of(module: str) -> set[str]:
    """The modules of ours that ``module`` imports: at its top, in functions and for the type checker alone."""
    file = MODULES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            stem = ".".join(filter(None, base))
            for alias in node.names:
                name = f"{stem}.{alias.name}" if stem else alias.name
                found.add(name if name in MODULES else stem)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire."):
            found.add((node.module or "").removeprefix("quire."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("quire.") for alias in node.names if alias.name.startswith("quire.")}
    return {name for name in found if name in MODULES and name != module}


IMPORTS = {module: imports_of(module) for module in MODULES}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """What is left when everything that imports nothing of the rest, or is imported by nothing of it, is taken away:
    split into the parts whose members reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*graph[start]]
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += graph[name]
        return seen

    reached = {name: reach(name) for name in graph}
    found = {frozenset(o for o in reached[name] if name in reached[o]) for name in graph if name in reached[name]}
    return sorted(sorted(circle) for circle in found)


def test_the_search_for_circles_finds_them() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set(), "f": {"g"}, "g": {"f"}}) == [
        ["a", "b", "c"],
        ["f", "g"],
    ]
    assert "scheduler.core" in IMPORTS["scheduler.membership"] and "proto.codec" in IMPORTS["scheduler.membership"]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(IMPORTS) == []


def floor_of(module: str) -> int:
    """The floor that names the module, or else the nearest package above it."""
    named = {name: n for n, names in enumerate(FLOORS[module.partition(".")[0]]) for name in names.split()}
    while module not in named:
        module = module.rpartition(".")[0]
    return named[module]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    if MODULES[module].name != "__init__.py":  # a package's own file only says what it holds
        within = [name for name in IMPORTS[module] if name.partition(".")[0] == module.partition(".")[0]]
        assert [name for name in within if floor_of(name) > floor_of(module)] == []


OUTSIDE = {"asyncio", "datetime", "os", "random", "secrets", "select", "signal", "socket", "subprocess", "threading",
           "time", "uuid", "zmq"}  # fmt: skip
"""What reads a clock, draws by chance, or comes from another process."""

DECIDES = ("client.core", "client.supervisor.watch", "detokenizer.core", "scheduler.inputs")
"""What is told what happens. A history of it can be run again, so its clocks are given to it, and its chance."""

HARMLESS = {
    "client.core": {"random"},  # the type of what it is given
    "client.supervisor.decision": {"signal"},  # a signal's number
    "client.supervisor.place": {"signal"},
    "detokenizer.begins": {"time"},  # when a warning is due again
    "detokenizer.detokenize": {"random"},  # of one fixed seed
    "detokenizer.specials": {"secrets"},  # a name for special tokens, on which no id depends
    "detokenizer.sandbox": {"datetime"},  # for templates that ask for the date
    "detokenizer.template_limits": {"threading", "time"},  # the processor's time that a rendering may take
    "detokenizer.tokenizer": {"os"},  # a setting for `tokenizers`, made once
    "proto.checkpoint.model_config": {"os"},  # reads a model's folder
    "proto.config": {"os"},  # the default address
    "proto.log_lines": {"os", "time"},  # what lines of the log say
    "proto.process": {"asyncio", "os", "signal", "socket", "threading", "time"},  # for an exit code in it
    "proto.readable": {"os"},  # whether a model's files are there
    "scheduler.blame": {"os"},  # the lock file, where there is one
}


def outside(module: str) -> set[str]:
    """What of ``OUTSIDE`` a module imports itself."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found & OUTSIDE


def test_what_decides_is_given_its_clock_and_what_it_draws_with() -> None:
    seen: set[str] = set()
    waiting = [*DECIDES]
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += IMPORTS[name]
    assert {name: found for name in seen if (found := outside(name))} == HARMLESS


@pytest.mark.parametrize("module", MODULES)
def test_a_file_and_its_functions_can_be_read(module: str) -> None:
    text = MODULES[module].read_text("utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MOST_FUNCTION_LINES, f"{node.name} has {lines} lines"
