r"""Plot the losses of one or several runs from their metrics.jsonl.

Example: python tools/plot_loss.py bf16=runs/bf16/metrics.jsonl nvfp4=runs/nvfp4/metrics.jsonl \
             --output loss.png
"""

from pathlib import Path

from megatron_lowbit.analysis.loss_curve import plot_loss
from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.errors import UserError, exit_on_user_error


def named_runs(arguments: list[str]) -> dict[str, Path]:
    """Split ``[NAME=]PATH`` into name and path; without a name the file's folder gives it."""
    runs: dict[str, Path] = {}
    for argument in arguments:
        name, found, path = argument.partition("=")
        if not found or Path(argument).is_file():
            name, path = Path(argument).absolute().parent.name, argument
        if name in runs:
            raise UserError(f"{argument}: two runs are named {name!r}; give NAME={path}")
        runs[name] = Path(path)
    return runs


def main(argv: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]METRICS.jsonl",
        help="the first is the reference of the gap; name: its folder's",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.png", help="the picture"
    )
    args = parser.parse_args(argv)
    plot_loss(named_runs(args.runs), args.output)
    print(args.output)


if __name__ == "__main__":
    exit_on_user_error(main)
