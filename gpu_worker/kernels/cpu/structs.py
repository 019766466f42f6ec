"""ctypes' twins of the structs in kernels.h; ``check`` compares their sizes with C's."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p


class Weight(Structure):
    """q_weight: a packed weight."""

    _fields_ = [
        ("type", c_int32), ("outputs", c_int32), ("inputs", c_int32), ("padded_inputs", c_int32), ("panels", c_int32),
        ("gated", c_int32), ("data", c_void_p), ("scales", c_void_p), ("offsets", c_void_p),
        ("group_scales", c_void_p), ("bias", c_void_p), ("codes", c_void_p), ("groups", c_int64),
    ]  # fmt: skip


class Numbers(Structure):
    """q_numbers: a number for each group and output."""

    _fields_ = [
        ("base", c_void_p), ("fine", c_void_p), ("base_stride", c_int64), ("fine_stride", c_int64),
        ("base_type", c_int32), ("fine_signed", c_int32), ("base_shift", c_int32), ("fine_shift", c_int32),
    ]  # fmt: skip


class Codes(Structure):
    """q_codes: what a weight of codes has beside its panels."""

    _fields_ = [
        ("bits", c_int32), ("kind", c_int32), ("group", c_int32), ("groups", c_int32), ("zero", c_float),
        ("step", c_float), ("zeros", c_void_p), ("scales", Numbers), ("minima", Numbers), ("table", c_void_p),
        ("order", c_void_p),
    ]  # fmt: skip


class Planes(Structure):
    """q_planes: codes as torch has them."""

    _fields_ = [
        ("planes", c_void_p * 3), ("strides", c_int64 * 3), ("widths", c_int32 * 3), ("flip", c_int32),
        ("units", c_int32),
    ]  # fmt: skip


class Words(Structure):
    """q_words: codes in the words of a checkpoint."""

    _fields_ = [
        ("words", c_void_p), ("order", c_void_p), ("planes", c_void_p * 3), ("stride", c_int64), ("rows", c_int32),
        ("columns", c_int32), ("width", c_int32), ("bits", c_int32), ("outputs", c_int32), ("shifts", c_int32 * 8),
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
