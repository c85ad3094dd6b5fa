"""Command line of the pretraining programs: Megatron-LM's arguments and those of recipes.

:func:`parse_arguments` reads the command line with a parser of its own, which knows Megatron-LM's
arguments too; translates it into one that Megatron-LM can follow on this machine; and passes that
to Megatron-LM's own parsing and validation.
"""

import argparse
import inspect
import os
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial

from megatron_lowbit.command_line import (
    HELP_WIDTH,
    CommandParser,
    GivenArguments,
    HelpFormatter,
    add_print_completion,
    asks_for_help,
    expand_files,
)
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.megatron.argument_values import (
    check_folders,
    check_samples,
    check_values,
    guard_layer_lists,
)
from megatron_lowbit.megatron.cpu_arguments import adapt_to_cpu, needs_one_connection
from megatron_lowbit.megatron.help import show_help
from megatron_lowbit.megatron.precision_arguments import Machine, check_layers, choose_precision
from megatron_lowbit.megatron.upstream_gaps import read_sources_once

COMMAND = "pretrain"
"""Name under which the help of the pretraining programs is cached."""

_OWN_GROUPS = ("dry run", "megatron-lowbit")
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")

_PACKED = ("--sft", "--dataloader-inter-document-masking", "--hybrid-context-parallel")
"""Arguments for sequences of several documents, which forward_step.py does not take apart."""
_FUSED = "--fused-allreduce-norm"
_NEVER = 10**9
"""Iterations that no run makes."""


def add_recipe_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of recipes to a parser, in a group of their own.

    Any script on Megatron-LM can use this function as its ``extra_args_provider``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group(_OWN_GROUPS[1])
    group.add_argument(
        "--precision-recipe", nargs="+", metavar="NAME_OR_FILE",
        help="precision of the linear layers: a recipe's name or YAML file, or two: the recipe of "
        "the forward pass and that of the backward pass (default: none, nothing is quantized)",
    )  # fmt: skip
    group.add_argument(
        "--recipe-set", action="append", default=[], metavar="FIELD=VALUE",
        help="set one field of the recipe, such as grad.rounding=nearest (repeatable); of two "
        "recipes, forward.FIELD=VALUE or backward.FIELD=VALUE",
    )  # fmt: skip
    group.add_argument(
        "--quantization-engine", choices=("auto", "reference"), default="auto",
        help="implementation that quantizes: the fastest available one, or plain torch",
    )  # fmt: skip
    group.add_argument(
        "--eval-precision", choices=("bf16", "recipe"), default="bf16",
        help="precision of validation and test: that of a model without a recipe, or the recipe's",
    )  # fmt: skip
    group.add_argument(
        "--mxnorm", action="store_true",
        help="replace RMSNorm before quantized layers by MXNorm, which estimates the norm from the "
        "block scales",
    )  # fmt: skip
    group.add_argument("--mxnorm-p", type=float, default=2.0, help="exponent of MXNorm's mean")
    group.add_argument(
        "--mxnorm-post-round", action="store_true",
        help="estimate MXNorm's norm from block absmaxes rounded down to powers of two, as E8M0 "
        "scales are; needs --mxnorm-p 1",
    )  # fmt: skip
    group.add_argument(
        "--fused-allreduce-norm", action="store_true",
        help="fuse the tensor-parallel all-reduce with the residual, the norm and quantization",
    )  # fmt: skip
    group.add_argument(
        "--log-quantization-error-interval", type=int, nargs="?", const=1000, default=0,
        metavar="N",
        help="log the quantization error of every layer every N iterations (default: never; "
        "without N: 1000)",
    )  # fmt: skip
    group.add_argument(
        "--load-latest-valid", action="store_true",
        help="if the newest checkpoint in --load is incomplete or damaged, load the newest valid "
        "one",
    )  # fmt: skip
    group.add_argument(
        "--save-keep-last", type=int, metavar="N",
        help="after each save, delete complete checkpoints except the newest N (default: keep all)",
    )  # fmt: skip
    group.add_argument(
        "--skip-bad-iterations", type=int, metavar="N",
        help="after a loss or gradient that is not finite, go back to the last checkpoint and skip "
        "the iteration, at most N times (default: the run ends)",
    )  # fmt: skip
    return parser


def front_parser() -> CommandParser:
    """Build the parser of everything that a user may write, our own arguments first.

    It differs from Megatron-LM's parser in what it accepts: any name of a recipe, and MXNorm. Its
    defaults are used only to look arguments up.
    """
    from megatron.training.arguments import add_megatron_arguments

    read_sources_once()
    parser = CommandParser(
        description="Pretrain a GPT or a hybrid in low precision with Megatron-LM.\n"
        "@FILE reads arguments from FILE, which may have comments.",
        usage="%(prog)s [@FILE ...] --num-layers N --hidden-size N --num-attention-heads N\n"
        "    --seq-length N --max-position-embeddings N --micro-batch-size N --train-iters N\n"
        "    --lr X --data-path PREFIX ...",
        allow_abbrev=False,
        formatter_class=partial(HelpFormatter, width=HELP_WIDTH),
    )
    _add_own_arguments(parser)
    add_print_completion(parser)
    add_megatron_arguments(parser)
    # Own groups come first in the help, before argparse's "options".
    parser._action_groups.sort(key=lambda group: group.title not in _OWN_GROUPS)
    for group in parser._action_groups:
        group.description = inspect.cleandoc(group.description or "") or None
    actions = parser._option_string_actions
    for flag in ("--fp8-recipe", "--fp4-recipe"):
        actions[flag].choices = actions[flag].default = None
        actions[flag].metavar = "NAME"
    guard_layer_lists(parser)
    actions["--normalization"].choices = (*(actions["--normalization"].choices or ()), "MXNorm")
    return parser


def _add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add everything that Megatron-LM does not have."""
    group = parser.add_argument_group(_OWN_GROUPS[0])
    group.add_argument(
        "--dry-run", action="store_true",
        help="check the arguments, describe the run, and exit without training",
    )  # fmt: skip
    group.add_argument(
        "--world-size", type=int, metavar="N", dest="dry_run_world_size",
        help="with --dry-run: number of GPUs to describe the run for (default: 1)",
    )  # fmt: skip
    return add_recipe_arguments(parser)


def parse_arguments(argv: Sequence[str] | None = None, hybrid: bool | None = None) -> Namespace:
    """Parse and validate a command line, and set up Megatron-LM's global variables.

    ``--help`` and ``--print-completion`` exit.

    Args:
        argv: arguments without the program's name; by default those of the process.
        hybrid: whether the program trains hybrids or GPTs; None for both.

    Returns:
        Megatron-LM's validated arguments, with those of :func:`add_recipe_arguments`, ``dry_run``,
        and ``upstream_command_line``: the words that Megatron-LM parsed.

    Raises:
        UserError: an argument is unknown, wrong, or does not fit the others.
    """
    parser = front_parser()
    if asks_for_help(argv):
        show_help(COMMAND, parser)
    written = expand_files(sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(written)
    if unknown:
        raise UserError(_describe_unknown(parser, written, unknown))
    given = GivenArguments(parser, written)
    check_values(parser, args, given)
    _check(args, given, hybrid)
    if not args.dry_run:
        check_folders(args)
    machine = Machine.current()
    lines = _translate(args, given, machine)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines), flush=True)
    if machine.capability is None and needs_one_connection(args):
        # Megatron-LM's validation demands it, but nothing on a CPU reads it.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    tokens = given.tokens()
    with _world_size(args.dry_run_world_size):
        parsed = _parse_upstream(tokens)
    parsed.upstream_command_line = tokens
    return parsed


def _describe_unknown(
    parser: argparse.ArgumentParser, written: Sequence[str], unknown: Sequence[str]
) -> str:
    """Name all unknown arguments in one line, each with what may have been meant."""
    known = parser._option_string_actions
    parts, of_unknown_flag, rest = [], False, list(unknown)
    for token in written:
        is_flag = token.startswith("--")
        if is_flag:
            of_unknown_flag = token.partition("=")[0] not in known
        if token not in rest:
            continue
        rest.remove(token)
        if is_flag:
            name = token.partition("=")[0]
            near = get_close_matches(name, known, n=2)
            parts.append(f"{name} (did you mean {' or '.join(near)}?)" if near else name)
        elif not of_unknown_flag:
            # A value of an unknown flag goes without saying.
            parts.append(repr(token))
    plural = "s" if len(parts) > 1 else ""
    return f"unknown argument{plural} {', '.join(parts)}; --help lists all"


def _check(args: Namespace, given: GivenArguments, hybrid: bool | None) -> None:
    """Check what Megatron-LM does not know."""
    if hybrid is True and not args.use_checkpoint_args:
        require(any(flag in given for flag in _PATTERNS), "--hybrid-layer-pattern is missing; for "
                "models without one, use pretrain_gpt.py")  # fmt: skip
    if hybrid is False:
        for flag in (*_PATTERNS, "--is-hybrid-model"):
            require(flag not in given, f"{flag} is for hybrids: use pretrain_hybrid.py")
    require(args.dry_run or args.dry_run_world_size is None, "--world-size needs --dry-run")
    for flag in _PACKED:
        require(flag not in given, f"{flag}: packed sequences are not supported, leave it out")
    if args.mxnorm:
        require(args.normalization != "LayerNorm", "--mxnorm needs --normalization RMSNorm")
    if args.mxnorm_post_round:
        normed = args.mxnorm or args.normalization == "MXNorm"
        require(normed, "--mxnorm-post-round needs --mxnorm")
        require(args.mxnorm_p == 1, "--mxnorm-post-round needs --mxnorm-p 1")
    require(args.load or not args.load_latest_valid, "--load-latest-valid needs --load")
    if args.save_keep_last is not None:
        require(bool(args.save), "--save-keep-last needs --save")


def _translate(args: Namespace, given: GivenArguments, machine: Machine) -> list[str]:
    """Turn the given arguments into those that Megatron-LM can follow on this machine.

    Returns:
        Lines that say what was decided and why.
    """
    given.remove("--world-size")
    if args.dry_run:
        # Megatron-LM opens its writers while it reads the arguments.
        for flag in ("--tensorboard-dir", "--wandb-project"):
            given.remove(flag)
    if args.normalization == "MXNorm":
        given.remove("--normalization")
        given.add("--normalization", "RMSNorm")
        if not args.mxnorm:
            given.add("--mxnorm")
            args.mxnorm = True
    check_layers(args, machine)
    precision = choose_precision(args, given, machine)
    for flag, name in ((args.mxnorm, "--mxnorm"), (args.fused_allreduce_norm, _FUSED)):
        require(not flag or bool(precision.recipes), f"{name} needs a recipe, such as bf16")
    for flag in (*precision.left_out, "--precision-recipe", "--recipe-set"):
        given.remove(flag)
    if precision.recipes:
        given.add("--precision-recipe", *precision.recipes)
    for override in precision.overrides:
        given.add("--recipe-set", override)
    lines = list(precision.lines)
    if "--eval-interval" not in given:
        given.add("--eval-interval", str(_NEVER))
        lines.append("--eval-interval is not given and has no default: evaluating at the end only")
    if args.phase_transition_iterations and args.train_iters:
        lines.append(_count_samples(args, given))
    if machine.capability is None:
        lines += adapt_to_cpu(args, given)
    return lines


def _count_samples(args: Namespace, given: GivenArguments) -> str:
    """Give the schedule in samples, the only unit that Megatron-LM's phases have.

    Returns:
        A line that says so.
    """
    batch = args.global_batch_size
    require(
        batch is not None and "--rampup-batch-size" not in given,
        "--phase-transition-iterations needs a --global-batch-size that never changes",
    )
    changed = []
    for part in ("train", "lr-decay", "lr-warmup", "lr-wsd-decay"):
        flag = f"--{part}-iters"
        if flag in given:
            samples = getattr(args, f"{part.replace('-', '_')}_iters") * batch
            given.remove(flag)
            given.add(f"--{part}-samples", str(samples))
            changed.append(f"{flag} as --{part}-samples {samples}")
    return f"--phase-transition-iterations: given to Megatron-LM: {', '.join(changed)}"


@contextmanager
def _world_size(ranks: int | None) -> Iterator[None]:
    """Let Megatron-LM see this number of ranks; None changes nothing."""
    before = os.environ.get("WORLD_SIZE")
    if ranks is not None:
        os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        if before is not None:
            os.environ["WORLD_SIZE"] = before
        elif ranks is not None:
            del os.environ["WORLD_SIZE"]


def _parse_upstream(tokens: list[str]) -> Namespace:
    """Run Megatron-LM's own parsing and validation, which read ``sys.argv``.

    Raises:
        UserError: Megatron-LM refuses the arguments, in one line.
    """
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.global_vars import unset_global_variables

    before = sys.argv
    sys.argv = [before[0], *tokens]
    args = None
    try:
        parsed = parse_and_validate_args(extra_args_provider=_add_own_arguments)
        if not parsed.dry_run:
            check_samples(parsed)
        args = parsed
        return args
    except UserError:
        raise
    except SystemExit as error:
        raise UserError(
            f"Megatron-LM refused the arguments (exit {error.code}), see above"
        ) from error
    except (AssertionError, ValueError, RuntimeError, OSError, ImportError) as error:
        raise UserError(in_one_line(error)) from error
    except Exception as error:
        # Values that it computes with before it checks them.
        raise UserError(f"Megatron-LM cannot follow the arguments: {in_one_line(error)}") from error
    finally:
        sys.argv = before
        if args is None:
            # Some of them are set by now, and would stand in the way of another run here.
            unset_global_variables()


def in_one_line(error: Exception) -> str:
    """Describe an exception of Megatron-LM's validation; without a message, by the failed check."""
    message = " ".join(str(error).split())
    if not message:
        check = (traceback.extract_tb(error.__traceback__)[-1].line or "").removeprefix("assert ")
        message = f"Megatron-LM demands {check}"
    if "apply_rope_fusion" in message:  # the configuration's name; fused where nothing is said
        message += " Or give --no-rope-fusion."
    return re.sub(r"\bargs\.(\w+)", lambda found: "--" + found[1].replace("_", "-"), message)
