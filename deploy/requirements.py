"""Print what one service's image installs: ``python requirements.py scheduler | pip install -r /dev/stdin``.

The one place that says what each service imports; the versions are those of pyproject.toml. A test compares this
table with the imports of the code, so an image has everything its service needs and nothing else.
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


def requirements(service: str, pyproject: Path) -> list[str]:
    """The lines of pyproject.toml's dependencies that ``service`` needs. Raises KeyError for one that is not there."""
    lines = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    by_name = {re.split(r"[^\w-]", line, maxsplit=1)[0]: line for line in lines}
    return [by_name[name] for name in NEEDS[service]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path(__file__).with_name("pyproject.toml"))))
