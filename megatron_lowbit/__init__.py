"""Low-precision LLM pretraining on Megatron: recipes, numerics, kernels."""

from typing import TYPE_CHECKING

from megatron_lowbit.lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lowbit.conversion.export import export as export
    from megatron_lowbit.layers import lowbit_linear as lowbit_linear
    from megatron_lowbit.numerics import QuantizedTensor as QuantizedTensor
    from megatron_lowbit.numerics import quantize as quantize
    from megatron_lowbit.pytorch import LowbitLinear as LowbitLinear
    from megatron_lowbit.pytorch import convert as convert
    from megatron_lowbit.recipes import Recipe as Recipe
    from megatron_lowbit.recipes import load_recipe as load_recipe
    from megatron_lowbit.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_attributes(
    __name__,
    {
        "conversion.export": ["export"],
        "layers": ["lowbit_linear"],
        "numerics": ["QuantizedTensor", "quantize"],
        "pytorch": ["LowbitLinear", "convert"],
        "recipes": ["Recipe", "load_recipe"],
        "version": ["__version__"],
    },
)
