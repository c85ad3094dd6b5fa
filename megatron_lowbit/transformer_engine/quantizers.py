"""Quantizers and GEMMs of this project inside Transformer Engine's modules, by its CustomRecipe.

A module asks a factory for a quantizer for each of its operands, and hands what they make of
tensors to the ``qgemm`` of the left one. Source: transformer_engine/pytorch/custom_recipes and
module/linear.py of version 2.20.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor import IdentityQuantizer

from megatron_lowbit.errors import require
from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.layers.autograd_state import flatten, unflatten
from megatron_lowbit.layers.context import draw_key
from megatron_lowbit.layers.operands import (
    quantize_dgrad_weight,
    quantize_grad,
    quantize_weight,
    requantized,
)
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.plan import Source
from megatron_lowbit.recipes import LinearPrecision

_ROLES = {"input": "input", "weight": "weight", "grad_output": "grad"}
"""Transformer Engine's names of the operands, and ours."""


@dataclass(frozen=True)
class Unquantized:
    """A weight that backward quantizes, with that call's random numbers."""

    weight: Tensor


class LowbitTensor(QuantizedTensorStorage):
    """Operand for the GEMM that contracts its columns, and for the one that contracts its rows.

    ``row`` and ``col`` are what the engine's GEMM takes, or a plain tensor for a GEMM in high
    precision; None where it is not used.
    """

    custom = True

    def __init__(self, quantizer: "LowbitQuantizer", source: Tensor) -> None:
        self._quantizer, self._described = quantizer, None
        self.row: Any = None
        self.col: Any = None
        self.original_shape, self.dtype, self.device = source.shape, source.dtype, source.device
        self.context: LinearContext | None = None
        self._call: LinearContext | None = None

    # What transformer_engine's custom_gemm asks for before it calls qgemm.
    @property
    def data(self) -> Any:
        """Operand for the GEMM that contracts its columns; as ``scale``, only asked for."""
        return self.row

    scale = data

    @property
    def data_t(self) -> Any:
        """Operand for the GEMM that contracts its rows; as ``scale_t``, only asked for."""
        return self.col

    scale_t = data_t

    def size(self, *args: Any) -> Any:
        """Return the size, as Tensor.size does."""
        shape = torch.Size(self.original_shape)
        return shape[args[0]] if args else shape

    def get_usages(self) -> dict[str, bool]:
        """Return the presence of each of the two operands."""
        return {"rowwise": self.row is not None, "columnwise": self.col is not None}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop what is not used any more. Raises RuntimeError for what was never made."""
        for name, wanted in (("row", rowwise_usage), ("col", columnwise_usage)):
            if wanted and getattr(self, name) is None:
                raise RuntimeError(f"a {self._quantizer.role} was not quantized for its {name}")
            if wanted is False:
                setattr(self, name, None)

    def clear(self) -> None:
        """Free the memory."""
        self.row = self.col = None

    def prepare_for_saving(self) -> tuple[list[Tensor], "LowbitTensor"]:
        """Return the tensors, for autograd to save, and the rest. This object keeps its own."""
        tensors: list[Tensor] = []
        rest = copy(self)
        parts = [flatten(part, tensors) for part in (self.row, self.col)]
        rest._described, rest._call = (parts, len(tensors)), self._quantizer.factory.forward
        rest.clear()
        return tensors, rest

    def restore_from_saved(self, tensors: list[Tensor]) -> list[Tensor]:
        """Take the tensors back from the front of a list, and return the others.

        A module does so first in its backward pass, whose call made the saved operands.
        """
        self._quantizer.factory.backward = self._call
        parts, count = self._described
        saved = iter(tensors[:count])
        self.row, self.col = (unflatten(part, saved) for part in parts)
        return tensors[count:]


class LowbitQuantizer(IdentityQuantizer):
    """Quantizes one operand of a module's calls as the call's precision says.

    An IdentityQuantizer, for those modules compute a bias's gradient outside of their quantizer.
    """

    custom = True

    def __init__(self, factory: "Factory", role: Role, layer: str) -> None:
        super().__init__()
        self.internal = True
        self.factory, self.role, self.layer = factory, role, layer

    def copy(self) -> "LowbitQuantizer":
        """Return a quantizer for the same operand with usages of its own."""
        return copy(self)

    def is_requantization_safe(self) -> bool:
        """Return True: a call's random numbers are a function of its key, and come again."""
        return True

    def quantize(self, tensor: Tensor, **_: Any) -> LowbitTensor:
        """Quantize an operand (..., K) for the GEMMs in use."""
        return self.update_quantized(tensor, LowbitTensor(self, tensor))

    quantize_impl = quantize

    def make_empty(self, shape: Iterable[int], **_: Any) -> Any:
        """Raise NotImplementedError: parameters are kept in high precision."""
        raise NotImplementedError("parameters are not kept quantized")

    def update_quantized(
        self, src: Tensor, dst: LowbitTensor, *, noop_flag: Tensor | None = None
    ) -> LowbitTensor:
        """Quantize ``src`` into ``dst``."""
        if noop_flag is not None:
            raise NotImplementedError("weights are not quantized inside CUDA graphs")
        x = src.detach().reshape(prod(src.shape[:-1]), src.shape[-1])
        dst.row, dst.col, dst.context = getattr(self, f"_{self.role}")(x)
        return dst

    def _input(self, x: Tensor) -> tuple[Any, Any, LinearContext]:
        if self.rowwise_usage:
            self.factory.forward = context = self.factory.context(self.layer)
        else:
            context = self.factory.backward  # quantized again, or gathered, for wgrad
        rows, columns = self.rowwise_usage, self.columnwise_usage
        source = context.plan()[Gemm.WGRAD, Role.INPUT].source
        if columns and source is not Source.TENSOR:
            by_row, _ = context.quantize(x, Role.INPUT, Gemm.FPROP, None, needs_codes=True)
            kept = (
                by_row if source is Source.DEQUANTIZED else requantized(context, Role.INPUT, by_row)
            )
            return by_row if rows else None, kept, context
        row, col = Gemm.FPROP if rows else None, Gemm.WGRAD if columns else None
        by_row, by_col = context.quantize(x, Role.INPUT, row, col)
        return by_row if rows else None, by_col if columns else None, context

    def _weight(self, x: Tensor) -> tuple[Any, Any, LinearContext]:
        # Whatever the usage: modules keep it, from an evaluation for training, too.
        context = self.factory.forward
        by_row, by_col = quantize_weight(context, lambda: x)
        return by_row, Unquantized(x) if by_col is None else by_col, context

    def _grad(self, x: Tensor) -> tuple[Any, Any, LinearContext]:
        context = self.factory.backward
        return *quantize_grad(context, x, self.rowwise_usage, self.columnwise_usage), context

    def qgemm(
        self,
        qx: Any,
        qw: Any,
        m_params: Any,
        out_dtype: torch.dtype,
        sx: Any,
        sw: Any,
        bias: Tensor | None = None,
        *,
        gemm_type: Any,
        qresult_x: LowbitTensor,
        qresult_w: LowbitTensor,
    ) -> Tensor:
        """Compute one of the three GEMMs, by its name, from its operands ``qx`` and ``qw``."""
        name, context = gemm_type.value, qresult_x.context
        if name == Gemm.WGRAD and qresult_w.context is not context:
            raise RuntimeError("wgrad's operands are of two calls: backward passes out of order")
        if isinstance(qw, Unquantized):
            qw = quantize_dgrad_weight(context, qw.weight)
        bias = bias.to(out_dtype) if bias is not None and bias.numel() else None
        return context.gemm(name, qx, qw, out_dtype, bias)


class Factory:
    """Factory of quantizers for a CustomRecipe, for modules outside of a model of this project.

    Modules quantize their operands one by one and do not say for which call: dY in backward must
    take the random key of X in forward. A call begins when its input is quantized for fprop; its
    backward pass, when the operands that it saved are restored.

    Attributes:
        forward: context of the call whose forward pass runs.
        backward: context of the call whose backward pass runs.
    """

    def __init__(self, precision: LinearPrecision, engine: Engine) -> None:
        delayed = bool(precision.history_length)
        require(not delayed, "delayed scaling on this GPU needs --transformer-impl local")
        keeps = precision.keeps_sources
        require(not keeps, "fallback and hot_channels need --transformer-impl local")
        self.precision, self.engine = precision, engine
        self.forward: LinearContext | None = None
        self.backward: LinearContext | None = None

    def __call__(self, role: Any) -> IdentityQuantizer:
        """Return the quantizer for a role; None is a slot that stays in high precision.

        Raises:
            UserError: the role is one of grouped linear layers, which have no GEMMs for it.
        """
        name = None if role is None else _ROLES.get(role.tensor_type)
        if name is None:
            return IdentityQuantizer()
        require(role.module_type != "grouped_linear", "a quantizer factory with grouped experts: "
                "omit --moe-grouped-gemm, or train by lowbit-pretrain")  # fmt: skip
        return LowbitQuantizer(self, name, role.name)

    def context(self, layer: str) -> LinearContext:
        """Begin a call of a layer. UserError where a CUDA graph would repeat its random numbers."""
        stochastic = self.precision.stochastic
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        require(not (stochastic and captured), "CUDA graphs repeat the random numbers of their "
                "capture: omit --cuda-graph-impl, or train by lowbit-pretrain")  # fmt: skip
        return LinearContext(self.precision, self.engine, self.key(layer) if stochastic else 0)

    def key(self, layer: str) -> int:
        """Return the key of a call's random numbers, from torch's default CPU generator."""
        return draw_key(self.precision)
