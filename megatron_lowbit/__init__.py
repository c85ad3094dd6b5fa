"""Low-precision LLM pretraining on Megatron: recipes, numerics, kernels."""

from megatron_lowbit.layers import lowbit_linear
from megatron_lowbit.numerics import quantize
from megatron_lowbit.recipes import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe", "lowbit_linear", "quantize"]
