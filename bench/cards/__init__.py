"""The parts of ``python -m bench gpu``: a module each, whose docstring's first line says what it measures.

``rows(card)`` yields (labels, values), one pair for each measurement, as it is made; `gpu.py` keeps them, and stops a
part that runs out of time between two of them. The order is the one to run them in: what says most comes first.
"""

PARTS = ("tests", "decode", "serve", "kernels", "quantized", "prefill", "mixed", "sampler", "moe", "idle", "sweep")
