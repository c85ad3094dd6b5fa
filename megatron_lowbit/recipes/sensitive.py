"""Recipes that keep named layers in high precision, in place of blocks by position."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lowbit.recipes.load import read_recipe

_MATCHER, _CONFIG = "sensitive", "high"


def keeping(name_or_path: str, paths: Sequence[str]) -> dict[str, Any]:
    """Return a recipe's YAML data with just the linear layers ``paths`` in high precision.

    Raises UserError where there is no such recipe.
    """
    raw = read_recipe(name_or_path)
    configs = {name: config for name, config in raw["configs"].items() if config}
    matchers = {name: m for name, m in raw["matchers"].items() if m["config"] in configs}
    if paths:
        configs[_CONFIG] = {}
        pattern = f"^({'|'.join(re.escape(path) for path in paths)})$"
        first = {"type": "regex", "pattern": pattern, "config": _CONFIG, "enabled": True}
        matchers = {_MATCHER: first, **matchers}
    return {**raw, "configs": configs, "matchers": matchers}


def most_sensitive(
    scores: Mapping[str, float], sizes: Mapping[str, int], share: float
) -> list[str]:
    """Return the layers with the largest scores, up to ``share`` of all weights.

    Taken one after another, leaving out what does not fit any more.
    """
    left, chosen = share * sum(sizes.values()), []
    for path in sorted(scores, key=lambda path: -scores[path]):
        if sizes[path] <= left:
            chosen.append(path)
            left -= sizes[path]
    return chosen
