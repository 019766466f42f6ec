"""``quire quantize MODEL OUT``: a quantized checkpoint of a float one, made by auto-round, with perplexities.

Rounding to the nearest is the default: it takes a minute and no text. With ``--iters`` auto-round tunes the rounding of
each block on a calibration text.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..proto.checkpoint.gguf import gguf_file
from ..proto.checkpoint.model_config import load_model_config, resolve_model
from ..proto.checkpoint.pooler_config import ENCODERS, family_of
from ..proto.checkpoint.quantization import quantization_of
from ..proto.process import EXIT_CONFIG
from .errors import CommandError

SCHEMES = {
    "gptq": ("W4A16", "auto_gptq"), "awq": ("W4A16", "auto_awq"), "int4": ("W4A16", "llm_compressor"),
    "int8": ("INT8", "llm_compressor"), "fp8": ("FP8_BLOCK", "fp8"),
}  # fmt: skip
"""Method -> auto-round's scheme and format."""
_GROUPED = ("gptq", "awq", "int4")
"""Methods with a scale for each group of inputs; int8 has one for each output, fp8 for blocks of 128 by 128."""
_HELD = 5
"""Of a calibration text one part of so many is kept for the perplexity."""
_WORDS = 300  # of a calibration sample
_LONGEST = 511  # tokens of a sample that are measured


def add_parser(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("quantize")
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a float model")
    parser.add_argument("out", metavar="OUT", help="folder to write, which must not exist or be empty")
    parser.add_argument("--method", choices=tuple(SCHEMES), default="gptq")
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="inputs that share a scale, of gptq, awq and int4 (default: 128)"
    )
    parser.add_argument("--calibration", metavar="FILE", help="text (UTF-8) to tune on, and to measure with")
    parser.add_argument("--iters", type=int, default=0, metavar="N", help="steps of tuning for each block (default: 0)")
    parser.add_argument("--no-perplexity", action="store_true", help="measure nothing before and after")
    parser.set_defaults(run=quantize)


def quantize(args: argparse.Namespace) -> int:
    """Write the checkpoint. Raises CommandError for what cannot be."""
    source, out = resolve_model(args.model), Path(args.out)
    _check(args, source, out)
    tuned, held = texts(args.calibration)
    if args.iters and not tuned:
        raise CommandError("--iters needs a text: add --calibration FILE.", EXIT_CONFIG)
    before = None if args.no_perplexity else _measured(source, held)
    with _ended_cleanly(), tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        _run(args, source, Path(scratch) / "made", tuned)
        made = next((file.parent for file in sorted(Path(scratch).rglob("config.json"))), None)
        if made is None:
            raise CommandError(f"auto-round wrote no config.json; see what it said above. Nothing is at {out}.")
        _complete(Path(source), made)
        if out.exists():
            out.rmdir()
        shutil.move(made, out)
        out.chmod(0o755)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {args.method}, {size / 2**20:.1f} MiB of weights", flush=True)
    if before is not None:
        after = _measured(str(out), held)
        print(f"perplexity: {before:.4f} before, {after:.4f} after ({100 * (after / before - 1):+.2f}%)", flush=True)
    return 0


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """SIGTERM ends this process as an exception does, so that no scratch folder stays and the other process ends."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(args: argparse.Namespace, source: str, out: Path) -> None:
    if gguf_file(source):
        raise CommandError(
            f"{source} is a GGUF model, which auto-round does not read; give the folder of the model's float weights.",
            EXIT_CONFIG,
        )
    try:
        found = json.loads((Path(source) / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{source}/config.json cannot be read: {error}", EXIT_CONFIG) from error
    names = found.get("architectures") if isinstance(found, dict) else None
    for name in names if isinstance(names, list) else ():
        family, convert = family_of(str(name))
        if family in ENCODERS or convert:
            raise CommandError(
                f"{source} is a {name!s:.80}, which pools and does not generate; quire quantize takes models that "
                "generate.", EXIT_CONFIG,
            )  # fmt: skip
    if quantization_of(source, found, None):
        raise CommandError(f"{source} is quantized already; give the model's float weights.", EXIT_CONFIG)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"{out} exists already; name another folder, or remove it.", EXIT_CONFIG)
    if not out.parent.is_dir():
        raise CommandError(f"{out.parent} is no folder; make it first.", EXIT_CONFIG)
    if args.iters < 0 or (args.group_size is not None and args.group_size < 1):
        raise CommandError("--iters must be at least 0 and --group-size at least 1.", EXIT_CONFIG)
    if args.group_size is not None and args.method not in _GROUPED:
        raise CommandError(
            f"--method {args.method} has no groups: leave --group-size {args.group_size} out, or use "
            f"{', '.join(_GROUPED)}.", EXIT_CONFIG,
        )  # fmt: skip


def texts(file: str | None) -> tuple[list[str], list[str]]:
    """Samples to tune on and others to measure with. Raises CommandError for a file that cannot be read."""
    if file is None:
        return [], [_TEXT]
    try:
        words = Path(file).read_text("utf-8").split(" ")
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} cannot be read as text: {error}", EXIT_CONFIG) from error
    samples = [" ".join(words[at : at + _WORDS]) for at in range(0, len(words), _WORDS)]
    samples = [sample for sample in samples if sample.strip()]
    if len(samples) < 2:
        raise CommandError(f"{file} has fewer than {_WORDS + 1} words; give a longer text.", EXIT_CONFIG)
    held = max(1, len(samples) // _HELD)
    return samples[:-held], samples[-held:]


def _measured(model: str, samples: Iterable[str]) -> float:
    """``perplexity``. Raises CommandError where quire cannot load the model."""
    from ..client.supervisor.launch import LaunchError

    try:
        return perplexity(model, samples)
    except LaunchError as error:
        raise CommandError(f"{model} cannot be measured: {error}", error.code) from error


def perplexity(model: str, samples: Iterable[str]) -> float:
    """Of ``samples`` by quire's own engine in this model's folder."""
    from ..client.offline.llm import LLM
    from ..proto.params import SamplingParams

    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(model, log_level="error") as llm:
        longest = min(_LONGEST, load_model_config(model).max_model_len - 1)
        tokenizer = llm.get_tokenizer()
        ids = [list(tokenizer.encode(sample))[:longest] for sample in samples]
        outputs = llm.generate(prompt_token_ids=ids, sampling_params=scored, use_tqdm=False)
    losses = [
        -each[token].logprob
        for output in outputs
        for token, each in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
        if each
    ]
    return math.exp(sum(losses) / max(1, len(losses)))


def _run(args: argparse.Namespace, source: str, scratch: Path, tuned: list[str]) -> None:
    """Have auto-round quantize ``source`` into ``scratch``, in a process of its own, whose progress bar is shown."""
    scheme, format = SCHEMES[args.method]
    job = {"model": source, "out": str(scratch), "scheme": scheme, "format": format, "iters": args.iters,
           "group_size": args.group_size, "texts": tuned}  # fmt: skip
    done = subprocess.run([sys.executable, "-P", "-c", _JOB], input=json.dumps(job), text=True, check=False)
    if done.returncode == _MISSING:
        raise CommandError("quire quantize needs auto-round: pip install 'quire[quantize]'", EXIT_CONFIG)
    if done.returncode:
        raise CommandError(f"auto-round failed with exit code {done.returncode}; its last lines are above.")


def _complete(source: Path, made: Path) -> None:
    """Copy what auto-round leaves out: tokenizer, chat template, generation defaults."""
    for file in source.iterdir():
        kept = file.suffix in (".json", ".jinja", ".model", ".txt", ".tiktoken")
        if kept and not file.name.endswith(".index.json") and file.is_file() and not (made / file.name).exists():
            shutil.copy(file, made)


_MISSING = 87
_JOB = f"""
import json, sys
job = json.load(sys.stdin)
try:
    from auto_round import AutoRound
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit({_MISSING})
more = {{}} if job["group_size"] is None else {{"group_size": job["group_size"]}}
if job["iters"]:
    more.update(dataset=job["texts"], nsamples=len(job["texts"]), seqlen=128)
else:
    more.update(disable_opt_rtn=True)
AutoRound(job["model"], scheme=job["scheme"], iters=job["iters"], **more).quantize_and_save(
    job["out"], format=job["format"]
)
"""
"""What the other process runs: auto-round brings torch, and this command line stays without it."""
_TEXT = """The harbour lay quiet in the early light. A few boats moved slowly out past the stone wall, and the men in
them spoke little, for the wind was cold and there was work to do. On the quay a woman sold bread and hot
tea to those who had come too late for the first tide. She knew every one of them by name, and asked each
how the night had been. By noon the square behind the church was full. Farmers had brought apples, cheese
and honey from the valley, and children ran between the stalls until somebody told them to stop. The old
clock struck twelve, a little late as always, and the baker said that it had been right only once, on the
day it was put up. In the afternoon the rain began. People folded their cloths, carried what was left into
the carts, and went home along the river, where the lamps were already lit."""
