"""Tables of the recipes, and of what one does to a model."""

import argparse
from collections.abc import Sequence

from rich.table import Table

from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import require
from megatron_lowbit.recipes import load
from megatron_lowbit.recipes.matchers import Layer
from megatron_lowbit.recipes.mxnorm import NORMALIZED, check_mxnorm
from megatron_lowbit.recipes.precision import GEMM_ROLES, GemmPrecision, side
from megatron_lowbit.recipes.recipe import Recipe

HIGH_PRECISION_BITS = 16.0
_UNLIMITED = 1000  # columns
_MOST_LAYERS = 400  # which take rich three seconds
_BLOCKS = {
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "-": ("mlp.linear_fc1", "mlp.linear_fc2"),
}
"""Linear layers of a hybrid's blocks, by the symbol of the block in a pattern."""


def list_recipes() -> None:
    """Print the recipes that come with the package."""
    table = Table("recipe", "description")
    for name in load.shipped_recipes():
        table.add_row(name, load.load_recipe(name).description)
    _print(table)


def show(recipes: Sequence[str], overrides: Sequence[str], shape: argparse.Namespace) -> None:
    """Print the precision of each GEMM of each linear layer of a model.

    Args:
        recipes: one, or fprop's and backward's.
        overrides: fields to change, as ``--recipe-set`` takes them.
        shape: the model's layers and norm.
    """
    if shape.first_last_layers_bf16:
        first, last = shape.num_layers_at_start_in_bf16, shape.num_layers_at_end_in_bf16
        blocks = load.for_sides([load.bf16_blocks(recipe, first, last) for recipe in recipes])
        overrides = (*blocks, *overrides)
    recipe = load.load_recipes(recipes, overrides)
    layers = model_layers(shape.hybrid_layer_pattern, shape.num_layers)
    recipe.check_matchers(layers)
    mxnorm = shape.normalization == "MXNorm"
    if mxnorm:
        check_mxnorm(recipe, layers)
    _print(resolved_table(recipe, layers, mxnorm))


def _print(table: Table) -> None:
    # A pipe has no width: take what the table needs, so that names stay whole.
    needed = plain_console(_UNLIMITED).measure(table).maximum
    plain_console(needed).print(table)


def model_layers(pattern: str | None, num_layers: int) -> list[Layer]:
    """Return the linear layers of a GPT of ``num_layers`` layers, or of a hybrid with that pattern.

    Raises:
        UserError: a symbol that stands for no block, no layers at all, or too many for a table.
    """
    count = num_layers if pattern is None else len(pattern)
    require(
        0 < count <= _MOST_LAYERS,
        f"{count} layers: a model to show has at least one layer and at most {_MOST_LAYERS}",
    )
    for symbol in sorted(set(pattern or ())):
        require(
            symbol in _BLOCKS,
            f"--hybrid-layer-pattern: no block is called {symbol!r}; use {', '.join(_BLOCKS)}",
        )
    return [
        Layer(f"decoder.layers.{number}.{name}", number, count)
        for number, symbols in enumerate(["*-"] * count if pattern is None else pattern)
        for symbol in symbols
        for name in _BLOCKS[symbol]
    ]


def resolved_table(recipe: Recipe, layers: Sequence[Layer], mxnorm: bool = False) -> Table:
    """Return a table of three rows a layer: each GEMM's operands, what they share, bits an element.

    With ``mxnorm`` fprop's row says where that norm makes the input.
    """
    quantized = sum(recipe.precision_for(layer).quantized for layer in layers)
    switches = [f"switch {switch}" for switch in recipe.switches]
    table = Table(
        title=f"{recipe.summary(layers)}, {1 - quantized / len(layers):.0%} in high precision",
        caption="\n".join([f"mean bits an element: {_means(recipe, layers)}", *switches]),
        title_justify="left",
        caption_justify="left",
    )
    for column in ("layer", "matcher", "GEMM", "left", "right", "bits", "both"):
        table.add_column(column, no_wrap=True)
    for layer in layers:
        name, matcher = layer.path, recipe.matcher_names(layer)
        whole = recipe.precision_for(layer)
        normalized = mxnorm and whole.quantized and name.endswith(NORMALIZED)
        for gemm, precision in whole.gemms.items():
            sides = zip(GEMM_ROLES[gemm], precision.sides, strict=True)
            operands = [f"{role}: {side(quantizer)}" for role, quantizer in sides]
            bits = " x ".join(f"{bits:.4g}" for bits in _bits(precision))
            both = [*precision.extras()]
            if normalized and gemm == "fprop":
                both.append("MXNorm")
            table.add_row(name, matcher, gemm, *operands, bits, ", ".join(both))
            name = matcher = ""
        table.add_section()
    return table


def _bits(precision: GemmPrecision) -> list[float]:
    """Return the bits an element of both operands."""
    return [
        HIGH_PRECISION_BITS if quantizer is None else quantizer.format.bits_per_element
        for quantizer in precision.sides
    ]


def _means(recipe: Recipe, layers: Sequence[Layer]) -> str:
    means = []
    for gemm in GEMM_ROLES:
        bits = [b for layer in layers for b in _bits(recipe.precision_for(layer).gemms[gemm])]
        means.append(f"{gemm} {sum(bits) / len(bits):.3g}")
    return ", ".join(means)
