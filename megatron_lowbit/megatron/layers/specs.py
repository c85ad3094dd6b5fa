"""Changes of the layer specs from which Megatron-LM builds a model, and parts of Gemma 3's layers.

Source of the parts: "Gemma 3 Technical Report" (arXiv 2503.19786), section 2, and transformers'
Gemma3. They are a norm of what attention and MLP add to the residual, rotary embeddings of another
base in layers with a sliding window, and an MLP gated by the tanh approximation of GELU. Scaled
embeddings are megatron-core's ``--mup-embedding-mult``, gains of 1 + w its
``--apply-layernorm-1p``. Granite multiplies what attention and MLP add by a constant.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, openai_gelu
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor

Change = Callable[[Any], Any]


def change_specs(model_config: Any, change: Change) -> None:
    """Let a model configuration build its layers from specs that ``change`` returns.

    ``model_config`` is Megatron-LM's GPTModelConfig or HybridModelConfig.
    """
    if hasattr(model_config, "hybrid_stack_spec"):
        model_config.hybrid_stack_spec = change(model_config.hybrid_stack_spec)
        return
    before = model_config.transformer_layer_spec

    def spec(model_config: Any, vp_stage: int | None) -> Any:
        if isinstance(before, ModuleSpec):
            return change(before)
        return change((before or default_layer_spec)(model_config, vp_stage))

    model_config.transformer_layer_spec = spec


def change_parts(spec: Any, change: Change) -> Any:
    """Return a spec, or a list or builder of modules, with its parts changed."""
    if isinstance(spec, list):
        return [change(entry) for entry in spec]
    if isinstance(spec, partial):
        parts = {name: change(part) for name, part in spec.keywords.items()}
        return partial(spec.func, *spec.args, **parts)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {f.name: change(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return spec


class NormAndAdd(torch.nn.Module):
    """Addition of a part's output to the residual after a norm, as in Gemma 3: a ``bda``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.post_layernorm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that adds, as megatron-core's functions do."""
        return partial(_change_and_add, self.post_layernorm, training)


def _scale_and_add(multiplier: float) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Return a ``bda`` that adds a part's output to the residual with a factor, as in Granite."""
    return lambda training, _: partial(_change_and_add, lambda x: x * multiplier, training)


def _change_and_add(
    change: Callable[[Tensor], Tensor],
    training: bool,
    output_and_bias: tuple[Tensor, Tensor | None],
    residual: Tensor,
    dropout: float,
) -> Tensor:
    output, bias = output_and_bias
    changed = change(output if bias is None else output + bias)
    return residual + torch.nn.functional.dropout(changed, dropout, training)


class WindowRotaryAttention(SelfAttention):
    """Self-attention whose rotary embeddings have another base in layers with a window."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *args: Any,
        window_rotary_base: int,
        rotary_percent: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.window_rotary = None
        skip = config.window_attn_skip_freq
        if is_layer_window_attention(config.window_size, skip, layer_number):
            self.window_rotary = RotaryEmbedding(
                config.kv_channels,
                rotary_percent,
                config.rotary_interleaved,
                rotary_base=window_rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
            )

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        """Attend; ``rotary_pos_emb`` (sequence, 1, 1, head) is the model's, for all layers."""
        if self.window_rotary is not None and rotary_pos_emb is not None:
            rotary_pos_emb = self.window_rotary(rotary_pos_emb.shape[0])
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class DirectQueryAttention(MLASelfAttention):
    """Latent attention without a latent of the queries, which then have no norm of their own."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolver = QKNormConfigResolver(self.config, submodules)
        resolver.has_q_lora = True  # The norm that this adds is not built without a latent.
        return resolver.resolve() | {"linear_q_proj": submodules.linear_q_proj}


def with_direct_queries(spec: Any) -> Any:
    """Return a spec of local layers whose latent attention may have no latent of the queries."""
    if isinstance(spec, ModuleSpec) and spec.module is MLASelfAttention:
        return dataclasses.replace(spec, module=DirectQueryAttention)
    return change_parts(spec, with_direct_queries)


def with_l2_norms(spec: Any) -> Any:
    """Return a spec of local layers whose attention has the norms of ``--qk-l2-norm``."""
    is_module = isinstance(spec, ModuleSpec) and isinstance(spec.module, type)  # or names of one
    if is_module and issubclass(spec.module, SelfAttention):
        parts = dataclasses.replace(spec.submodules, q_layernorm=L2Norm, k_layernorm=L2Norm)
        return dataclasses.replace(spec, submodules=parts)
    return change_parts(spec, with_l2_norms)


def use_gemma_layers(model_config: Any, args: Namespace) -> None:
    """Give a model configuration the parts that the arguments ask for."""
    if args.geglu:
        transformer = model_config.transformer
        transformer.activation_func, transformer.gated_linear_unit = openai_gelu, True
        transformer.bias_activation_fusion = False
    if args.sandwich_norm or args.window_rotary_base or args.residual_multiplier != 1:
        change_specs(model_config, partial(_with_gemma_parts, model_config.transformer, args))


def _with_gemma_parts(config: TransformerConfig, args: Namespace, spec: Any) -> Any:
    if not isinstance(spec, TransformerLayerSubmodules):
        return change_parts(spec, partial(_with_gemma_parts, config, args))
    changes: dict[str, Any] = {}
    if args.sandwich_norm:
        add = ModuleSpec(NormAndAdd, params={"config": config})
        changes = {"self_attn_bda": add, "mlp_bda": add}
    if args.residual_multiplier != 1:
        scale_and_add = _scale_and_add(args.residual_multiplier)
        changes = {"self_attn_bda": scale_and_add, "mlp_bda": scale_and_add}
    if args.window_rotary_base:
        attention = spec.self_attention
        names = ("window_rotary_base", "rotary_percent")
        params = {**attention.params, **{name: getattr(args, name) for name in names}}
        changes["self_attention"] = dataclasses.replace(
            attention, module=WindowRotaryAttention, params=params
        )
    return dataclasses.replace(spec, **changes)
