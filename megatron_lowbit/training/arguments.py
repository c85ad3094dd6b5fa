"""Command-line arguments: Megatron-LM's names and meanings, and the recipe's own."""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from difflib import get_close_matches

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.training.expert_arguments import check_experts, fill_experts
from megatron_lowbit.training.hybrid_arguments import check_hybrid
from megatron_lowbit.training.model_arguments import add_model
from megatron_lowbit.training.parallel_arguments import (
    add_parallelism,
    check_parallelism,
    fill_parallelism,
)
from megatron_lowbit.training.profile_arguments import add_profiling, check_profiling
from megatron_lowbit.training.weights_and_biases import import_wandb


def parse_arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Parse and check the arguments of a pretraining run.

    Raises:
        UserError: an unknown or missing argument, a bad value, or values that do not fit together.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        near = get_close_matches(unknown[0], options)
        hint = f"; did you mean {', '.join(near)}?" if near else "; --help lists all"
        raise UserError(f"unknown argument {unknown[0]}{hint}")
    _fill_defaults(args)
    _check_model(args)
    _check_batches(args)
    _check_logging(args)
    check_profiling(args)
    _check_checkpointing(args)
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser, its arguments in the groups that ``--help`` shows."""
    parser = command_parser(
        description="Pretrain a GPT or a hybrid in low precision. @FILE reads arguments from FILE.",
        usage="%(prog)s [@FILE ...] --num-layers N --hidden-size N --num-attention-heads N\n"
        "    --data-path PREFIX --seq-length N --micro-batch-size N --train-iters N --lr X ...",
        allow_abbrev=False,
        fromfile_prefix_chars="@",
    )
    for add_group in (
        _add_precision,
        add_model,
        _add_data,
        _add_training,
        _add_learning_rate,
        _add_checkpointing,
        _add_logging,
        add_profiling,
        add_parallelism,
    ):
        add_group(parser)
    return parser


def _add_precision(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision")
    group.add_argument("--fp4-recipe", metavar="NAME", help="FP4 recipe, such as nvfp4")
    group.add_argument(
        "--fp8-recipe", metavar="NAME",
        help="FP8 recipe, such as fp8-tile; with --fp4-recipe, the forward pass only",
    )  # fmt: skip
    group.add_argument(
        "--precision-recipe", metavar="NAME_OR_FILE", help="any recipe (default: bf16)"
    )
    group.add_argument(
        "--recipe-set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="set one field of the recipe, such as grad.rounding=nearest (repeatable); of two "
        "recipes, forward.FIELD=VALUE or backward.FIELD=VALUE",
    )
    group.add_argument(
        "--quantization-engine",
        choices=("auto", "reference"),
        default="auto",
        help="what quantizes: the fastest there is, or plain torch",
    )
    compute = group.add_mutually_exclusive_group()
    compute.add_argument("--bf16", action="store_true", help="BF16 compute (FP32 on a CPU)")
    compute.add_argument("--fp32", action="store_true", help="FP32 compute (default)")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path", nargs="+", required=True, metavar="PREFIX",
        help="a dataset's prefix, or weights and prefixes: 0.3 A 0.7 B",
    )  # fmt: skip
    group.add_argument("--split", default="969, 30, 1", help="train, validation, test shares")
    group.add_argument(
        "--data-cache-path",
        metavar="DIR",
        help="index of samples (default: a folder beside the dataset)",
    )
    group.add_argument("--num-workers", type=int, default=0, help="data loading processes")
    group.add_argument(
        "--tokenizer-type", choices=("HuggingFaceTokenizer", "NullTokenizer"),
        default="HuggingFaceTokenizer", help="NullTokenizer: data that is token ids already",
    )  # fmt: skip
    group.add_argument("--tokenizer-model", metavar="DIR", help="a Hugging Face tokenizer folder")
    group.add_argument("--vocab-size", type=int, help="tokens, with NullTokenizer")
    group.add_argument("--seq-length", type=int, required=True, help="tokens of a sample")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--micro-batch-size", type=int, required=True, help="samples of a rank in one pass"
    )
    group.add_argument(
        "--global-batch-size", type=int,
        help="samples of an iteration (default: --micro-batch-size x data-parallel ranks)",
    )  # fmt: skip
    group.add_argument("--train-iters", type=int, required=True, help="iterations of the run")
    group.add_argument("--weight-decay", type=float, default=0.01, help="AdamW's")
    group.add_argument("--adam-beta1", type=float, default=0.9, help="decay of Adam's mean")
    group.add_argument(
        "--adam-beta2", type=float, default=0.999, help="decay of Adam's mean square"
    )
    group.add_argument("--adam-eps", type=float, default=1e-8, help="added to its root")
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: any")
    group.add_argument("--seed", type=int, default=1234, help="of weights, data and rounding")
    group.add_argument(
        "--eval-interval", type=int, default=1000, help="iterations between evaluations"
    )
    group.add_argument("--eval-iters", type=int, default=100, help="batches of one; 0: none at all")
    group.add_argument(
        "--max-skipped-updates", type=int, default=3,
        help="updates skipped in a row, for a loss or gradient that is not finite, after which "
        "the run goes back to its last checkpoint and leaves out their data",
    )  # fmt: skip
    group.add_argument(
        "--check-output-norm-interval", type=int, metavar="N",
        help="name the layers whose outputs are not finite, every so many iterations",
    )  # fmt: skip
    group.add_argument(
        "--recompute-granularity", choices=("full", "selective"),
        help="layers, or the core of attention alone, anew in backward (default: neither)",
    )  # fmt: skip
    group.add_argument(
        "--recompute-method",
        choices=("uniform", "block"),
        help="all layers, N at a time, or N of a stage",
    )
    group.add_argument("--recompute-num-layers", type=int, metavar="N", help="that N")
    group.add_argument(
        "--no-gradient-accumulation-fusion", dest="gradient_accumulation_fusion",
        action="store_false", help="let autograd add weight gradients to the main gradients",
    )  # fmt: skip


def _add_learning_rate(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning rate")
    group.add_argument("--lr", type=float, required=True, help="highest learning rate")
    group.add_argument("--min-lr", type=float, default=0.0, help="lowest, at its end")
    group.add_argument(
        "--lr-decay-style", choices=("constant", "linear", "cosine", "WSD"), default="linear",
        help="its course; WSD: warm-up, stable, decay",
    )  # fmt: skip
    group.add_argument("--lr-decay-iters", type=int, help="iterations (default: --train-iters)")
    group.add_argument("--lr-warmup-iters", type=int, default=0, help="iterations, linear from 0")
    group.add_argument("--lr-wsd-decay-iters", type=int, help="iterations of WSD's final decay")
    group.add_argument(
        "--lr-wsd-decay-style", choices=("exponential", "linear", "cosine", "minus_sqrt"),
        default="exponential", help="of that decay",
    )  # fmt: skip


def _add_checkpointing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="DIR", help="checkpoints, metrics and the loss curve")
    group.add_argument("--load", metavar="DIR", help="go on from DIR's newest checkpoint")
    group.add_argument(
        "--finetune", action="store_true",
        help="of --load's checkpoint the model alone: begin at iteration 0",
    )  # fmt: skip
    group.add_argument(
        "--exit-on-missing-checkpoint", action="store_true",
        help="an error, not a fresh start, where --load has no checkpoint",
    )  # fmt: skip
    group.add_argument(
        "--override-opt-param-scheduler", "--override-opt_param-scheduler", action="store_true",
        help="on --load, the arguments' learning-rate schedule instead of the checkpoint's",
    )  # fmt: skip
    group.add_argument("--save-interval", type=int, help="iterations (default: the end only)")
    group.add_argument(
        "--async-save", action="store_true",
        help="write checkpoints while training goes on, from a copy in the CPU's memory",
    )  # fmt: skip
    group.add_argument(
        "--load-latest-valid", action="store_true",
        help="where --load's newest checkpoint is incomplete or damaged, go back to a valid one",
    )  # fmt: skip
    group.add_argument(
        "--save-keep-last", type=int, metavar="N",
        help="after a save, delete older complete checkpoints beyond N (default: keep all)",
    )  # fmt: skip


def _add_logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--log-interval", type=int, default=10, help="iterations between lines")
    group.add_argument(
        "--log-quantization-error-interval", type=int, nargs="?", const=1000, default=0,
        metavar="N",
        help="measure every layer's every N iterations (default: never; without N: 1000)",
    )  # fmt: skip
    group.add_argument("--tensorboard-dir", metavar="DIR", help="TensorBoard events in DIR")
    group.add_argument("--log-file-dir", metavar="DIR", help="a log file for each rank in DIR")
    group.add_argument("--wandb-project", metavar="NAME", help="log to Weights & Biases")
    group.add_argument("--wandb-exp-name", metavar="NAME", help="(default: its own choice)")
    group.add_argument("--wandb-save-dir", metavar="DIR", help="(default: a folder in --save)")


def _fill_defaults(args: Namespace) -> None:
    """Values that follow from others, and fixed ones that other modules read."""
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        # Gated layers have three matrices: two thirds of the width keep the parameter count.
        args.ffn_hidden_size = int(wide * 2 / 3 / 64) * 64 if args.swiglu else wide
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.recipes = [name for name in (args.fp8_recipe, args.fp4_recipe) if name]
    require(
        not (args.precision_recipe and args.recipes),
        "--precision-recipe excludes --fp4-recipe and --fp8-recipe",
    )
    args.recipes = args.recipes or [args.precision_recipe or "bf16"]
    fill_experts(args)
    fill_parallelism(args)


def _require_divisible(args: Namespace, dividend: str, divisor: str) -> None:
    left, right = getattr(args, dividend), getattr(args, divisor)
    names = [f"--{name.replace('_', '-')}" for name in (dividend, divisor)]
    require(left % right == 0, f"{names[0]} {left} is not divisible by {names[1]} {right}")


_POSITIVE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "seq_length", "micro_batch_size", "train_iters", "log_interval", "eval_interval",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "make_vocab_size_divisible_by",
    "max_skipped_updates", "distributed_timeout_minutes",
)  # fmt: skip


def _check_model(args: Namespace) -> None:
    for name in _POSITIVE:
        value = getattr(args, name)
        require(value > 0, f"--{name.replace('_', '-')} {value}: must be positive")
    if args.kv_channels is None:
        _require_divisible(args, "hidden_size", "num_attention_heads")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    _require_divisible(args, "num_attention_heads", "num_query_groups")
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        _require_divisible(args, name, "tensor_model_parallel_size")
    _require_divisible(args, "num_layers", "pipeline_model_parallel_size")
    require(args.mxnorm_p > 0, f"--mxnorm-p {args.mxnorm_p:g}: must be positive")
    require(
        not args.use_rope_scaling
        or (args.position_embedding_type == "rope" and args.hybrid_override_pattern is None),
        "--use-rope-scaling needs a GPT with --position-embedding-type rope",
    )
    activations = ("--swiglu", "--squared-relu", "--openai-gelu")
    given = [name for name in activations if getattr(args, name[2:].replace("-", "_"))]
    require(len(given) <= 1, f"{' and '.join(given)} exclude each other")
    require(
        args.seq_length <= args.max_position_embeddings,
        f"--seq-length {args.seq_length} exceeds --max-position-embeddings "
        f"{args.max_position_embeddings}",
    )
    check_experts(args)
    check_hybrid(args)
    check_parallelism(args)


def _check_batches(args: Namespace) -> None:
    require(args.eval_iters >= 0, f"--eval-iters {args.eval_iters} is negative")
    require(args.min_lr <= args.lr, f"--min-lr {args.min_lr} exceeds --lr {args.lr}")
    require(
        0 <= args.lr_warmup_iters < args.lr_decay_iters,
        f"--lr-warmup-iters {args.lr_warmup_iters} must be below --lr-decay-iters "
        f"{args.lr_decay_iters}",
    )
    if args.lr_decay_style == "WSD":
        require(
            args.lr_wsd_decay_iters is not None,
            "--lr-decay-style WSD needs --lr-wsd-decay-iters",
        )
    if args.recompute_granularity == "full":
        require(
            args.recompute_method is not None and args.recompute_num_layers is not None,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        )


def _check_checkpointing(args: Namespace) -> None:
    require(args.load is not None or not args.load_latest_valid, "--load-latest-valid needs --load")
    require(args.load is not None or not args.finetune, "--finetune needs --load")
    require(args.save is not None or not args.async_save, "--async-save needs --save")
    if args.save_keep_last is not None:
        require(args.save is not None, "--save-keep-last needs --save")
        require(args.save_keep_last >= 1, "--save-keep-last must be at least 1")


def _check_logging(args: Namespace) -> None:
    interval = args.log_quantization_error_interval
    require(interval >= 0, f"--log-quantization-error-interval {interval}: must not be negative")
    if args.wandb_project:
        import_wandb()
        return
    for name in ("wandb_exp_name", "wandb_save_dir"):
        option = f"--{name.replace('_', '-')}"
        require(getattr(args, name) is None, f"{option} needs --wandb-project")


def resolve_batch_size(args: Namespace, data_parallel_size: int) -> None:
    """Fill and check ``global_batch_size`` once the number of data-parallel ranks is known."""
    step = args.micro_batch_size * data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = step
    require(
        args.global_batch_size > 0 and args.global_batch_size % step == 0,
        f"--global-batch-size {args.global_batch_size} is not divisible by --micro-batch-size "
        f"{args.micro_batch_size} x {data_parallel_size} data-parallel ranks",
    )
