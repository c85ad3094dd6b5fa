"""Recipes in plain PyTorch models, without Megatron-LM."""

from megatron_lowbit.pytorch.convert import convert
from megatron_lowbit.pytorch.linear import LowbitLinear

__all__ = ["LowbitLinear", "convert"]
