"""Tables of the recipes, and of what one does to a model."""

import argparse
import sys
from collections.abc import Sequence

from rich.table import Table

from megatron_lowbit.console import print_report
from megatron_lowbit.errors import require
from megatron_lowbit.recipes import load
from megatron_lowbit.recipes.matchers import Layer
from megatron_lowbit.recipes.mxnorm import check_mxnorm
from megatron_lowbit.recipes.table import line_table, mean_bits, precision_table

_MOST_LAYERS = 400
_BLOCKS = {
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "+": (
        "self_attention.linear_q_proj",
        "self_attention.linear_kv_down_proj",
        "self_attention.linear_kv_up_proj",
        "self_attention.linear_proj",
    ),
    "-": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "E": (
        "mlp.experts.local_experts.0.linear_fc1",
        "mlp.experts.local_experts.0.linear_fc2",
    ),
}
"""Linear layers of a hybrid's blocks, by the symbol in a pattern; of all experts the first."""
_LOW_RANK_QUERIES = ("self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj")
"""Layers in the place of latent attention's first with ``--q-lora-rank``."""
_PREDICTIONS, _STAGE = "/", "|"
"""Symbols before the blocks of each multi-token prediction, and between pipeline stages."""


def list_recipes() -> None:
    """Print the recipes that come with the package."""
    table = Table("recipe", "description")
    for name in load.shipped_recipes():
        table.add_row(name, load.load_recipe(name).description)
    print_report(table)


def show(recipes: Sequence[str], overrides: Sequence[str], shape: argparse.Namespace) -> None:
    """Print the precision of each operand of each GEMM of a model's linear layers.

    Args:
        recipes: one, or fprop's and backward's.
        overrides: fields to change, as ``--recipe-set`` takes them.
        shape: the model's layers and norm.
    """
    if shape.first_last_layers_bf16:
        first, last = shape.num_layers_at_start_in_bf16, shape.num_layers_at_end_in_bf16
        of_preset = shape.blocks_of_preset
        blocks = [load.bf16_blocks(recipe, first, last, of_preset) or () for recipe in recipes]
        overrides = (*load.for_sides(blocks), *overrides)
    recipe = load.load_recipes(recipes, overrides)
    layers = model_layers(shape.hybrid_layer_pattern, shape.num_layers, shape.q_lora_rank)
    recipe.check_matchers(layers)
    mxnorm = shape.normalization == "MXNorm"
    if mxnorm:
        check_mxnorm(recipe, layers)
    make_table = precision_table if sys.stdout.isatty() else line_table
    print_report(
        recipe.summary(layers),
        make_table(recipe, layers, mxnorm),
        mean_bits(recipe, layers),
        *(f"switch {switch}" for switch in recipe.switches),
        *([f"oscillation: {recipe.oscillation}"] if recipe.oscillation else []),
    )


def model_layers(
    pattern: str | None, num_layers: int, q_lora_rank: int | None = None
) -> list[Layer]:
    """Return the linear layers of a GPT of ``num_layers`` layers, or of a hybrid with that pattern.

    Latent attention has one projection of queries without ``q_lora_rank``. The blocks of a
    multi-token prediction are one block for a recipe's rules, after the last of the decoder.

    Raises:
        UserError: a symbol that stands for no block, predictions that differ, no layers at all, or
            too many for a table.
    """
    main, *predictions = [""] if pattern is None else pattern.split(_PREDICTIONS)
    main = main.replace(_STAGE, "")
    predictions = predictions if any(predictions) else []
    count = num_layers if pattern is None else len(main)
    require(
        0 < count <= _MOST_LAYERS and sum(map(len, predictions)) <= _MOST_LAYERS,
        f"{count} layers: a model to show has at least one layer and at most {_MOST_LAYERS}",
    )
    require(
        len(set(predictions)) < 2,
        f"--hybrid-layer-pattern {pattern}: predictions, each after {_PREDICTIONS}, must be equal",
    )
    for symbol in sorted({*main, *"".join(predictions)}):
        require(
            symbol in _BLOCKS,
            f"--hybrid-layer-pattern: no block is called {symbol!r}; use {', '.join(_BLOCKS)}",
        )
    names = dict(_BLOCKS)
    if q_lora_rank is not None:
        names["+"] = _LOW_RANK_QUERIES + _BLOCKS["+"][1:]
    found = [
        Layer(f"decoder.layers.{number}.{name}", number, count)
        for number, symbols in enumerate(["*-"] * count if pattern is None else main)
        for symbol in symbols
        for name in names[symbol]
    ]
    for depth, symbols in enumerate(predictions):
        path = f"mtp.layers.{depth}"
        inner = [
            f"mtp_model_layer.layers.{number}.{name}"
            for number, symbol in enumerate(symbols)
            for name in names[symbol]
        ]
        found += [Layer(f"{path}.{name}", count + depth, count) for name in ("eh_proj", *inner)]
    return found
