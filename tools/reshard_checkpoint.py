"""A checkpoint in the pieces of another tensor- and pipeline-parallel layout, without its ranks.

    python tools/reshard_checkpoint.py RUN OUTPUT --tensor-model-parallel-size 8

A run of any layout loads any checkpoint; cut for it, each rank reads its own pieces alone.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.conversion.reshard import reshard
from megatron_lowbit.errors import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> None:
    """Cut anew what the command line names."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "source", type=Path, metavar="RUN", help="what --save wrote, or one iteration"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, help="ranks that will share a layer"
    )
    parser.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, help="stages that there will be"
    )
    parser.add_argument("--force", action="store_true", help="replace OUTPUT")
    args = parser.parse_args(argv)
    reshard(
        args.source, args.output, args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size, args.force,
    )  # fmt: skip
    print(args.output)


if __name__ == "__main__":
    exit_on_user_error(main)
