"""The parts of ``python -m bench``: a module each, whose docstring's first line says what it measures.

``add_flags(parser)`` adds its flags, and ``measure(report, args)`` takes its samples by
``with report.sample(label=value, ..., repeat=number) as values: values["name_unit"] = figure``.
"""

PARTS = (
    "control-plane", "chain", "worker-python", "kernels", "sampling", "steps", "offline", "serve", "startup",
    "prefix-caching", "preemption", "roles", "moves", "quantization", "llamacpp", "quality", "idle", "simulation",
    "speculation", "identity", "tiers", "pairs", "watched",
)  # fmt: skip
