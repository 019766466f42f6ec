"""Compiles the CPU kernels: ``pip install`` runs it, and ``python gpu_worker/kernels/cpu/build.py`` in a checkout.

One shared library with every instruction set in it, opened by ``library.py`` through ctypes: no Python header, no torch
header, any C11 compiler that knows GCC's vectors (gcc >= 10, clang >= 12). Where there is none the install goes on
without, and the worker computes with torch alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
SOURCES = HERE / "src"
COMMON = (
    "team.c", "library.c", "linear_run.c", "pack.c", "pack_codes.c", "word_planes.c", "attention_run.c", "sampler.c",
    "program.c", "experts.c", "adapt_run.c", "speculate.c",
)  # fmt: skip
"""Compiled once; the other sources once for each instruction set."""

# The tuning is for gcc, which for "generic" keeps fewer accumulators in registers and spills the others in inner loops.
_AVX512 = ("-march=x86-64-v4", "-mtune=icelake-server", "-mavx512vnni", "-mprefer-vector-width=512")
_X86 = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
}
_FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall",
)  # fmt: skip


class NotBuilt(Exception):
    """Why there is no library."""


def compiler() -> str:
    """The C compiler: $CC, cc, gcc or clang. Raises NotBuilt."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name.split()[0])):
            return found
    raise NotBuilt("no C compiler (cc, gcc or clang) is on the PATH")


def variants(cc: str, machine: str) -> dict[str, tuple[str, ...]]:
    """The instruction sets that ``cc`` can compile for ``machine``, with its flags for them."""
    wanted = _X86 if machine in ("x86_64", "AMD64") else {"plain": ()}
    return {name: flags for name, flags in wanted.items() if not flags or _accepts(cc, flags)}


def _accepts(cc: str, flags: tuple[str, ...]) -> bool:
    command = [cc, *flags, "-x", "c", "-c", "-o", os.devnull, "-"]
    return subprocess.run(command, input="int x;", text=True, capture_output=True, check=False).returncode == 0


def compile_kernels(target: Path, cc: str | None = None, machine: str | None = None) -> None:
    """Compile and link ``target``. Raises NotBuilt, with what the compiler said."""
    cc = cc or compiler()
    found = variants(cc, machine or platform.machine())
    have = [f"-DQ_HAVE_{name}" for name in found]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(SOURCES / name, Path(folder, name + ".o"), have) for name in COMMON]
        for variant, flags in found.items():
            for source in sorted(SOURCES.glob("*.c")):
                if source.name not in COMMON:
                    jobs.append(
                        (source, Path(folder, f"{source.stem}.{variant}.o"), [*flags, f"-DQ_VARIANT={variant}"])
                    )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _call([cc, *_FLAGS, *job[2], "-c", str(job[0]), "-o", str(job[1])]), jobs))
        made = Path(folder, target.name)
        objects = [str(job[1]) for job in jobs]
        bound = [] if sys.platform == "darwin" else ["-Wl,-Bsymbolic"]
        _call([cc, "-shared", "-pthread", *bound, *objects, "-o", str(made), "-lm"])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, target)


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, text=True, capture_output=True)
    except OSError as error:
        raise NotBuilt(f"{command[0]}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise NotBuilt(f"{' '.join(command)}: {error.stderr.strip()[-2000:]}") from error


class BuildKernels(build_ext):
    """setuptools' build_ext for this one extension, which may fail without harm."""

    def build_extension(self, ext: object) -> None:
        target = Path(self.get_ext_fullpath(ext.name))  # type: ignore[attr-defined]
        try:
            compile_kernels(target)
        except NotBuilt as why:
            self.warn(
                f"quire is installed without its native CPU kernels, so a CPU worker is several times slower: {why}"
            )

    def get_outputs(self) -> list[str]:
        """Of a build that failed there is nothing to install."""
        return [name for name in super().get_outputs() if Path(name).exists()]


def main() -> None:
    """Compile into the checkout, beside this file."""
    from sysconfig import get_config_var

    target = HERE / f"_kernels{get_config_var('EXT_SUFFIX')}"
    try:
        compile_kernels(target)
    except NotBuilt as why:
        sys.exit(f"error: {why}")
    print(target)


if __name__ == "__main__":
    main()
