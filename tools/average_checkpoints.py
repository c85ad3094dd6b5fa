"""The mean of the last checkpoints of a run, or of chosen ones: their models alone.

python tools/average_checkpoints.py RUN OUTPUT --last 5
python tools/average_checkpoints.py RUN OUTPUT --iterations 800 900 1000
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.conversion.average import average
from megatron_lowbit.conversion.checkpoints import chosen_iterations
from megatron_lowbit.errors import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> None:
    """Average what the command line names."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="RUN", help="what --save wrote")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="N", help="the last N complete ones")
    which.add_argument(
        "--iterations", type=int, nargs="+", default=[], metavar="ITERATION", help="these"
    )
    parser.add_argument("--force", action="store_true", help="replace OUTPUT")
    args = parser.parse_args(argv)
    iterations = chosen_iterations(args.source, args.last, args.iterations)
    average(args.source, iterations, args.output, args.force)
    print(f"{args.output}: the mean of iterations {', '.join(map(str, iterations))}")


if __name__ == "__main__":
    exit_on_user_error(main)
