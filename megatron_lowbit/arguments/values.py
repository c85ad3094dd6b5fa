"""Checks of argument values: ranges of numbers, lengths of patterns, folders, memory of indices.

Megatron-LM checks few of its numbers. Other invalid ones end in a traceback, hang, or train another
model. By default a number must be finite and not negative; names of arguments have other ranges by
``_RULES``. Only arguments on the command line are checked.
"""

import argparse
import ast
import math
import os
import re
import stat
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from megatron_lowbit.command_line import CommandLine, value_of
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import check_folder, reason

HYBRID_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
"""Arguments with the layers of a hybrid, the second one of earlier Megatron-LM."""
LARGEST_SEED = 2**32 - 2**20
"""Megatron-LM adds offsets of ranks to a seed, and NumPy accepts 32 bits."""


class _Range(NamedTuple):
    """Closed interval of numbers, with its description in an error message."""

    low: float
    high: float
    words: str


def _up_to(high: int, low: int = 0) -> _Range:
    return _Range(low, high, f"from {low} to {high}")


_LARGEST = 2**63 - 1
_MOST_LAYERS = 100_000
_MOST_PROCESSES = 256
_MOST_MINUTES = 1_000_000
_TINY, _HUGE = math.ulp(0), math.nextafter(math.inf, 0)

_INT = _Range(0, _LARGEST, "an integer from 0 to 2**63 - 1")
_FLOAT = _Range(0, _HUGE, "finite and not negative")
_RULES = (
    # Negative values mean no evaluation, no torchrun, no token, off, automatic, a niceness, or all
    # tokens.
    (r"eval-iters|local-rank|null-tokenizer-...-id|inference-batch-times-.*|.*-num-cuda-graphs"
     r"|async-ckpt-cpu-priority|rl-default-top-k|fp8-margin|delta-offload-.*|.*-topk-offset",
     _Range(-_LARGEST, _LARGEST, "an integer of 64 bits")),
    # Negative values mean no limit or another method, or are ordinary numbers.
    (r".*expert-capacity-factor|.*-force-biased|.*-buffer-size-factor-.*|glu-linear-offset"
     r"|.*-attn-scale-power|grpo-entropy-.*|grpo-kl-beta", _Range(-_HUGE, _HUGE, "finite")),
    (r"((en|de)coder-)?num-layers", _up_to(_MOST_LAYERS, 1)),
    (r"mtp-num-layers", _up_to(_MOST_LAYERS)),
    (r"dist-ckpt-workers|num-dataset-builder-threads", _up_to(_MOST_PROCESSES, 1)),
    (r"num-workers|.*-decode-threads", _up_to(_MOST_PROCESSES)),
    (r"world-size", _up_to(1_000_000, 1)),
    (r"seed", _up_to(LARGEST_SEED, 1)),
    (r".*-port", _up_to(65535)),
    (r"distributed-timeout-minutes", _up_to(_MOST_MINUTES, 1)),
    (r"distributed-timeout-seconds-.*", _up_to(60 * _MOST_MINUTES, 1)),
    (r"mxnorm-p|(rope|rotary|moe-router-topk)-scaling-factor|mup-base-head-dim",
     _Range(_TINY, _HUGE, "positive and finite")),
    (r"rotary-percent|logits-save-top-p", _Range(_TINY, 1, "greater than 0 and at most 1")),
    (r".*-(dropout|fraction|prob|top-p)|fim-.*rate|sample-rate", _Range(0, 1, "from 0 to 1")),
    (r"(adam|lion)-beta.|.*-ema", _Range(0, math.nextafter(1, 0), "at least 0 and less than 1")),
    # Sizes and counts that Megatron-LM divides by, or whose 0 it takes for an absent argument.
    (r".*(hidden|vocab|micro-batch|global-batch|latent|parallel)-sizes?|.*-divisible-by"
     r"|(?!qk-pos|biencoder|mscale|manual-gc|inprocess|inference-log|log-quant|save-interval)"
     r".*-(heads|channels|length|len|dim|lora-rank|embeddings|num-buckets"
     r"|distance|base|shards|instances|granularity|interpolation-factor|virtual-pipeline-stage"
     r"|per-pipeline-rank|interval)|.*query-groups|(mamba|moe-router)-num-groups"
     r"|moe-router-(group-)?topk|.*-indexer-topk(-freq)?|lr-decay-(iters|samples)|ckpt-step"
     r"|exit-duration-in-mins|replication-jump|moe-routing-trace-max-training-iters"
     r"|save-keep-last", _Range(1, _LARGEST, "an integer from 1 to 2**63 - 1")),
)  # fmt: skip
"""Ranges by patterns of arguments' names; the first pattern that fits the whole name counts."""

_OUTPUT_FOLDERS = (
    "--save", "--data-cache-path", "--non-persistent-global-ckpt-dir",
    "--tensorboard-dir", "--wandb-save-dir",
)  # fmt: skip
_LOGS = ("--tensorboard-dir", "--wandb-save-dir")
"""Folders that only the last rank writes to."""

_LAYER_LISTS = (
    "--moe-layer-freq", "--window-attn-skip-freq", "--no-rope-freq", "--linear-attention-freq",
)  # fmt: skip


def guard_layer_lists(parser: argparse.ArgumentParser) -> None:
    """Limit the length of lists such as ``([0]*3+[1])*8`` before Megatron-LM evaluates them."""
    for flag in _LAYER_LISTS:
        action = parser._option_string_actions[flag]
        action.type = partial(_layer_list, action.type)


def _layer_list(evaluate: Callable[[str], Any], text: str) -> Any:
    """Evaluate a list by Megatron-LM's function, unless it is too long."""
    try:
        size = _size(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither an integer nor a list such as ([0]*3+[1])*2"
        ) from None
    if "[" in text and size > _MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than {_MOST_LAYERS} layers")
    return evaluate(text)


def _size(node: ast.AST) -> int:
    """Return an upper bound of an expression's value or of the length of its list."""
    match node:
        case ast.Constant(value=int(value)):
            return max(value, 1)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return max(sum(map(_size, elements)), 1)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _size(left) + _size(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _size(left) * _size(right)
        case ast.UnaryOp(operand=operand):
            return _size(operand)
    raise ValueError("no list of integers")


def range_of(action: argparse.Action) -> _Range:
    """Return the range of numbers that an argument of a parser accepts."""
    name = action.option_strings[0].removeprefix("--")
    default = _INT if action.type is int else _FLOAT
    return next((bounds for names, bounds in _RULES if re.fullmatch(names, name)), default)


def check_values(parser: argparse.ArgumentParser, args: Namespace, words: CommandLine) -> None:
    """Raise UserError for a number out of its range, or a pattern that could become too long."""
    destinations = words.destinations()
    for action in parser._actions:
        if action.dest in destinations and action.type in (int, float):
            value, bounds = getattr(args, action.dest), range_of(action)
            for number in value if isinstance(value, list) else [value]:
                require(
                    number is None or bounds.low <= number <= bounds.high,
                    f"{action.option_strings[0]} {number}: must be {bounds.words}",
                )
    _check_profiler(args)
    _check_split(args.split)
    _check_attention(args)
    _check_layout(args.pipeline_model_parallel_layout)
    for flag in HYBRID_PATTERNS:
        pattern = value_of(args, flag)
        has_blocks = pattern is None or pattern.partition("/")[0].strip("|")
        require(has_blocks, f"{flag} {pattern!r}: has no block before multi-token prediction")
    require(
        args.recompute_num_layers != 0 or args.recompute_method != "uniform",
        "--recompute-num-layers 0: must be at least 1 with --recompute-method uniform",
    )


def _check_attention(args: Namespace) -> None:
    """Check widths of heads and windows, with which Megatron-LM computes before it checks them."""
    window = args.window_size
    require(
        window is None or len(window) == 2,
        f"--window-size {window}: must be two numbers, such as 127,0",
    )
    heads = args.num_attention_heads
    if args.position_embedding_type == "rope" and not args.multi_latent_attention and heads:
        width = args.kv_channels or (args.hidden_size or 0) // heads
        rotated = int(width * args.rotary_percent)
        require(rotated % 2 == 0, f"--position-embedding-type rope rotates {rotated} of a head's "
                f"{width} --kv-channels: must be an even number")  # fmt: skip


def _check_profiler(args: Namespace) -> None:
    """Check the iterations of a profile, and that there is a folder to write torch's next to."""
    if not args.profile:
        return
    start, end = args.profile_step_start, args.profile_step_end
    require(
        start < end,
        f"--profile-step-end {end}: must be greater than --profile-step-start {start}",
    )
    require(
        args.tensorboard_dir or not args.use_pytorch_profiler,
        "--use-pytorch-profiler needs --tensorboard-dir, next to which it writes torch_profile/",
    )


def _check_split(split: str | None) -> None:
    """Check the shares of training, validation and test data.

    Megatron-LM extracts all sequences of digits and points, and ignores other characters.
    """
    if split is None:
        return
    try:
        shares = [float(share) for share in re.findall(r"[.0-9]+", split)]
    except ValueError:
        shares = []
    require(
        1 <= len(shares) <= 3
        and 0 < sum(shares) < math.inf
        and re.search(r"[A-Za-z]|(^|[,\s])-", split) is None,
        f"--split {split}: must be up to three numbers that are not negative, such as 969,30,1",
    )


def _check_layout(layout: object) -> None:
    """Limit the repetitions in a pipeline layout, which Megatron-LM expands as text."""
    if not isinstance(layout, str):
        return
    text = layout.replace(",", "")
    counts = sorted((int(count[:9]) for count in re.findall(r"\d+", text)), reverse=True)
    require(
        math.prod(counts[:2]) <= 10 * _MOST_LAYERS and not re.search(r"\(\d", text),
        f"--pipeline-model-parallel-layout {layout}: more than {_MOST_LAYERS} layers",
    )


def hybrid_pattern(args: Namespace) -> str | None:
    """Return the layers of a hybrid by either of its arguments, such as ``M*-``."""
    return args.hybrid_layer_pattern or args.hybrid_override_pattern


def check_folders(args: Namespace) -> None:
    """Raise UserError unless output folders are writable, and ``--load`` is a folder."""
    is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    for flag in _OUTPUT_FOLDERS:
        folder = value_of(args, flag)
        require(folder != "", f"{flag}: the name of the folder is empty")
        if folder is not None and (is_last or flag not in _LOGS):
            check_folder(flag, folder)
    if args.load is not None:
        require(args.load != "", "--load: the name of the folder is empty")
        try:
            is_folder = stat.S_ISDIR(os.stat(args.load).st_mode)
        except FileNotFoundError:
            return  # Megatron-LM initializes the weights and prints a line.
        except (OSError, ValueError) as error:
            raise UserError(f"--load {args.load}: {reason(error)}") from error
        require(is_folder, f"--load {args.load}: a folder with checkpoints is needed")


def check_samples(args: Namespace) -> None:
    """Raise UserError for a run without a length, or with indices that do not fit into memory.

    Megatron-LM builds them before training, for training and all evaluations: each sample's
    position in the data, and its order.
    """
    batch = args.global_batch_size
    only_evaluates = args.skip_train and args.train_iters == 0
    require(
        args.train_iters or args.train_samples or only_evaluates,
        "give --train-iters or --train-samples, at least 1; --train-iters 0 is for --skip-train",
    )
    unit = "samples" if args.train_samples else "iters"
    trained = args.train_samples or (args.train_iters or 0) * batch
    _check_index(f"--train-{unit} {getattr(args, f'train_{unit}')}", trained)
    if not args.full_validation:
        evaluations = trained // (batch * args.eval_interval) + 1
        evaluated = evaluations * args.eval_iters * (args.eval_global_batch_size or batch)
        _check_index(f"--eval-iters {args.eval_iters}", evaluated)


def check_warmup(args: Namespace) -> None:
    """Raise UserError unless the warmup of the learning rate is shorter than its schedule."""
    unit = "iters" if args.train_iters else "samples"
    warmup, decay = (getattr(args, f"lr_{part}_{unit}") for part in ("warmup", "decay"))
    flag, length = f"--lr-decay-{unit}", decay
    if not decay:
        flag, length = f"--train-{unit}", getattr(args, f"train_{unit}")
    require(
        not length or not warmup or warmup < length,
        f"--lr-warmup-{unit} {warmup} must be less than {flag} {length}",
    )


def check_profiled_iterations(args: Namespace) -> None:
    """Raise UserError for a profile that starts after the run, or that torch cannot write.

    Torch's profiler writes its trace at ``--profile-step-end``; a run that ends before ends in a
    segmentation fault. Nsight Systems records until the run ends.
    """
    if not args.profile or args.skip_train or args.step_batch_size_schedule is not None:
        return
    iterations = args.train_iters or (args.train_samples or 0) // args.global_batch_size
    last = args.profile_step_end if args.use_pytorch_profiler else args.profile_step_start + 1
    require(
        not iterations or last <= iterations,
        f"--profile-step-start {args.profile_step_start} --profile-step-end "
        f"{args.profile_step_end}: the run has {iterations} iterations; give smaller numbers",
    )


def check_microbatches(args: Namespace, prefix: str = "") -> None:
    """Raise UserError where virtual pipeline stages cannot take the microbatches of a step.

    They take them in groups. Megatron-LM fails at the first step if the last group has fewer than
    there are stages (``forward_backward_pipelining_with_interleaving`` of its ``schedules.py``).
    ``prefix``: ``"eval-"`` for the microbatches of an evaluation.
    """
    stages = args.pipeline_model_parallel_size
    is_scheduled = args.step_batch_size_schedule is not None and not prefix
    if args.virtual_pipeline_model_parallel_size is None or is_scheduled:
        return  # A resumed run may be past the batches of a schedule that do not fit.
    group = args.microbatch_group_size_per_vp_stage or stages
    require(
        group >= stages,
        f"--microbatch-group-size-per-virtual-pipeline-stage {group}: must be at least "
        f"--pipeline-model-parallel-size {stages}",
    )
    names = (f"{prefix}{size}-batch-size" for size in ("global", "micro"))
    batch, size = (getattr(args, name.replace("-", "_")) for name in names)
    step = size * args.data_parallel_size * args.gtp_weight_remat_size
    number = batch // step
    require(
        number >= group and (number % group == 0 or number % group >= stages),
        f"--{prefix}global-batch-size {batch}: virtual pipeline stages take microbatches in groups "
        f"of {group}, and these are {number}; give a multiple of {group * step}",
    )


def _check_index(argument: str, samples: int) -> None:
    needed = 12 * samples  # Two 32-bit numbers for a sample's position, one for its order.
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    require(
        needed <= memory,
        f"{argument}: the index of {samples:.3g} samples takes {needed / 2**30:.3g} GiB of memory, "
        f"and this machine has {memory / 2**30:.3g}",
    )
