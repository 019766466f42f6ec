"""Print what one service's image installs: ``python requirements.py scheduler [EXTRAS] | pip install -r /dev/stdin``.

The one place that says what each service imports; the versions are those of pyproject.toml. A test compares this
table with the imports of the code, so an image has everything its service needs and nothing else, but for the extras of
pyproject.toml that are asked for, with commas between them: ``tracing``.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

NEEDS = {
    "scheduler": ["msgspec", "numpy", "pyzmq"],
    "frontend": ["aiohttp", "huggingface_hub", "msgspec", "numpy", "prometheus_client", "pyzmq", "uvloop"],
    "detokenizer": [
        "huggingface_hub", "jinja2", "llguidance", "msgspec", "pyzmq", "tokenizers", "transformers", "uvloop",
    ],
    "gpu_worker": [
        "huggingface_hub", "llguidance", "msgspec", "numpy", "pyzmq", "safetensors", "tokenizers", "torch", "tqdm",
        "transformers", "triton",
    ],
}  # fmt: skip


def requirements(service: str, pyproject: Path, extras: str = "") -> list[str]:
    """The lines of pyproject.toml's dependencies that ``service`` needs, and those of ``extras``.

    Raises KeyError for a dependency that is not there, and SystemExit with one line for such an extra.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    by_name = {re.split(r"[^\w-]", line, maxsplit=1)[0]: line for line in project["dependencies"]}
    lines = [by_name[name] for name in NEEDS[service]]
    for extra in extras.replace(",", " ").split():
        if extra not in project["optional-dependencies"]:
            known = ", ".join(sorted(project["optional-dependencies"]))
            sys.exit(f"QUIRE_EXTRAS names {extra!r}, which is no extra of quire; there are {known}.")
        lines += project["optional-dependencies"][extra]
    return lines


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path(__file__).with_name("pyproject.toml"), ",".join(sys.argv[2:]))))
