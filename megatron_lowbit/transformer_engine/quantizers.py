"""Quantizers and GEMMs of this project inside Transformer Engine's modules, by its CustomRecipe.

A module asks a factory for a quantizer for each of its operands, and hands what they make of
tensors to the ``qgemm`` of the left one. Source: transformer_engine/pytorch/custom_recipes and
module/linear.py of version 2.20.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
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


class CallTracker:
    """Contexts of one module's calls, which its quantizers share.

    A module quantizes its operands one by one, in forward and in backward, and does not say for
    which call: dY in backward must take the random key of X in forward. Backward passes come in the
    order of their forward passes; a call whose input autograd has let go of has none.

    Args:
        make_context: returns a call's context, given True if it trains.
    """

    def __init__(self, make_context: Callable[[bool], LinearContext]) -> None:
        self.forward: LinearContext | None = None
        self.backward: LinearContext | None = None
        self._make_context = make_context
        self._pending: deque[weakref.ref[LinearContext]] = deque()

    def open(self, training: bool) -> LinearContext:
        """Begin a call; one that trains waits for its backward pass."""
        self.forward = context = self._make_context(training)
        if training:
            self._pending.append(weakref.ref(context))
        return context

    def open_backward(self) -> LinearContext:
        """Begin the backward pass of the oldest call that waits for it."""
        while self._pending:
            context = self._pending.popleft()()
            if context is not None:
                self.backward = context
                return context
        raise RuntimeError("a backward pass without its forward pass")


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
        rest._described = parts, len(tensors)
        rest.clear()
        return tensors, rest

    def restore_from_saved(self, tensors: list[Tensor]) -> list[Tensor]:
        """Take the tensors back from the front of a list, and return the others."""
        parts, count = self._described
        saved = iter(tensors[:count])
        self.row, self.col = (unflatten(part, saved) for part in parts)
        return tensors[count:]


class LowbitQuantizer(IdentityQuantizer):
    """Quantizes one operand of a module's calls as the call's precision says.

    An IdentityQuantizer, for those modules compute a bias's gradient outside of their quantizer.
    """

    custom = True

    def __init__(self, calls: CallTracker, role: Role) -> None:
        super().__init__()
        self.internal = True
        self.calls, self.role = calls, role

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
        if not self.rowwise_usage:
            context = self.calls.backward  # quantized again, or gathered, for wgrad
        else:
            context = self.calls.open(training=self.columnwise_usage)
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
        context = self.calls.forward
        by_row, by_col = quantize_weight(context, lambda: x)
        return by_row, Unquantized(x) if by_col is None else by_col, context

    def _grad(self, x: Tensor) -> tuple[Any, Any, LinearContext]:
        context = self.calls.open_backward()
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

    A module asks for all of its quantizers at once, its input's first. Its random numbers are drawn
    from torch's default CPU generator, one key per call.
    """

    def __init__(self, precision: LinearPrecision, engine: Engine) -> None:
        delayed = bool(precision.history_length)
        require(not delayed, "delayed scaling on this GPU needs --transformer-impl local")
        require(not precision.falls_back, "fallback: bf16 needs --transformer-impl local")
        self.precision, self.engine = precision, engine
        self._calls: CallTracker | None = None

    def __call__(self, role: Any) -> IdentityQuantizer:
        """Return the quantizer for a role; None is a slot that stays in high precision."""
        name = None if role is None else _ROLES.get(role.tensor_type)
        if name is None:
            return IdentityQuantizer()
        if name == "input":
            self._calls = CallTracker(self._make_context)
        assert self._calls is not None, "a module asks for its input's quantizer first"
        return LowbitQuantizer(self._calls, name)

    def _make_context(self, training: bool) -> LinearContext:
        return LinearContext(self.precision, self.engine, draw_key(self.precision), training)
