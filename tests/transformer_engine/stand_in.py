"""Stand-ins for Transformer Engine, which a CPU cannot import, with its modules' order of calls.

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
    "megatron_lowbit.megatron.transformer_engine_layers",
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

    def __init__(self, name: str, tensor_type: str) -> None:
        self.name, self.tensor_type = name, tensor_type


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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, x: Any, module: "Linear", first: bool | None) -> Any:
        by_input, by_weight, ctx.by_grad = module.quantizers
        keeps = module.save_original_input
        by_input.set_usage(rowwise=True, columnwise=weight.requires_grad and not keeps)
        operand = by_input(x)
        by_weight.set_usage(rowwise=True, columnwise=True)
        workspace = None if first is None else module._fp8_workspaces.get("weight")
        if workspace is None:
            workspace = by_weight.quantize(weight, dtype=x.dtype)
            if first is not None:
                module._fp8_workspaces["weight"] = workspace
        elif first:
            workspace.quantize_(weight, noop_flag=None)
        workspace.update_usage(rowwise_usage=True)
        y = multiply(Gemm.FPROP, operand, workspace, x.dtype)
        if not keeps:
            operand.update_usage(rowwise_usage=False, columnwise_usage=True)
        tensors, ctx.objects = [], []
        for value in (x if keeps else operand, workspace, weight):
            found, rest = (
                ([value], None) if isinstance(value, torch.Tensor) else value.prepare_for_saving()
            )
            tensors += found
            ctx.objects.append(rest)
        ctx.save_for_backward(*tensors)
        ctx.by_input, ctx.module = by_input, module
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tensors, found = list(ctx.saved_tensors), []
        for rest in ctx.objects:
            if rest is None:
                found.append(tensors.pop(0))
            else:
                tensors = rest.restore_from_saved(tensors)
                found.append(rest)
        operand, workspace, weight = found
        ctx.by_grad.set_usage(rowwise=True, columnwise=True)
        by_both = ctx.by_grad(grad)
        by_both.update_usage(rowwise_usage=True)
        workspace.update_usage(columnwise_usage=True)
        dgrad = multiply(Gemm.DGRAD, by_both, workspace, grad.dtype)
        if isinstance(operand, torch.Tensor):
            ctx.by_input.set_usage(rowwise=False, columnwise=True)
            operand = ctx.by_input(operand)
        operand.update_usage(columnwise_usage=True)
        by_both.update_usage(columnwise_usage=True)
        wgrad = multiply(Gemm.WGRAD, by_both, operand, grad.dtype)
        if ctx.module.fuse_wgrad_accumulation:
            weight.grad_added_to_main_grad = True
            wgrad = torch.zeros(weight.shape, dtype=weight.dtype)
        return wgrad, dgrad, None, None


class Linear(torch.nn.Module):
    """TELinear of one rank, quantized by the factory of its configuration, without a bias."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs).to(dtype))
        self.name, self.tp_size, self.tp_group = "Layer_1", 1, None
        self.fuse_wgrad_accumulation = self.save_original_input = False
        self.config = SimpleNamespace(recompute_granularity=None, attention_output_gate=False)
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = False
        self._fp8_workspaces: dict[str, Any] = {}
        self.fp8_initialized = self.fp8_meta_tensors_initialized = False

    def finish_init(self, config: Any) -> None:
        self.content = config.config

    @property
    def quantizers(self) -> list[Any]:
        factory = sys.modules[_OURS[0]].factory
        roles = ("input", "weight", "grad_output")
        if not self.fp8_initialized:
            self._quantizers = [factory(Role(self.name, role)) for role in roles]
            self.fp8_initialized = True
        return self._quantizers

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        kind = "training_recipe" if self.training else "evaluation_recipe"
        if not self.content[kind]:
            return torch.nn.functional.linear(x, self.weight), None
        first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        y = _Linear.apply(self.weight, x, self, first)
        self.is_first_microbatch = False
        return y, None


class ColumnLinear(Linear):
    """TEColumnParallelLinear."""


class GroupedLinear(torch.nn.Module):
    """TEGroupedLinear."""


def use_stand_ins(patch: pytest.MonkeyPatch) -> ModuleType:
    """Return ``transformer_engine_layers`` on stand-ins, until the patch is undone."""
    contents = {
        "transformer_engine": {},
        "transformer_engine.common": {"recipe": SimpleNamespace(Recipe=object)},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.quantization": {"RecipeState": None},
        "transformer_engine.pytorch.quantized_tensor": {"QuantizedTensorStorage": Storage},
        "transformer_engine.pytorch.tensor": {"IdentityQuantizer": IdentityQuantizer},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values, __path__=[])
        patch.setitem(sys.modules, name, module)
    classes = {
        "TELinear": Linear, "TEColumnParallelLinear": ColumnLinear, "TERowParallelLinear": Linear,
        "TELayerNormColumnParallelLinear": ColumnLinear, "TEGroupedLinear": GroupedLinear,
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
