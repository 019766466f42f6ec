"""Benchmarks of quire: ``python -m bench --list`` in a checkout shows what there is. It is no part of the package."""
