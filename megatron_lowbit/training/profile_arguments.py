"""Arguments of profiling, under Megatron-LM's names."""

from argparse import ArgumentParser, Namespace

from megatron_lowbit.errors import require


def add_profiling(parser: ArgumentParser) -> None:
    """Megatron-LM's arguments of profiling."""
    group = parser.add_argument_group("profiling")
    group.add_argument(
        "--profile", action="store_true",
        help="mark iterations for nsys profile --capture-range=cudaProfilerApi",
    )  # fmt: skip
    group.add_argument(
        "--use-pytorch-profiler", action="store_true",
        help="with --profile: a trace and a table of torch's profiler, in --tensorboard-dir",
    )  # fmt: skip
    group.add_argument(
        "--profile-step-start", type=int, default=10, metavar="N", help="after so many iterations"
    )
    group.add_argument(
        "--profile-step-end", type=int, default=12, metavar="N", help="until so many are done"
    )
    group.add_argument(
        "--profile-ranks", type=int, nargs="+", default=[0], metavar="RANK", help="(default: 0)"
    )


def check_profiling(args: Namespace) -> None:
    """Raises UserError where profiling's arguments do not go together."""
    start, end = args.profile_step_start, args.profile_step_end
    require(start >= 1, f"--profile-step-start {start}: must be positive, for a first warm-up")
    require(end > start, f"--profile-step-end {end} must exceed --profile-step-start {start}")
    require(
        not args.profile or end <= args.train_iters,
        f"--profile-step-end {end} exceeds --train-iters {args.train_iters}",
    )
    if args.use_pytorch_profiler:
        require(args.profile, "--use-pytorch-profiler needs --profile")
        require(args.tensorboard_dir is not None, "--use-pytorch-profiler needs --tensorboard-dir")
