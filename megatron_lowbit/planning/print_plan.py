"""Report of a search of layouts, and the command that starts the fastest."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_lowbit.command_line import shell_line
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.planning import report
from megatron_lowbit.planning.command import read_arguments
from megatron_lowbit.planning.hardware import GPU, gpu, kinds
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.routing import needs_transformer_engine
from megatron_lowbit.planning.search import (
    MOST_GPUS,
    Plan,
    changes,
    enough_gpus,
    layout_arguments,
    plan_run,
)
from megatron_lowbit.planning.training_arguments import TrainingArguments

_WIDTH = 130


def print_plan(own: Namespace, training: Sequence[str]) -> None:
    """Print the layouts of a run, fastest first, or the fastest under each of several recipes.

    Args:
        own: arguments of ``lowbit-plan``.
        training: arguments of the run.

    Raises:
        UserError: an argument is wrong, or no layout fits.
    """
    for name in ("gpus", "gpus_per_node", "top", "tokens"):
        value = getattr(own, name)
        message = f"--{name.replace('_', '-')} {value}: must be positive"
        require(value is None or 0 < value < inf, message)
    names = [] if own.recipes is None else own.recipes.split(",")
    if names:
        given = TrainingArguments(training).flags.precision_recipe
        require(given is None, "--recipes excludes --precision-recipe: leave one of them out")
    choices = [("--precision-recipe", name) for name in names] or [()]
    plans = [plan_run(own, [*training, *choice]) for choice in choices]
    if not any(one.ranked for one in plans):
        raise UserError(_too_large(own, plans))
    first, console = plans[0], plain_console(_WIDTH)
    if own.figures:
        console.print(report.gpu_table(first.device))
    heading = report.heading(first.args, first.parts, first.vocabulary, own.gpus, first.device)
    console.print(heading, highlight=False)
    if names:
        console.print(_comparison(own, plans))
    else:
        _show(console, own, first)
    for one in plans:
        for line in report.routing_notes(one.parts, one.recipe, one.device):
            console.print(line, highlight=False)
    fitting = [one for one in plans if one.ranked]
    for one in fitting:
        start = f"recipe {one.recipe.name}: " if names else ""
        for line in changes(one, own.gpus, own.as_given):
            console.print(start + line, highlight=False, soft_wrap=True)
    _show_command(console, own, max(fitting, key=lambda one: one.best.tokens_per_second))


def _comparison(own: Namespace, plans: Sequence[Plan]) -> Table:
    """Tabulate the fastest layout under each recipe."""
    rows = [(one.recipe.name, one.best, bool(one.ranked)) for one in plans]
    title = "the layout as given" if own.as_given else "fastest layout of each recipe"
    return report.recipe_table(rows, plans[0].device, title, plans[0].tokens)


def _show(console: Console, own: Namespace, found: Plan) -> None:
    """Print the layouts, ranked, and the first of them in detail."""
    device, usable = found.device, usable_bytes(found.device)
    console.print(report.gemm_table(found.parts, found.recipe, device))
    if not own.as_given:
        caption = (
            f"{len(found.found)} layouts tried: {len(found.found) - len(found.ranked)} do not fit "
            f"in {usable / report.GIB:.0f} GiB and are left out, {found.refused} more are refused "
            "by training's own checks"
        )
        title = "layouts, fastest first"
        console.print(report.layout_table(found.ranked[: own.top], device, title, caption))
    best = found.best
    console.print(report.memory_table(best, usable))
    console.print(report.time_table(best, device, found.tokens))


def _show_command(console: Console, own: Namespace, found: Plan) -> None:
    """Print the command that starts the fastest plan, as one line."""
    command, added = run_command(
        found.training, found.words, [] if own.as_given else layout_arguments(found, found.best),
        own.gpus, own.gpus_per_node, found.device.gpu,
    )  # fmt: skip
    if added:
        line = f"added because the run needs them: {' '.join(added)}"
        console.print(line, highlight=False, soft_wrap=True)
    console.print(command, highlight=False, soft_wrap=True)


def _too_large(own: Namespace, plans: Sequence[Plan]) -> str:
    """Describe a run that has no layout, and the number of GPUs on which it has one."""
    enough = [number for one in plans if (number := enough_gpus(own, one)) is not None]
    help_ = f"--gpus {min(enough)} would do" if enough else f"{MOST_GPUS:,} GPUs would not do"
    if own.as_given and enough:
        help_ += ", without --as-given"
    smallest = min(
        (one.best for one in plans if one.found), key=attrgetter("most_memory"), default=None
    )
    if smallest is None:
        why = "no layout is possible; --global-batch-size is no multiple of any layout's ranks"
    else:
        what = "the layout as given" if own.as_given else "no layout fits, the smallest"
        usable = usable_bytes(plans[0].device) / report.GIB
        why = f"{what} takes {smallest.most_memory / report.GIB:.0f} GiB of a GPU's {usable:.0f}"
    return f"--gpus {own.gpus}: {why}; {help_}"


_DATA = (
    "data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "mock_data",
)  # fmt: skip
"""Attributes of which training needs one."""


def run_command(
    training: Sequence[str], words: TrainingArguments, layout: Sequence[str], gpus: int,
    per_node: int, gpu: GPU,
) -> tuple[str, list[str]]:  # fmt: skip
    """Return the command that starts a run, and the arguments in it that nobody gave.

    Args:
        training: arguments of the run as they were given, with ``@FILE``.
        words: the same without those that the layout replaces.
        layout: arguments that ask for the layout.
        gpus: number of GPUs.
        per_node: most GPUs of a host.
        gpu: kind of the GPUs.
    """
    added = [*words.added, *_data(words.flags)]
    written = [*words.given.tokens(), *layout, *added]
    kept = [*training, *layout, *added]
    args = _parsed(written, gpus)
    # A later argument replaces one in a file, but cannot switch off a flag.
    chosen = kept if _parsed(kept, gpus) == args else written
    processes = next(n for n in range(min(per_node, gpus), 0, -1) if gpus % n == 0)
    start = []
    if args["tensor_model_parallel_size"] > 1 and not needs_transformer_engine(gpu.capability):
        start.append("CUDA_DEVICE_MAX_CONNECTIONS=1")
    if gpus > 1:
        start.append("torchrun")
        if gpus > processes:
            rendezvous = "--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500"
            start.append(f"--nnodes {gpus // processes} {rendezvous}")
        start.append(f"--nproc-per-node {processes} --no-python")
    return " ".join([*start, "lowbit-pretrain", shell_line(chosen)]), added


def _data(flags: Namespace) -> list[str]:
    """Return arguments that let a run without data start: mock data and its tokenizer."""
    found = [] if any(getattr(flags, name) for name in _DATA) else ["--mock-data"]
    if flags.tokenizer_model is None:
        found += ["--tokenizer-type", "NullTokenizer"]
    return found


def _parsed(words: Sequence[str], gpus: int) -> dict[str, Any]:
    """Return the validated arguments; none where training refuses them."""
    try:
        return vars(TrainingArguments(words).parse(gpus))
    except UserError:
        return {}


_ASSUMED = "h200"


def planned_gpu(kind: str | None) -> tuple[str, str]:
    """Return the kind of GPU to plan for, and why: it is given, this machine's, or assumed.

    Args:
        kind: as ``--gpu`` names it; None if it is not given.

    Raises:
        UserError: there are no figures of that kind.
    """
    if kind is not None:
        gpu(kind)
        return kind, "as --gpu asks"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for known in kinds():
        if known.upper() in name:
            return known, "this machine's"
    return _ASSUMED, "assumed, --gpu names another"


def describe_plan(training: Sequence[str], gpus: int, kind: str, why: str) -> Iterator[str | Table]:
    """Yield tables of the memory and time of a run, or the reason why there are none.

    Args:
        training: arguments of the run, as given.
        gpus: all of them.
        kind, why: as :func:`planned_gpu` returns them.
    """
    own, _ = read_arguments(["--gpu", kind, "--gpus", str(gpus), "--as-given"])
    try:
        plan = plan_run(own, training)
    except UserError as error:
        yield f"memory and time are not planned: {error}"
        return
    device, (found,) = plan.device, plan.found
    layers = "Transformer Engine's layers" if device.transformer_engine else "local layers"
    yield f"planned for {gpus} x {device.gpu.name} ({why}), {layers}, BF16"
    yield report.memory_table(found, usable_bytes(device))
    yield report.time_table(found, device, plan.tokens)
    yield from report.routing_notes(plan.parts, plan.recipe, device)
