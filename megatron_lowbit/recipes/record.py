"""Record of the recipe of a run, for its checkpoints: text that gives the same recipe anywhere.

A record is plain data: ``recipes`` are YAML texts, one or two as on the command line, after changes
of single fields; ``targets`` the texts of the recipes that switches name; ``format_files`` the
SHA-256 of files of formats by name; ``megatron_lm`` names Megatron-LM's own FP8 or FP4.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from megatron_lowbit.errors import UserError, error_prefix, require
from megatron_lowbit.recipes.load import overrides_by_recipe, read_recipe
from megatron_lowbit.recipes.recipe import Recipe, combine
from megatron_lowbit.recipes.schema import parse_recipe
from megatron_lowbit.recipes.yaml_reader import first_error, read_yaml

Record = dict[str, Any]
_ABSENT = "nothing"


class _Entries(BaseModel):
    recipes: list[str] = Field(default_factory=list)
    targets: dict[str, str] = Field(default_factory=dict)
    format_files: dict[str, str] = Field(default_factory=dict)
    megatron_lm: str = ""


def record_of(names: Sequence[str], overrides: Sequence[str] = (), megatron_lm: str = "") -> Record:
    """Return the record of the recipes of a command line, of which there may be none.

    ``names``: one recipe, or two, of which the first gives fprop; ``overrides`` as for
    :func:`megatron_lowbit.recipes.load_recipes`; ``megatron_lm``: description of Megatron-LM's own
    FP8 or FP4. Raises UserError for a recipe that does not exist or is wrong.
    """
    sides = overrides_by_recipe(names, overrides)
    recipes = [read_recipe(name, given) for name, given in zip(names, sides, strict=True)]
    targets = {name: read_recipe(name) for name in _targets(recipes)}
    files = {Path(f) for raw in (*recipes, *targets.values()) for f in raw.get("formats") or ()}
    return {
        "recipes": [yaml.safe_dump(raw, sort_keys=False) for raw in recipes],
        "targets": {name: yaml.safe_dump(raw, sort_keys=False) for name, raw in targets.items()},
        "format_files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)},
        "megatron_lm": megatron_lm,
    }


def files_named_by(recipe: str) -> list[str]:
    """Return the recipes that switches of a recipe name, and the files of formats of all of them.

    Raises UserError for a recipe that does not exist or is wrong.
    """
    raws = [read_recipe(recipe)]
    targets = list(_targets(raws))
    raws += map(read_recipe, targets)
    return [*targets, *(file for raw in raws for file in raw.get("formats") or ())]


def _targets(raws: Sequence[dict[str, Any]]) -> dict[str, None]:
    """Return the names of recipes to which switches that are on change, in their order."""
    switches = [s for raw in raws for s in parse_recipe(raw, "recipe").switches.values()]
    return dict.fromkeys(switch.to for switch in switches if switch.enabled)


def digest(record: Record) -> str:
    """Return the SHA-256 of a record, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def name_of(record: Record) -> str:
    """Return the names of a record's recipes, as in messages."""
    names = [raw.get("name") for raw in _read(record)[0]]
    return f"recipe {'+'.join(map(str, names))}" if names else record["megatron_lm"] or "no recipe"


def recipe_from(record: Record, source: str) -> Recipe:
    """Return the recipe of a record that has one; raise UserError where its text is none.

    Files of formats are read again; see ``refuse_format_files`` for records of others.
    """
    return _build(*_read(record), source)


def checked(record: Any, source: str) -> Record:
    """Return a record that a file holds; raise UserError that names the source if it is none."""
    try:
        known = _Entries.model_validate(record).model_dump()
    except ValidationError as error:
        raise UserError(f"{source}: {first_error(error)}") from None
    with error_prefix(f"{source}: "):
        recipes, targets = _read(known)
    mappings = all(isinstance(raw, dict) for raw in (*recipes, *targets.values()))
    require(mappings, f"{source}: holds no mapping")
    return known


def difference(current: Record, saved: Record) -> str | None:
    """Return a phrase for the difference between two runs' records; None for none.

    Names, descriptions, comments and defaults do not count.
    """
    if _meaning(current) == _meaning(saved):
        return None
    names = name_of(current), name_of(saved)
    if names[0] != names[1]:
        return f"{names[0]} instead of {names[1]}"
    new, old = dict(_fields(current)), dict(_fields(saved))
    changed = [key for key in {**new, **old} if new.get(key, _ABSENT) != old.get(key, _ABSENT)]
    if not changed:
        return f"{names[0]} with another order of matchers"
    first, more = changed[0], len(changed) - 1
    others = f" ({more} more fields differ)" if more else ""
    values = (str(side.get(first, _ABSENT)) for side in (new, old))
    return f"{names[0]} with {first} {' instead of '.join(values)}{others}"


def _read(record: Record) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the raw data of the recipes, and of those that switches name."""
    targets = {name: read_yaml(text) for name, text in record["targets"].items()}
    return [read_yaml(text) for text in record["recipes"]], targets


def _build(raws: list[dict[str, Any]], targets: dict[str, Any], source: str) -> Recipe:
    def load(name: str) -> Recipe:
        target = f"{source}: {name}"
        return parse_recipe(targets.get(name), target).build(target, None)

    sides = (parse_recipe(raw, source).build(source, load) for raw in (raws[0], raws[-1]))
    return combine(*sides)


def _meaning(record: Record) -> tuple[Any, ...]:
    """Return the parts of a record that decide a run's numbers; matchers count in their order."""
    raws, targets = _read(record)
    for raw in (*raws, *targets.values()):
        raw.update(name="", description="", formats=[])
    try:
        recipe = _build(raws, targets, "recipe") if raws else None
    except UserError:
        return "unknown", repr((raws, targets))
    quantizes = recipe is not None and any(each.quantized for each in recipe.precisions())
    decides = None
    if quantizes:
        # Older records have the targets of switches that are off, too.
        ordered = *raws, *(targets[name] for name in _targets(raws))
        decides = recipe, [list(raw.get("matchers", ())) for raw in ordered]
    return decides, record["format_files"], record["megatron_lm"]


def _fields(record: Record) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a record's recipes with their paths."""
    raws, targets = _read(record)
    sides = ("forward.", "backward.") if len(raws) == 2 else ("",)
    for side, raw in zip(sides, raws, strict=True):
        yield from _leaves(raw, side)
    for name, raw in targets.items():
        yield from _leaves(raw, f"{name}: ")
    yield from _leaves(record["format_files"], "")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path.removesuffix("."), value
        return
    for key, inner in value.items():
        if key not in ("name", "description", "formats"):
            yield from _leaves(inner, f"{path}{key}.")
