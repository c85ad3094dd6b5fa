"""A checkpoint in the pieces of another tensor- and pipeline-parallel layout, without its ranks.

    python tools/reshard_checkpoint.py RUN OUTPUT --tensor-model-parallel-size 8

A run of any layout loads any checkpoint; cut for it, each rank reads its own pieces alone.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.conversion.reshard import reshard
from megatron_lowbit.errors import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> None:
    """Cut anew what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN", help="what --save wrote, or one iteration"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT")
    args = parser.parse_args(argv)
    reshard(
        args.source, args.output, args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size, args.force,
    )  # fmt: skip
    print(args.output)


if __name__ == "__main__":
    exit_on_user_error(main)
