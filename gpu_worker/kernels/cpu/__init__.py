"""Native kernels of CPU workers, in C: ``src/`` is compiled by ``build.py`` and opened by ``library.py``."""
