"""Arguments of parallelism: Megatron-LM's names and meanings, and the fused all-reduce."""

import argparse
from argparse import Namespace

from megatron_lowbit.errors import require


def add_parallelism(parser: argparse.ArgumentParser) -> None:
    """The arguments, as a group of their own."""
    group = parser.add_argument_group("parallelism")
    group.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, help="ranks that share each layer"
    )
    group.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, help="stages of layers, a rank each"
    )
    group.add_argument(
        "--num-layers-per-virtual-pipeline-stage", type=int,
        help="a rank has several stages of so many layers (default: one stage)",
    )  # fmt: skip
    group.add_argument(
        "--expert-model-parallel-size", type=int, default=1, help="ranks that share the experts"
    )
    group.add_argument("--context-parallel-size", type=int, default=1, help="1 here")
    group.add_argument(
        "--sequence-parallel", action="store_true",
        help="tensor-parallel ranks share the sequence between their layers, too",
    )  # fmt: skip
    group.add_argument(
        "--fused-allreduce-norm", action="store_true",
        help="one kernel for the all-reduce of tensor parallelism, the residual and the next norm",
    )  # fmt: skip
    group.add_argument(
        "--use-distributed-optimizer", action="store_true",
        help="data-parallel ranks share the optimizer's state",
    )  # fmt: skip
    group.add_argument(
        "--overlap-grad-reduce", action="store_true", help="reduce gradients during backward"
    )
    group.add_argument(
        "--overlap-param-gather", action="store_true", help="gather weights during forward"
    )
    group.add_argument(
        "--distributed-timeout-minutes", type=float, default=10,
        help="minutes without progress after which a rank ends the job",
    )  # fmt: skip


def fill_parallelism(args: Namespace) -> None:
    """Values that follow from other arguments."""
    args.virtual_pipeline_model_parallel_size = None
    if args.num_layers_per_virtual_pipeline_stage:
        per_stage = args.num_layers // args.pipeline_model_parallel_size
        stages = per_stage // args.num_layers_per_virtual_pipeline_stage
        args.virtual_pipeline_model_parallel_size = stages


def check_parallelism(args: Namespace) -> None:
    """Raise UserError where the arguments do not fit together."""
    require(
        args.distributed_timeout_minutes <= 1e6,
        f"--distributed-timeout-minutes {args.distributed_timeout_minutes:g}: at most 1000000",
    )
    if args.sequence_parallel:
        ranks = args.tensor_model_parallel_size
        require(ranks > 1, "--sequence-parallel needs --tensor-model-parallel-size above 1")
        require(
            args.seq_length % ranks == 0,
            f"--seq-length {args.seq_length} is not divisible by --tensor-model-parallel-size "
            f"{ranks}",
        )
    require(
        args.context_parallel_size == 1,
        f"--context-parallel-size {args.context_parallel_size}: only Transformer Engine's "
        "attention splits a sequence; this runs megatron-core's local layers, so leave it at 1",
    )
    if args.num_layers_per_virtual_pipeline_stage:
        require(
            args.virtual_pipeline_model_parallel_size >= 2
            and args.pipeline_model_parallel_size >= 2,
            "--num-layers-per-virtual-pipeline-stage needs at least 2 pipeline stages with 2 "
            "virtual stages each",
        )
    require(
        not args.overlap_param_gather
        or (args.overlap_grad_reduce and args.use_distributed_optimizer),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    )
    if args.fused_allreduce_norm:
        _check_fused(args)


def _check_fused(args: Namespace) -> None:
    fitting = {
        "--tensor-model-parallel-size above 1": args.tensor_model_parallel_size > 1,
        "a model without --sequence-parallel, which splits what is normalized": (
            not args.sequence_parallel
        ),
        "--normalization RMSNorm": args.normalization == "RMSNorm",
        "--disable-bias-linear": args.disable_bias_linear,
        "--hidden-dropout 0": args.hidden_dropout == 0,
        "a model without --num-experts": args.num_experts is None,
        "a GPT: Mamba blocks are not wired up to it": args.hybrid_override_pattern is None,
    }
    for what, fits in fitting.items():
        require(fits, f"--fused-allreduce-norm needs {what}")
