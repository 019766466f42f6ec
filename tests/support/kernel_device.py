"""Where the kernels' tests run: compiled on the GPU if there is one, else under Triton's interpreter.

Import this before anything that may import Triton. Triton decides at its import whether it interprets, and another
test may have imported it already (torch.compile and transformers do): then its Python half is imported again.
"""

import importlib.util
import os
import sys

import torch
from interpreter_bf16 import widen_bfloat16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _forget(name: str) -> None:
    module, _, leaf = name.rpartition(".")
    del sys.modules[name]
    if hasattr(sys.modules.get(module), leaf):  # `from package import module` looks at the package first
        delattr(sys.modules[module], leaf)


if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        compiled = name.startswith("triton._C")  # cannot be loaded twice, and need not be
        ours = name.startswith("quire.gpu_worker.kernels.") and name.endswith("_jit")
        if ours or (name.split(".")[0] == "triton" and not compiled):
            _forget(name)

if DEVICE == "cpu" and importlib.util.find_spec("triton"):
    widen_bfloat16()
