"""Recipes by name or file, and single fields of them set from the command line."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from functools import cache, lru_cache
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from megatron_lowbit.errors import UserError, error_prefix, require, require_type
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.numerics.precision import HIGH_PRECISION, LinearPrecision
from megatron_lowbit.recipes.recipe import Recipe, combine
from megatron_lowbit.recipes.schema import PrecisionSpec, RecipeSpec, operand_keys, parse_recipe
from megatron_lowbit.recipes.yaml_reader import has_control_characters, read_text, read_yaml

MEGATRON_NAMES = {
    "blockwise": "fp8-tile",
    "delayed": "fp8-delayed",
    "tensorwise": "fp8-tensorwise",
    "qat": "qat-nvfp4",
}
"""Megatron-LM's names of recipes where ours differ; and for the file of QAT recipes, its first."""

_GEMMS = {"forward": (Gemm.FPROP,), "backward": (Gemm.DGRAD, Gemm.WGRAD)}
"""GEMMs that each of two combined recipes gives."""


@cache
def shipped_recipes() -> dict[str, Any]:
    """Return the YAML files of the recipes that come with the package, by name; one has several."""
    folder = files("megatron_lowbit.recipes") / "shipped"
    yaml_files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    recipes = {file.name.removesuffix(".yaml"): file for file in yaml_files}
    family = recipes.pop("qat")
    recipes |= dict.fromkeys(_parsed(family.read_text("utf-8")), family)
    return {name: recipes[name] for name in sorted(recipes, key="{}.yaml".format)}


def load_recipe(name_or_path: str | PathLike[str], overrides: str | Sequence[str] = ()) -> Recipe:
    """Load a shipped recipe by name, or any recipe from a YAML file.

    Args:
        name_or_path: a shipped name (ours or Megatron-LM's), or a path that ends in .yaml or .yml.
        overrides: changes of fields as ``--recipe-set`` takes them, one ``FIELD=VALUE`` or several,
            VALUE in YAML; see :func:`apply_override`.

    Raises:
        UserError: no such recipe or file, a wrong key or value, an override that fits nothing.
        TypeError: an argument of another type.
    """
    require_type("name_or_path", name_or_path, str | PathLike, "the name or the path of a recipe")
    overrides = [overrides] if isinstance(overrides, str) else overrides
    for override in overrides:
        require_type("an override", override, str, "FIELD=VALUE")
    return _load(fspath(name_or_path), overrides)[1]


def load_recipes(names: Sequence[str], overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe of a command line: one, or two as :func:`load_combined` takes them."""
    check_names(names)
    if len(names) == 1:
        return load_recipe(names[0], overrides)
    forward, backward = names
    return load_combined(forward, backward, overrides)


def check_names(names: Sequence[str]) -> None:
    """Raise UserError unless ``--precision-recipe`` names one recipe or two."""
    known = ", ".join(shipped_recipes())
    require(bool(names), f"--precision-recipe needs a YAML file or one of {known}")
    require(len(names) <= 2, "--precision-recipe takes at most two recipes")


def load_combined(forward: str, backward: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load two recipes as one: fprop of the first, dgrad and wgrad of the second.

    Overrides start with ``forward.`` or ``backward.``, then go on as for :func:`load_recipe`.
    Raises UserError as that does; for an override without its side, or of a GEMM that the other
    recipe gives; and for recipes with switches.
    """
    names = (forward, backward)
    recipes = []
    for side, name, given in zip(_GEMMS, names, overrides_by_recipe(names, overrides), strict=True):
        recipes.append(load_recipe(name, given))
        for number, override in enumerate(given):
            others = [*given[:number], *given[number + 1 :]]
            if _is_idle(_GEMMS[side], recipes[-1], name, others):
                raise UserError(
                    f"--recipe-set {side}.{override}: without effect, the {side} recipe gives "
                    f"{' and '.join(_GEMMS[side])} only; remove it"
                )
    return combine(*recipes)


def _is_idle(gemms: Sequence[Gemm], recipe: Recipe, name: str, others: Sequence[str]) -> bool:
    """Return True if a recipe differs from one with the other overrides only in unused GEMMs."""

    def used(recipe: Recipe) -> tuple[Recipe, list[Any]]:
        configs = [(key, [p.gemms[gemm] for gemm in gemms]) for key, p in recipe.configs.items()]
        return replace(recipe, configs={}), configs

    try:
        plain = load_recipe(name, others)
    except UserError:
        return False  # the others need it
    return plain != recipe and used(plain) == used(recipe)


def load_precision(recipe: LinearPrecision | Recipe | str | PathLike[str]) -> LinearPrecision:
    """Return the precision of a linear layer that has no place in a model.

    ``recipe``: a precision; or a recipe with one config that quantizes, or with none; or the name
    or file of such a recipe, which is read once per process. Raises UserError for a recipe with
    several precisions or with switches, TypeError for another type, and as :func:`load_recipe`.
    """
    if isinstance(recipe, LinearPrecision):
        return recipe
    if isinstance(recipe, str | PathLike):
        return _precision_of_file(fspath(recipe))
    require_type("the precision", recipe, Recipe, "a LinearPrecision, a recipe or a recipe's name")
    require(
        not recipe.switches and recipe.backward is None,
        f"recipe {recipe.name} changes during a run or is combined from two; a single layer has "
        "one precision: choose one of a recipe's configs",
    )
    quantizing = {name: config for name, config in recipe.configs.items() if config.quantized}
    require(
        len(quantizing) <= 1,
        f"recipe {recipe.name} has several precisions; choose one: "
        + " or ".join(f"load_recipe({recipe.name!r}).configs[{name!r}]" for name in quantizing),
    )
    return next(iter(quantizing.values()), HIGH_PRECISION)


@cache
def _precision_of_file(name_or_path: str) -> LinearPrecision:
    return load_precision(load_recipe(name_or_path))


def read_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the raw YAML data of a recipe, checked. Arguments and errors: :func:`load_recipe`."""
    return _load(name_or_path, overrides)[0]


def bf16_blocks(
    name: str, first: int, last: int, of_preset: bool = False
) -> tuple[str, ...] | None:
    """Return the overrides that keep just the first and last blocks of a model in BF16.

    For a recipe that quantizes nothing there are none. ``of_preset``: the numbers are a preset's,
    which its paper gives for NVFP4. They replace shares of any model's blocks only, as ``nvfp4``
    keeps them: None is returned for a recipe that keeps no blocks, or a number of them.
    """
    raw, recipe = _load(name)
    if not any(raw["configs"].values()):
        return ()
    matcher = recipe.matchers.get("bf16_blocks")
    extents = (getattr(matcher, end, None) for end in ("first", "last"))
    if of_preset and not any(isinstance(extent, Fraction) for extent in extents):
        return None
    has_matcher = "bf16_blocks" in raw["matchers"]
    if first == last == 0:
        return ("bf16_blocks=none",) if has_matcher else ()
    if has_matcher:
        enabled = () if matcher else ("bf16_blocks.enabled=true",)
        return (f"bf16_blocks.first={first}", f"bf16_blocks.last={last}", *enabled)
    blocks = f"{{type: blocks, first: {first}, last: {last}, config: bf16, enabled: true}}"
    return ("configs.bf16={}", f"matchers.bf16_blocks={blocks}")


def for_sides(sides: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the overrides of one recipe, or of two, as :func:`load_recipes` takes them."""
    if len(sides) == 1:
        return sides[0]
    named = zip(_GEMMS, sides, strict=True)
    return tuple(f"{side}.{override}" for side, overrides in named for override in overrides)


def overrides_by_recipe(names: Sequence[str], overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each recipe: the reverse of :func:`for_sides`.

    Raises UserError for an override that does not say for which of two recipes it is.
    """
    if len(names) < 2:
        return [list(overrides) for _ in names]
    sides: dict[str, list[str]] = {side: [] for side in _GEMMS}
    for override in overrides:
        side, _, rest = override.partition(".")
        if side not in sides:
            raise UserError(
                f"--recipe-set {override}: two recipes are combined; write forward.{override} for "
                f"{names[0]} or backward.{override} for {names[1]}"
            )
        sides[side].append(rest)
    return [*sides.values()]


def _load(
    name_or_path: str, overrides: Sequence[str] = (), is_target: bool = False
) -> tuple[dict[str, Any], Recipe]:
    """Load a recipe as raw YAML data and built; both with overrides.

    ``is_target``: a switch names it. It has no switches, which could lead in a circle.
    """
    raw, source = _read(name_or_path)
    load_target = None if is_target else cache(lambda name: _load(name, is_target=True)[1])
    spec = _checked(raw, source)
    recipe = spec.build(source, load_target)
    for path, why in spec.effects().items():
        if why is not None:
            raise UserError(f"{source}: {'.'.join(path)}: without effect, {why}; remove it")
    if not overrides:
        return raw, recipe
    changed = []
    for override in overrides:
        changed.append((override, apply_override(raw, override)))
        _copy_output_config(raw)  # The next override may change a field of it.
    spec = _checked(raw, source)
    recipe = spec.build(source, load_target)
    unused = spec.unused_configs()
    effects = {path: unused.get(path[1], why) for path, why in spec.effects().items()}
    effects |= {("configs", name): why for name, why in unused.items()}
    for override, paths in changed:
        reasons = [
            why
            for path in paths
            for leaf, why in effects.items()
            if leaf[: len(path)] == path[: len(leaf)]
        ]
        if reasons and None not in reasons:
            raise UserError(f"--recipe-set {override}: without effect, {reasons[0]}; remove it")
    return raw, recipe


def _checked(raw: dict[str, Any], source: str) -> RecipeSpec:
    """Check raw YAML data, after :func:`_copy_output_config`."""
    spec = parse_recipe(raw, source)
    name = spec.output_layer
    if name is None or name in spec.configs:
        return spec
    if not _copy_output_config(raw):
        choices = [*{**spec.configs, **_single_configs()}]
        near = get_close_matches(name, choices) or choices
        raise UserError(f"{source}: output_layer: no config {name!r}; use one of {', '.join(near)}")
    return parse_recipe(raw, source)


def _copy_output_config(raw: dict[str, Any]) -> bool:
    """Copy the config of a shipped recipe that ``output_layer`` names; return True if it does."""
    name = raw.get("output_layer")
    if not isinstance(name, str) or name in raw["configs"] or name not in _single_configs():
        return False
    raw["configs"][name] = deepcopy(_single_configs()[name])
    return True


@cache
def _single_configs() -> dict[str, Any]:
    """Return the raw config of each shipped recipe that has one precision, by the recipe's name."""
    raws = {name: _read(name)[0] for name in shipped_recipes()}
    configs = {name: [*filter(None, raw["configs"].values())] for name, raw in raws.items()}
    return {
        name: found[0] if found else {}
        for name, found in configs.items()
        if len(found) < 2 and not raws[name].get("switches")
    }


def _holds_recipes(raw: Any) -> bool:
    """Return True for the content of the file that holds several recipes by their names."""
    if not isinstance(raw, dict) or not raw.keys() <= shipped_recipes().keys():
        return False
    return bool(raw) and all(isinstance(recipe, dict) for recipe in raw.values())


_parsed = lru_cache(maxsize=64)(read_yaml)
"""Commands and switches read the same recipes many times; PyYAML takes half of the time."""


def _read(name_or_path: str) -> tuple[Any, str]:
    if name_or_path.endswith((".yaml", ".yml")):
        entry: Any = Path(name_or_path)
    else:
        shipped = shipped_recipes()
        name_or_path = MEGATRON_NAMES.get(name_or_path, name_or_path)
        if name_or_path not in shipped:
            near = ", ".join(get_close_matches(name_or_path, shipped))
            advice = f"did you mean {near}?" if near else "lowbit-recipes list prints all."
            raise UserError(
                f"unknown recipe {name_or_path!r}; {advice} The name of a recipe file ends in .yaml"
            )
        entry = shipped[name_or_path]
    text = read_text(entry, f"recipe file {name_or_path}")
    with error_prefix(f"{entry.name}: not YAML of a recipe: "):
        content = _parsed(text)
    if _holds_recipes(content):
        name = name_or_path if name_or_path in content else next(iter(content))
        return {"name": name} | deepcopy(content[name]), f"{name}.yaml"
    raw = deepcopy(content)
    if isinstance(raw, dict) and isinstance(names := raw.get("formats"), list):
        # Files of formats lie next to the recipe, wherever the run starts.
        folder = entry.parent.absolute()
        raw["formats"] = [str(folder / name) if isinstance(name, str) else name for name in names]
    return raw, entry.name


def apply_override(raw: dict[str, Any], override: str) -> list[tuple[str, ...]]:
    """Set one field of a recipe's raw YAML data in place; return the paths that are set.

    ``grad.rounding=nearest`` (a role or a GEMM) sets the field in every config that quantizes;
    ``bf16_blocks.last=4`` a matcher's field; a path that starts with ``configs.``, ``matchers.`` or
    ``switches.`` names exactly one field. ``none`` and ``null`` are the same; a matcher or switch
    set to them is removed. A new matcher comes first, or it might never be asked. A role's new
    format drops the options that it lacks. Whether the field and value are right is checked when
    the recipe is parsed. Raises UserError where there is no such field, no value, or a section
    would be no mapping, and for a matcher or switch to remove that is not there.
    """
    known = set(raw["matchers"])
    with error_prefix(f"--recipe-set {override}: "):
        field, value = _field_and_value(override)
        paths = _paths(raw, field)
        section, *names = paths[0]
        if section in ("matchers", "switches") and len(names) == 1 and value is None:
            there = raw.get(section, {})
            message = f"no {names[0]!r} to remove; {section} are {', '.join(there) or 'empty'}"
            require(names[0] in there, message)
        for path in paths:
            _set(raw, path, value)
        # The next override must find the sections, and mappings in them.
        for section in ("configs", "matchers", "switches"):
            entries = raw.get(section, {})
            require(isinstance(entries, dict), f"{section} must be a mapping")
            for name, entry in entries.items():
                is_mapping = entry is None or isinstance(entry, dict)
                require(is_mapping, f"{section}.{name} must be a mapping")
            if section != "configs":
                raw[section] = {name: entry for name, entry in entries.items() if entry is not None}
    raw["matchers"] = dict(sorted(raw["matchers"].items(), key=lambda item: item[0] in known))
    return paths


def _field_and_value(override: str) -> tuple[str, Any]:
    field, separator, text = override.partition("=")
    if not separator or not field:
        raise ValueError("write FIELD=VALUE, such as grad.rounding=nearest")
    if has_control_characters(field):
        raise ValueError("control characters in FIELD")
    try:
        return field, None if text == "none" else read_yaml(text)
    except ValueError as error:
        problem = str(error).removeprefix("line 1: ")
        raise ValueError(f"{text!r} is not a YAML value: {problem}") from None


def _paths(raw: dict[str, Any], field: str) -> list[tuple[str, ...]]:
    """Return every path in the raw data that a field stands for."""
    path = tuple(field.split("."))
    if path[0] == "formats":
        raise ValueError("formats are named only in a recipe file")
    if path[0] in RecipeSpec.model_fields:
        return [path]
    if path[0] in raw["matchers"]:
        return [("matchers", *path)]
    if path[0] not in PrecisionSpec.model_fields:
        good = [*PrecisionSpec.model_fields, *raw["matchers"], *RecipeSpec.model_fields]
        near = get_close_matches(path[0], good)
        raise ValueError(f"no field {path[0]!r}; use {', '.join(near or good)}")
    quantizing = [name for name, config in raw["configs"].items() if config]
    if not quantizing:
        paths = ", ".join(f"configs.{name}.{field}" for name in raw["configs"])
        raise ValueError(f"no config of the recipe quantizes; name one: {paths}")
    return [("configs", name, *path) for name in quantizing]


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        if key in GEMM_ROLES and data.get(key, {}) is None:
            raise ValueError(
                f"{key} is null, high precision; {key}={{}} quantizes it by its roles, then its "
                "fields can be set"
            )
        if data.get(key) is None:
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            raise ValueError(f"{key} has no fields below it")
    if last == "format":
        kept = ("format",) if value is None else operand_keys(str(value))
        for option in data.keys() - set(kept):
            del data[option]
    data[last] = value
