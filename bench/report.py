"""What a run leaves behind: JSON with the machine, the versions, the commit, the command, and every sample taken.

A sample is one measurement: its ``labels`` say of what, its ``values`` are the figures (a name ends in its unit), and
``machine`` is how busy the machine was meanwhile. Repeats are samples that differ in their label ``repeat`` or ``turn``
alone; none is left out, and medians are made by the reader (`stats.medians`).
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .machine import ROOT, Watch, commit, device, versions

SCHEMA = 1
RESULTS = ROOT / "bench" / "results"


class BenchError(Exception):
    """A benchmark that cannot run. One line: value, limit, remedy."""


class Report:
    """The samples so far. The file is written after each, so that a run that is cut short keeps what it has."""

    def __init__(self, part: str, out: Path | None, settings: dict[str, Any], argv: list[str]):
        self.out = out
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "part": part,
            "command": shlex.join(["python", "-m", "bench", *argv]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": commit(),
            "device": device(),
            "versions": versions(),
            "settings": settings,
            "samples": [],
        }

    @property
    def samples(self) -> list[dict[str, Any]]:
        return self.data["samples"]

    @contextlib.contextmanager
    def sample(self, **labels: Any) -> Iterator[dict[str, Any]]:
        """Measure in the body of ``with`` and put the figures into the dict; the machine is watched meanwhile."""
        values: dict[str, Any] = {}
        watch = Watch()
        yield values
        self.add(labels, values, watch.stop())

    def add(self, labels: dict[str, Any], values: dict[str, Any], machine: dict[str, float]) -> None:
        """Keep a sample, print it, and write the file."""
        kept = {name: rounded(value) for name, value in values.items() if value is not None}
        self.samples.append({"labels": labels, "values": kept, "machine": machine})
        print(line(labels, kept, machine), flush=True)
        self.save()

    def save(self) -> None:
        """Write the file; a reader never sees half of one."""
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            draft = self.out.with_name(self.out.name + ".part")
            draft.write_text(json.dumps(self.data, indent=1) + "\n")
            draft.replace(self.out)


def rounded(value: Any) -> Any:
    """A float with five significant digits; more were noise."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def line(labels: dict[str, Any], values: dict[str, Any], machine: dict[str, float]) -> str:
    """A sample for people to read."""
    what = " ".join(f"{name}={value}" for name, value in labels.items())
    figures = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in values.items())  # fmt: skip
    return f"{what}: {figures} [others {machine['others_pct']:.0f}%, steal {machine['steal_pct']:.0f}%]"


def load(path: Path) -> dict[str, Any]:
    """A file of results. Raises BenchError where it is none."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read results from {path}: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BenchError(f"{path} is no file of results with schema {SCHEMA}; write it with `python -m bench`.")
    return data


def merge(files: list[dict[str, Any]]) -> dict[str, Any]:
    """One file of results out of several slices of the same part, taken on the same device.

    Commands and dates of all are kept under ``slices``. Raises BenchError where they do not belong together.
    """
    first = files[0]
    for other in files[1:]:
        for name in ("part", "device"):
            if other[name] != first[name]:
                raise BenchError(f"cannot merge results whose {name} differs: {first[name]!r} and {other[name]!r}.")
    own = ("command", "date", "commit", "versions", "settings")
    slices = [piece for file in files for piece in file.get("slices") or [{name: file[name] for name in own}]]
    samples = [sample for file in files for sample in file["samples"]]
    versions_of_all = {name: value for file in files for name, value in file["versions"].items()}
    return {**first, "versions": versions_of_all, "slices": slices, "samples": samples}


def note_progress(text: str) -> None:
    """Say what is going on, on standard error."""
    print(f"  .. {text}", file=sys.stderr, flush=True)
