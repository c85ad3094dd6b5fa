"""Arguments that Megatron-LM 0.19.2 parses and then ignores, applied to a model's configuration."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.transformer.utils import openai_gelu


def apply_ignored_arguments(model_config: Any, args: Namespace) -> Iterator[str]:
    """Let ``--rope-scaling-factor`` and ``--openai-gelu`` have their effect.

    ``gpt_config_from_args`` leaves the factor at 8. Nothing reads the other argument: Megatron-LM
    computes GELU's approximation by tanh where it fuses bias and activation, and exact GELU
    elsewhere, such as on a CPU.

    Args:
        model_config: Megatron-LM's GPTModelConfig or HybridModelConfig.
        args: parsed by Megatron-LM.

    Yields:
        A line to print for each setting that now differs from what Megatron-LM made of it.
    """
    factor = getattr(model_config, "rope_scaling_factor", args.rope_scaling_factor)
    if args.use_rope_scaling and factor != args.rope_scaling_factor:
        model_config.rope_scaling_factor = args.rope_scaling_factor
        yield f"--rope-scaling-factor {args.rope_scaling_factor:g} applied: Megatron-LM ignores it"
    if args.openai_gelu and not args.bias_gelu_fusion:
        model_config.transformer.activation_func = openai_gelu
        yield "--openai-gelu applied: Megatron-LM ignores it"
