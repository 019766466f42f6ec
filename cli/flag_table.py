"""The table of docs/flags.md: ``python -m quire.cli.flag_table docs/flags.md`` writes it anew."""

from __future__ import annotations

import sys
from pathlib import Path

from ..proto.vllm_flags import HONOURED, NOTES, rows

BEGIN, END = "<!-- table: python -m quire.cli.flag_table docs/flags.md -->\n", "<!-- end of the table -->"


def table() -> str:
    """All flags of ``vllm serve`` and what becomes of each, in the order of the alphabet, as Markdown."""
    found = {name: f"as in vLLM{': ' + NOTES[name] if name in NOTES else ''}" for name in HONOURED if name[0] != "-"}
    shorts: dict[str, str] = {}
    for row in rows():
        told = "refused: " if row.refused else "changes nothing: "
        but = f"; only {row.told()} is taken" if row.values else ""
        found[row.name] = told + row.said + but
        shorts[row.name] = "".join(f", `{short}`" for short in row.shorts)
    lines = [f"| `--{name}`{shorts.get(name, '')} | {said} |" for name, said in sorted(found.items())]
    return "\n".join(["| flag of vLLM | in quire |", "|---|---|", *lines, ""])


def written(page: str) -> str:
    """A page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text("utf-8")), "utf-8")
