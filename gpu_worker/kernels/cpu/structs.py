"""ctypes' twins of the structs in kernels.h; ``check`` compares their sizes with C's."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p


class Weight(Structure):
    """q_weight: a packed weight."""

    _fields_ = [
        ("type", c_int32), ("outputs", c_int32), ("inputs", c_int32), ("padded_inputs", c_int32), ("panels", c_int32),
        ("gated", c_int32), ("data", c_void_p), ("scales", c_void_p), ("offsets", c_void_p),
        ("group_scales", c_void_p), ("bias", c_void_p),
    ]  # fmt: skip


class Rows(Structure):
    """q_rows: rows of activations as a product reads them."""

    _fields_ = [("data", c_void_p), ("stride", c_int64), ("scales", c_void_p), ("sums", c_void_p)]


class Epilogue(Structure):
    """q_epilogue: what becomes of a product's sums."""

    _fields_ = [
        ("kind", c_int32), ("out_type", c_int32), ("activation", c_int32), ("scale", c_float), ("out", c_void_p),
        ("stride", c_int64),
    ]  # fmt: skip


class Matrix(Structure):
    """q_matrix: a matrix as torch has it."""

    _fields_ = [("type", c_int32), ("stride", c_int64), ("data", c_void_p)]
