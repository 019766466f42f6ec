"""Servers of one model with different flags under the same load, in turns: what several parts share."""

from __future__ import annotations

import contextlib
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .load import Load
from .models import find_model, prompt_ids
from .report import Report
from .serving import measure_load
from .sides import Server, quire

PREEMPTIONS = re.compile(r"^quire:num_preemptions\S* (\S+)$", re.M)


def run_variants(
    report: Report, model: str, dtype: str, variants: dict[str, list[str]], load: Load, turns: int,
    folders: Mapping[str, Path] | None = None,
) -> None:  # fmt: skip
    """A sample for each variant (name: flags of the server) and turn. A server is started for each, for one alone may
    have the machine; preemptions are counted from its start, prefix caching is on unless its flags say otherwise.
    ``folders``: of variants that are another checkpoint of the model."""
    folder = find_model(model)
    for turn in range(turns):
        for name, flags in variants.items():
            own = (folders or {}).get(name, folder)
            with Server(quire(flags), own, dtype, prefix_caching=True) as server:
                asked = replace(load, port=server.port, model=own.name, ids=prompt_ids(folder))
                with report.sample(model=folder.name, dtype=dtype, variant=name, turn=turn) as values:
                    values |= measure_load(asked, server.pid, {})
                    values |= preemptions(server.port)


def preemptions(port: int) -> dict[str, Any]:
    """Sequences put back for want of blocks since the server's start; nothing where it does not say."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        if found := PREEMPTIONS.search(answer.read().decode()):
            return {"preemptions": float(found.group(1))}
    return {}
