"""Linear layers: products with fixed weights, in whichever format the weights are (``formats/``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..batch import Chooser
from ..kernels.lora import Layout
from ..kernels.moe import Blocks
from .formats.base import ExpertProducts, Format, Run, Tensors, Weight, whole
from .formats.cuda import MeasuredProduct
from .formats.cuda_coded import CHOOSERS, CudaCoded
from .formats.dense import SMALL, Dequantized, dense
from .formats.native import NativeExperts, NativeRun

# Fewer rows are filled up with zeros. Below four the libraries sum in another order; from four on a row's product has
# the same bits in any batch, so that a token does not depend on its neighbours. With oneDNN four rows are also faster.
LEAST_ROWS = 4


class Linear:
    """``x [T, in] -> x @ weight.T + bias [T, out]`` for a fixed weight [out, in]; ``bias`` may be set later.

    ``packed``: the weight as the native kernels read it, with the bias; None where something else multiplies.
    ``choosers``: as ``Model.choosers``, what is chosen for this product beside ``kernels.linear.ByRows``.
    """

    __slots__ = ("_bias", "_least", "_run", "_unit", "choosers", "packed")

    def __init__(self, format: Format, tensors: Tensors, weight: Weight, bias: torch.Tensor | None = None) -> None:
        """``tensors`` of ``weight``, as ``format`` names them."""
        self._run = format.linear(tensors, weight)
        self.packed = self._run.packed if isinstance(self._run, NativeRun) else None
        self._least = LEAST_ROWS if weight.device.type == "cpu" and self.packed is None else 0
        # Small products round otherwise between the multiples.
        self._unit = LEAST_ROWS if self._least and weight.numel < SMALL else 1
        self.bias = bias
        # Of any quantized format: it may add something to the product with its codes.
        coded = isinstance(format, Dequantized) and weight.device.type == "cuda"
        self.choosers: frozenset[Chooser] = CHOOSERS if coded else frozenset()

    @property
    def product(self) -> Run:
        """What multiplies."""
        return self._run

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], or None."""
        return self._bias

    @bias.setter
    def bias(self, bias: torch.Tensor | None) -> None:
        self._bias = bias
        if self.packed is not None:
            self.packed.set_bias(bias)

    @classmethod
    def of(cls, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """By the float weight ``matrix`` [out, in]. Where it is packed the caller may drop it."""
        weight = weight_of(matrix)
        return cls(dense(weight), {"weight": matrix}, weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        missing = max(self._least - rows, -rows % self._unit)
        if missing <= 0:
            return self._run(x, self.bias)
        return self._run(F.pad(x, (0, 0, 0, missing)), self.bias)[:rows]

    def joined(self, activation: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """x [T, in] -> [T, out / 2], the outputs' halves joined by a gated activation, where that is one product; else
        None. Later changes of ``bias`` count."""
        if not isinstance(self._run, MeasuredProduct | CudaCoded):
            return None
        run = self._run.joined(activation)
        return lambda x: run(x, self.bias)


class ExpertLinear:
    """A ``Linear`` for each of the experts that one rank holds; ``bias`` [E, out] or None, and may be set later.

    ``packed``: of each expert, as ``Linear.packed``, or None.
    """

    adapted = False
    """Whether adapters may add anything."""

    def __init__(self, format: Format, tensors: Tensors, weight: Weight, bias: torch.Tensor | None = None) -> None:
        """``tensors`` of ``weight``, as ``format`` names them, each with a first dim of ``weight.experts``."""
        self._count = weight.experts or 0
        self._products = format.experts(tensors, weight)
        self.packed = self._products.packed if isinstance(self._products, NativeExperts) else None
        self.bias = bias

    @property
    def product(self) -> ExpertProducts:
        """What multiplies."""
        return self._products

    @property
    def bias(self) -> torch.Tensor | None:
        """[E, out], or None."""
        return self._bias

    @bias.setter
    def bias(self, bias: torch.Tensor | None) -> None:
        self._bias = bias
        for expert, packed in enumerate(self.packed or ()):
            packed.set_bias(None if bias is None else bias[expert])

    @classmethod
    def of(cls, matrices: torch.Tensor, bias: torch.Tensor | None = None) -> ExpertLinear:
        """By the float weights ``matrices`` [E, out, in]."""
        weight = weight_of(matrices)
        return cls(dense(weight), {"weight": matrices}, weight, bias)

    def __len__(self) -> int:
        return self._count

    def add(self, expert: int, rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to ``y`` [T, out], in place, what adapters make of ``x`` [T, in], the tokens ``rows``. On a CPU."""

    def laid_out(self, ids: torch.Tensor, first: int, among: int) -> Layout | None:
        """What ``add_grouped`` takes for the chosen experts ``ids`` int64 [T, k], of which these begin at ``first`` of
        ``among``; None: no adapter adds anything in this step. On a GPU."""
        return None

    def add_grouped(
        self, x: torch.Tensor, y: torch.Tensor, layout: Layout, weights: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        """Add to ``y`` [T * k, out], in place, what adapters make of ``x`` [T, in] or [T * k, in], times ``weights``
        [T, k]. On a GPU."""

    def one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """x [T, in] -> [T, out] by one expert, on a CPU."""
        return self._products.one(x, None if self.bias is None else self.bias[expert], expert)

    def grouped(
        self, x: torch.Tensor, blocks: Blocks, activation: str = "", weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The slots of ``blocks`` each by its own expert, on a GPU; see ``kernels.moe.grouped_product``."""
        return self._products.grouped(x, self.bias, blocks, activation, weights)


def weight_of(matrix: torch.Tensor) -> Weight:
    """What a format is told of all of a float weight [out, in], or of experts' [E, out, in]."""
    rows, columns = matrix.shape[-2:]
    experts = len(matrix) if matrix.dim() == 3 else None
    return Weight((whole(rows),), whole(columns), matrix.dtype, matrix.device, experts)
