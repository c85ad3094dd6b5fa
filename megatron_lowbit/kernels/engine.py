"""Engines: the operations of a linear layer on one kind of device, all with the reference's bits.

| engine | device | quantization | GEMM |
| --- | --- | --- | --- |
| ``ReferenceEngine`` | any | ``numerics``, in eager torch | FP32, dequantized |
| ``CompiledEngine`` | CPU with a C++ compiler | the same by torch.compile | the same |
| ``FusedEngine`` | GPU of capability 8.9 or more | Triton | tensor cores, by ``routes.py`` |

``select.select_engine`` chooses one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.kernels.routes import Format, route
from megatron_lowbit.kernels.split import Rows
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
from megatron_lowbit.numerics.quantizer import REFERENCE
from megatron_lowbit.numerics.swiglu import swiglu, swiglu_grad

Into = tuple[Tensor, bool] | None
"""Tensor that :meth:`Engine.gemm` writes or adds a product to, and True if it adds."""
Pairs = Sequence[tuple[Request | None, Request | None, bool]]
"""Requests of both operands of GEMMs, without keys, and ``folding``."""
ScaleAmax = Callable[[Tensor], Tensor]
"""Function of FP32 scalars."""


@dataclass(frozen=True)
class Transposed:
    """The transpose of an operand in square blocks, which it shares its codes with."""

    of: QuantizedTensor

    @property
    def format(self) -> BlockFormat:
        """The format of the operand."""
        return self.of.format

    def dequantize(self) -> Tensor:
        """Return the FP32 values."""
        return self.of.dequantize().t()


class Engine:
    """Operations of a linear layer on one kind of device: the reference's where none is faster.

    Args:
        reason: why this engine was chosen.
    """

    name: str
    arithmetic = REFERENCE
    """Elementwise functions that quantize and decode."""
    multiplies_groups: bool = False
    """True if one launch multiplies many pairs of matrices in BF16."""

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
            amaxes: that tensor scales are made from; None takes the tensor's own. Amaxes of
                earlier steps record the tensor's own as well.

        Returns:
            For a request that needs codes a QuantizedTensor, else whatever :meth:`gemm` takes.
        """
        return quantize_both(x, row, col, amaxes, self.arithmetic)

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

    def split_rows(self, codes: QuantizedTensor, rows: Rows, request: Request) -> Sequence[Any]:
        """Return parts of quantized rows as :meth:`quantize_all` would have quantized them.

        Args:
            codes: (T, K), whose scales lie within a row.
            rows: numbers of rows of the parts, of sum T.
            request: of the parts, for codes.
        """
        counts = rows.on_host.tolist()
        parts = zip(codes.codes.split(counts), codes.scales.split(counts), counts, strict=True)
        return [
            replace(codes, codes=part, scales=scales, shape=(count, codes.shape[1]))
            for part, scales, count in parts
        ]

    def transpose(self, operand: QuantizedTensor, lhs: Any) -> Any:
        """Return the transpose of codes (R, C) with their values, to be multiplied by ``lhs``."""
        return self.dequantize(operand, torch.float32).t()

    def dequantize(self, operand: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Decode codes (R, C) to FP32, or round that to BF16."""
        return operand.dequantize(self.arithmetic).to(dtype)

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
        into: Into = None,
    ) -> Tensor:
        """Multiply lhs (M, K) by rhs (N, K), as :func:`megatron_lowbit.numerics.gemm` does.

        Args:
            lhs, rhs, bias, accumulation, out_dtype: as there.
            folding: False to leave operands with power-of-two scales as they are.
            into: FP32 or BF16 tensor (M, N), to which the product in FP32 is added in place, and
                True. It is rounded once, with the sum. False writes the product there.
        """
        are_tensors = isinstance(lhs, Tensor) and isinstance(rhs, Tensor)
        if into is not None and are_tensors and lhs.dtype is rhs.dtype is torch.bfloat16:
            lhs, rhs = lhs.float(), rhs.float()  # whose product is not rounded
        y = reference_gemm(lhs, rhs, bias, accumulation, out_dtype, self.arithmetic)
        return y if into is None else accumulate_into(*into, y)

    def describe(self, lhs: Format, rhs: Format, folding: bool = True) -> str:
        """Describe how two formats (None: high precision) are multiplied."""
        return "dequantized to FP32, FP32 sums"

    def takes_counts(self, pairs: Pairs, weights: Sequence[Tensor], rows: int) -> bool:
        """Return True if how many rows go to each weight may stay on the device.

        Args:
            pairs: of each GEMM.
            weights: (N, K), of which the rows have the dtype.
            rows: of all weights together.
        """
        return False

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
                self.gemm(left, right, None, None, torch.float32, folding, (out, beta))
            else:
                product = self.gemm(left, right, None, accumulation, out.dtype, folding)
                accumulate_into(out, beta, product)

    def amaxes(self, x: Tensor, row: Request | None, col: Request | None) -> Amaxes:
        """Return the tensor amaxes of x (R, C) and of its transpose, for :meth:`quantize`."""
        return tensor_amaxes(x, row, col)

    def normalize(
        self, x: Tensor, norm: MXNorm, request: Request, scale_amax: ScaleAmax | None = None
    ) -> tuple[Any, Tensor]:
        """Normalize x (R, C) and quantize it along its rows.

        ``scale_amax`` makes the amax of the tensor scale from the amax of the normalized rows.

        Returns:
            The operand, and the FP32 factors (R, 1) of the rows.
        """
        rho = norm.inverse_rms(x, request.quantizer.format.block)
        normalized = x.float() * rho
        amax = None if scale_amax is None else scale_amax(request.amax(normalized))
        return self.quantize(normalized, request, None, (amax, None))[0], rho

    def norm_grad(self, grad: Tensor, x: Tensor, rho: Tensor) -> Tensor:
        """Return the gradient of a norm's input; see :func:`numerics.mxnorm.norm_grad`."""
        return norm_grad(grad, x, rho)

    def rms_norm(self, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor] | None:
        """Normalize rows as ``kernels/rms_norm.py`` does; None where the engine has no kernel."""
        return None

    def swiglu(self, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return SwiGLU (R, C) of (R, 2 C), and its amax, FP32 (), where that costs nothing."""
        return swiglu(gate_up), None

    def swiglu_grad(self, gate_up: Tensor, grad: Tensor) -> Tensor | None:
        """Overwrite SwiGLU's input (R, 2 C) by its gradient; return its amax as :meth:`swiglu`."""
        gate_up.copy_(swiglu_grad(gate_up, grad))
        return None

    def add_rows(self, sums: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Sum rows (T, K) of the same id in FP32, and add each sum to the id's row of ``sums``.

        Args:
            sums: FP32 or BF16 (N, K), contiguous; a row is rounded once.
            ids: integers (T,) below N; rows of id -1 are skipped.
            rows: FP32 or BF16.
        """
        sums.add_(torch.ops.aten.embedding_dense_backward(rows.float(), ids, len(sums), -1, False))

    def fold_losses(self, lhs: Any, rhs: Any) -> tuple[int, int]:
        """Return the numbers of values that folding rounds in a product's operands, and of all."""
        return 0, 0

    def __deepcopy__(self, _: dict) -> "Engine":
        """Return the engine itself: megatron-core copies what it hands to layers."""
        return self


class ReferenceEngine(Engine):
    """The reference arithmetic in eager torch, on any device."""

    name = "reference"


class GpuEngine(Engine):
    """The engine of GPUs of one compute capability; without kernels, it only describes them."""

    name = "fused"

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(f"GPU of compute capability {'.'.join(map(str, capability))}")
        self.capability = capability

    def describe(self, lhs: Format, rhs: Format, folding: bool = True) -> str:
        """Describe the route of two formats and its sums."""
        return str(route(lhs, rhs, self.capability, folding))


def accumulate_into(out: Tensor, beta: bool, product: Tensor) -> Tensor:
    """Write a product to ``out``, or add it to that, as :meth:`Engine.gemm` says."""
    return out.add_(product) if beta else out.copy_(product)
