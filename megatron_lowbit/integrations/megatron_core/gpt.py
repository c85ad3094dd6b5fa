"""GPTs: megatron-core's model with a loss of its own."""

from argparse import Namespace

import torch

from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.integrations.megatron_core.cross_entropy import ChunkedLoss
from megatron_lowbit.integrations.megatron_core.specs import gpt_block_spec


class LowbitGPTModel(ChunkedLoss, GPTModel):
    """megatron-core's model, with a loss that makes no FP32 copy of the logits."""


def gpt_chunk(
    args: Namespace,
    config: TransformerConfig,
    padded_vocab_size: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> torch.nn.Module:
    """One pipeline stage, or virtual stage, of a GPT."""
    return LowbitGPTModel(
        config=config,
        transformer_layer_spec=gpt_block_spec(config, vp_stage),
        vocab_size=padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )
