"""Search of the layouts of a training run, and its report."""

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.planning import report
from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.estimate import Estimate, estimate
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import Candidate, candidate_of, candidates
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.model import Part, check_plannable, layers, stages
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import Recipe, load_recipes

_WIDTH = 130


class Plan(NamedTuple):
    """Estimates of a run under one recipe.

    ``parts`` are the whole model's, ``refused`` is the number of rank layouts that training
    refuses, and ``tokens`` are those of the whole run, where the arguments say it.
    """

    args: Namespace
    recipe: Recipe
    parts: Counter[Part]
    vocabulary: int
    device: Device
    found: list[Estimate]
    refused: int
    tokens: float | None

    @property
    def ranked(self) -> list[Estimate]:
        """The layouts that fit, fastest first."""
        usable = usable_bytes(self.device)
        fitting = [one for one in self.found if one.most_memory <= usable]
        return sorted(fitting, key=lambda one: -one.tokens_per_second)

    @property
    def best(self) -> Estimate:
        """The fastest layout that fits, or else the smallest."""
        return (self.ranked or [min(self.found, key=lambda one: one.most_memory)])[0]


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
    names = own.recipes.split(",") if own.recipes else []
    if names:
        given = TrainingArguments(training).flags.precision_recipe
        require(given is None, "--recipes excludes --precision-recipe: leave one of them out")
    choices = [("--precision-recipe", name) for name in names] or [()]
    plans = [plan_run(own, [*training, *choice]) for choice in choices]
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
    smallest = min((one.best for one in plans), key=lambda one: one.most_memory)
    usable = usable_bytes(first.device) / report.GIB
    require(
        any(one.ranked for one in plans),
        f"--gpus {own.gpus}: no layout fits in {usable:.0f} GiB a GPU, the smallest, "
        f"above, takes {smallest.most_memory / report.GIB:.0f}; pipeline stages must divide "
        "--num-layers and the GPUs",
    )


def plan_run(own: Namespace, training: Sequence[str]) -> Plan:
    """Estimate the layouts of a run under the recipe of its arguments.

    Args:
        own: arguments of ``lowbit-plan``.
        training: arguments of the run.

    Raises:
        UserError: an argument is wrong.
    """
    kind, words = gpu(own.gpu), TrainingArguments(training)
    cluster = Cluster(kind, min(own.gpus_per_node, own.gpus))
    if own.as_given:
        tried, refused = [candidate_of(words.parse(own.gpus), own.gpus)], 0
    else:
        tried, refused = _search(words, own.gpus, cluster.gpus_per_node)
    args = tried[0].args
    check_plannable(args)
    vocabulary = vocabulary_size(args)
    recipe = load_recipes(args.precision_recipe, args.recipe_set)
    recipe.check_matchers(layers(args))
    device = Device(kind, args.transformer_impl == "transformer_engine", own.scan)
    found = plan(tried, recipe, vocabulary, device, cluster)
    (parts,) = stages(args, recipe)
    tokens = own.tokens or words.tokens
    return Plan(args, recipe, parts, vocabulary, device, found, refused, tokens)


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
    console.print("arguments: " + " ".join(best.layout.arguments()), highlight=False)
    console.print(report.memory_table(best, usable))
    console.print(report.time_table(best, device, found.tokens))


def plan(
    tried: Sequence[Candidate], recipe: Recipe, vocabulary: int, device: Device, cluster: Cluster
) -> list[Estimate]:
    """Estimate every candidate, in their order."""
    made: dict[tuple, list] = {}
    found = []
    for layout, args in tried:
        key = layout.pipeline, layout.virtual
        if key not in made:
            made[key] = stages(args, recipe, *key)
        found.append(estimate(args, made[key], layout, vocabulary, device, cluster))
    return found


def _search(words: TrainingArguments, gpus: int, per_node: int) -> tuple[list[Candidate], int]:
    """Return the candidates, and how many rank layouts training refuses."""
    tried = list(candidates(words, gpus, per_node))
    refusals = [one for one in tried if isinstance(one, str)]
    good = [one for one in tried if not isinstance(one, str)]
    if not good:
        why = (
            refusals[0] if refusals else "--global-batch-size is no multiple of any layout's ranks"
        )
        raise UserError(f"--gpus {gpus}: no layout is possible; {why}")
    return good, len(refusals)


def vocabulary_size(args: Namespace) -> int:
    """Return the tokenizer's size, without padding.

    Raises UserError where no argument says it.
    """
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    if args.vocab_size is not None:
        require(args.vocab_size > 0, f"--vocab-size {args.vocab_size}: must be positive")
        return args.vocab_size
    require(
        args.tokenizer_model is not None,
        "--vocab-size is missing: give the tokenizer's size, or the tokenizer by --tokenizer-model",
    )
    from megatron_lowbit.data.tokenizer import load_tokenizer

    return load_tokenizer(args.tokenizer_type, args.tokenizer_model, None).vocab_size
