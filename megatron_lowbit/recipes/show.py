"""Lists the recipes, and shows what one does to a model."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from megatron_lowbit.command_line import CommandParser, command_parser
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.recipes.load import (
    bf16_blocks,
    for_sides,
    load_recipe,
    load_recipes,
    shipped_recipes,
)
from megatron_lowbit.recipes.matchers import Layer
from megatron_lowbit.recipes.mxnorm import NORMALIZED, check_mxnorm
from megatron_lowbit.recipes.precision import GEMM_ROLES, GemmPrecision, side
from megatron_lowbit.recipes.recipe import Recipe

HIGH_PRECISION_BITS = 16.0
_UNLIMITED = 1000  # columns
_MOST_LAYERS = 400  # which take rich three seconds
_PARTS = {
    "attention": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "mlp": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "mamba": ("mixer.in_proj", "mixer.out_proj"),
}
_SYMBOLS: dict[str, tuple[str, ...]] = {"M": ("mamba",), "*": ("attention",), "-": ("mlp",)}
_GPT_LAYER: tuple[str, ...] = ("attention", "mlp")


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``list``, or ``show NAME`` for a GPT or hybrid model of some size."""
    args = _parser().parse_args(argv)
    if args.command == "list":
        table = Table("recipe", "description")
        for name in shipped_recipes():
            table.add_row(name, load_recipe(name).description)
    else:
        shape = args if args.model is None else _read_model(args.model)
        recipes = (args.forward, args.recipe) if args.forward else (args.recipe,)
        recipe = load_recipes(recipes, (*_blocks(recipes, shape), *args.recipe_set))
        layers = model_layers(shape.hybrid_layer_pattern, shape.num_layers)
        recipe.check_matchers(layers)
        mxnorm = shape.normalization == "MXNorm"
        if mxnorm:
            check_mxnorm(recipe, layers)
        table = resolved_table(recipe, layers, mxnorm)
    # A pipe has no width: take what the table needs, so that names stay whole.
    needed = plain_console(_UNLIMITED).measure(table).maximum
    plain_console(needed).print(table)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(prog="lowbit-recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the recipes that come with the package")
    show = commands.add_parser("show", help="show a recipe layer by layer and GEMM by GEMM")
    show.add_argument("recipe", metavar="NAME_OR_FILE", help="a recipe of the list, or a YAML file")
    show.add_argument("--forward", metavar="NAME_OR_FILE", help="another recipe for fprop")
    show.add_argument(
        "--recipe-set", metavar="FIELD=VALUE", action="append", default=[],
        help="change a field of the recipe, as in training (repeatable)",
    )  # fmt: skip
    show.add_argument("--model", metavar="FILE", help="a model's arguments, as in examples/")
    _add_shape(show)
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-layers", type=int, default=12, help="number of layers of a GPT")
    parser.add_argument(
        "--hybrid-layer-pattern",
        "--hybrid-override-pattern",  # Megatron-LM's deprecated name
        metavar="PATTERN",
        help="blocks of a hybrid: M for Mamba, * for attention, - for an MLP",
    )
    parser.add_argument(
        "--normalization", metavar="NAME", help="MXNorm is shown where it is active"
    )
    parser.add_argument(
        "--first-last-layers-bf16", action="store_true", help="replace the recipe's own BF16 blocks"
    )
    for name, end in (("start", "first"), ("end", "last")):
        parser.add_argument(
            f"--num-layers-at-{name}-in-bf16", type=int, default=1, metavar="BLOCKS",
            help=f"{end} blocks that --first-last-layers-bf16 keeps in BF16",
        )  # fmt: skip


def _blocks(recipes: tuple[str, ...], shape: argparse.Namespace) -> tuple[str, ...]:
    """Return the overrides of a model that says itself which of its blocks stay in BF16."""
    if not shape.first_last_layers_bf16:
        return ()
    first, last = shape.num_layers_at_start_in_bf16, shape.num_layers_at_end_in_bf16
    return for_sides([bf16_blocks(recipe, first, last) for recipe in recipes])


def _read_model(file: str) -> argparse.Namespace:
    """Read layers, pattern and norm from a file of arguments, most of which say other things."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        arguments = shlex.split(text, comments=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--model {file}: {reason}") from None
    parser = CommandParser(prog=file, allow_abbrev=False)
    _add_shape(parser)
    shape, _ = parser.parse_known_args(arguments)
    return shape


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
    if pattern is None:
        blocks = [_GPT_LAYER] * num_layers
    else:
        unknown = sorted(set(pattern) - set(_SYMBOLS))
        if unknown:
            raise UserError(
                f"--hybrid-layer-pattern: no block is called {unknown[0]!r}; "
                f"use {', '.join(_SYMBOLS)}"
            )
        blocks = [_SYMBOLS[symbol] for symbol in pattern]
    return [
        Layer(f"decoder.layers.{number}.{name}", number, len(blocks))
        for number, block in enumerate(blocks)
        for part in block
        for name in _PARTS[part]
    ]


def resolved_table(recipe: Recipe, layers: Sequence[Layer], mxnorm: bool = False) -> Table:
    """Return a table of three rows a layer: each GEMM's operands, what they share, bits an element.

    With ``mxnorm`` fprop's row says where that norm makes the input.
    """
    quantized = sum(recipe.precision_for(layer).quantized for layer in layers)
    switches = [f"switch {switch}" for switch in recipe.switches]
    table = Table(
        title=f"recipe {recipe.name}: {quantized} of {len(layers)} linear layers quantized, "
        f"{1 - quantized / len(layers):.0%} in high precision",
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
            *cells, both = _cells(gemm, precision)
            if normalized and gemm == "fprop":
                both = f"{both}, MXNorm" if both else "MXNorm"
            table.add_row(name, matcher, gemm, *cells, both)
            name = matcher = ""
        table.add_section()
    return table


def _cells(gemm: str, precision: GemmPrecision) -> Iterator[str]:
    left, right = GEMM_ROLES[gemm]
    yield f"{left}: {side(precision.lhs)}"
    yield f"{right}: {side(precision.rhs)}"
    yield " x ".join(f"{bits:.4g}" for bits in _bits(precision))
    yield ", ".join(precision.extras())


def _bits(precision: GemmPrecision) -> tuple[float, float]:
    """Return the bits an element of both operands."""
    left, right = (
        HIGH_PRECISION_BITS if quantizer is None else quantizer.format.bits_per_element
        for quantizer in (precision.lhs, precision.rhs)
    )
    return left, right


def _means(recipe: Recipe, layers: Sequence[Layer]) -> str:
    means = []
    for gemm in GEMM_ROLES:
        bits = [b for layer in layers for b in _bits(recipe.precision_for(layer).gemms[gemm])]
        means.append(f"{gemm} {sum(bits) / len(bits):.3g}")
    return ", ".join(means)
