"""Builds this rank's part of a model from parsed arguments, its linears under a recipe."""

from argparse import Namespace

import torch
import torch.distributed as dist

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_lowbit.megatron import allreduce_norm, experts
from megatron_lowbit.megatron.gpt import gpt_chunk
from megatron_lowbit.megatron.hybrid import hybrid_chunk
from megatron_lowbit.megatron.layer_state import layer_states
from megatron_lowbit.megatron.quant_recipe import QuantRecipe
from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.recipes import Layer, Recipe

_FP32_PARAMETERS = ("mixer.A_log", "mixer.D")
"""Ends of the names of parameters that stay FP32 in a BF16 model."""


def build_model(
    args: Namespace,
    config: TransformerConfig,
    recipe: Recipe,
    engine: Engine,
    padded_vocab_size: int,
) -> list[torch.nn.Module]:
    """This rank's model chunks: one, or one for each virtual pipeline stage.

    A GPT, or a hybrid where the arguments have a ``hybrid_override_pattern``.
    """
    stages = config.virtual_pipeline_model_parallel_size
    build_chunk = gpt_chunk if args.hybrid_override_pattern is None else hybrid_chunk
    experts.use_torch_router()
    kind, take_over = QuantRecipe, None
    if args.transformer_impl == "transformer_engine":
        from megatron_lowbit.transformer_engine.layers import (
            TEQuantRecipe as kind,
        )
        from megatron_lowbit.transformer_engine.layers import take_over
    norm = None
    if args.normalization == "MXNorm":
        norm = MXNorm(p=args.mxnorm_p, eps=args.norm_epsilon)
    operation = None
    if args.fused_allreduce_norm:
        operation = allreduce_norm.make_operation(args, config.params_dtype)
    chunks = []
    for vp_stage in range(stages or 1):
        stage = vp_stage if stages else None
        config.quant_recipe = kind(
            recipe,
            config.num_layers,
            get_transformer_layer_offset(config, vp_stage=stage),
            engine,
            accumulate_main_grad=args.gradient_accumulation_fusion,
            first_expert=experts.first_local(config),
            norm=norm,
        )
        where = {"ignore_virtual": False, "vp_stage": stage}
        shared = {
            "config": config,
            "vocab_size": padded_vocab_size,
            "max_sequence_length": args.max_position_embeddings,
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
            "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
            "position_embedding_type": args.position_embedding_type,
            "rotary_percent": args.rotary_percent,
            "rotary_base": args.rotary_base,
        }
        chunk = build_chunk(args, shared, stage)
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        chunk = chunk.to(device)
        if operation is not None:
            allreduce_norm.fuse_all_reduces(chunk, operation)
        if take_over is not None:
            take_over(chunk, config.quant_recipe)
        chunks.append(_in_bf16(config, chunk) if config.bf16 else chunk)
    return chunks


def _in_bf16(config: TransformerConfig, chunk: torch.nn.Module) -> torch.nn.Module:
    """The chunk with BF16 parameters, but for those that decide how fast states decay."""
    kept = [
        (parameter, parameter.data)
        for name, parameter in chunk.named_parameters()
        if name.endswith(_FP32_PARAMETERS)
    ]
    wrapped = Float16Module(config, chunk)
    for parameter, data in kept:
        parameter.data = data
    return wrapped


def quantizable_layers(chunks: list[torch.nn.Module]) -> list[Layer]:
    """Every linear layer of the whole model that a recipe can reach, in order of its path."""
    mine = [state.plan.layer for state in layer_states(chunks)]
    gathered: list[list[Layer]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    unique = {layer.path: layer for layers in gathered for layer in layers}
    return sorted(unique.values(), key=lambda layer: (layer.block, layer.path))
