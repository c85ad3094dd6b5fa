"""Stand-ins for Transformer Engine, which a CPU cannot import, and its modules' order of calls.

Source of the order: ``transformer_engine/pytorch/module/linear.py``, ``layernorm_linear.py``,
``custom_recipes/gemm.py`` and ``quantized_tensor.py`` of version 2.20.
"""

import importlib
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.extensions import transformer_engine as extensions

_OURS = (
    "megatron_lowbit.megatron.layers.transformer_engine",
    "megatron_lowbit.transformer_engine.named",
    "megatron_lowbit.transformer_engine.norm",
    "megatron_lowbit.transformer_engine.quantizers",
    "megatron_lowbit.transformer_engine.recipe",
)
"""Modules that import Transformer Engine."""


class Storage:
    """QuantizedTensorStorage, as far as modules call it on a weight's workspace."""

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: Any = None) -> Any:
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self


class IdentityQuantizer:
    """IdentityQuantizer with the usages of all quantizers."""

    def __init__(self) -> None:
        self.rowwise_usage = self.columnwise_usage = True

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.quantize(tensor)


class Role:
    """QuantizerRole of a module's operand."""

    def __init__(self, name: str, tensor_type: str, module_type: str = "linear") -> None:
        self.name, self.tensor_type, self.module_type = name, tensor_type, module_type


class Gemm(Enum):
    """GEMMType."""

    FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"


def multiply(gemm: Gemm, lhs: Any, rhs: Any, dtype: torch.dtype) -> torch.Tensor:
    """Compute a product as custom_gemm does."""
    left = lhs.data_t if gemm is Gemm.WGRAD else lhs.data
    right = rhs.data if gemm is Gemm.FPROP else rhs.data_t
    assert left is not None and right is not None
    return lhs._quantizer.qgemm(
        left, right, None, dtype, left, right, gemm_type=gemm, qresult_x=lhs, qresult_w=rhs
    )


class _Quantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, x: Any, module: "QuantizedLinear", first: bool) -> Any:
        by_input, by_weight, ctx.by_grad = module.quantizers
        by_input.set_usage(rowwise=True, columnwise=not module.save_original_input)
        operand = by_input(x)
        by_weight.set_usage(rowwise=True, columnwise=True)
        if module.workspace is None:
            module.workspace = by_weight.quantize(weight, dtype=x.dtype)
        elif first:
            module.workspace.quantize_(weight, noop_flag=None)
        workspace = module.workspace
        workspace.update_usage(rowwise_usage=True)
        y = multiply(Gemm.FPROP, operand, workspace, x.dtype)
        ctx.by_input, tensors, ctx.objects = by_input, [], []
        if module.save_original_input:
            tensors.append(x)
        else:
            operand.update_usage(rowwise_usage=False, columnwise_usage=True)
        for value in (workspace,) if module.save_original_input else (operand, workspace):
            found, rest = value.prepare_for_saving()
            tensors += found
            ctx.objects.append(rest)
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tensors = list(ctx.saved_tensors)
        original = tensors.pop(0) if len(ctx.objects) == 1 else None
        for rest in ctx.objects:
            tensors = rest.restore_from_saved(tensors)
        workspace = ctx.objects[-1]
        ctx.by_grad.set_usage(rowwise=True, columnwise=True)
        by_both = ctx.by_grad(grad)
        by_both.update_usage(rowwise_usage=True)
        workspace.update_usage(columnwise_usage=True)
        dgrad = multiply(Gemm.DGRAD, by_both, workspace, grad.dtype)
        if original is None:
            operand = ctx.objects[0]
        else:
            ctx.by_input.set_usage(rowwise=False, columnwise=True)
            operand = ctx.by_input(original)
        operand.update_usage(columnwise_usage=True)
        by_both.update_usage(columnwise_usage=True)
        wgrad = multiply(Gemm.WGRAD, by_both, operand, grad.dtype)
        return wgrad, dgrad, None, None


class QuantizedLinear(torch.nn.Module):
    """te.Linear without a bias, under a CustomRecipe of a factory."""

    def __init__(
        self, weight: torch.Tensor, factory: Any, save_original_input: bool = False
    ) -> None:
        super().__init__()
        self.save_original_input = save_original_input
        self.weight = torch.nn.Parameter(weight)
        roles = ("input", "weight", "grad_output")
        self.quantizers = [factory(Role("Layer_1", role)) for role in roles]
        self.workspace: Any = None

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return _Quantized.apply(self.weight, x, self, first)


class _Accumulating(torch.autograd.Function):
    """A product whose weight gradient goes to the weight's main gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, writes: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.writes = weight, writes
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        wgrad, main_grad = grad.T @ ctx.saved_tensors[0], ctx.weight.main_grad
        main_grad.copy_(wgrad if ctx.writes else main_grad + wgrad)
        return grad @ ctx.weight, None, None


class Linear(torch.nn.Module):
    """TELinear of one rank, which computes in BF16."""

    parallel_mode: str | None = None

    def __init__(
        self, inputs: int, outputs: int, bias: bool = False, returns_bias: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs).bfloat16())
        self.use_bias, self.te_return_bias = bias, bias and returns_bias
        self.bias = torch.nn.Parameter(torch.randn(outputs).bfloat16()) if bias else None
        self.name, self.tp_size, self.tp_group = "Layer_1", 1, None
        self.sequence_parallel = self.save_original_input = False
        self.config = SimpleNamespace(
            recompute_granularity=None, attention_output_gate=False, tp_comm_overlap=False,
            gtp_weight_remat_size=1,
        )  # fmt: skip
        self._fp8_workspaces: dict[str, Any] = {}
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False

    def finish_init(self, config: Any) -> None:
        self.content = config.config

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert not self.content["training_recipe"] and not self.content["evaluation_recipe"]
        returned = self.bias if self.te_return_bias else None
        added = None if self.te_return_bias else self.bias
        writes = self.is_first_microbatch and not self.disable_parameter_transpose_cache
        self.is_first_microbatch = False
        if not hasattr(self.weight, "main_grad"):
            return torch.nn.functional.linear(x, self.weight, added), returned
        y = _Accumulating.apply(x, self.weight, writes)
        return y if added is None else y + added, returned


class ColumnLinear(Linear):
    """TEColumnParallelLinear."""

    parallel_mode = "column"


class NormColumnLinear(ColumnLinear):
    """TELayerNormColumnParallelLinear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        del self.save_original_input
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(inputs).bfloat16())
        self.layer_norm_bias, self.eps, self.zero_centered_gamma = None, 1e-5, False
        self.fwd_ln_sm_margin = self.bwd_ln_sm_margin = self.inf_ln_sm_margin = 0


class RowLinear(Linear):
    """TERowParallelLinear."""

    parallel_mode = "row"


class GroupedLinear(torch.nn.Module):
    """TEGroupedLinear."""


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: None, quantizer: None,
    dtype: torch.dtype, margin: int, zero_centered: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:  # fmt: skip
    """Normalize as transformer_engine_torch's function of that name does."""
    inverse = (x.float().square().mean(-1) + eps).rsqrt()
    return (
        (x.float() * inverse[:, None] * (weight.float() + zero_centered)).to(dtype),
        None,
        inverse,
    )


def rmsnorm_bwd(
    grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, margin: int,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return both gradients, as transformer_engine_torch's function of that name does."""
    unit = x.float() * inverse[:, None]
    scaled = grad.float() * (weight.float() + zero_centered)
    dx = inverse[:, None] * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad.float() * unit).sum(0).to(weight.dtype)


def rmsnorm_bwd_add(
    grad: torch.Tensor, x: torch.Tensor, added: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both gradients, the first with ``added``; x's own is not rounded before."""
    dx, dweight = rmsnorm_bwd(grad, x.float(), *arguments)
    return (dx + added.float()).to(x.dtype), dweight


def use_stand_ins(patch: pytest.MonkeyPatch) -> ModuleType:
    """Return ``transformer_engine_layers`` on stand-ins, until the patch is undone."""
    contents = {
        "transformer_engine": {},
        "transformer_engine.common": {"recipe": SimpleNamespace(Recipe=object)},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.constants": {"TE_DType": {torch.bfloat16: torch.bfloat16}},
        "transformer_engine.pytorch.quantization": {"RecipeState": None},
        "transformer_engine.pytorch.quantized_tensor": {"QuantizedTensorStorage": Storage},
        "transformer_engine.pytorch.tensor": {"IdentityQuantizer": IdentityQuantizer},
        "transformer_engine_torch": {
            function.__name__: function for function in (rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add)
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values, __path__=[])
        patch.setitem(sys.modules, name, module)
    classes = {
        "TELinear": Linear, "TEColumnParallelLinear": ColumnLinear,
        "TERowParallelLinear": RowLinear, "TEGroupedLinear": GroupedLinear,
        "TELayerNormColumnParallelLinear": NormColumnLinear,
        "TEColumnParallelGroupedLinear": GroupedLinear,
    }  # fmt: skip
    for name, kind in classes.items():
        patch.setattr(extensions, name, kind, raising=False)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in _OURS:  # set to be removed again
        package, _, last = name.rpartition(".")
        patch.setattr(importlib.import_module(package), last, None, raising=False)
        patch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return importlib.import_module(_OURS[0])
