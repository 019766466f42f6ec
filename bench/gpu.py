"""Everything there is to know about quire on one GPU, in one command.

    python bench/gpu.py --out bench/results/h200.json

Runs the kernels' tests compiled, measures the card's ceilings, then each kernel and the decode step of a Llama-3-8B
shape (dummy weights) against their floors. Results are written after each part, so a run cut short keeps what it has.
``--dry-run`` walks the same code with tiny shapes on the CPU, under Triton's interpreter; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tests", "kernels", "decode")
TESTS = tuple(
    f"tests/gpu_worker/test_{name}.py"
    for name in (
        "kernels_attention", "kernels_layers", "kernels_sampling", "sampler_kernels", "sampler", "sampler_edits",
        "sampler_logprobs", "sampler_mixed",
    )
)  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--sweep", action="store_true", help="also try other tiles for the attention kernels (minutes)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="batches of the decode step")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024], help="contexts of the decode step")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU: does it run at all")
    return parser.parse_args(argv)


class Report:
    """What is known so far; every addition is printed and written."""

    def __init__(self, out: Path | None, head: dict[str, Any]):
        self.out, self.data = out, head
        self.save()

    def set(self, key: str, value: Any) -> None:
        """Record a part."""
        self.data[key] = value
        print(f"{key}: {json.dumps(value)}", flush=True)
        self.save()

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Record one line of a part."""
        self.data.setdefault(key, []).append(row)
        print(line(row), flush=True)
        self.save()

    def save(self) -> None:
        """Write the file; a reader never sees half of one."""
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            draft = self.out.with_name(self.out.name + ".part")
            draft.write_text(json.dumps(self.data, indent=1) + "\n")
            draft.replace(self.out)


def line(row: dict[str, Any]) -> str:
    """A row for people: numbers with three digits."""
    cells = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v is not None)
    return "  " + ", ".join(cells)


def head(device: str, argv: list[str]) -> dict[str, Any]:
    """Device, date, commit and command: what a number is worth nothing without."""
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "device": device,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(["python", "bench/gpu.py", *argv]),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version,
    }


def _commit() -> str:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return git.stdout.strip() or "unknown"


def run_tests() -> dict[str, Any]:
    """The kernels' tests, compiled, in a process of their own."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=600", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [text for text in done.stdout.splitlines() if text.strip()]
    if done.returncode:
        print("\n".join(lines[-60:]))
    return {
        "passed": done.returncode == 0,
        "summary": lines[-1] if lines else done.stderr[-500:],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when everything ran and the tests passed."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print("bench/gpu.py: error: no CUDA device here; run it on a machine with a GPU, or with --dry-run.",
              file=sys.stderr)  # fmt: skip
        return 1
    device = torch.device("cpu" if args.dry_run else "cuda")
    name = "dry run: the numbers mean nothing" if args.dry_run else torch.cuda.get_device_name()
    report = Report(args.out, head(name, argv))
    print(json.dumps(report.data), flush=True)

    import gpu_kernels
    from gpu_floor import LLAMA_3_8B, TINY

    passed = True
    if "tests" in args.only and not args.dry_run:
        report.set("tests", run_tests())
        passed = report.data["tests"]["passed"]
    ceilings = gpu_kernels.measure_ceilings(device, args.dry_run)
    report.set("ceilings", {"copy_bytes_per_s": ceilings.bandwidth, "product_flops_per_s": ceilings.products})
    if "kernels" in args.only:
        bench = gpu_kernels.Bench(device, ceilings, args.dry_run)
        with torch.inference_mode():
            for row in bench.run():
                report.add("kernels", row)
            for row in bench.sweep() if args.sweep else ():
                report.add("sweep", row)
    if "decode" in args.only:
        import gpu_decode

        shape = (TINY, (2,), (40,)) if args.dry_run else (LLAMA_3_8B, tuple(args.batches), tuple(args.contexts))
        for row in gpu_decode.run(shape[0], device, ceilings, *shape[1:]):
            report.add("decode", row)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
