r"""Run studies, compare runs, and find the layers with the largest quantization error.

    lowbit-study run --recipes bf16 mine.yaml --output runs/compared \
        -- @examples/gpt-7m-cpu.args --data-path data/text --tokenizer-model data/tokenizer
    lowbit-study run examples/studies/mxfp4-backward.yaml --output runs/mxfp4-backward \
        -- --data-path data/text --tokenizer-model data/tokenizer
    lowbit-study plan examples/studies/leaderboard.yaml --output runs/leaderboard --gpu h100 \
        --minutes 9 -- --vocab-size 8192
    lowbit-study compare bf16=runs/bf16-1 bf16=runs/bf16-2 nvfp4=runs/nvfp4-1 nvfp4=runs/nvfp4-2
    lowbit-study sensitivity --recipe nvfp4 --keep 0.15 --output mine.yaml \
        -- @examples/gpt-30m.args --load runs/bf16 --data-path data/text

Arguments after -- are training arguments, as for lowbit-pretrain.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from math import inf, ulp
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lowbit.command_line import add_command, command_parser, split_at_dashes
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import require, say

if TYPE_CHECKING:
    from megatron_lowbit.analysis.comparison import Contender
    from megatron_lowbit.study.definition import Job, Study

_LIMITS = {
    "at_once": (1, 1001, "from 1 to 1000"),
    "count": (1, 100_001, "from 1 to 100000"),
    "minutes": (ulp(0), inf, "positive and finite"),
    "start_up": (0, inf, "not negative and finite"),
    "leave_out": (0, inf, "not negative and finite"),
}
"""Least values of arguments, values that they must be below, and the words for both."""
_TRAINING = "Arguments after -- are training arguments, as for lowbit-pretrain."
DEFAULT_SEEDS = (1, 2)
"""Seeds of a comparison of recipes; gaps have no standard error with less than two."""
# Imports inside the functions below are slow: the help needs none of them.


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that the command line names."""
    before, training = split_at_dashes(argv)
    args = _parser().parse_args(before)
    args.start(args, training)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = add_command(
        commands, "run", "run recipes or a study, then compare the runs", epilog=_TRAINING
    )
    _add_study(run)
    run.add_argument("--gpus", nargs="+", metavar="N", help="GPUs to use (default: the first)")
    run.add_argument(
        "--minutes", type=float, help="time after which runs stop, with a checkpoint to resume from"
    )
    run.add_argument(
        "--leave-out", type=float, metavar="ERRORS",
        help="start no further seeds of a run that is this many standard errors behind the best",
    )  # fmt: skip
    run.add_argument(
        "--keep-checkpoints", action="store_true", help="keep the checkpoints of finished runs"
    )
    run.set_defaults(start=_run)

    plan = add_command(
        commands,
        "plan",
        "estimate the time of a study's runs, and which of them fit into each command",
        epilog=_TRAINING,
    )
    _add_study(plan)
    plan.add_argument("--gpu", default="h200", help="GPU as in lowbit-plan (default: h200)")
    plan.add_argument("--count", type=int, default=1, metavar="N", help="number of GPUs")
    plan.add_argument("--minutes", type=float, default=60, help="time limit of each command")
    plan.add_argument(
        "--start-up", type=float, default=60, metavar="SECONDS",
        help="time until a run's first iteration (default: 60)",
    )  # fmt: skip
    plan.set_defaults(start=_plan)

    compare = add_command(
        commands,
        "compare",
        "compare runs with a baseline: losses, gaps with standard errors, speed",
    )
    compare.add_argument(
        "runs", nargs="+", metavar="[NAME=]RUN",
        help="folder of a run; runs of one name differ in the seed, the first name is the baseline",
    )  # fmt: skip
    compare.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for comparison.png and .html"
    )
    compare.add_argument("--title", default="Runs compared", help="title of the page")
    compare.set_defaults(start=_compare)

    sensitivity = add_command(
        commands,
        "sensitivity",
        "rank layers by quantization error, and write a recipe that keeps the worst in BF16",
        epilog=_TRAINING,
    )
    sensitivity.add_argument(
        "--recipe", required=True, metavar="NAME_OR_FILE", help="recipe to measure"
    )
    sensitivity.add_argument("--batches", type=int, default=4, help="number of batches to measure")
    sensitivity.add_argument(
        "--keep", type=float, default=0.15, help="largest fraction of the weights to keep in BF16"
    )
    sensitivity.add_argument("--output", type=Path, metavar="FILE.yaml", help="recipe to write")
    sensitivity.set_defaults(start=_sensitivity)
    return parser


def _add_study(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a study's runs and its folder."""
    parser.add_argument(
        "study", type=Path, nargs="?", metavar="STUDY.yaml",
        help="study file, such as those in examples/studies",
    )  # fmt: skip
    parser.add_argument(
        "--recipes", nargs="+", metavar="NAME_OR_FILE",
        help="recipes to compare, the baseline first; with a study file, recipes in place of its "
        "runs, compared with its baseline",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="only these runs of the study file, and its baseline",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", nargs="+", type=int, metavar="N",
        help="seeds of each run (default: from the study file; 1 and 2 for --recipes)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER",
        help="folder of runs and comparison; an interrupted study continues there",
    )  # fmt: skip
    parser.add_argument("--at-once", type=int, default=1, help="number of runs per GPU at a time")


def _study_of(args: argparse.Namespace) -> "Study":
    from megatron_lowbit.recipes import load_recipes
    from megatron_lowbit.study.definition import read_study, study_of, with_recipes, with_runs

    for name, (least, limit, words) in _LIMITS.items():
        value = getattr(args, name, None)
        message = f"--{name.replace('_', '-')} {value}: must be {words}"
        require(value is None or least <= value < limit, message)
    require(bool(args.study or args.recipes), "give STUDY.yaml or --recipes")
    require(
        not args.only or (args.study and not args.recipes),
        "--only names runs of STUDY.yaml: not with --recipes",
    )
    for recipe in args.recipes or ():
        load_recipes([recipe])
    if not args.study:
        return study_of(args.recipes, args.seeds or DEFAULT_SEEDS)
    study = read_study(args.study)
    study = with_recipes(study, args.recipes) if args.recipes else study
    study = with_runs(study, args.only) if args.only else study
    return study.model_copy(update={"seeds": args.seeds}) if args.seeds else study


def _run(args: argparse.Namespace, training: list[str]) -> None:
    from torch.cuda import device_count

    from megatron_lowbit.analysis.comparison import compare, far_behind, read_contenders
    from megatron_lowbit.analysis.comparison_page import gaps_text
    from megatron_lowbit.folders import check_folder
    from megatron_lowbit.storage.lock import FolderLock
    from megatron_lowbit.study.definition import jobs_of
    from megatron_lowbit.study.runner import run

    study = _study_of(args)

    def contenders_of(finished: "Sequence[Job]") -> "list[Contender]":
        jobs = sorted(finished, key=lambda job: study.names.index(job.name))
        return read_contenders([(job.name, job.folder) for job in jobs])

    def judge(finished: "Sequence[Job]") -> tuple[str, set[str]]:
        """Compare finished runs; nothing before a run of the baseline has finished."""
        if study.names[0] not in {job.name for job in finished}:
            return "", set()
        rows = compare(contenders_of(finished))
        behind = set() if args.leave_out is None else far_behind(rows, args.leave_out)
        return gaps_text(rows), behind

    jobs = jobs_of(study, args.output, training)
    count = device_count()
    absent = [n for n in args.gpus or () if not count or (n.isdigit() and int(n) >= count)]
    advice = "omit it to train on the CPU" if not count else f"the last is {count - 1}"
    require(not absent, f"--gpus {' '.join(absent)}: this machine has {count} GPUs; {advice}")
    gpus = (args.gpus or [None]) * args.at_once
    check_folder("--output", args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    with closing(FolderLock(args.output, f"--output {args.output}")):
        if jobs := run(jobs, gpus, args.keep_checkpoints, judge, args.minutes):
            title = args.study.stem if args.study else ", ".join(study.names)
            _show(contenders_of(jobs), args.output, title)


def _plan(args: argparse.Namespace, training: list[str]) -> None:
    from megatron_lowbit.study.definition import jobs_of
    from megatron_lowbit.study.schedule import described

    jobs = jobs_of(_study_of(args), args.output, training)
    runs, console = args.count * args.at_once, plain_console(120)
    for line in described(jobs, args.gpu, runs, args.at_once, args.minutes, args.start_up):
        console.print(line, highlight=False)


def _compare(args: argparse.Namespace, training: list[str]) -> None:
    from megatron_lowbit.analysis.comparison import read_contenders
    from megatron_lowbit.folders import check_folder

    require(not training, f"-- {' '.join(training)}: compare trains nothing; omit them")
    if args.output is not None:
        check_folder("--output", args.output)
    _show(read_contenders([named(run) for run in args.runs]), args.output, args.title)


def named(argument: str) -> tuple[str, Path]:
    """Split ``[NAME=]PATH`` into name and path; without a name the folder gives it."""
    name, equals, path = argument.partition("=")
    if equals and not Path(argument).exists():
        return name, Path(path)
    run = Path(argument).absolute()
    return (run.name if run.is_dir() else run.parent.name), Path(argument)


def _show(contenders: "list[Contender]", output: Path | None, title: str) -> None:
    from megatron_lowbit.analysis.comparison_page import table, write_page

    plain_console(120).print(table(contenders))
    if output is not None:
        write_page(contenders, output, title)
        say(str(output / "comparison.html"))


def _sensitivity(args: argparse.Namespace, training: list[str]) -> None:
    from megatron_lowbit.study.sensitivity import rank_layers

    rank_layers(args.recipe, args.batches, args.keep, args.output, training)
