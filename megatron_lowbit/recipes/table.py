"""Tables of a recipe's effect on a model, in which equal linear layers share a row."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.box import HORIZONTALS
from rich.table import Table

from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.recipes.matchers import Layer
from megatron_lowbit.recipes.mxnorm import NORMALIZED
from megatron_lowbit.recipes.precision import GemmPrecision, LinearPrecision, side
from megatron_lowbit.recipes.recipe import Recipe

HIGH_PRECISION_BITS = 16.0
_COLUMNS = ("GEMM", "operand", "format", "bits")
_LAYERS_WIDTH = 16  # columns at least, where a narrow terminal cannot hold all


class _Group(NamedTuple):
    """Precision that some layers have in common, and the reason for it.

    Attributes:
        matcher: name of the matcher that decided.
        precision: of the layers' GEMMs.
        normalized: True if MXNorm makes the input.
    """

    matcher: str
    precision: LinearPrecision
    normalized: bool


class _Row(NamedTuple):
    """Format of one operand of a GEMM, or something that concerns ``both`` of them."""

    gemm: str
    operand: str
    format: str
    bits: str


def precision_table(recipe: Recipe, layers: Sequence[Layer], mxnorm: bool = False) -> Table:
    """Return a table with one row for all layers that a matcher gives the same precision.

    It fits a terminal of 80 columns. With ``mxnorm``, rows show where that norm makes the input.
    """
    table = Table(box=HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("matcher and layers", min_width=_LAYERS_WIDTH, overflow="fold")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    for group, members in _groups(recipe, layers, mxnorm).items():
        label = [
            line
            for blocks, names in members.items()
            for line in (f"{group.matcher}, blocks {blocks}:", *(f" {name}" for name in names))
        ]
        rows = [
            row if number == 0 else row._replace(gemm="")
            for _, of_gemm in groupby(_rows(group), lambda row: row.gemm)
            for number, row in enumerate(of_gemm)
        ]
        table.add_row("\n".join(label), *map("\n".join, zip(*rows, strict=True)))
        table.add_section()
    return table


def line_table(recipe: Recipe, layers: Sequence[Layer], mxnorm: bool = False) -> Table:
    """Return the same as a table of one operand a row, each row complete by itself."""
    table = Table("blocks", "linear layers", "matcher", *_COLUMNS)
    for group, members in _groups(recipe, layers, mxnorm).items():
        for blocks, names in members.items():
            for row in _rows(group):
                table.add_row(blocks, ", ".join(names), group.matcher, *row)
    return table


def mean_bits(recipe: Recipe, layers: Sequence[Layer]) -> str:
    """Describe the mean number of bits an element of each GEMM's operands."""
    means = []
    for gemm in GEMM_ROLES:
        bits = [b for layer in layers for b in _bits(recipe.precision_for(layer).gemms[gemm])]
        means.append(f"{gemm} {sum(bits) / len(bits):.3g}")
    return f"mean bits an element: {', '.join(means)}"


def _groups(
    recipe: Recipe, layers: Iterable[Layer], mxnorm: bool
) -> dict[_Group, dict[str, list[str]]]:
    """Return, for each group, names of linear layers by the blocks in which they belong to it.

    A range of blocks counts those alone that have a layer of the name, as in a hybrid.
    """

    def group_of(layer: Layer) -> _Group:
        precision = recipe.precision_for(layer)
        normalized = mxnorm and precision.quantized and layer.path.endswith(NORMALIZED)
        return _Group(recipe.matcher_names(layer), precision, normalized)

    by_name = defaultdict(list)
    for layer in sorted(layers, key=lambda layer: layer.block):
        by_name[_name_in_block(layer.path)].append(layer)
    groups: dict[_Group, dict[str, list[str]]] = defaultdict(dict)
    for name, same_name in by_name.items():
        spans = defaultdict(list)
        for group, run in groupby(same_name, group_of):
            numbers = [layer.block for layer in run]
            first, last = numbers[0], numbers[-1]
            spans[group].append(str(first) if first == last else f"{first}-{last}")
        for group, blocks in spans.items():
            groups[group].setdefault(", ".join(blocks), []).append(name)
    return groups


def _name_in_block(path: str) -> str:
    """Return a layer's path below its block; all local experts have one name."""
    return re.sub(r"\.\d+\.", ".*.", re.sub(r"^.*?layers\.\d+\.", "", path))


def _rows(group: _Group) -> Iterator[_Row]:
    for gemm, precision in group.precision.gemms.items():
        for role, quantizer, bits in zip(
            GEMM_ROLES[gemm], precision.sides, _bits(precision), strict=True
        ):
            yield _Row(gemm, role, side(quantizer), f"{bits:.4g}")
        for shared in precision.extras():
            yield _Row(gemm, "both", shared, "")
        if group.normalized and gemm == Gemm.FPROP:
            yield _Row(gemm, "input", "of MXNorm", "")


def _bits(precision: GemmPrecision) -> list[float]:
    """Return the bits an element of both operands."""
    return [
        HIGH_PRECISION_BITS if quantizer is None else quantizer.format.bits_per_element
        for quantizer in precision.sides
    ]
