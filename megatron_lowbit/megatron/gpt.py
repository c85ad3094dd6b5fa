"""GPTs: megatron-core's model with a loss of its own."""

from argparse import Namespace
from typing import Any

import torch

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.megatron.cross_entropy import ChunkedLoss
from megatron_lowbit.megatron.mxnorm import use_mxnorm
from megatron_lowbit.megatron.specs import swap_modules


class LowbitGPTModel(ChunkedLoss, GPTModel):
    """megatron-core's model, with a loss that makes no FP32 copy of the logits."""


def gpt_chunk(args: Namespace, shared: dict[str, Any], vp_stage: int | None) -> torch.nn.Module:
    """One pipeline stage, or virtual stage, of a GPT; ``shared`` are arguments of all models."""
    use_te = args.transformer_impl == "transformer_engine"
    spec = _block_spec(shared["config"], use_te, vp_stage)
    if args.normalization == "MXNorm":
        spec = use_mxnorm(spec)
    return LowbitGPTModel(
        **shared,
        transformer_layer_spec=spec,
        vp_stage=vp_stage,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    )


def _block_spec(
    config: TransformerConfig, use_te: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The decoder of one pipeline stage, in Transformer Engine's layers or in this project's."""
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    return block if use_te else swap_modules(block)
