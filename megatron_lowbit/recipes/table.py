"""The table printed at start: which linear layers run in which precision."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from megatron_lowbit.recipes.matchers import Layer
from megatron_lowbit.recipes.precision import LinearPrecision
from megatron_lowbit.recipes.recipe import Recipe

_Key = tuple[str, LinearPrecision]  # the matcher's name, and the precision it gives


def precision_table(recipe: Recipe, layers: Sequence[Layer]) -> Table:
    """Return a row for each run of blocks with the same precision by the same matcher."""
    columns = ("blocks", "linear layers", "matcher", "fprop", "dgrad", "wgrad")
    title = f"recipe {recipe.name}: {_summary(recipe, layers)}"
    table = Table(*columns, title=title, title_justify="left")
    for blocks, names, matcher, precision in _rows(recipe, layers):
        gemms = (str(precision.fprop), str(precision.dgrad), str(precision.wgrad))
        table.add_row(blocks, names, matcher, *gemms)
    return table


def _summary(recipe: Recipe, layers: Sequence[Layer]) -> str:
    count = sum(recipe.precision_for(layer).quantized for layer in layers)
    return f"{count} of {len(layers)} linear layers quantized"


def _rows(
    recipe: Recipe, layers: Sequence[Layer]
) -> Iterator[tuple[str, str, str, LinearPrecision]]:
    """Group neighbouring blocks, also where they hold other layers, as in a hybrid."""
    groups: list[tuple[list[int], _Key, dict[str, None]]] = []
    for block in sorted({layer.block for layer in layers}):
        for key, names in _by_matcher(recipe, [x for x in layers if x.block == block]).items():
            group = next((g for g in groups if g[1] == key and g[0][-1] == block - 1), None)
            if group is None:
                group = ([], key, {})
                groups.append(group)
            group[0].append(block)
            group[2].update(dict.fromkeys(names))
    for blocks, (matcher, precision), short in groups:
        span = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])
        yield span, ", ".join(short), matcher, precision


def _by_matcher(recipe: Recipe, layers: Sequence[Layer]) -> dict[_Key, list[str]]:
    """Group the short names of one block's layers by matcher and precision."""
    grouped: dict[_Key, list[str]] = {}
    for layer in layers:
        key = (recipe.matcher_names(layer), recipe.precision_for(layer))
        grouped.setdefault(key, []).append(layer.path.rsplit(".", 1)[-1])
    return grouped
