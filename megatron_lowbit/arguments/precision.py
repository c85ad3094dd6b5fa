"""Choice of a run's precision: a recipe of this project, or Megatron-LM's own FP8 or FP4.

Megatron-LM's FP8 and FP4 need Transformer Engine's layers and a GPU with the right tensor cores.
Without them, a recipe with the same formats replaces them.
"""

import importlib.util
from argparse import Namespace
from typing import NamedTuple

from megatron_lowbit.command_line import CommandLine
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.recipes import load_recipes
from megatron_lowbit.recipes.load import MEGATRON_NAMES, bf16_blocks, check_names, for_sides

INSTALL_TRANSFORMER_ENGINE = (
    "pip install --no-build-isolation 'transformer_engine[pytorch]==2.20.2'"
)


class Machine(NamedTuple):
    """Properties of a machine that determine which precisions Megatron-LM itself supports on it."""

    capability: tuple[int, int] | None  # of CUDA; None without a CUDA device
    transformer_engine: bool  # is installed

    @classmethod
    def current(cls) -> "Machine":
        """Return the properties of this machine."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(capability, importlib.util.find_spec("transformer_engine") is not None)


_Side = tuple[str, tuple[str, ...] | None]
"""A recipe of one or both passes, and its overrides; None where a preset's blocks do not apply."""

_CAPABILITY = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
    "custom": (8, 9),
}
"""Smallest compute capability that runs each of Megatron-LM's recipes."""
_EQUIVALENTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("delayed", "hybrid"): ("fp8-delayed",),
    ("delayed", "e4m3"): ("fp8-delayed", "grad.format=fp8-tensor-e4m3"),
    ("tensorwise", "hybrid"): ("fp8-tensorwise",),
    ("tensorwise", "e4m3"): ("fp8-tensorwise", "grad.format=fp8-tensor-e4m3"),
    ("blockwise", "hybrid"): ("fp8-tile",),
    # Transformer Engine's tiles have scales that are powers of two, unlike the recipe's.
    ("blockwise", "e4m3"): (
        "fp8-tile-e4m3",
        *(f"{role}.scale_format=pow2" for role in ("input", "weight", "grad")),
    ),
    ("mxfp8", "hybrid"): ("mxfp8", "grad.format=mxfp8-e5m2"),
    ("mxfp8", "e4m3"): ("mxfp8",),
    ("nvfp4", "e2m1"): ("nvfp4",),
}
"""Equivalent recipe of this project for Megatron-LM's recipe and format, and its overrides."""
BF16_BLOCKS = (
    "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16",
)  # fmt: skip
"""Flags that keep the first and last blocks in BF16."""
_REPLACED = {
    "the recipe takes its place": "--fp8-format --fp4-format --fp8-recipe --fp4-recipe",
    "bf16_blocks of the recipe take its place": " ".join(BF16_BLOCKS),
    "amax_history of fp8-delayed takes its place":
        "--fp8-amax-history-len --fp8-amax-compute-algo",
    "wgrad of the recipe takes its place": "--no-fp8-wgrad",
    "the recipes' scales have no margin": "--fp8-margin",
    "the recipes update scales in every iteration": "--fp8-interval",
    "output_layer of the recipe takes its place": "--fp8-output-proj",
    "Transformer Engine's layers keep BF16 weights under a recipe, and local ones codes by "
    "--quantized-param-gather": "--fp8-param-gather --fp4-param-gather",
    "it is about weights that Transformer Engine stores quantized":
        "--keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag",
    "only a custom recipe of Megatron-LM reads it":
        "--fp8-quantizer-factory --fp4-quantizer-factory",
    "the recipes pad no tokens":
        "--moe-router-padding-for-fp8 --moe-router-padding-for-quantization",
}  # fmt: skip
_DEPENDENT = {flag: reason for reason, flags in _REPLACED.items() for flag in flags.split()}
"""Flags that only Megatron-LM's own FP8 or FP4 reads, with the reason for ignoring them."""
_NAMING = ("--fp8-recipe", "--fp4-recipe")
"""Flags of ``_DEPENDENT`` that the line with the recipe's name mentions."""
_PARAM_GATHER = ("--fp8-param-gather", "--fp4-param-gather")
"""Flags that mean ``--quantized-param-gather`` together with the name of a recipe."""
_UPSTREAM_ONLY = (*_NAMING, "--fp8-format", "--fp4-format", "--te-precision-config-file")


def translate_precision(args: Namespace, words: CommandLine, machine: Machine) -> list[str]:
    """Write a recipe into the arguments in place of Megatron-LM's flags, or leave FP8 or FP4 to it.

    Returns lines to print when the program starts. Raises UserError where arguments exclude each
    other, or a recipe does not exist.

    Args:
        args: arguments as parsed by the front parser: ``fp8_recipe`` and ``fp4_recipe`` are None
            unless given.
        words: the same arguments as written on the command line; changed in place.
        machine: the machine of the run.
    """
    if args.normalization == "MXNorm":
        words.remove("--normalization")
        words.add("--normalization", "RMSNorm")
        if not args.mxnorm:
            words.add("--mxnorm")
    sides, reason = _choose(args, words, machine)
    if sides:
        return _write_recipes(args, words, sides, reason)
    return [f"precision: {reason}"]


def _choose(args: Namespace, words: CommandLine, machine: Machine) -> tuple[list[_Side], str]:
    """Choose one recipe, or one for each pass, or none; return them with the reason."""
    if args.precision_recipe is not None:
        check_names(args.precision_recipe)
        for flag in _UPSTREAM_ONLY:
            require(flag not in words, f"--precision-recipe excludes {flag}: omit one of them")
        recipes, reason = args.precision_recipe, "selected by --precision-recipe"
    elif args.fp8 and args.fp4:
        raise UserError("--fp8-format excludes --fp4-format: --fp8-recipe FP8 --fp4-recipe FP4 "
                        "without formats runs FP8 forward and FP4 backward")  # fmt: skip
    elif args.fp8 or args.fp4:
        return _choose_with_format(args, words, machine)
    elif names := [name for name in (args.fp8_recipe, args.fp4_recipe) if name]:
        require("custom" not in names, "recipe custom needs --fp8-format, or --fp4-format, and its "
                "quantizer factory")  # fmt: skip
        recipes = [MEGATRON_NAMES.get(name, name) for name in names]
        given = [words.text(flag) for flag in _NAMING if flag in words]
        reason = f"selected by {' and '.join(given)} without a format"
    else:
        require(not args.recipe_set, "--recipe-set needs a recipe: add --precision-recipe NAME")
        return [], "nothing is quantized, no argument names a recipe"
    return [(recipe, _bf16_blocks(args, words, recipe)) for recipe in recipes], reason


def _choose_with_format(
    args: Namespace, words: CommandLine, machine: Machine
) -> tuple[list[_Side], str]:
    """Choose between Megatron-LM's own code and an equivalent recipe, given a format."""
    bits, other_recipe = ("fp8", args.fp4_recipe) if args.fp8 else ("fp4", args.fp8_recipe)
    format_, name = getattr(args, bits), getattr(args, f"{bits}_recipe")
    name = name or {"fp8": "delayed", "fp4": "nvfp4"}[bits]
    known = ("nvfp4", "custom") if args.fp4 else [n for n in _CAPABILITY if n != "nvfp4"]
    require(
        name in known,
        f"--{bits}-recipe {name}: with --{bits}-format one of {', '.join(known)}; a recipe of "
        f"this project is named without --{bits}-format",
    )
    obstacle = _obstacle(args, machine, name)
    if obstacle is None and not other_recipe:
        require(not args.recipe_set, "--recipe-set: Megatron-LM's own code runs "
                f"--{bits}-format {format_}, not a recipe of this project")  # fmt: skip
        code = f"Megatron-LM's own {name} {bits.upper()} ({format_})"
        return [], f"{code}, through Transformer Engine, as --{bits}-format asks"
    obstacle = obstacle or "only recipes combine FP8 forward with FP4 backward"
    unavailable = f"is for Megatron-LM's own code, which cannot run here: {obstacle}"
    require(name != "custom", f"--{bits}-recipe custom {unavailable}")
    flag = "--te-precision-config-file"
    require(flag not in words, f"{flag} {unavailable}")
    equivalent, *overrides = _EQUIVALENTS[name, format_]
    if name == "delayed":
        length = args.fp8_amax_history_len if args.fp8_amax_compute_algo == "max" else 1
        wgrad = () if args.fp8_wgrad else ("wgrad=none",)
        overrides = [f"amax_history.length={length}", *wgrad, *overrides]
    if other_recipe:  # which gives dgrad and wgrad
        overrides = [o for o in overrides if not o.startswith(("grad.", "wgrad"))]
    # Megatron-LM's own code keeps no blocks in BF16 unless it is asked to.
    first, last = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    blocks = bf16_blocks(equivalent, *((first, last) if args.first_last_layers_bf16 else (0, 0)))
    sides: list[_Side] = [(equivalent, (*overrides, *(blocks or ())))]
    if other_recipe:
        require(other_recipe != "custom", "recipe custom cannot be combined with another")
        other = MEGATRON_NAMES.get(other_recipe, other_recipe)
        sides.append((other, _bf16_blocks(args, words, other)))
    if args.fp4:
        sides.reverse()
    return sides, f"in place of Megatron-LM's {name} {bits.upper()} ({format_}): {obstacle}"


def check_layers(args: Namespace, machine: Machine) -> None:
    """Raise UserError if the model needs Transformer Engine's layers, which are not installed.

    A CPU always gets local layers, and ``--spec`` names a model's layers itself.
    """
    if machine.capability is None or args.dry_run or args.spec:
        return
    require(
        args.transformer_impl != "transformer_engine" or machine.transformer_engine,
        "--transformer-impl transformer_engine, the default: Transformer Engine is not installed; "
        f"give --transformer-impl local, or {INSTALL_TRANSFORMER_ENGINE}",
    )


def _obstacle(args: Namespace, machine: Machine, name: str) -> str | None:
    """Return the reason why Megatron-LM cannot run one of its recipes, or None if it can."""
    if machine.capability is None:
        return "this machine has no CUDA device"
    if args.transformer_impl == "local":
        return "--transformer-impl local has no FP8 or FP4 of its own"
    if not machine.transformer_engine:
        return "Transformer Engine is not installed"
    least = _CAPABILITY[name]
    if machine.capability < least:
        has, needs = (".".join(map(str, pair)) for pair in (machine.capability, least))
        return f"it needs compute capability {needs}, this GPU has {has}"
    return None


def _bf16_blocks(args: Namespace, words: CommandLine, recipe: str) -> tuple[str, ...] | None:
    """Return overrides for ``--first-last-layers-bf16``; without it, none."""
    if not args.first_last_layers_bf16:
        return ()
    first, last = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    return bf16_blocks(recipe, first, last, words.is_of_preset(*BF16_BLOCKS))


def _write_recipes(
    args: Namespace, words: CommandLine, sides: list[_Side], reason: str
) -> list[str]:
    """Check recipes and write them into the arguments. The user's overrides take precedence."""
    require("--te-precision-config-file" not in words, "--te-precision-config-file is for "
            "Megatron-LM's own code, not for a recipe: omit it")  # fmt: skip
    recipes = [recipe for recipe, _ in sides]
    made = for_sides([changes or () for _, changes in sides])
    # A matcher that the user removes as well would not be found a second time.
    overrides = [*(change for change in made if change not in args.recipe_set), *args.recipe_set]
    recipe = load_recipes(recipes, overrides)
    quantizes = any(precision.quantized for precision in recipe.precisions())
    require(not (args.fp16 and quantizes), "--fp16 with a recipe: recipes quantize BF16 and FP32; "
            "give --bf16")  # fmt: skip
    shown = f"recipe {recipes[0]}"
    if len(recipes) == 2:
        shown = f"recipes {recipes[0]} (forward) and {recipes[1]} (backward)"
    changed = f" with {', '.join(overrides)}" if overrides else ""
    lines = [f"{shown} of megatron-lowbit{changed}, {reason}"]
    # A format is for Transformer Engine's layers, whose script runs without codes as well.
    stored = [] if args.fp8 or args.fp4 else [flag for flag in _PARAM_GATHER if flag in words]
    lines += [f"{flag} taken as --quantized-param-gather" for flag in stored]
    unchanged = [name for name, changes in sides if changes is None]
    if unchanged:
        lines.append(
            "--first-last-layers-bf16 of the preset is for recipes that keep a share of the blocks "
            f"in BF16, as nvfp4 does: the blocks of {' and '.join(unchanged)} are its own; give "
            "the argument itself to set them"
        )
    explained = (*_NAMING, *stored, *(BF16_BLOCKS if unchanged else ()))
    for flag, why in _DEPENDENT.items():
        if flag in words:
            lines += [] if flag in explained else [f"ignored {words.text(flag)}: {why}"]
            words.remove(flag)
    words.remove("--precision-recipe")
    words.remove("--recipe-set")
    words.add("--precision-recipe", *recipes)
    if stored:
        args.quantized_param_gather = True
        if "--quantized-param-gather" not in words:
            words.add("--quantized-param-gather")
    for override in overrides:
        words.add("--recipe-set", override)
    return [f"precision: {line}" for line in lines]
