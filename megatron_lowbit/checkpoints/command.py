"""Inspect, verify and average checkpoints.

    lowbit-checkpoint inspect RUN [--json]
    lowbit-checkpoint verify RUN
    lowbit-checkpoint average RUN OUTPUT --last 5
    lowbit-checkpoint average RUN OUTPUT --iterations 800 900 1000

RUN is a --save folder (its newest checkpoint) or one iteration of it; inspect accepts Hugging Face
folders, too. A checkpoint loads in any parallel layout, without resharding.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.command_line import add_command, command_parser
from megatron_lowbit.errors import say


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that the command line names."""
    parser = command_parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = add_command(commands, "inspect", "print tensors, files, model and recipe")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    verify = add_command(commands, "verify", "compare the files with their checksums")
    average = add_command(commands, "average", "average the models of several checkpoints")
    for command, start in ((inspect, _inspect), (verify, _verify), (average, _average)):
        command.add_argument("source", type=Path, metavar="RUN", help="--save folder or iteration")
        command.set_defaults(start=start)
    average.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    which = average.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="N", help="number of newest checkpoints")
    which.add_argument(
        "--iterations", type=int, nargs="+", default=[], metavar="N", help="iterations to average"
    )
    average.add_argument("--force", action="store_true", help="replace OUTPUT")
    args = parser.parse_args(argv)
    args.start(args)


def _inspect(args: argparse.Namespace) -> None:
    from megatron_lowbit.checkpoints.inspect import inspect, report

    checkpoint = inspect(args.source)
    say(*([json.dumps(checkpoint)] if args.json else report(checkpoint)))


def _verify(args: argparse.Namespace) -> None:
    from megatron_lowbit.checkpoints.reader import open_checkpoint
    from megatron_lowbit.errors import require

    checkpoint = open_checkpoint(args.source)
    require(checkpoint.files is not None, f"{checkpoint.path}: has no lowbit.json with checksums")
    say(f"{checkpoint.path}: {len(checkpoint.files or ())} files are as they were saved")


def _average(args: argparse.Namespace) -> None:
    from megatron_lowbit.checkpoints.reader import chosen_iterations
    from megatron_lowbit.checkpoints.writer import average

    iterations = chosen_iterations(args.source, args.last, args.iterations)
    average(args.source, iterations, args.output, args.force)
    say(f"{args.output}: the mean of iterations {', '.join(map(str, iterations))}")
