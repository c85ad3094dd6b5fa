"""Definitions of the arguments that this project adds, and the parser of a whole command line.

Rendering the help needs all of Megatron-LM's 800 arguments and imports torch and megatron, which
takes seconds. :func:`show_help` therefore caches the text for each version, and
:func:`megatron_lowbit.command_line.print_cached_help` prints it before any such import.
"""

import argparse
import inspect
import os
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial, wraps
from typing import NoReturn

from megatron_lowbit.command_line import (
    HELP_PROGRAM,
    HELP_WIDTH,
    CommandParser,
    HelpFormatter,
    add_print_completion,
    help_cache,
    print_help,
)
from megatron_lowbit.megatron.arguments.values import guard_layer_lists

_OWN_GROUPS = ("dry run", "megatron-lowbit")


def add_recipe_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of recipes to a parser, in their own group.

    Any script based on Megatron-LM can pass this function as its ``extra_args_provider``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group(_OWN_GROUPS[1])
    group.add_argument(
        "--precision-recipe", nargs="+", metavar="NAME_OR_FILE",
        help="precision of the linear layers: the name or YAML file of one recipe, or of two, for "
        "the forward pass and the backward pass (default: none, nothing is quantized)",
    )  # fmt: skip
    group.add_argument(
        "--recipe-set", action="append", default=[], metavar="FIELD=VALUE",
        help="set one field of the recipe, such as grad.rounding=nearest (repeatable); with two "
        "recipes, forward.FIELD=VALUE or backward.FIELD=VALUE",
    )  # fmt: skip
    group.add_argument(
        "--quantization-engine", choices=("auto", "reference"), default="auto",
        help="implementation that quantizes: the fastest available one, or plain torch",
    )  # fmt: skip
    group.add_argument(
        "--eval-precision", choices=("bf16", "recipe"), default="bf16",
        help="precision of validation and test: BF16 as without a recipe, or the recipe's",
    )  # fmt: skip
    group.add_argument(
        "--mxnorm", action="store_true",
        help="replace RMSNorm before quantized layers by MXNorm, which estimates the norm from the "
        "block scales",
    )  # fmt: skip
    group.add_argument(
        "--mxnorm-p", type=float, default=2.0, help="exponent of MXNorm's power mean"
    )
    group.add_argument(
        "--mxnorm-post-round", action="store_true",
        help="estimate MXNorm's norm from block absmaxes rounded down to powers of two, like E8M0 "
        "scales; needs --mxnorm-p 1",
    )  # fmt: skip
    group.add_argument(
        "--fused-allreduce-norm", action="store_true",
        help="fuse the tensor-parallel all-reduce with the residual addition, the norm and the "
        "quantization",
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
        help="after a loss or gradient that is not finite, restart from the last checkpoint "
        "without the iteration's data, at most N times (default: the run ends)",
    )  # fmt: skip
    return parser


def front_parser() -> CommandParser:
    """Build the parser of a whole command line, with this project's arguments first.

    Unlike Megatron-LM's parser, it accepts any recipe name, and ``--normalization MXNorm``. Only
    Megatron-LM's parser determines the run; this one's results decide how to translate arguments.
    """
    from megatron.training.arguments import add_megatron_arguments

    _read_sources_once()
    parser = CommandParser(
        description="Pretrain a GPT or a hybrid in low precision with Megatron-LM.\n"
        "@FILE reads arguments from FILE, which may have comments.",
        usage="%(prog)s [@FILE ...] --num-layers N --hidden-size N --num-attention-heads N\n"
        "    --seq-length N --max-position-embeddings N --micro-batch-size N --train-iters N\n"
        "    --lr X --data-path PREFIX ...",
        allow_abbrev=False,
        formatter_class=partial(HelpFormatter, width=HELP_WIDTH),
    )
    add_own_arguments(parser)
    add_print_completion(parser)
    add_megatron_arguments(parser)
    # Put this project's groups first in the help, before argparse's "options".
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


def add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all arguments that Megatron-LM does not have; return the same parser."""
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


def describe_unknown(
    parser: argparse.ArgumentParser, written: Sequence[str], unknown: Sequence[str]
) -> str:
    """Describe all unknown arguments in one line, each with similar known ones."""
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
            # Values of an unknown flag are not listed.
            parts.append(repr(token))
    plural = "s" if len(parts) > 1 else ""
    return f"unknown argument{plural} {', '.join(parts)}; --help lists all"


def show_help(command: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Render a command's help, store it in the user's cache, print it and exit."""
    parser.prog = HELP_PROGRAM
    text = parser.format_help()
    # The cache is optional. RuntimeError: there is no home folder.
    with suppress(OSError, RuntimeError):
        cache = help_cache(command)
        cache.parent.mkdir(parents=True, exist_ok=True)
        # Rename a complete file, so that no other process reads a partial one.
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(cache)
        finally:
            temporary.unlink(missing_ok=True)
    print_help(text)


def _read_sources_once() -> None:
    """Reuse the help texts that Megatron-LM's parsers read from source code."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    upstream = ArgumentGroupFactory._get_field_docstrings
    if hasattr(upstream, "__wrapped__"):
        return
    docstrings: dict[type, dict[str, str]] = {}

    @wraps(upstream)
    def read_once(factory: ArgumentGroupFactory, kind: type) -> dict[str, str]:
        if kind not in docstrings:
            docstrings[kind] = upstream(factory, kind)
        return dict(docstrings[kind])

    ArgumentGroupFactory._get_field_docstrings = read_once
