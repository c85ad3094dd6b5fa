"""Definitions of the arguments that this project adds, and the parser of a whole command line."""

import argparse
import inspect
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Literal

from megatron_lowbit import command_line
from megatron_lowbit.arguments.from_checkpoint import guard_checkpoint_arguments
from megatron_lowbit.arguments.values import guard_layer_lists
from megatron_lowbit.errors import UserError, require


@dataclass
class RecipeArguments:
    """Precision of the linear layers, lengths of documents, and protection of long runs."""

    precision_recipe: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"metavar": "NAME_OR_FILE", "nargs": "*"}}
    )
    """name or YAML file of a recipe, or of two, for the forward and the backward pass; without a
    name, list the recipes (default: nothing is quantized)"""

    recipe_set: list[str] = field(
        default_factory=list,
        metadata={"argparse_meta": {"action": "append", "nargs": None, "metavar": "FIELD=VALUE"}},
    )
    """set one field of the recipe, such as grad.rounding=nearest (repeatable); with two recipes,
    forward.FIELD=VALUE or backward.FIELD=VALUE"""

    quantization_engine: Literal["auto", "reference"] = "auto"
    """quantize by the fastest available implementation, or by plain torch"""

    eval_precision: Literal["bf16", "recipe"] = "bf16"
    """precision of validation and test: BF16, or the precision of the recipe"""

    mxnorm: bool = False
    """replace RMSNorm before quantized layers by MXNorm, which estimates the norm from the block
    scales"""

    mxnorm_p: float = 2.0
    """exponent of MXNorm's power mean"""

    mxnorm_post_round: bool = False
    """estimate MXNorm's norm from block amaxes rounded down to powers of two, like E8M0 scales;
    needs --mxnorm-p 1"""

    fused_allreduce_norm: bool = False
    """fuse the tensor-parallel all-reduce with the residual addition, the norm and the
    quantization"""

    quantized_param_gather: bool = False
    """store and gather quantized weights instead of BF16 weights; needs --use-distributed-optimizer
    and --bf16"""

    quantized_expert_dispatch: bool = False
    """send quantized tokens instead of BF16 tokens to experts of other ranks; needs
    wgrad.input.requantize in the recipe, --moe-token-dispatcher-type alltoall and
    --moe-grouped-gemm"""

    pad_documents_to_multiple_of: int = 1
    """with --dataloader-inter-document-masking: pad each document of a sample to a multiple of N
    tokens, without a loss; context parallelism needs a multiple of twice its size"""

    distill_from: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "DIR"}})
    """learn from an unquantized teacher of the same shape: the loss is the KL divergence from its
    output; DIR has its checkpoints (the newest is used), or is one, like RUN/iter_0001000"""

    log_quantization_error_interval: int = field(
        default=0, metadata={"argparse_meta": {"nargs": "?", "const": 1000}}
    )
    """log the quantization error of every layer every N iterations (default: never; without N:
    1000)"""

    load_latest_valid: bool = False
    """if the newest checkpoint in --load is incomplete or damaged, load the newest valid one"""

    resume_changed: list[Literal["recipe", "data", "model"]] = field(default_factory=list)
    """load a checkpoint into a run with another recipe, other data or another model (default: the
    run is refused)"""

    save_keep_last: int | None = None
    """after each save, delete complete checkpoints except the newest N (default: keep all)"""

    skip_bad_iterations: int | None = None
    """after a loss or gradient that is not finite, restart from the last checkpoint without the
    iteration's data, at most N times (default: the run ends)"""


@dataclass
class DryRunArguments:
    """Description of a run without training."""

    dry_run: bool = False
    """check the arguments, describe the run, and exit without training"""

    dry_run_world_size: int | None = field(
        default=None, metadata={"argparse_meta": {"arg_names": ["--world-size"]}}
    )
    """with --dry-run: number of GPUs to describe the run for (default: 1)"""

    dry_run_gpu: str | None = field(
        default=None, metadata={"argparse_meta": {"arg_names": ["--gpu"], "metavar": "NAME"}}
    )
    """with --dry-run: kind of GPU to plan for, as in lowbit-plan (default: this machine's, or
    h200)"""


@dataclass
class LogArguments:
    """Output of a run on the terminal."""

    short_log: bool = False
    """print model, recipe, data and plan, then loss, tokens/s and time left every --log-interval
    iterations; Megatron-LM's lines and warnings go to SAVE/megatron.log"""


@dataclass
class LayerArguments:
    """Parts of layers, as in Gemma 3 and Granite, for which Megatron-LM has no argument."""

    geglu: bool = False
    """gate MLPs by the tanh approximation of GELU"""

    sandwich_norm: bool = False
    """normalize the outputs of attention and MLP before they are added to the residual"""

    residual_multiplier: float = 1.0
    """factor of the outputs of attention and MLP when they are added to the residual"""

    window_rotary_base: int | None = None
    """base of rotary embeddings in layers with --window-size (default: --rotary-base)"""

    activation_func_fp8_input_store: bool = False
    """store the input of SwiGLU for the backward pass in E4M3, without a scale"""


_OWN_GROUPS = {
    "dry run": DryRunArguments,
    "log": LogArguments,
    "megatron-lowbit": RecipeArguments,
    "layers": LayerArguments,
}
"""Groups of arguments that Megatron-LM does not have, by title."""
LOSSES = ("liger", "lowbit")
"""Values of ``--cross-entropy-fusion-impl`` that Megatron-LM does not have."""


def add_recipe_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of recipes and layers to a parser, in their own groups; return the parser.

    Any script based on Megatron-LM can pass this function as its ``extra_args_provider``.
    """
    return add_own_arguments(parser, ("megatron-lowbit", "layers"))


def add_own_arguments(
    parser: argparse.ArgumentParser, titles: Iterable[str] = tuple(_OWN_GROUPS)
) -> argparse.ArgumentParser:
    """Add groups of arguments that Megatron-LM does not have, by their titles; return the parser.

    Its ``--cross-entropy-fusion-impl`` accepts :data:`LOSSES`, too, from now on.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    guard_checkpoint_arguments()
    for title in titles:
        ArgumentGroupFactory(_OWN_GROUPS[title]).build_group(parser, title)
    loss = parser._option_string_actions["--cross-entropy-fusion-impl"]
    loss.choices = (*(loss.choices or ()), *LOSSES)
    loss.help = f"{loss.help} If 'liger', liger-kernel's kernels; if 'lowbit', this project's."
    return parser


def front_parser() -> command_line.CommandParser:
    """Build the parser of a whole command line, with this project's arguments first.

    Unlike Megatron-LM's parser, it accepts any recipe name, and ``--normalization MXNorm``. Only
    Megatron-LM's parser determines the run; this one's results decide how to translate arguments.
    """
    from megatron.training.arguments import add_megatron_arguments

    _read_sources_once()
    names = ", ".join(Path(name).stem for name in command_line.shipped_presets())
    presets = f"@examples/NAME.args is a model that comes with the package: {names}."
    parser = command_line.CommandParser(
        description="Pretrain a GPT or a hybrid in low precision with Megatron-LM.\n"
        "@FILE reads arguments from FILE, which may have comments.\n"
        + textwrap.fill(presets, command_line.HELP_WIDTH),
        usage="%(prog)s [@FILE ...] --num-layers N --hidden-size N --num-attention-heads N\n"
        "    --seq-length N --max-position-embeddings N --micro-batch-size N --train-iters N\n"
        "    --lr X --data-path PREFIX ...",
        allow_abbrev=False,
        formatter_class=partial(command_line.HelpFormatter, width=command_line.HELP_WIDTH),
    )
    command_line.add_exits(parser)
    add_own_arguments(add_megatron_arguments(parser))
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


def read_command_line(
    parser: argparse.ArgumentParser, argv: Iterable[str]
) -> tuple[Namespace, command_line.CommandLine]:
    """Parse a command line by the front parser; return the arguments, and the same as written.

    Files of arguments are expanded. Raises UserError for an argument that is unknown or has an
    invalid value, and for a file that cannot be read.
    """
    expanded = command_line.expand_with_origin(argv)
    written = [word for word, _ in expanded]
    require("--" not in written, "--: omit it, training's arguments need no separator")
    args, unknown = parser.parse_known_args(written)
    if unknown:
        raise UserError(_describe_unknown(parser, written, unknown))
    of_user = [word for word, of_preset in expanded if not of_preset]
    return args, command_line.CommandLine(parser, written, of_user)


def _describe_unknown(
    parser: argparse.ArgumentParser, written: Sequence[str], unknown: Sequence[str]
) -> str:
    """Describe all unknown arguments in one line, each with similar known ones."""
    known = parser._option_string_actions
    parts, of_unknown_flag, rest = [], False, list(unknown)
    for token in written:
        name, is_flag = token.partition("=")[0], token.startswith("--")
        if is_flag:
            of_unknown_flag = name not in known
        if token not in rest:
            continue
        rest.remove(token)
        if is_flag:
            near = get_close_matches(name, known, n=2)
            parts.append(f"{name} (did you mean {' or '.join(near)}?)" if near else name)
        elif not of_unknown_flag:
            # Values of an unknown flag are not listed.
            parts.append(repr(token))
    plural = "s" if len(parts) > 1 else ""
    return f"unknown argument{plural} {', '.join(parts)}; --help lists all"


@cache
def _read_sources_once() -> None:
    """Reuse the help texts that Megatron-LM's parsers read from source code."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = object.__new__(ArgumentGroupFactory)._get_field_docstrings
    ArgumentGroupFactory._get_field_docstrings = staticmethod(cache(read))
