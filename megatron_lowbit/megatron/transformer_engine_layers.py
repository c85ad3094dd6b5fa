"""megatron-core's Transformer Engine layers under a recipe, module by module.

Each takes its precision through megatron-core's own ``finish_init``, which by default knows a
recipe of Transformer Engine or the path of a factory of quantizers: :func:`factory` here, which
finds its module by the name that Transformer Engine hands on.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.pytorch.quantization import RecipeState

from megatron_lowbit.layers import LinearContext
from megatron_lowbit.megatron.layer_plan import LayerPlan
from megatron_lowbit.megatron.layer_state import LayerState, device_of, split_features
from megatron_lowbit.megatron.transformer_engine_experts import Expert, take_over_expert
from megatron_lowbit.recipes import LinearPrecision
from megatron_lowbit.transformer_engine.call_tracker import CallTracker
from megatron_lowbit.transformer_engine.native import Native, native_recipe
from megatron_lowbit.transformer_engine.quantizers import slot
from megatron_lowbit.transformer_engine.recipe import build

_COLUMN = (te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear)
_FACTORY = f"{__name__}.factory"


class TELayerState(LayerState):
    """The state of a module of Transformer Engine, which it keeps in step with its precision."""

    def __init__(self, plan: LayerPlan, module: torch.nn.Module) -> None:
        self.module, is_column = module, isinstance(module, _COLUMN)
        self.calls = CallTracker(self._make_context, opened_outside=True, main_grad=self._main_grad)
        module.name = _Name(plan.layer.path)
        module.name.state = self
        # Not a hook: Megatron-LM's CUDA graphs take no module that has one.
        module.forward = self._opening(module.forward)
        if plan.layer.path.endswith("attention.linear_proj"):
            module.save_original_input |= _attention_keeps_output(module.config)
        features = None
        if module.tp_size > 1:
            split = module.out_features if is_column else module.in_features
            features = split_features(split, module.weight, module.tp_group)
        super().__init__(plan, device_of(module.weight), module.tp_group, features, is_column)

    def set_precision(self, precision: LinearPrecision) -> None:
        """Compute in another precision from now on."""
        super().set_precision(precision)
        module, layer = self.module, self.plan.layer
        self.native = _native(precision)
        content = _content(precision, self.native, self.plan.evaluates)
        where = MatchContext(layer.path, layer.block)
        module.finish_init(QuantizationConfig(content, where, "recipe"))
        self.own = precision.quantized and self.native is None
        module.fp8_initialized = module.fp8_meta_tensors_initialized = False
        module._fp8_workspaces.clear()

    def forget_weight(self) -> None:
        """Quantize the weight anew in the next call: it has changed.

        megatron-core says so to its modules only where one recipe is for all of them.
        """
        self.module.is_first_microbatch = True

    def _opening(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        module = self.module

        def opened(*args: Any, **kwargs: Any) -> Any:
            if is_graph_capturing():
                module.is_first_microbatch = True  # a graph quantizes the weight each time
            if self.own and (module.training or self.plan.evaluates):
                self.calls.open(training=module.training and torch.is_grad_enabled())
            return forward(*args, **kwargs)

        return opened

    def _main_grad(self) -> torch.Tensor | None:
        # Transformer Engine hands main_grad to its own GEMMs, but not to those of a custom recipe.
        module, weight = self.module, self.module.weight
        if not module.fuse_wgrad_accumulation:
            return None
        main_grad = getattr(weight, "get_main_grad", lambda: weight.main_grad)()
        return main_grad.zero_() if getattr(weight, "overwrite_main_grad", False) else main_grad

    def _make_context(self, training: bool) -> LinearContext:
        # Communication, gradient buffers and the weight's cache are Transformer Engine's, which
        # keeps in it the codes that are stored in place of the weight.
        return LinearContext(
            self.plan.precision,
            self.plan.engine,
            self.call_key(),
            training,
            shards=self.shards(),
            amax_history=self.call_history(),
            weight_cache=self.weight_cache if self.weight_cache.stored else None,
        )


def _attention_keeps_output(config: TransformerConfig) -> bool:
    """Return True if attention's output is in memory until the backward pass.

    Its projection then needs no codes of it for wgrad, which it quantizes again.
    """
    recomputed = config.recompute_granularity == "selective" and (
        "core_attn" in config.recompute_modules
    )
    return not recomputed and not config.attention_output_gate


def te_linears(chunk: torch.nn.Module) -> dict[str, torch.nn.Module | Expert]:
    """Return a chunk's linear layers that can take a recipe, and experts, by their path in it."""
    kinds = (*_COLUMN, te.TERowParallelLinear, te.TELinear)
    found: dict[str, torch.nn.Module | Expert] = {}
    for name, module in chunk.named_modules():
        if isinstance(module, kinds):
            found[name] = module
        elif isinstance(module, te.TEGroupedLinear):
            found |= {f"{name}.{i}": Expert(module, i) for i in range(module.num_gemms)}
    return found


def take_over(module: torch.nn.Module | Expert, plan: LayerPlan) -> LayerState:
    """Give a linear layer of Transformer Engine its precision; return the state it now has."""
    if isinstance(module, Expert):
        is_column = isinstance(module.grouped, te.TEColumnParallelGroupedLinear)
        return take_over_expert(module, plan, is_column)
    module.layer_state = TELayerState(plan, module)
    return module.layer_state


class _Name(str):
    """A module's path, which comes with every role that Transformer Engine asks a factory for."""

    state: TELayerState


def factory(role: Any) -> Any:
    """Return the quantizer of one operand of one module."""
    state = None if role is None else getattr(role.name, "state", None)
    if state is None or state.own:
        return slot(role, lambda: state.calls)
    # Transformer Engine's own recipe makes the quantizers of a pass together.
    mode, count, index = {
        "input": ("forward", 3, 0),
        "weight": ("forward", 3, 1),
        "grad_output": ("backward", 2, 0),
    }[role.tensor_type]
    own = RecipeState.create(build(state.native), mode=mode, num_quantizers=count)
    return own.make_quantizers()[index]


def _content(precision: LinearPrecision, native: Native | None, evaluates: bool) -> dict[str, Any]:
    """Return megatron-core's configuration of a module; an empty recipe is high precision."""
    training: dict[str, Any] = {}
    if precision.quantized:
        custom = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": _FACTORY}
        training = dict(native.megatron) if native and native.megatron else custom
        training["override_nonquantized_autocast"] = True
    return {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": training,
        "evaluation_recipe": training if evaluates else {},
    }


def _native(precision: LinearPrecision) -> Native | None:
    if precision.history_length:
        # megatron-core's layers take no delayed scaling one by one, and Transformer Engine's
        # checkpoints of it are pickles.
        return None
    return native_recipe(precision, torch.cuda.get_device_capability())


def kernels(precision: LinearPrecision) -> str:
    """Describe whose kernels compute a layer of this precision."""
    if not precision.quantized:
        return "Transformer Engine's, BF16"
    native = _native(precision)
    return "this project's" if native is None else f"Transformer Engine's {native.name}"
