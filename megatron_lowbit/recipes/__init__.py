"""Recipes: the precision of each GEMM of each linear layer, read from YAML."""

from typing import TYPE_CHECKING

from megatron_lowbit.lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lowbit.numerics.gemms import OPERANDS as OPERANDS
    from megatron_lowbit.numerics.precision import HIGH_PRECISION as HIGH_PRECISION
    from megatron_lowbit.numerics.precision import GemmPrecision as GemmPrecision
    from megatron_lowbit.numerics.precision import LinearPrecision as LinearPrecision
    from megatron_lowbit.recipes.load import load_combined as load_combined
    from megatron_lowbit.recipes.load import load_precision as load_precision
    from megatron_lowbit.recipes.load import load_recipe as load_recipe
    from megatron_lowbit.recipes.load import load_recipes as load_recipes
    from megatron_lowbit.recipes.load import shipped_recipes as shipped_recipes
    from megatron_lowbit.recipes.matchers import Layer as Layer
    from megatron_lowbit.recipes.recipe import Progress as Progress
    from megatron_lowbit.recipes.recipe import Recipe as Recipe
    from megatron_lowbit.recipes.recipe import combine as combine
    from megatron_lowbit.recipes.show import precision_table as precision_table

__getattr__, __dir__, __all__ = lazy_attributes(
    __name__,
    {
        "load": [
            "load_combined",
            "load_precision",
            "load_recipe",
            "load_recipes",
            "shipped_recipes",
        ],
        "matchers": ["Layer"],
        ".numerics.precision": ["HIGH_PRECISION", "OPERANDS", "GemmPrecision", "LinearPrecision"],
        "recipe": ["Progress", "Recipe", "combine"],
        "show": ["precision_table"],
    },
)
