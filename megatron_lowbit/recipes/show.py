"""Tables of the recipes, and of a recipe's effect on a model: equal linear layers share a row."""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.box import HORIZONTALS
from rich.table import Table

from megatron_lowbit.console import print_report
from megatron_lowbit.errors import require, say
from megatron_lowbit.kernels.routes import BLOCKS, DEQUANTIZED, EXACT, route
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.numerics.precision import GemmPrecision, LinearPrecision, side
from megatron_lowbit.recipes import load
from megatron_lowbit.recipes.matchers import OUTPUT_LAYER, Layer
from megatron_lowbit.recipes.recipe import NORMALIZED, Recipe
from megatron_lowbit.recipes.te_config import te_config

_HOPPER = (9, 0)
_PRODUCTS = {EXACT: "BF16", BLOCKS: "BF16", DEQUANTIZED: "FP32"}
"""Number formats of the routes that do not use FP8 tensor cores."""
_COLUMNS = ("GEMM", "operand", "format", "bits")
_LAYERS_WIDTH = 16  # columns at least, where a narrow terminal cannot hold all

_MOST_LAYERS = 400
LINEAR_LAYERS = {
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "+": (
        "self_attention.linear_q_proj",
        "self_attention.linear_kv_down_proj",
        "self_attention.linear_kv_up_proj",
        "self_attention.linear_proj",
    ),
    "-": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "E": ("mlp.experts.local_experts.0.linear_fc1", "mlp.experts.local_experts.0.linear_fc2"),
}
"""Linear layers of a hybrid's blocks, by the symbol in a pattern; of all experts the first."""
_PREDICTIONS, _STAGE = "/", "|"
"""Symbols before the blocks of each multi-token prediction, and between pipeline stages."""


def list_recipes() -> None:
    """Print the recipes that come with the package, their use, and their GEMMs on a GPU."""
    table = Table("recipe", "use", "GEMMs on H100, H200", "description")
    for name in load.shipped_recipes():
        recipe = load.load_recipe(name)
        gemms = [gemm for precision in recipe.configs.values() for gemm in precision.gemms.items()]
        table.add_row(name, _use(gemms), _gemms_on_hopper(gemms), recipe.description)
    print_report(table, "loss gaps and speeds: docs/choose-a-recipe.md in the repository")


def _use(gemms: Sequence[tuple[Gemm, GemmPrecision]]) -> str:
    """Return the use of a recipe; gradients in high precision stand for fine-tuning."""
    if not any(gemm.quantized for _, gemm in gemms):
        return "baseline"
    backward = any(gemm.lhs for name, gemm in gemms if name is not Gemm.FPROP)
    return "pretraining" if backward else "fine-tuning"


def _gemms_on_hopper(gemms: Sequence[tuple[Gemm, GemmPrecision]]) -> str:
    """Return the number formats in which an H100 or H200 multiplies quantized operands."""
    products = set()
    for _, gemm in gemms:
        if gemm.quantized:
            formats = (side and side.format for side in gemm.sides)
            taken = route(*formats, _HOPPER, gemm.folding)
            products.add("FP32" if gemm.dequantizes else _PRODUCTS.get(taken, "FP8"))
    return ", ".join(sorted(products)) or "BF16"


def show(recipes: Sequence[str], overrides: Sequence[str], shape: argparse.Namespace) -> None:
    """Print the precision of each operand of each GEMM of a model's linear layers.

    ``recipes``: one, or fprop's and backward's. ``shape``: the model's layers and norm.
    """
    recipe, layers = _recipe_and_layers(recipes, overrides, shape)
    mxnorm = shape.normalization == "MXNorm"
    if mxnorm:
        recipe.check_mxnorm(layers)
    make_table = precision_table if sys.stdout.isatty() else line_table
    print_report(
        recipe.summary(layers),
        make_table(recipe, layers, mxnorm),
        _mean_bits(recipe, layers),
        *(f"switch {switch}" for switch in recipe.switches),
        *([f"oscillation: {recipe.oscillation}"] if recipe.oscillation else []),
    )


def write_te_config(name: str, shape: argparse.Namespace) -> None:
    """Print a shipped recipe as a file for Megatron-LM's ``--te-precision-config-file``."""
    require(name in load.shipped_recipes(), f"{name}: only recipes that come with the package have "
            "factories; `lowbit-recipes list` prints them")  # fmt: skip
    unlisted = shape.num_experts or shape.multi_latent_attention
    require(shape.hybrid_layer_pattern or not unlisted, "te-config: the layers of a GPT with "
            "experts or latent attention are not known; give --hybrid-layer-pattern")  # fmt: skip
    recipe, layers = _recipe_and_layers([name], (), shape)
    say(*te_config(recipe, layers, shape.pipeline_model_parallel_size).splitlines())


def _recipe_and_layers(
    recipes: Sequence[str], overrides: Sequence[str], shape: argparse.Namespace
) -> tuple[Recipe, list[Layer]]:
    """Return a model's recipe and its linear layers; arguments as for :func:`show`."""
    if shape.first_last_layers_bf16:
        first, last = shape.num_layers_at_start_in_bf16, shape.num_layers_at_end_in_bf16
        of_preset = shape.blocks_of_preset
        blocks = [load.bf16_blocks(recipe, first, last, of_preset) or () for recipe in recipes]
        overrides = (*load.for_sides(blocks), *overrides)
    recipe = load.load_recipes(recipes, overrides)
    layers = model_layers(shape.hybrid_layer_pattern, shape.num_layers, shape.q_lora_rank)
    layers += [Layer.output(layers[0].num_blocks)] if recipe.takes_output_layer else []
    recipe.check_matchers(layers)
    return recipe, layers


def model_layers(
    pattern: str | None, num_layers: int, q_lora_rank: int | None = None
) -> list[Layer]:
    """Return the linear layers of a GPT of ``num_layers`` layers, or of a hybrid with that pattern.

    Latent attention has one projection of queries without ``q_lora_rank``. The blocks of a
    multi-token prediction are one block for a recipe's rules, after the last of the decoder. Raises
    UserError for a symbol that stands for no block, predictions that differ, no layers, or too many
    for a table.
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
    names = dict(LINEAR_LAYERS)
    if q_lora_rank is not None:
        queries = ("self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj")
        names["+"] = queries + names["+"][1:]
    for symbol in sorted({*main, *"".join(predictions)}):
        require(
            symbol in names,
            f"--hybrid-layer-pattern: no block is called {symbol!r}; use {', '.join(names)}",
        )
    layers = [
        Layer(f"decoder.layers.{number}.{name}", number, count)
        for number, symbols in enumerate(["*-"] * count if pattern is None else main)
        for symbol in symbols
        for name in names[symbol]
    ]
    for depth, symbols in enumerate(predictions):
        inner = [
            f"mtp_model_layer.layers.{number}.{name}"
            for number, symbol in enumerate(symbols)
            for name in names[symbol]
        ]
        layers += [
            Layer(f"mtp.layers.{depth}.{name}", count + depth, count)
            for name in ("eh_proj", *inner)
        ]
    return layers


class _Group(NamedTuple):
    """Precision that some layers have in common, with the matcher that decided."""

    matcher: str
    precision: LinearPrecision
    normalized: bool  # MXNorm makes the input


def precision_table(recipe: Recipe, layers: Sequence[Layer], mxnorm: bool = False) -> Table:
    """Return a table with one row for all layers that a matcher gives the same precision.

    It fits a terminal of 80 columns. With ``mxnorm``, rows show where that norm makes the input.
    """
    table = Table(box=HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("matcher and layers", min_width=_LAYERS_WIDTH, overflow="fold")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    for group, members in _groups(recipe, layers, mxnorm).items():
        label = []
        for blocks, names in members.items():
            where = f"{group.matcher}, blocks {blocks}" if blocks else group.matcher
            label += [f"{where}:", *(f" {name}" for name in names)]
        rows = [
            (gemm if number == 0 else "", *rest)
            for gemm, of_gemm in groupby(_rows(group), lambda row: row[0])
            for number, (_, *rest) in enumerate(of_gemm)
        ]
        table.add_row("\n".join(label), *map("\n".join, zip(*rows, strict=True)))
        table.add_section()
    return table


def line_table(recipe: Recipe, layers: Sequence[Layer], mxnorm: bool = False) -> Table:
    """Return the same as a table with one operand per row, each row complete by itself."""
    table = Table("blocks", "linear layers", "matcher", *_COLUMNS)
    for group, members in _groups(recipe, layers, mxnorm).items():
        for blocks, names in members.items():
            for row in _rows(group):
                table.add_row(blocks or "-", ", ".join(names), group.matcher, *row)
    return table


def _mean_bits(recipe: Recipe, layers: Sequence[Layer]) -> str:
    means = []
    for gemm in GEMM_ROLES:
        bits = [b for layer in layers for b in _bits(recipe.precision_for(layer).gemms[gemm])]
        means.append(f"{gemm} {sum(bits) / len(bits):.3g}")
    return f"mean bits per element: {', '.join(means)}"


def _groups(
    recipe: Recipe, layers: Iterable[Layer], mxnorm: bool
) -> dict[_Group, dict[str, list[str]]]:
    """Return, for each group, names of linear layers by the blocks in which they belong to it.

    A range of blocks counts only those that have a layer of the name, as in a hybrid. It is empty
    for the output layer.
    """

    def group_of(layer: Layer) -> _Group:
        precision = recipe.precision_for(layer)
        normalized = mxnorm and precision.quantized and layer.path.endswith(NORMALIZED)
        return _Group(recipe.matcher_names(layer), precision, normalized)

    by_name = defaultdict(list)
    for layer in sorted(layers, key=lambda layer: layer.block):
        # The path below the block; all local experts have one name.
        name = re.sub(r"\.\d+\.", ".*.", re.sub(r"^.*?layers\.\d+\.", "", layer.path))
        by_name[name].append(layer)
    groups: dict[_Group, dict[str, list[str]]] = defaultdict(dict)
    for name, same_name in by_name.items():
        spans = defaultdict(list)
        for group, run in groupby(same_name, group_of):
            numbers = [layer.block for layer in run]
            first, last = numbers[0], numbers[-1]
            span = str(first) if first == last else f"{first}-{last}"
            spans[group].append("" if name == OUTPUT_LAYER else span)
        for group, blocks in spans.items():
            groups[group].setdefault(", ".join(blocks), []).append(name)
    return groups


def _rows(group: _Group) -> Iterator[tuple[str, str, str, str]]:
    """Yield the ``_COLUMNS`` of each operand, and of what concerns both operands of a GEMM."""
    for gemm, precision in group.precision.gemms.items():
        for role, quantizer, bits in zip(
            GEMM_ROLES[gemm], precision.sides, _bits(precision), strict=True
        ):
            yield gemm, role, side(quantizer), f"{bits:.4g}"
        for shared in precision.extras():
            yield gemm, "both", shared, ""
        if group.normalized and gemm == Gemm.FPROP:
            yield gemm, "input", "of MXNorm", ""


def _bits(precision: GemmPrecision) -> list[float]:
    """Return the bits per element of both operands."""
    return [
        16.0 if quantizer is None else quantizer.format.bits_per_element
        for quantizer in precision.sides
    ]
