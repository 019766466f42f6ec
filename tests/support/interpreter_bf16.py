"""bfloat16 in Triton's interpreter, for tests alone.

The interpreter keeps bfloat16 values as uint16 bits. As it stands (Triton 3.9) it multiplies, adds and compares those
bits as if they were integers, and its conversion from float32 drops the lower bits where a GPU rounds to nearest even.
``widen_bfloat16`` lets it compute in float32, in which products of two bfloat16 values are exact, and round what is
bfloat16 again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_BITS = np.uint32(16)
_NAN = np.uint16(0x7FC0)


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits, uint16, as float32 of the same shape."""
    return (np.asarray(bits).astype(np.uint32) << _BITS).view(np.float32)


def narrowed(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, of two equally near the even one: its bits, uint16."""
    values = np.ascontiguousarray(values, np.float32).reshape(np.shape(values))
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> _BITS) & np.uint32(1))) >> _BITS
    return np.where(np.isnan(values), _NAN, rounded.astype(np.uint16))


def widen_bfloat16() -> None:
    """Change the interpreter that this process has imported; once for each import of Triton."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def wide(handle: Any) -> Any:
        bf16 = handle.dtype.scalar == tl.bfloat16
        return TensorHandle(widened(handle.data), tl.float32) if bf16 else handle

    def narrow(handle: Any) -> Any:
        if handle.data.dtype == np.bool_:  # a comparison
            return TensorHandle(handle.data, tl.int1)
        return TensorHandle(narrowed(handle.data), tl.bfloat16)

    def wrapped(original: Any, operands: int) -> Any:
        """``original``, a method, with its first ``operands`` widened; of bfloat16 comes bfloat16 again."""

        def call(self: Any, *args: Any, **named: Any) -> Any:
            given = args[:operands]
            done = original(self, *map(wide, given), *args[operands:], **named)
            return narrow(done) if given[-1].dtype.scalar == tl.bfloat16 else done

        return call

    def cast(original: Any) -> Any:
        """``original``, a conversion to the type that follows its operand, by way of float32."""

        def call(self: Any, source: Any, dtype: Any, *args: Any) -> Any:
            to = dtype.scalar
            if tl.bfloat16 not in (source.dtype.scalar, to) or source.dtype.scalar == to:
                return original(self, source, dtype, *args)
            source = wide(source)
            if to != tl.bfloat16:
                return source if to == tl.float32 else original(self, source, dtype, *args)
            if source.dtype.scalar != tl.float32:
                source = original(self, source, tl.float32, *args)
            return TensorHandle(narrowed(source.data), tl.bfloat16)

        return call

    builder = InterpreterBuilder
    builder.create_dot = wrapped(builder.create_dot, 3)
    builder.binary_op = wrapped(builder.binary_op, 2)
    builder.unary_op = wrapped(builder.unary_op, 1)
    builder.cast_impl = cast(builder.cast_impl)
    builder.create_fp_to_fp = cast(builder.create_fp_to_fp)
