"""This project's quantizers and GEMMs inside Transformer Engine's modules, by its CustomRecipe.

A module asks a factory for a quantizer for each of its operands, and hands what they make of
tensors to the ``qgemm`` of the left one. Source: transformer_engine/pytorch/custom_recipes and
module/linear.py of version 2.20.
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor import IdentityQuantizer

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.layers.call import LinearCall, draw_key, quantize_grad, quantize_weight
from megatron_lowbit.layers.saved import put_together, take_apart
from megatron_lowbit.recipes import LinearPrecision
from megatron_lowbit.transformer_engine.site import Site

_ROLES = {"input": "input", "weight": "weight", "grad_output": "grad"}
"""Transformer Engine's names of the operands, and ours."""


@dataclass(frozen=True)
class Unquantized:
    """A weight that backward quantizes, with that call's random numbers."""

    weight: Tensor


class LowbitTensor(QuantizedTensorStorage):
    """One operand for the GEMM that contracts its columns, and for the one that contracts its rows.

    ``row`` and ``col`` are what the engine's GEMM takes, or a plain tensor for a GEMM in high
    precision; None where it is not used.
    """

    custom = True

    def __init__(self, quantizer: "LowbitQuantizer", source: Tensor) -> None:
        self._quantizer, self._described = quantizer, None
        self.row: Any = None
        self.col: Any = None
        self.original_shape, self.dtype, self.device = source.shape, source.dtype, source.device
        self.call: LinearCall | None = None

    # What transformer_engine's custom_gemm asks for before it calls qgemm.
    @property
    def data(self) -> Any:
        """The operand for the GEMM that contracts its columns; as ``scale``, only asked for."""
        return self.row

    scale = data

    @property
    def data_t(self) -> Any:
        """The operand for the GEMM that contracts its rows; as ``scale_t``, only asked for."""
        return self.col

    scale_t = data_t

    def size(self, *args: Any) -> Any:
        """As Tensor.size."""
        shape = torch.Size(self.original_shape)
        return shape[args[0]] if args else shape

    def get_usages(self) -> dict[str, bool]:
        """Which of the two are there."""
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
        """The tensors, for autograd to save, and the rest. This object keeps its own."""
        tensors: list[Tensor] = []
        rest = copy(self)
        parts = [take_apart(part, tensors) for part in (self.row, self.col)]
        rest._described = parts, len(tensors)
        rest.clear()
        return tensors, rest

    def restore_from_saved(self, tensors: list[Tensor]) -> list[Tensor]:
        """Take the tensors back from the front of a list, and return the others."""
        parts, count = self._described
        own = iter(tensors[:count])
        self.row, self.col = (put_together(part, own) for part in parts)
        return tensors[count:]


class LowbitQuantizer(IdentityQuantizer):
    """Quantizes one operand of a module's calls as the call's precision says.

    An IdentityQuantizer, for those modules compute a bias's gradient outside of their quantizer.
    """

    custom = True

    def __init__(self, site: Site, role: str) -> None:
        super().__init__()
        self.internal = True
        self.site, self.role = site, role

    def copy(self) -> "LowbitQuantizer":
        """A quantizer for the same operand with usages of its own."""
        return copy(self)

    def is_requantization_safe(self) -> bool:
        """A call's random numbers are a function of its key: they come again."""
        return True

    def quantize(self, tensor: Tensor, **_: Any) -> LowbitTensor:
        """The operand (..., K), as the GEMMs in use take it."""
        return self.update_quantized(tensor, LowbitTensor(self, tensor))

    quantize_impl = quantize

    def make_empty(self, shape: Iterable[int], **_: Any) -> Any:
        """Not offered: parameters are kept in high precision."""
        raise NotImplementedError("parameters are not kept quantized")

    def update_quantized(
        self, src: Tensor, dst: LowbitTensor, *, noop_flag: Tensor | None = None
    ) -> LowbitTensor:
        """Quantize ``src`` anew in place of what ``dst`` holds."""
        if noop_flag is not None:
            raise NotImplementedError("weights are not quantized inside CUDA graphs")
        x = src.detach().reshape(prod(src.shape[:-1]), src.shape[-1])
        dst.row, dst.col, dst.call = getattr(self, f"_{self.role}")(x)
        return dst

    def _input(self, x: Tensor) -> tuple[Any, Any, LinearCall]:
        if not self.rowwise_usage:
            call = self.site.backward  # quantized again, or gathered, for wgrad
        elif self.site.opened_outside:
            call = self.site.forward
        else:
            call = self.site.open(training=self.columnwise_usage)
        rows, columns = self.rowwise_usage, self.columnwise_usage
        if columns and call.precision.wgrad.rhs_of_fprop:
            by_row, _ = call.quantize(x, call.request("fprop", "input", len(x), kept=True), None)
            return by_row if rows else None, by_row.dequantize().t(), call
        row = call.request("fprop", "input", len(x)) if rows else None
        col = call.request("wgrad", "input", len(x), kept=True) if columns else None
        by_row, by_col = call.quantize(x, row, col)
        return by_row if rows else None, by_col if columns else None, call

    def _weight(self, x: Tensor) -> tuple[Any, Any, LinearCall]:
        # Whatever the usage: modules keep it, from an evaluation for training, too.
        call = self.site.forward
        by_row, by_col = quantize_weight(call, lambda: x)
        return by_row, Unquantized(x) if by_col is None else by_col, call

    def _grad(self, x: Tensor) -> tuple[Any, Any, LinearCall]:
        call = self.site.open_backward()
        return *quantize_grad(call, x, self.rowwise_usage, self.columnwise_usage), call

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
        """One of the three GEMMs, by its name; ``qx`` and ``qw`` are its operands."""
        name, call = gemm_type.value, qresult_x.call
        if name == "wgrad" and qresult_w.call is not call:
            raise RuntimeError("wgrad's operands are of two calls: backward passes out of order")
        if isinstance(qw, Unquantized):
            _, qw = call.quantize(qw.weight, None, call.request("dgrad", "weight", 0))
        bias = bias.to(out_dtype) if bias is not None and bias.numel() else None
        return call.gemm(name, qx, qw, out_dtype, bias)


class Factory:
    """What a CustomRecipe asks for quantizers, for modules outside of a model of this project.

    A module asks for all of its quantizers at once, its input's first. Its random numbers are drawn
    from torch's default CPU generator, a key a call.
    """

    def __init__(self, precision: LinearPrecision, engine: Engine) -> None:
        if precision.history_length:
            raise UserError("delayed scaling on this GPU needs --transformer-impl local")
        if precision.falls_back:
            raise UserError("fallback: bf16 needs --transformer-impl local")
        self.precision, self.engine = precision, engine
        self._site: Site | None = None

    def __call__(self, role: Any) -> IdentityQuantizer:
        """A quantizer for a slot; role None is one that stays in high precision."""
        if role is not None and role.tensor_type == "input":
            self._site = Site(self._make_call)
        return slot(role, lambda: self._site)

    def _make_call(self, training: bool) -> LinearCall:
        key = draw_key(self.precision)
        return LinearCall(self.precision, self.engine, key, training, keep_input=training)


def slot(role: Any, site: Callable[[], Site]) -> IdentityQuantizer:
    """The quantizer for a role of a linear module; high precision for all others."""
    name = None if role is None else _ROLES.get(role.tensor_type)
    return IdentityQuantizer() if name is None else LowbitQuantizer(site(), name)
