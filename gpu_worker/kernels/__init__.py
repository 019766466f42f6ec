"""Kernels of the worker, each with a plain torch (or numpy) twin of the same signature.

``X(...)`` launches Triton and needs a GPU (or TRITON_INTERPRET=1, as in the tests); ``X_torch(...)`` runs anywhere and
is the oracle. Callers choose by ``tensor.is_cuda``. Triton itself is imported by the ``*_jit`` modules alone, and these
by the first launch, so a machine without Triton or a GPU never pays for them.
"""
