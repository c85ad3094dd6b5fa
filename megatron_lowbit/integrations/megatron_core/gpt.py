"""GPTs: megatron-core's model with a loss of its own."""

from argparse import Namespace
from typing import Any

import torch

from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.models.gpt import GPTModel

from megatron_lowbit.integrations.megatron_core.cross_entropy import ChunkedLoss
from megatron_lowbit.integrations.megatron_core.specs import gpt_block_spec


class LowbitGPTModel(ChunkedLoss, GPTModel):
    """megatron-core's model, with a loss that makes no FP32 copy of the logits."""


def gpt_chunk(args: Namespace, shared: dict[str, Any], vp_stage: int | None) -> torch.nn.Module:
    """One pipeline stage, or virtual stage, of a GPT; ``shared`` are arguments of all models."""
    spec = gpt_block_spec(shared["config"], vp_stage)
    return LowbitGPTModel(**shared, transformer_layer_spec=spec, vp_stage=vp_stage)
