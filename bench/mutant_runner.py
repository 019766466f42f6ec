"""Runs tests against mutants, each in a fork of a process that has collected the tests once.

A mutant in a function takes its place there (``__code__``); one in what runs at import has everything imported anew.
Only tests that run one of its lines are run, the quick ones and those that found others nearby first, until one fails.
So a mutant costs a fork and what its tests take, a second or less.
"""

from __future__ import annotations

import gc
import importlib.machinery
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.tmpdir import tmppath_result_key

from .mutations import Mutant

ROOT = Path(__file__).resolve().parent.parent
MEMORY = 4 << 30
LEAST_S, FACTOR, WALL_S = 1.0, 8.0, 120
"""A test may take so long with a mutant: FACTOR times what it takes without, and LEAST_S more, in seconds of the
processor; WALL_S if it sleeps."""

IMPORT_S = 60.0
"""To import everything anew, and to collect the tests again."""

LEAST_TEST_S = 0.002
"""What pytest takes for any test."""

KILLED, SURVIVED, TIMEOUT, UNTESTED = "killed", "survived", "timeout", "untested"
Done = Callable[[Mutant, str, str], None]
"""Told of each mutant what became of it, and which test saw it first."""


def run(tests: list[str], mutants: list[Mutant], jobs: int, longest: float, budget: float, done: Done) -> int:
    """Collect ``tests`` (arguments of pytest), and run them against all ``mutants``, each for ``budget`` seconds at
    most. Tests that take over ``longest`` seconds, that do not pass, or are skipped, are left out. Pytest's exit
    code."""
    return _pytest(tests, _Runner(mutants, jobs, longest, budget, done))


def _pytest(tests: list[str], plugin: object) -> int:
    options = ["-p", "no:timeout", "-p", "no:cacheprovider", "-s", "-q", "-o", "addopts=--import-mode=importlib"]
    return pytest.main([*options, "--rootdir", str(ROOT), *tests], [plugin])


class _Runner:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, mutants: list[Mutant], jobs: int, longest: float, budget: float, done: Done):
        self.mutants, self.jobs, self.done = mutants, jobs, done
        self.longest, self.budget = longest, budget
        self.files = {str(mutant.file) for mutant in mutants}
        self.kills: dict[tuple[Path, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        gc.collect()
        self.functions = self._functions()  # before the freeze, which hides them
        gc.freeze()  # a fork would copy every page that the collector writes on
        self.seconds = dict(_in_child(self._time_all))
        self.lines = {at: {(file, line) for file, line in lines} for at, lines in _in_child(self._trace_all)}
        print(f"{len(self.seconds)} of {len(self.items)} tests, {sum(self.seconds.values()):.1f} s", flush=True)
        waiting, running = list(reversed(self.mutants)), {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop()
                tests = self._tests(mutant)
                if tests:
                    running.update([self._start(mutant, tests)])
                else:
                    self.done(mutant, UNTESTED, "")
            if running:
                pid, status = os.wait()
                self._finish(*running.pop(pid), status)
        return True

    # -- what the tests are

    def _time_all(self) -> list[tuple[int, float]]:
        """Seconds of the processor of each test that passes in time."""
        found = []
        signal.signal(signal.SIGPROF, _too_long)
        for at, item in enumerate(self.items):
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, self.longest)
            passed = self._passes([at])
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            if passed:
                found.append((at, time.process_time() - began))
            else:
                with suppress(BaseException):
                    item.session._setupstate.teardown_exact(None)
        return found

    def _trace_all(self) -> list[tuple[int, list[tuple[str, int]]]]:
        """File and line of all in the mutants' files that each of them runs."""
        found = []
        for at in self.seconds:
            lines: set[tuple[str, int]] = set()
            sys.settrace(_tracer(self.files, lines))
            self._passes([at])
            sys.settrace(None)
            found.append((at, list(lines)))
        return found

    def _passes(self, tests: list[int], limited: bool = False) -> bool:
        for number, at in enumerate(tests):
            after = self.items[tests[number + 1]] if number + 1 < len(tests) else None
            passed = False
            if limited:
                _limit(self.seconds[at])
            with suppress(BaseException):
                _run_item(self.items[at], after)
                passed = True
            if not passed:
                self.failed = self.items[at].nodeid
                return False
        return True

    def _functions(self) -> dict[tuple[str, str, int], list[FunctionType]]:
        """By file, qualified name and first line: every function that is there now."""
        found = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename in self.files:
                code = thing.__code__
                found[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
        return found

    # -- a mutant

    def _tests(self, mutant: Mutant) -> list[int]:
        """Those that may see it, the likeliest first."""
        if mutant.function is None:  # it runs at import: any test may see it, those that run the file's functions first
            wanted = {*self.lines}
            own = {at for at, lines in self.lines.items() if any(file == str(mutant.file) for file, _ in lines)}
        else:
            where = {(str(mutant.file), line) for line in mutant.lines}
            wanted = own = {at for at, lines in self.lines.items() if not where.isdisjoint(lines)}
        near, far = self.kills[mutant.file, mutant.where], self.kills[mutant.file, ""]
        worth = {at: (0.1 + far[at] + 10 * near[at]) / (LEAST_TEST_S + self.seconds[at]) for at in wanted}
        tests = sorted(wanted, key=lambda at: (at not in own, -worth[at]))
        sums = itertools.accumulate(self.seconds[at] for at in tests)
        return [at for at, seconds in zip(tests, sums, strict=True) if seconds <= self.budget] or tests[:1]

    def _start(self, mutant: Mutant, tests: list[int]) -> tuple[int, tuple[Mutant, int]]:
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            return pid, (mutant, read)
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        self.failed, status = "", 1
        with suppress(BaseException):
            _silence()
            status = self._try(mutant, tests)
        os.write(write, self.failed.encode())
        os._exit(status)

    def _try(self, mutant: Mutant, tests: list[int]) -> int:
        """0 where all pass."""
        if self._put_in_place(mutant):
            return 0 if self._passes(tests, limited=True) else 1
        _limit(IMPORT_S)
        _forget_ours()
        _compile_as(mutant)
        plugin = _First({self.items[at].nodeid: self.seconds[at] for at in tests})
        try:
            return _pytest(["-x", *(str(ROOT / self.items[at].nodeid) for at in tests)], plugin)
        finally:
            self.failed = plugin.failed

    def _put_in_place(self, mutant: Mutant) -> bool:
        """False where the module must be imported anew: it runs then, or without ``super`` it is no such function."""
        if mutant.function is None:
            return False
        code = _within(mutant.code(), *mutant.function)
        functions = self.functions[str(mutant.file), *mutant.function]
        if not functions or any(len(f.__code__.co_freevars) != len(code.co_freevars) for f in functions):
            return False
        for function in functions:
            function.__code__ = code
        return True

    def _finish(self, mutant: Mutant, read: int, status: int) -> None:
        with os.fdopen(read) as pipe:
            failed = pipe.read()
        if os.WIFSIGNALED(status):
            late = os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF, signal.SIGKILL)
            self.done(mutant, TIMEOUT if late else KILLED, failed)
        elif os.WEXITSTATUS(status):
            for at, item in enumerate(self.items):
                if item.nodeid == failed:
                    self.kills[mutant.file, mutant.where][at] += 1
                    self.kills[mutant.file, ""][at] += 1
            self.done(mutant, KILLED, failed)
        else:
            self.done(mutant, SURVIVED, "")


def _run_item(item: Any, after: pytest.Item | None) -> None:
    """One test. What it raises is raised, and nobody writes a report of it, which would take longer than the test."""
    item._initrequest()
    item.stash[tmppath_result_key] = {}  # reports would fill it, and tmp_path asks for it when it is torn down
    item.ihook.pytest_runtest_setup(item=item)
    item.ihook.pytest_runtest_call(item=item)
    item.ihook.pytest_runtest_teardown(item=item, nextitem=after)


class _TooLong(BaseException):
    """A test takes longer than those that are wanted."""


def _too_long(*_: object) -> None:
    raise _TooLong


class _First:
    """Remembers which test failed first. ``seconds`` are what each takes without a mutant."""

    def __init__(self, seconds: dict[str, float]):
        self.failed, self._seconds = "", seconds

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _limit(self._seconds[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, as JSON has it, from a fork: what it leaves in caches is not seen here."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        status = 1
        with suppress(BaseException):
            _silence()
            with os.fdopen(write, "w") as pipe:
                json.dump(work(), pipe)
            status = 0
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"the tests end the process that runs them: status {status}")
    return json.loads(text)


def _silence() -> None:
    """What tests of a child write is of no use."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _limit(seconds: float) -> None:
    """End this process where its next test, which takes ``seconds`` of the processor without a fault, takes too
    long."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, LEAST_S + FACTOR * seconds)
    signal.alarm(WALL_S)


def _tracer(files: set[str], lines: set[tuple[str, int]]) -> Callable[..., Any]:
    def local(frame: Any, event: str, arg: object) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def call(frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    return call


def _within(code: CodeType, name: str, line: int) -> CodeType:
    """The code of a function, somewhere in that of its module."""
    for one in _codes(code):
        if one.co_qualname == name and one.co_firstlineno == line:
            return one
    raise LookupError(f"no function {name} in line {line}")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)


def _forget_ours() -> None:
    """Import everything in this checkout anew, but for the benchmarks."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(ROOT) and not name.startswith("bench"):
            del sys.modules[name]
    for name in [name for name in sys.modules if name.partition(".")[0] == "quire"]:
        del sys.modules[name]


def _compile_as(mutant: Mutant) -> None:
    """From here on the mutant's file is imported with its fault."""
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if loader.path == str(mutant.file):
            return mutant.code()
        return plain(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
