"""What the scheduler does, as a stranger can read it: a command, and the lines that come back.

Each file of ``transcripts/`` is one history. ``pytest --rewrite-transcripts`` writes the lines anew, for when they are
meant to change: read the difference before it is committed. Lines that begin with # explain.

    config max-num-seqs=2            begin again with these flags (8 tokens a block, 4 rows, 16 tokens a step else)
    worker w0 num-blocks=8           a worker comes, loads and is ready; hello, loaded, ready are its steps one by one
    submit 1 prompt=20 n=2           a request: any sampling parameter, and eos, key, priority, attempt, losses, resume.
                                     prompt=16a+4: 16 tokens of a text called a, then 4 of its own
    plan                             every replica is planned for, as long as it takes more
    run w0 tokens=5,6                the worker runs its oldest plan and draws these (default: what a fake model draws)
    step w0                          plan, and run
    finish                           plan and run until nothing is left
    keep w0, arrive w0               run, with the result still on its way; now it comes
    fail w0 WORDS                    the step raised an exception
    lose NAME, unreachable NAME      a connection breaks; what is sent there does not arrive
    beat w0                          a worker's heartbeat, which is not shown
    drain w0, leave w0               a worker asks to leave; it says Bye when it was let go
    operator o0, manage o0 ACTION    an operator comes; list, drain or remove
    abort 1, stopped 1.0 LENGTH      the client is gone; a stop string ended a child
    embed 1 prompt=8                 a pooling request
    answer 0 3                       the detokenizer says which candidates of a beam search a stop string ends
    tick SECONDS w0                  time passes, in which all workers beat but those named
    sleep SECONDS                    the scheduler's own process stands still
    stats                            what is counted
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transcript_world import TranscriptWorld

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
RULE = "----"


def replay(text: str) -> str:
    """The file with the lines that come back today."""
    world, out = TranscriptWorld(), []
    for part in text.strip("\n").split("\n\n"):
        head = part.split(f"\n{RULE}")[0]
        out.append(head)
        commands = [line for line in head.splitlines() if not line.startswith("#")]
        if commands:
            lines = [line for command in commands for line in world.run(command)]
            out[-1] += "\n" + "\n".join([RULE, *(lines or ["(nothing)"])])
    return "\n\n".join(out) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text("utf-8")
    now = replay(text)
    if request.config.getoption("--rewrite-transcripts"):
        path.write_text(now, "utf-8")
    else:
        assert now == text


@pytest.mark.parametrize("path", FILES[:2], ids=lambda path: path.stem)
def test_the_same_twice(path: Path) -> None:
    text = path.read_text("utf-8")
    assert replay(text) == replay(text)
