r"""Run a study: a grid of runs and seeds, then compare them with the first.

Example: python tools/ablate.py examples/studies/mxfp4-backward.yaml --output runs/mxfp4-backward \
             -- --data-path data/text --tokenizer-model data/tokenizer

What follows -- is for every run. A study that was interrupted goes on when it is run again.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.analysis.comparison import read_contenders
from megatron_lowbit.analysis.comparison_page import table, write_page
from megatron_lowbit.analysis.study import jobs_of, read_study
from megatron_lowbit.analysis.study_runner import run
from megatron_lowbit.command_line import CommandParser, split_at_dashes
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> None:
    """Run and compare what the command line names."""
    own, more = split_at_dashes(argv)
    parser = CommandParser(description=__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="as in examples/studies")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="of runs and comparison",
    )
    parser.add_argument("--gpus", nargs="+", metavar="N", help="a run at a time on each of them")
    parser.add_argument("--at-once", type=int, default=1, help="runs on a GPU")
    parser.add_argument("--keep-checkpoints", action="store_true", help="also of finished runs")
    args = parser.parse_args(own)
    study = read_study(args.study)
    jobs = jobs_of(study, args.output, more)
    run(jobs, (args.gpus or [None]) * args.at_once, args.keep_checkpoints)
    contenders = read_contenders([(job.name, job.folder) for job in jobs])
    contenders.sort(key=lambda contender: study.names.index(contender.name))
    plain_console(120).print(table(contenders))
    write_page(contenders, args.output, args.study.stem)
    print(args.output / "comparison.html")


if __name__ == "__main__":
    exit_on_user_error(main)
