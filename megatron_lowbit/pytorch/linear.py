"""A linear layer of a plain PyTorch model in a recipe's precision."""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lowbit.errors import require, require_type
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.layers.autograd_state import autocast_dtype
from megatron_lowbit.layers.compiled import call_key, compiled_linear, number_of
from megatron_lowbit.recipes import LinearPrecision, Recipe, load_precision

EvalPrecision = Literal["bf16", "recipe"]
"""Precision of a module in evaluation mode: high precision, or the recipe's."""


class LowbitLinear(nn.Linear):
    """``nn.Linear`` whose three GEMMs run in a recipe's precision.

    Parameters and state dict are as in ``nn.Linear``. Each call whose precision is stochastic
    draws its random key from torch's default CPU generator, as dropout does on a CPU. Ranks of
    ``torch.distributed`` draw different bits from equal states of their generators.

    Args:
        in_features: as of ``nn.Linear``, like ``out_features``, ``bias``, ``device``, ``dtype``.
        precision: of the three GEMMs; or a recipe or its name, as for ``load_precision``.
        eval_precision: precision in evaluation mode (``module.eval()``).

    Raises:
        UserError: the precision needs state between steps; a recipe with several precisions.
    """

    precision: LinearPrecision
    eval_precision: EvalPrecision
    scaled_with: tuple[nn.Linear, ...] = ()
    """Modules whose weights share this weight's tensor scale; a tuple registers no submodule."""
    number: int
    """Number of the precision in this process, for ``torch.compile``."""
    stochastic: bool
    """True if a call draws a key; a compiler cannot read the precision's cached property."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: LinearPrecision | Recipe | str,
        eval_precision: EvalPrecision = "bf16",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        precision = load_precision(precision)
        check_precision(precision)
        check_eval_precision(eval_precision)
        self.set_precision(precision, eval_precision)

    def set_precision(self, precision: LinearPrecision, eval_precision: EvalPrecision) -> None:
        """Compute in a precision from now on."""
        self.precision, self.eval_precision = precision, eval_precision
        self.number, self.stochastic = number_of(precision), precision.stochastic

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or a module that another process has pickled, under its number here."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.set_precision(self.precision, self.eval_precision)

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ weight.T + bias``.

        Args:
            input: (..., in_features), FP32 or BF16 as the weight. Autocast casts both, as it does
                for ``nn.Linear``.

        Returns:
            (..., out_features) in the input's dtype, or autocast's.

        Raises:
            UserError: another dtype or shape, or a weight that is no plain tensor.
            TypeError: the input is no tensor.
        """
        if self.training or self.eval_precision == "recipe":
            return self._product(input)
        return super().forward(input)

    def _product(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        require_type("the input of LowbitLinear", x, Tensor, "a tensor")
        require(
            # Dynamo in torch 2.11 traces is_exporting() as True under torch.compile, too.
            not torch.compiler._is_exporting_flag,
            "LowbitLinear: a program of torch.export does not contain the recipe; export in "
            "evaluation mode with eval_precision='bf16', or the weights by megatron_lowbit.export",
        )
        require(
            type(weight) in (nn.Parameter, Tensor),
            f"LowbitLinear: the weight is a {type(weight).__name__} in the forward pass; plain "
            "tensors are supported, and fully_shard, which gathers them, but no tensor parallelism",
        )
        others = [module.weight.detach() for module in self.scaled_with]
        for other in others:
            require(
                type(other) is Tensor and other.device == weight.device,
                f"LowbitLinear: a weight that shares this one's tensor scale is a "
                f"{type(other).__name__} on {other.device} in the forward pass; give fully_shard "
                "the block with both layers, and keep both on one device",
            )
        if x.numel() == 0:
            # An expert without tokens has nothing to quantize.
            return F.linear(x, weight, bias)
        dtype = autocast_dtype(x.device)
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
            others = [other.to(dtype) for other in others]
            bias = None if bias is None else bias.to(dtype)
        if torch.compiler.is_compiling():
            return compiled_linear(x, weight, bias, others, self.number, self.stochastic)
        key, engine = call_key(self.precision), select_engine(x.device)
        context = LinearContext(self.precision, engine, key, scaled_with=others)
        return lowbit_linear(x, weight, context, bias)

    def extra_repr(self) -> str:
        """Describe the precision of each GEMM after the sizes."""
        return f"{super().extra_repr()}, {self.precision}"


def check_eval_precision(eval_precision: EvalPrecision) -> None:
    """Raise UserError for an unknown precision in evaluation mode."""
    known = get_args(EvalPrecision)
    message = f"eval_precision={eval_precision!r} is not one of {', '.join(known)}"
    require(eval_precision in known, message)


def check_precision(precision: LinearPrecision) -> None:
    """Raise UserError for a precision that a layer without state of its own cannot compute in."""
    require(
        precision.history_length == 0,
        "amax_history: delayed scaling keeps amaxes between steps, for which the state dict of "
        "nn.Linear has no place; formats that are scaled by the tensor itself are supported, such "
        "as in the recipes fp8-tensorwise, fp8-tile, mxfp8 and nvfp4",
    )
