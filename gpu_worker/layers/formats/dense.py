"""Which format multiplies a float weight where it lives, and the way of a quantized weight to become one.

On a GPU that is ``Cuda``. On a CPU the weight is packed once, at load, into the blocks its product kernel reads.
Which library packs is a rule, not a race, so that a restarted worker rounds as the one before it did:

- quire's own kernels, where they were compiled. They alone give a row the same bits in any batch, in bfloat16 too.
- Else oneDNN (``mkldnn``) unless the processor is Intel's: MKL's fp32 kernels are for Intel, and take 1.3 to 2.3 times
  as long on AMD at 8 to 128 rows (``python -m bench kernels`` measures both).
- MKL on Intel, for fp32.
- Plain where torch has neither, and there for weights too small to matter.

``QUIRE_CPU_LINEAR`` = native | onednn | mkl | plain overrides the rule.
"""

from __future__ import annotations

import functools
import os

import torch

from ...kernels.cpu.library import library
from .base import ExpertProducts, Format, Run, Tensors, Weight
from .cuda import CUDA
from .mkl import MKL
from .native import Native
from .onednn import OneDNN
from .plain import Plain

PLAIN = Plain()
DENSE: dict[str, Format] = {"plain": PLAIN, "native": Native(), "onednn": OneDNN(), "mkl": MKL()}
# Packing costs MKL some 6 MB a weight whatever its size, and saves nothing below this many values.
SMALL = 1 << 16


@functools.cache
def cpu_flags() -> tuple[str, frozenset[str]]:
    """The processor's vendor and instruction sets as /proc/cpuinfo names them; empty elsewhere than on Linux."""
    vendor, flags = "", frozenset[str]()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                key = key.strip()
                if key in ("vendor_id", "CPU implementer"):
                    vendor = value.strip()
                elif key in ("flags", "Features"):
                    return vendor, frozenset(value.split())
    except OSError:
        pass
    return vendor, flags


def cpu_has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 itself; without that, bf16 products are slower than fp32."""
    return bool(cpu_flags()[1] & {"avx512_bf16", "amx_bf16", "bf16"})


def cpu_backend(dtype: torch.dtype = torch.float32) -> str:
    """The packing that the rule above chooses on this machine: native, onednn, mkl or plain."""
    asked = os.environ.get("QUIRE_CPU_LINEAR", "")
    if asked == "plain":
        return asked
    if asked in ("", "native") and dtype in (torch.float32, torch.bfloat16) and library() is not None:
        return "native"
    mkl = torch.backends.mkl.is_available() and dtype == torch.float32
    onednn = torch.backends.mkldnn.is_available() and dtype in (torch.float32, torch.bfloat16)
    if mkl and (asked == "mkl" or not onednn or (not asked and cpu_flags()[0] == "GenuineIntel")):
        return "mkl"
    return "onednn" if onednn else "plain"


def dense(weight: Weight) -> Format:
    """The format of a float weight, or of several experts'."""
    if weight.device.type == "cuda":
        return CUDA
    if weight.device.type != "cpu":
        return PLAIN
    backend = cpu_backend(weight.dtype)
    return PLAIN if backend != "native" and weight.numel < SMALL else DENSE[backend]


class Dequantized(Format):
    """The products of a format that says its tensors and ``dequantize`` alone: by the weight itself, made at load.

    A format overrides ``linear`` and ``experts`` where it multiplies without making it, and so saves memory.
    """

    def linear(self, tensors: Tensors, weight: Weight) -> Run:
        return dense(weight).linear({"weight": self.dequantize(tensors, weight)}, weight)

    def experts(self, tensors: Tensors, weight: Weight) -> ExpertProducts:
        return dense(weight).experts({"weight": self.dequantize(tensors, weight)}, weight)
