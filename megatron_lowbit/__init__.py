"""Low-precision LLM pretraining on Megatron: recipes, numerics, kernels."""

from typing import TYPE_CHECKING

from megatron_lowbit.lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lowbit.layers import lowbit_linear
    from megatron_lowbit.numerics import QuantizedTensor, quantize
    from megatron_lowbit.recipes import Recipe, load_recipe

__all__ = ["QuantizedTensor", "Recipe", "load_recipe", "lowbit_linear", "quantize"]
__getattr__ = lazy_attributes(
    __name__,
    {
        "layers": ["lowbit_linear"],
        "numerics": ["QuantizedTensor", "quantize"],
        "recipes": ["Recipe", "load_recipe"],
    },
)
