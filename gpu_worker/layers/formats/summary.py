"""What the log says of a quantized model: its codes, how much smaller they are, and what multiplies them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ...kernels.cpu.codes import PackedCodes
from ...kernels.cpu.library import CODES, I4, I8, library
from ...kernels.cpu.linear import PackedWeight
from .base import ExpertProducts, Run, Tensors, Weight
from .cuda_coded import CudaCoded, CudaCodedExperts, CudaNarrow
from .int8_rows import Int8Experts, Int8Run
from .native import NativeExperts, NativeRun
from .table import CodedTable

Product = Run | ExpertProducts
_FLOAT = "none of codes, float weights made at load"
_OFF = " (the native CPU kernels are off)"
_NATIVE = {I8: "native, int8 by int8", I4: "native, int4 by int8", CODES: "native, of codes"}
_SCALES = ("scale", "absmax", "SCB")
"""In names of tensors of scales."""


@dataclass
class Summary:
    """Of the weights that one process holds, as they are made."""

    kinds: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    floats: int = 0  # weights that are not quantized, but for routers
    outer: dict[str, str] = field(default_factory=dict)
    held: int = 0  # bytes of quantized weights
    whole: int = 0  # which they would be in the model's dtype

    def add(self, name: str, weight: Weight, tensors: Tensors, quantized: bool, product: Product) -> None:
        """Take note of a linear or experts' weight. ``quantized``: whether it is, in the file or since it was read."""
        product = getattr(product, "dense", product)  # without a sparse part that is added to it
        kind = kind_of(weight, tensors, product) if quantized else _name(weight.dtype)
        if not name.startswith("layers."):
            self.outer[name] = kind
        if not quantized:
            self.floats += not weight.chooses
            return
        kernel, size = kernel_of(product), weight.numel * (weight.experts or 1) * weight.dtype.itemsize
        self.kinds[kind] += 1
        off = kernel == _FLOAT and weight.device.type == "cpu" and library() is None
        self.kernels[kernel + (_OFF if off else "")] += 1
        self.whole += size
        self.held += size if kernel == _FLOAT else bytes_of(tensors, product)

    def add_table(
        self, name: str, weight: Weight, tensors: Tensors | None = None, table: CodedTable | None = None
    ) -> None:
        """Take note of rows that are looked up, the embedding's. ``tensors``: of one that is kept as codes. ``table``:
        that, unless its codes belong to a product too.
        """
        self.outer[name] = _name(weight.dtype) if tensors is None else kind_of(weight, tensors)
        if table is not None:
            self.whole += weight.numel * weight.dtype.itemsize
            self.held += table.nbytes

    def lines(self, method: str) -> list[str]:
        """For the log; none where no weight is quantized."""
        if not self.kinds:
            return []
        count = self.kinds.total()
        outer = "".join(f"; {name}: {kind}" for name, kind in self.outer.items())
        return [
            f"quantization {method}: {_most(self.kinds)}; {count} of {count + self.floats} weights{outer}",
            f"the quantized weights take {_size(self.held)}, {_size(self.whole - self.held)} less than as floats; "
            f"kernel: {_most(self.kernels)}",
        ]


def kind_of(weight: Weight, tensors: Tensors, product: Product | None = None) -> str:
    """The codes of a weight, and what shares a scale: "4 bits in groups of 128"."""
    count, rows = weight.numel * (weight.experts or 1), weight.shape[0] * (weight.experts or 1)
    if (
        product and len(tensors) == 1 and next(iter(tensors.values())).dtype == weight.dtype
    ):  # made narrower since it was read
        return f"{_bits(product) or round(bytes_of(tensors, product) * 8 / count)} bits"
    dense = {name: tensor for name, tensor in tensors.items() if not tensor.is_sparse}
    scales = [tensor for name, tensor in dense.items() if any(each in name for each in _SCALES)]
    if not scales:  # all is in the same bytes, which may be of several types
        return f"{sum(each.nbytes for each in dense.values() if not each.is_floating_point()) * 8 / count:.3g} bits"
    text = f"{max(tensor.nbytes for tensor in dense.values()) * 8 / count:.3g} bits"
    number = max(scale.numel() for scale in scales)
    if number == rows:
        return f"{text}, a scale a row"
    if number > rows:
        return f"{text} in groups of {round(count / number)}"
    whole = number <= len(weight.parts) * (weight.experts or 1)
    return f"{text}, a scale a tensor" if whole else f"{text}, a scale a block"


def kernel_of(product: Product) -> str:
    """What multiplies, for a reader."""
    packed = _packed(product)
    if packed:
        return _NATIVE.get(packed[0].struct.type, _FLOAT)
    if isinstance(product, CudaNarrow):
        return f"Triton, {product.kind} by {product.kind}"
    if isinstance(product, CudaCoded | CudaCodedExperts):
        return "Triton, of codes"
    if isinstance(product, Int8Run | Int8Experts):
        return "torch, int8 by int8"
    return _FLOAT


def bytes_of(tensors: Tensors, product: Product) -> int:
    """Of a weight as it is held: packed, or as kernels of a GPU read it; else as the file has it."""
    if packed := _packed(product):
        return sum(each.nbytes for each in packed)
    if isinstance(product, CudaCoded | CudaCodedExperts):
        return sum(tensor.nbytes for tensor in _tensors_in(product.held))
    return sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_sparse)


def _bits(product: Product) -> int:
    """Of a code, where the product tells; else 0."""
    packed = _packed(product)
    if isinstance(product, CudaCoded | CudaCodedExperts):
        return product.held.bits
    if packed and isinstance(packed[0], PackedCodes):
        return packed[0].codes.bits
    return {I8: 8, I4: 4}.get(packed[0].struct.type, 0) if packed else 0


def _packed(product: Product) -> list[PackedWeight]:
    if isinstance(product, NativeRun):
        return [product.packed]
    return product.packed if isinstance(product, NativeExperts) else []


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors_in(each)
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, each.name))


def _most(counts: Counter[str]) -> str:
    """The most frequent, and the others with their numbers."""
    (first, _), *others = counts.most_common()
    return first + "".join(f", {each} ({number})" for each, number in others)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
