"""Engines: the operations of a linear layer on one kind of device, all with the reference's bits.

| engine | device | quantization | GEMM |
| --- | --- | --- | --- |
| ``ReferenceEngine`` | any | ``numerics``, in eager torch | FP32, dequantized |
| ``CompiledEngine`` | CPU with a C++ compiler | the same by torch.compile | the same |
| ``FusedEngine`` | GPU of capability 8.9 or more | Triton | tensor cores, by ``routes.py`` |

``select.select_engine`` chooses one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.numerics import (
    Accumulation,
    Amaxes,
    QuantizedTensor,
    Request,
    Requests,
    ScaleAmaxes,
    quantize_both,
    tensor_amaxes,
)
from megatron_lowbit.numerics import gemm as reference_gemm
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.mxnorm import MXNorm, norm_grad


class Engine:
    """Operations of a linear layer on one kind of device.

    Args:
        reason: why this engine was chosen.
    """

    name: str

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def quantize(
        self,
        x: Tensor,
        row: Request | None,
        col: Request | None,
        amaxes: ScaleAmaxes = (None, None),
    ) -> tuple[Any, Any]:
        """Quantize x (R, C) as ``row`` says, and its transpose as ``col`` says; None for None.

        Args:
            x: FP32 or BF16, any strides.
            row, col: may be one object for square blocks, which then serve both sides.
            amaxes: that tensor scales are made from; None takes the tensor's own. Those of earlier
                steps record the tensor's own as well.

        Returns:
            For a request that needs codes a QuantizedTensor, else whatever :meth:`gemm` takes.
        """
        raise NotImplementedError

    def quantize_all(
        self, xs: Sequence[Tensor], rows: Requests | None, cols: Requests | None
    ) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
        """Quantize each x (R, C) by a row request and a column request, as :meth:`quantize` does.

        Args:
            xs: matrices of one dtype and C.
            rows, cols: requests for all; None for no operand. One object for square blocks, which
                then serve both sides.
        """
        pairs = []
        for number, x in enumerate(xs):
            row = None if rows is None else rows[number]
            col = row if cols is rows else None if cols is None else cols[number]
            pairs.append(self.quantize(x, row, col))
        left, right = map(list, zip(*pairs, strict=True))
        return None if rows is None else left, None if cols is None else right

    def transpose(self, operand: QuantizedTensor, lhs: Any) -> Any:
        """Return the transpose of codes (R, C) with their values, to be multiplied by ``lhs``."""
        return self.dequantize(operand, torch.float32).t()

    def dequantize(self, operand: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Decode codes (R, C) to FP32, or round that to BF16."""
        return operand.dequantize().to(dtype)

    def transposed(self, operand: QuantizedTensor) -> Any:
        """Return the transpose of square blocks as :meth:`quantize` gives it for both sides."""
        return operand.transpose()

    def gemm(
        self,
        lhs: Any,
        rhs: Any,
        bias: Tensor | None = None,
        accumulation: Accumulation | None = None,
        out_dtype: torch.dtype | None = None,
        folding: bool = True,
    ) -> Tensor:
        """Multiply lhs (M, K) by rhs (N, K), as :func:`megatron_lowbit.numerics.gemm` does.

        ``folding``: False to leave operands with power-of-two scales as they are.
        """
        return reference_gemm(lhs, rhs, bias, accumulation, out_dtype)

    def describe(
        self, lhs: BlockFormat | None, rhs: BlockFormat | None, folding: bool = True
    ) -> str:
        """Describe how two formats (None: high precision) are multiplied."""
        raise NotImplementedError

    def product_to(
        self,
        out: Tensor,
        lhs: Any,
        rhs: Any,
        beta: bool | Tensor = True,
        folding: bool = True,
    ) -> Tensor:
        """Add the product of lhs (M, K) and rhs (N, K) to ``out`` (M, N), in place; return that.

        It is rounded once, with the sum.

        Args:
            out: FP32 or BF16.
            lhs, rhs: as for :meth:`gemm`.
            beta: False to write the product there; or an FP32 scalar on ``out``'s device, 0 where
                ``out`` has nothing but zeros, which a GEMM that adds need not read, else 1.
            folding: as for :meth:`gemm`.
        """
        if are_bf16(lhs, rhs):
            lhs, rhs = lhs.float(), rhs.float()
        product = self.gemm(lhs, rhs, out_dtype=torch.float32, folding=folding)
        return accumulate_into(out, product, beta)

    def gemm_all(
        self,
        lhs: Sequence[Any],
        rhs: Sequence[Any],
        outs: Sequence[Tensor],
        beta: bool = False,
        accumulation: Accumulation | None = None,
        folding: bool = True,
    ) -> None:
        """Write the product of each lhs (M, K) and rhs (N, K) to its out (M, N), or add it."""
        for left, right, out in zip(lhs, rhs, outs, strict=True):
            if beta and accumulation is None:
                self.product_to(out, left, right, beta, folding)
            else:
                product = self.gemm(left, right, None, accumulation, out.dtype, folding)
                accumulate_into(out, product, beta)

    def amaxes(self, x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
        """Return the tensor amaxes of x (R, C) and of its transpose, for :meth:`quantize`."""
        return tensor_amaxes(x, row, col)

    def normalize(
        self, x: Tensor, norm: MXNorm, request: Request, amax: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Normalize x (R, C) and quantize it along its rows.

        Returns:
            The operand, and the FP32 factors (R, 1) of the rows.
        """
        rho = norm.inverse_rms(x, request.quantizer.format.block)
        return self.quantize(x.float() * rho, request, None, (amax, None))[0], rho

    def normalized_amax(self, x: Tensor, norm: MXNorm, request: Request) -> Tensor:
        """Return the amax (FP32 scalar) of x (R, C) once it is normalized."""
        return request.amax(x.float() * norm.inverse_rms(x, request.quantizer.format.block))

    def norm_grad(self, grad: Tensor, x: Tensor, rho: Tensor) -> Tensor:
        """Return the gradient of a norm's input; see :func:`numerics.mxnorm.norm_grad`."""
        return norm_grad(grad, x, rho)

    def fold_losses(self, lhs: Any, rhs: Any) -> tuple[int, int]:
        """Return how many values of a product's operands folding rounds, of how many."""
        return 0, 0

    def __deepcopy__(self, _: dict) -> "Engine":
        """Return the engine itself: megatron-core copies what it hands to layers."""
        return self


class ReferenceEngine(Engine):
    """The reference arithmetic in eager torch, on any device."""

    name = "reference"
    quantize = staticmethod(quantize_both)

    def describe(
        self, lhs: BlockFormat | None, rhs: BlockFormat | None, folding: bool = True
    ) -> str:
        """Describe the product, which is the same for all formats."""
        return "dequantized to FP32, FP32 sums"


def accumulate_into(out: Tensor, product: Tensor, beta: bool | Tensor) -> Tensor:
    """Write a product to ``out``, or add it to that, as :meth:`Engine.product_to` says."""
    return out.copy_(product) if beta is False else out.add_(product)


def are_bf16(lhs: Any, rhs: Any) -> bool:
    """Return True for two operands in high precision whose product would be rounded to BF16."""
    return all(isinstance(one, Tensor) and one.dtype is torch.bfloat16 for one in (lhs, rhs))
