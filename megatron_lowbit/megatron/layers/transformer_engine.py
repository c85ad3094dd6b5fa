"""megatron-core's Transformer Engine layers under a recipe, module by module.

They keep the parameters, their sharding and their checkpoints. Where Transformer Engine has
kernels for a precision on this GPU, its module computes in a recipe of its own, which it takes
through megatron-core's ``finish_init``: by a name that megatron-core knows, or by the path of
:func:`factory`, which finds its module by the name that Transformer Engine passes. Elsewhere this
project computes the product. A norm of the module's own then runs before the residual branches off,
so that its backward pass can add the residual's gradient.
"""

import weakref
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions import transformer_engine as te
from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from transformer_engine.pytorch.quantization import RecipeState
from transformer_engine.pytorch.tensor import IdentityQuantizer

from megatron_lowbit.errors import require
from megatron_lowbit.layers import LinearContext, lowbit_linear, lowbit_mlp
from megatron_lowbit.layers.autograd_state import eager
from megatron_lowbit.megatron.layers.experts import Expert, take_over_expert
from megatron_lowbit.megatron.layers.state import LayerPlan, LayerState, device_of, split_features
from megatron_lowbit.recipes import LinearPrecision
from megatron_lowbit.recipes.te_config import custom_recipe, module_config
from megatron_lowbit.transformer_engine.native import layer_recipe
from megatron_lowbit.transformer_engine.norm import normalized
from megatron_lowbit.transformer_engine.recipe import build

_COLUMN = (te.TEColumnParallelLinear, te.TELayerNormColumnParallelLinear)
_FACTORY = f"{__name__}.factory"


def linears_of(chunk: torch.nn.Module) -> dict[str, torch.nn.Module | Expert]:
    """Return a chunk's linear layers that can take a recipe, and experts, by their path in it."""
    classes = (*_COLUMN, te.TERowParallelLinear, te.TELinear)
    linears: dict[str, torch.nn.Module | Expert] = {}
    for name, module in chunk.named_modules():
        if isinstance(module, classes):
            linears[name] = module
        elif isinstance(module, te.TEGroupedLinear):
            linears |= {f"{name}.{i}": Expert(module, i) for i in range(module.num_gemms)}
    return linears


def take_over(module: torch.nn.Module | Expert, plan: LayerPlan) -> LayerState:
    """Give a linear layer of Transformer Engine its precision; return the state it now has."""
    if isinstance(module, Expert):
        is_column = isinstance(module.grouped, te.TEColumnParallelGroupedLinear)
        return take_over_expert(module, plan, is_column)
    module.layer_state = TELayerState(plan, module)
    module.forward = _Forward(module.layer_state)
    return module.layer_state


class TELayerState(LayerState):
    """The state of a module of Transformer Engine, which it keeps in step with its precision.

    ``native`` is Transformer Engine's recipe that computes the layer, None for this project's.
    """

    def __init__(self, plan: LayerPlan, module: torch.nn.Module) -> None:
        self.module, is_column = module, isinstance(module, _COLUMN)
        module.name = _Name(plan.layer.path)
        module.name.state = self
        module.get_extra_state = _no_extra_state
        if plan.layer.path.endswith("attention.linear_proj"):
            module.save_original_input |= _attention_keeps_output(module.config)
        # Layers with a norm have no such choice: nothing else keeps what it gives.
        self.saves_input = getattr(module, "save_original_input", False)
        features = None
        if module.tp_size > 1:
            split = module.out_features if is_column else module.in_features
            features = split_features(split, module.weight, module.tp_group)
        is_expert = ".local_experts." in plan.layer.path
        super().__init__(
            plan, device_of(module.weight), module.tp_group, features, is_column, is_expert
        )

    def set_precision(self, precision: LinearPrecision) -> None:
        self.native = None
        module, layer = self.module, self.plan.layer
        if precision.quantized:
            capability = torch.cuda.get_device_capability()
            self.native = layer_recipe(precision, capability, module.weight.shape)
        super().set_precision(precision)
        if precision.quantized and self.native is None:
            _check(module.config)
        where = MatchContext(layer.path, layer.block)
        recipe = self.native and (self.native.megatron or custom_recipe(_FACTORY))
        config = module_config(recipe, self.plan.evaluates)
        module.finish_init(QuantizationConfig(config, where, "recipe"))
        module.fp8_initialized = module.fp8_meta_tensors_initialized = False
        module._fp8_workspaces.clear()

    @property
    def quantizes_weight(self) -> bool:
        return self.native is None and super().quantizes_weight

    def forget_weight(self) -> None:
        """Quantize the weight again in the next call: it has changed.

        megatron-core says so to its modules only where one recipe is for all of them, and never to
        those that quantize nothing.
        """
        super().forget_weight()
        if self.native is not None:
            self.module.is_first_microbatch = True


def _no_extra_state() -> torch.Tensor:
    """Return the extra state of a module whose recipe keeps nothing between iterations.

    Transformer Engine would pickle a recipe that it has no name for, and refuse it at the load.
    """
    return torch.empty(0, dtype=torch.uint8)


class _Forward:
    """The forward pass of a module, in the precision of its state."""

    def __init__(self, state: TELayerState) -> None:
        module = state.module
        self.state, self.upstream = state, module.forward
        self.normalizes, self.follows_norm = hasattr(module, "layer_norm_weight"), False
        self._amax: tuple[weakref.ref, torch.Tensor | None] | None = None
        self.reduces = module.parallel_mode == "row" and module.tp_size > 1

    @eager  # The key is another one in every microbatch.
    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = self.state.module
        if not self.quantizes(x):
            if is_graph_capturing():
                # A graph quantizes the weight, and adds its gradient, in every microbatch.
                module.disable_parameter_transpose_cache = True
            return self.upstream(x)
        bias = module.bias if module.use_bias else None
        added, returned = (None, bias) if module.te_return_bias else (bias, None)
        x, amax = self.input(x)
        if not self.reduces:
            return lowbit_linear(x, module.weight, self.context(), added, amax), returned
        y = self.output(lowbit_linear(x, module.weight, self.context(), None, amax))
        return y if added is None else y + added, returned

    def quantizes(self, x: torch.Tensor) -> bool:
        """Return True if this project computes the module's product with x."""
        state = self.state
        # An expert without tokens has nothing to quantize, nor an amax to record.
        return not state.native and state.is_active(state.module.training) and x.numel() > 0

    def input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the product's input, x normalized by the module's norm; its amax if known."""
        if not self.normalizes:
            return x, None
        if not self.is_normalized(x):
            x, _, amax = normalized(x, self.state.module, self.state.plan.engine)
            return x, amax
        given, self._amax = self._amax, None
        return x, given[1] if given is not None and given[0]() is x else None

    def is_normalized(self, x: torch.Tensor) -> bool:
        """Return True if :meth:`normalize` is called before a product of this project with x."""
        return self.follows_norm and self.quantizes(x) and not _is_watched(self.state.module)

    @eager
    def normalize(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalize x before the layer; return the rows, and x for the residual connection.

        One kernel then adds the residual's gradient to the norm's. Megatron-LM accepts such a pair
        from a norm, as from its own fused residual norm.
        """
        if not self.is_normalized(x):
            return x
        module = self.state.module
        _wait_for_parameters(module)
        y, residual, amax = normalized(x, module, self.state.plan.engine)
        self._amax = weakref.ref(y), amax
        return y, residual

    def context(self) -> LinearContext:
        """Return the context of a call."""
        splits_tokens: bool = self.state.module.sequence_parallel
        shards = self.state.shards(splits_tokens, allreduce_dgrad=not splits_tokens)
        return self.state.context(shards)

    def output(self, y: torch.Tensor) -> torch.Tensor:
        """Sum the product of a row-parallel module over the tensor-parallel ranks."""
        if not self.reduces:
            return y
        module, reduce = self.state.module, reduce_from_tensor_model_parallel_region
        if module.sequence_parallel:
            reduce = reduce_scatter_to_sequence_parallel_region
        return reduce(y, group=module.tp_group)


def fuse_mlps(chunk: torch.nn.Module) -> None:
    """Let a chunk's MLPs with fused SwiGLU compute both layers by one function of autograd."""
    for module in chunk.modules():
        if type(module) is MLP and _has_plain_swiglu(module.config):
            layers = module.linear_fc1, module.linear_fc2
            if all(isinstance(layer.forward, _Forward) for layer in layers):
                module.forward = _MLPForward(module)


def fuse_norms(chunk: torch.nn.Module) -> None:
    """Let norms of a chunk's linear layers take the residual's gradient.

    Where a norm belongs to the linear layer, Megatron-LM's blocks have an IdentityOp in its place.
    """
    for block in chunk.modules():
        if isinstance(block, TransformerLayer):
            linears = (
                (block.input_layernorm, getattr(block.self_attention, "linear_qkv", None)),
                (block.pre_mlp_layernorm, getattr(block.mlp, "linear_fc1", None)),
            )
            for norm, linear in linears:
                forward = getattr(linear, "forward", None)
                if type(norm) is IdentityOp and isinstance(forward, _Forward):
                    forward.follows_norm = forward.normalizes and linear.layer_norm_bias is None
                    if forward.follows_norm:
                        norm.forward = forward.normalize


def _has_plain_swiglu(config: TransformerConfig) -> bool:
    """Return True if Megatron-LM's MLPs compute ``silu(gate) * up`` in BF16 by its fused kernel.

    That kernel knows neither ``activation_func_clamp_value`` nor ``glu_linear_offset``.
    """
    swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    other = config.use_te_activation_func or config.activation_func_fp8_input_store
    plain = config.bf16 and config.bias_activation_fusion and not config.add_bias_linear
    return swiglu and plain and not other and not config.cpu_offloading


def _is_watched(module: torch.nn.Module) -> bool:
    """Return True for a module with other hooks than those that wait for gathered parameters."""
    # Transformer Engine's own, while it captures: what it runs before is what it captures.
    forward = {} if is_graph_capturing() else module._forward_hooks
    waiting = DistributedDataParallel.__module__
    others = [h for h in module._forward_pre_hooks.values() if h.__module__ != waiting]
    return any((forward, module._backward_hooks, module._backward_pre_hooks, others))


def _wait_for_parameters(module: torch.nn.Module) -> None:
    """Call a module's hooks that wait for gathered parameters; it has no others."""
    for hook in module._forward_pre_hooks.values():
        hook(module)


class _MLPForward:
    """The forward pass of an MLP whose linear layers have states of this project.

    It calls the layers' hooks that wait for gathered parameters; with any other hooks, the layers
    run one by one.
    """

    def __init__(self, module: MLP) -> None:
        self.layers, self.upstream = (module.linear_fc1, module.linear_fc2), module.forward

    @eager
    def __call__(
        self, x: torch.Tensor, per_token_scale: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fc1, fc2 = self.layers
        first, second = fc1.forward, fc2.forward
        quantized = first.quantizes(x) and second.quantizes(x)
        if per_token_scale is not None or not quantized or any(map(_is_watched, self.layers)):
            return self.upstream(x, per_token_scale, **options)
        for layer in self.layers:
            _wait_for_parameters(layer)
        x, amax = first.input(x)
        y = lowbit_mlp(x, fc1.weight, fc2.weight, first.context(), second.context(), amax)
        return second.output(y), None


def _check(config: TransformerConfig) -> None:
    """Raise UserError for what Transformer Engine's modules do and this project's layers do not."""
    refused = {
        "--tp-comm-overlap": config.tp_comm_overlap,
        "--tensor-parallel-num-weight-shards": config.gtp_weight_remat_size > 1,
    }
    for flag, given in refused.items():
        require(not given, f"{flag} under a recipe: this project's kernels compute the linear "
                "layers, and do not have it; omit it")  # fmt: skip


def _attention_keeps_output(config: TransformerConfig) -> bool:
    """Return True if attention's output is in memory until the backward pass.

    Its projection then needs no codes of it for wgrad, which it quantizes again.
    """
    recomputed = config.recompute_granularity == "selective" and (
        "core_attn" in config.recompute_modules
    )
    return not recomputed and not config.attention_output_gate


class _Name(str):
    """A module's path, which comes with every role that Transformer Engine asks a factory for."""

    state: TELayerState


_QUANTIZERS = {
    "input": ("forward", 3, 0),
    "weight": ("forward", 3, 1),
    "grad_output": ("backward", 2, 0),
}
"""Pass of each operand, the number of the pass's quantizers, and the operand's index there."""


def factory(role: Any) -> Any:
    """Return the quantizer of one operand of a module that a recipe of its own computes."""
    if role is None or role.tensor_type not in _QUANTIZERS:
        return IdentityQuantizer()  # a slot that stays in high precision
    # Transformer Engine's own recipe makes the quantizers of a pass together.
    mode, count, index = _QUANTIZERS[role.tensor_type]
    recipe = build(role.name.state.native)
    return RecipeState.create(recipe, mode=mode, num_quantizers=count).make_quantizers()[index]
