"""``quire doctor [MODEL]``: what is installed and what the machine has. Nothing is changed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ..proto.config import ConfigError, EngineArgs
from . import doctor_checks as checks
from .cards import sheet_of_device
from .doctor_checks import FAIL, OK, WARN, Finding
from .fit import Answer, answer, config_file

_MARKS = {OK: "ok  ", WARN: "warn", FAIL: "FAIL"}


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("doctor")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id: would it fit, and in which dtype?"
    )
    parser.add_argument("--port", type=int, default=8000, help="port that a server would listen on (default: 8000)")
    parser.add_argument("--keys", metavar="FILE", help="key file of the processes, as for quire serve")
    parser.add_argument("--api-key-file", metavar="FILE", help="file of API keys, as for quire serve")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print the findings; 1 where one of them is a failure."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {args.port}.")
    findings = list(_findings(args))
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
    else:
        print(as_text(findings))
    return 1 if any(each.state == FAIL for each in findings) else 0


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    folder, missing = None, ""
    if args.model is not None:
        try:
            folder = config_file(EngineArgs(model=args.model))
        except ConfigError as error:
            missing = str(error)
    told = checks.probe(folder)
    yield from checks.packages()
    yield from checks.devices(told)
    yield from checks.system()
    yield from checks.ports(args.port)
    yield from checks.hub()
    yield from checks.keys([("--keys", args.keys), ("--api-key-file", args.api_key_file)])
    if missing:
        yield Finding("Model", args.model, FAIL, missing, "name a folder with a config.json")
    elif folder is not None:
        yield from _model(args.model, folder, told)


def _model(model: str, folder: str, told: dict[str, Any]) -> Iterator[Finding]:
    """What a worker would choose for it, and whether it fits the first GPU, or this machine's memory."""
    chosen = told.get("model", {})
    if "error" in chosen:
        yield Finding("Model", "config.json", FAIL, chosen["error"], "correct it, or use another model")
        return
    if chosen:
        why = f" ({chosen['why']})" if chosen["why"] else ""
        yield Finding(
            "Model", "runs as", OK,
            f"{chosen['dtype']} on {chosen['device']} by {chosen['runs']}'s own code, KV cache in {chosen['cache']}; "
            f"stored as {chosen['stored']}{why}",
        )  # fmt: skip
    gpus = told.get("gpus") or []
    sheet = sheet_of_device(gpus[0]["name"]) if gpus else None
    if gpus and sheet is None:
        yield Finding("Model", "memory", WARN, f"no figures of a {gpus[0]['name']}", f"quire fit {model} --gpu NAME")
        return
    try:
        found = answer(EngineArgs(model=model), folder, sheet, 1)
    except ConfigError as error:
        yield Finding("Model", "memory", FAIL, str(error), "correct config.json, or use another model")
        return
    dtype = str(chosen.get("dtype", "bfloat16"))
    yield _memory(found, "bfloat16" if dtype == "float16" else dtype)  # which are as wide


def _memory(found: Answer, dtype: str) -> Finding:
    """Whether it fits as it would be loaded; if not, in which formats it would."""
    where = f"{found.sheet.name if found.sheet else 'memory of this machine'}, {found.load.length} tokens"
    fitting = [fmt.how for fmt, plan in found.plans.items() if plan is not None and plan.holds(found.load.length)]
    own = next((fmt for fmt in found.plans if fmt.name == dtype), next(iter(found.plans)))
    plan = found.plans[own]
    if plan is not None and plan.holds(found.load.length):
        return Finding(
            "Model", "memory", OK, f"fits in {own.name} ({where}): {plan.rows} requests of that length at once"
        )
    remedy = f"start with {', or '.join(fitting)}" if fitting else "a shorter --max-model-len, or a larger device"
    return Finding("Model", "memory", WARN if fitting else FAIL, f"does not fit in {own.name} ({where})", remedy)


def as_text(findings: list[Finding]) -> str:
    """Sections of marked lines, a remedy under each that is not ok, and a count."""
    lines = []
    for section, group in groupby(findings, key=lambda each: each.section):
        lines.append(section)
        for each in group:
            lines.append(f"  {_MARKS[each.state]}  {each.name:<18} {each.found}")
            if each.remedy:
                lines.append(f"{'':>8}{'':<18} -> {each.remedy}")
    counts = {state: sum(each.state == state for each in findings) for state in _MARKS}
    lines.append(f"{counts[OK]} ok, {counts[WARN]} to look at, {counts[FAIL]} that must be mended")
    return "\n".join(lines)
