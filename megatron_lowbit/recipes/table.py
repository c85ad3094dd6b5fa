"""The table printed at start: which linear layers run in which precision."""

from collections.abc import Sequence

from rich.table import Table

from megatron_lowbit.recipes.matchers import Layer
from megatron_lowbit.recipes.precision import GEMM_ROLES, LinearPrecision
from megatron_lowbit.recipes.recipe import Recipe

_Key = tuple[str, LinearPrecision]  # the matcher's name, and the precision it gives
_Run = tuple[list[int], list[str]]  # block numbers, and short names of layers in them


def precision_table(recipe: Recipe, layers: Sequence[Layer]) -> Table:
    """Return a row for each run of blocks with the same precision by the same matcher."""
    table = Table(
        *("blocks", "linear layers", "matcher", *GEMM_ROLES),
        title=recipe.summary(layers),
        title_justify="left",
    )
    for (matcher, precision), (blocks, names) in _runs(recipe, layers):
        span = f"{blocks[0]}-{blocks[-1]}" if blocks[0] < blocks[-1] else str(blocks[0])
        table.add_row(span, ", ".join(names), matcher, *map(str, precision.gemms.values()))
    return table


def _runs(recipe: Recipe, layers: Sequence[Layer]) -> list[tuple[_Key, _Run]]:
    """Group neighbouring blocks, also where they hold other layers, as in a hybrid."""
    runs: list[tuple[_Key, _Run]] = []
    latest: dict[_Key, _Run] = {}
    for layer in sorted(layers, key=lambda layer: layer.block):
        key = (recipe.matcher_names(layer), recipe.precision_for(layer))
        if key not in latest or latest[key][0][-1] < layer.block - 1:
            latest[key] = ([], [])
            runs.append((key, latest[key]))
        blocks, names = latest[key]
        blocks.append(layer.block)
        if (name := layer.path.rsplit(".", 1)[-1]) not in names:
            names.append(name)
    return runs
