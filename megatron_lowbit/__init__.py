"""Low-precision LLM pretraining on Megatron: recipes, numerics, kernels."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_lowbit.layers import lowbit_linear
    from megatron_lowbit.numerics import QuantizedTensor, quantize
    from megatron_lowbit.recipes import Recipe, load_recipe

__all__ = ["QuantizedTensor", "Recipe", "load_recipe", "lowbit_linear", "quantize"]

_HOMES = {
    "QuantizedTensor": "numerics",
    "Recipe": "recipes",
    "load_recipe": "recipes",
    "lowbit_linear": "layers",
    "quantize": "numerics",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
