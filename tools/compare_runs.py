r"""Compare runs with a baseline: losses, gaps with their noise, spikes, speed.

Example: python tools/compare_runs.py bf16=runs/bf16-1 bf16=runs/bf16-2 nvfp4=runs/nvfp4-1 \
             nvfp4=runs/nvfp4-2 --output runs/comparison

Runs of one name are seeds; the first name is the baseline. The folder gets comparison.png and
comparison.html.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.analysis.comparison import read_contenders
from megatron_lowbit.analysis.comparison_page import table, write_page
from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import exit_on_user_error


def named(argument: str) -> tuple[str, Path]:
    """Split ``[NAME=]PATH`` into name and path; without a name the folder gives it."""
    name, found, path = argument.partition("=")
    if found and not Path(argument).exists():
        return name, Path(path)
    whole = Path(argument).absolute()
    return (whole.name if whole.is_dir() else whole.parent.name), Path(argument)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare what the command line names."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="what --save wrote")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="picture and page go there")
    parser.add_argument("--title", default="Runs compared", help="of the page")
    args = parser.parse_args(argv)
    contenders = read_contenders([named(run) for run in args.runs])
    plain_console(120).print(table(contenders))
    if args.output is not None:
        write_page(contenders, args.output, args.title)
        print(args.output / "comparison.html")


if __name__ == "__main__":
    exit_on_user_error(main)
