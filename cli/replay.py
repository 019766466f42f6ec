"""``quire replay FILE``: run what a scheduler recorded through the same code, and compare every plan."""

from __future__ import annotations

import argparse
from typing import Any

from ..proto.process import EXIT_CONFIG
from .main import CommandError

DIFFERENT = 1


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("replay")
    parser.add_argument("file", metavar="FILE", help="what --flight-recorder wrote")
    parser.add_argument("--from-step", type=int, metavar="N", help="print what happened from step N of a worker on")
    parser.add_argument("--steps", type=int, metavar="K", help="print so many steps, and no more")
    parser.add_argument("--request", type=int, metavar="UID", help="print only what names this request")
    parser.set_defaults(run=replay)


def replay(args: argparse.Namespace) -> int:
    """Exit code 0 where every plan comes out as it was recorded, 1 where one does not. Raises CommandError for a file
    that cannot be replayed."""
    from ..scheduler.recording import RecordingError

    try:
        return _replay(args)
    except RecordingError as error:
        raise CommandError(str(error), EXIT_CONFIG) from error


def _replay(args: argparse.Namespace) -> int:
    from ..scheduler.replay import Replay, about

    recording = Replay(args.file)
    if not recording.whole:
        print("the ring has wrapped: this begins with the oldest state that is still there")
    asked = not (args.from_step is None and args.steps is None and args.request is None)
    wanted = args.from_step is None
    turns = plans = shown = 0
    for turn in recording.turns():
        turns, plans = turns + 1, plans + len(turn.plans)
        wanted = wanted or any(step >= args.from_step for _, step in turn.plans)
        if wanted and asked and (args.steps is None or shown < args.steps):
            shown += len(turn.plans)
            lines = turn.lines if args.request is None else about(turn.lines, args.request)
            print("\n".join(lines), end="\n" if lines else "")
        if turn.trace:
            print(*turn.lines, turn.trace, sep="\n")
        if turn.different:
            print(f"DIFFERENT in turn {turns}: {turn.different}", *turn.lines, sep="\n")
            return DIFFERENT
    print(f"the same: {plans} plans in {turns} turns, until {recording.ended}")
    return 0
