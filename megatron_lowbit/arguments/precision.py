"""Choice of a run's precision: a recipe of this project, or Megatron-LM's own FP8 or FP4.

Megatron-LM's FP8 and FP4 need Transformer Engine's layers and a GPU with the right tensor cores.
Without them, a recipe with the same formats replaces them.
"""

import importlib.util
from argparse import Namespace
from dataclasses import dataclass

from megatron_lowbit.command_line import CommandLine
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.recipes import load_recipes
from megatron_lowbit.recipes.load import MEGATRON_NAMES, bf16_blocks, for_sides

INSTALL_TRANSFORMER_ENGINE = (
    "pip install --no-build-isolation 'transformer_engine[pytorch]==2.20.2'"
)


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that determine which precisions Megatron-LM itself supports on it.

    Attributes:
        capability: CUDA compute capability, or None without a CUDA device.
        transformer_engine: True if Transformer Engine is installed.
    """

    capability: tuple[int, int] | None
    transformer_engine: bool

    @classmethod
    def current(cls) -> "Machine":
        """Return the properties of this machine."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(capability, importlib.util.find_spec("transformer_engine") is not None)


@dataclass(frozen=True)
class Precision:
    """Chosen precision of a run.

    Attributes:
        recipes: one recipe, or one for the forward and one for the backward pass; empty for none.
        overrides: values of ``--recipe-set``, in order.
        left_out: Megatron-LM's flags that the recipe replaces.
        lines: lines to print when the program starts.
        stores_codes: True if Megatron-LM's flags ask for weights that are stored as codes.
    """

    recipes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    stores_codes: bool = False


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
_REPLACED = {
    "the recipe takes its place": "--fp8-format --fp4-format --fp8-recipe --fp4-recipe",
    "bf16_blocks of the recipe take its place":
        "--first-last-layers-bf16 --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16",
    "amax_history of fp8-delayed takes its place":
        "--fp8-amax-history-len --fp8-amax-compute-algo",
    "wgrad of fp8-delayed takes its place": "--no-fp8-wgrad",
    "the recipes' scales have no margin": "--fp8-margin",
    "the recipes update scales in every iteration": "--fp8-interval",
    "the recipes leave the output layer in high precision": "--fp8-output-proj",
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
"""Flags that only Megatron-LM's own FP8 or FP4 reads, with the reason for leaving them out."""
_NAMING = ("--fp8-recipe", "--fp4-recipe")
"""Flags of ``_DEPENDENT`` that the line with the recipe's name mentions."""
_BLOCKS = (
    "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16",
)  # fmt: skip
_PARAM_GATHER = ("--fp8-param-gather", "--fp4-param-gather")
"""Flags that mean ``--quantized-param-gather`` beside the name of a recipe."""
_UPSTREAM_ONLY = (*_NAMING, "--fp8-format", "--fp4-format", "--te-precision-config-file")


def translate_precision(
    args: Namespace, words: CommandLine, machine: Machine, default: tuple[str, ...] = ()
) -> Precision:
    """Write the chosen precision into the arguments, in place of Megatron-LM's flags.

    Args:
        args, words, machine: as for :func:`choose_precision`, which is called.
        default: recipes where no argument names one.
    """
    if args.normalization == "MXNorm":
        words.remove("--normalization")
        words.add("--normalization", "RMSNorm")
        if not args.mxnorm:
            words.add("--mxnorm")
    precision = choose_precision(args, words, machine)
    for flag in (*precision.left_out, "--precision-recipe", "--recipe-set"):
        words.remove(flag)
    if recipes := precision.recipes or default:
        words.add("--precision-recipe", *recipes)
    if precision.stores_codes:
        args.quantized_param_gather = True
        if "--quantized-param-gather" not in words:
            words.add("--quantized-param-gather")
    for override in precision.overrides:
        words.add("--recipe-set", override)
    return precision


def choose_precision(args: Namespace, words: CommandLine, machine: Machine) -> Precision:
    """Choose between a recipe and Megatron-LM's own FP8 or FP4.

    Args:
        args: arguments as parsed by the front parser: ``fp8_recipe`` and ``fp4_recipe`` are None
            unless given.
        words: the same arguments as written on the command line.
        machine: the machine of the run.

    Raises:
        UserError: arguments exclude each other, or a recipe does not exist.
    """
    if args.precision_recipe:
        for flag in _UPSTREAM_ONLY:
            require(flag not in words, f"--precision-recipe excludes {flag}: leave one of them out")
        require(len(args.precision_recipe) <= 2, "--precision-recipe takes at most two recipes")
        recipes, reason = args.precision_recipe, "--precision-recipe names it"
    elif args.fp8 and args.fp4:
        raise UserError("--fp8-format excludes --fp4-format: --fp8-recipe FP8 --fp4-recipe FP4 "
                        "without formats runs FP8 forward and FP4 backward")  # fmt: skip
    elif args.fp8 or args.fp4:
        return _with_format(args, words, machine)
    elif names := [name for name in (args.fp8_recipe, args.fp4_recipe) if name]:
        require("custom" not in names, "recipe custom needs --fp8-format, or --fp4-format, and its "
                "quantizer factory")  # fmt: skip
        recipes = [MEGATRON_NAMES.get(name, name) for name in names]
        given = [words.text(flag) for flag in _NAMING if flag in words]
        reason = f"{' and '.join(given)} without a format"
    else:
        require(not args.recipe_set, "--recipe-set needs a recipe: add --precision-recipe NAME")
        return Precision(lines=("precision: nothing is quantized, no argument names a recipe",))
    sides = [(recipe, _bf16_blocks(args, words, recipe)) for recipe in recipes]
    return _with_recipes(args, words, sides, reason)


def _with_format(args: Namespace, words: CommandLine, machine: Machine) -> Precision:
    """Choose between Megatron-LM's own code and an equivalent recipe, given a format."""
    bits, other_recipe = ("fp8", args.fp4_recipe) if args.fp8 else ("fp4", args.fp8_recipe)
    format_, name = getattr(args, bits), getattr(args, f"{bits}_recipe")
    name = name or {"fp8": "delayed", "fp4": "nvfp4"}[bits]
    known = ("nvfp4", "custom") if args.fp4 else [n for n in _CAPABILITY if n != "nvfp4"]
    if name not in known:
        raise UserError(
            f"--{bits}-recipe {name}: with --{bits}-format one of {', '.join(known)}; a recipe of "
            f"this project is named without --{bits}-format"
        )
    obstacle = _obstacle(args, machine, name)
    if obstacle is None and not other_recipe:
        require(not args.recipe_set, "--recipe-set: Megatron-LM's own code runs "
                f"--{bits}-format {format_}, not a recipe of this project")  # fmt: skip
        code = f"Megatron-LM's own {name} {bits.upper()} ({format_})"
        line = f"precision: {code}, through Transformer Engine, as --{bits}-format asks"
        return Precision(lines=(line,))
    obstacle = obstacle or "only recipes combine FP8 forward with FP4 backward"
    unavailable = f"is for Megatron-LM's own code, which cannot run here: {obstacle}"
    require(name != "custom", f"--{bits}-recipe custom {unavailable}")
    flag = "--te-precision-config-file"
    require(flag not in words, f"{flag} {unavailable}")
    own, *overrides = _EQUIVALENTS[name, format_]
    if name == "delayed":
        length = args.fp8_amax_history_len if args.fp8_amax_compute_algo == "max" else 1
        wgrad = () if args.fp8_wgrad else ("wgrad=none",)
        overrides = [f"amax_history.length={length}", *wgrad, *overrides]
    if other_recipe:  # which gives dgrad and wgrad
        overrides = [one for one in overrides if not one.startswith(("grad.", "wgrad"))]
    # Megatron-LM's own code keeps no blocks in BF16 unless it is asked to.
    first, last = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    blocks = bf16_blocks(own, *((first, last) if args.first_last_layers_bf16 else (0, 0)))
    sides: list[tuple[str, tuple[str, ...] | None]] = [(own, (*overrides, *(blocks or ())))]
    reason = f"in place of Megatron-LM's {name} {bits.upper()} ({format_}): {obstacle}"
    if other_recipe:
        require(other_recipe != "custom", "recipe custom cannot be combined with another")
        other = MEGATRON_NAMES.get(other_recipe, other_recipe)
        sides.append((other, _bf16_blocks(args, words, other)))
    if args.fp4:
        sides.reverse()
    return _with_recipes(args, words, sides, reason)


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
    """Return overrides for ``--first-last-layers-bf16``; without it, keep the recipe's blocks.

    None where they are a preset's and the recipe keeps other blocks.
    """
    if not args.first_last_layers_bf16:
        return ()
    first, last = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    return bf16_blocks(recipe, first, last, words.is_of_preset(*_BLOCKS))


def _with_recipes(
    args: Namespace,
    words: CommandLine,
    sides: list[tuple[str, tuple[str, ...] | None]],
    reason: str,
) -> Precision:
    """Check recipes and return the choice of them. The user's overrides take precedence.

    Args:
        args, words: as for :func:`choose_precision`.
        sides: one recipe with its overrides, or one for each pass; None as overrides for a recipe
            to which a preset's blocks do not apply.
        reason: why these recipes are chosen.
    """
    require("--te-precision-config-file" not in words, "--te-precision-config-file is for "
            "Megatron-LM's own code, not for a recipe: leave it out")  # fmt: skip
    recipes = tuple(recipe for recipe, _ in sides)
    made = for_sides([changes or () for _, changes in sides])
    # A matcher that the user removes as well would not be found a second time.
    overrides = (*(one for one in made if one not in args.recipe_set), *args.recipe_set)
    recipe = load_recipes(recipes, overrides)
    quantizes = any(precision.quantized for precision in recipe.precisions())
    require(not (args.fp16 and quantizes), "--fp16 with a recipe: recipes quantize BF16 and FP32; "
            "give --bf16")  # fmt: skip
    left_out = tuple(flag for flag in _DEPENDENT if flag in words)
    shown = f"recipe {recipes[0]}"
    if len(recipes) == 2:
        shown = f"recipes {recipes[0]} (forward) and {recipes[1]} (backward)"
    changed = f" with {', '.join(overrides)}" if overrides else ""
    own_blocks = [name for name, changes in sides if changes is None]
    lines = [f"precision: {shown} of megatron-lowbit{changed}; {reason}"]
    # A format is for Transformer Engine's layers, whose script runs without codes as well.
    stored = [] if args.fp8 or args.fp4 else [flag for flag in _PARAM_GATHER if flag in words]
    lines += [f"precision: {flag} taken as --quantized-param-gather" for flag in stored]
    if own_blocks:
        lines.append(
            "precision: --first-last-layers-bf16 of the preset is for recipes that keep a share of "
            f"the blocks in BF16, as nvfp4 does: the blocks of {' and '.join(own_blocks)} are its "
            "own; give the argument itself to set them"
        )
    lines += [
        f"precision: left out {words.text(flag)}: {_DEPENDENT[flag]}"
        for flag in left_out
        if flag not in (*_NAMING, *stored, *(_BLOCKS if own_blocks else ()))
    ]
    return Precision(recipes, overrides, left_out, tuple(lines), bool(stored))
