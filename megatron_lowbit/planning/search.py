"""Search of the layouts of a training run, and its report."""

from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console

from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.planning import report
from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.estimate import Estimate, estimate
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import Candidate, candidate_of, candidates
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.model import check_plannable, layers, stages
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import Recipe, load_recipes

_WIDTH = 130


def print_plan(own: Namespace, training: Sequence[str]) -> None:
    """Print the layouts of a run, fastest first.

    Args:
        own: arguments of ``lowbit-plan``.
        training: arguments of the run.

    Raises:
        UserError: an argument is wrong, or no layout fits.
    """
    for name in ("gpus", "gpus_per_node", "top"):
        value = getattr(own, name)
        require(value > 0, f"--{name.replace('_', '-')} {value}: must be positive")
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
    console = plain_console(_WIDTH)
    if own.figures:
        console.print(report.gpu_table(device))
    (whole,) = stages(args, recipe)
    console.print(report.heading(args, whole, vocabulary, own.gpus, device), highlight=False)
    console.print(report.gemm_table(whole, recipe, device))
    _show(console, own, found, refused, device)


def _show(
    console: Console, own: Namespace, found: list[Estimate], refused: int, device: Device
) -> None:
    """Print the layouts, ranked, and the first of them in detail."""
    usable = usable_bytes(device)
    fitting = [one for one in found if one.most_memory <= usable]
    ranked = sorted(fitting, key=lambda one: -one.tokens_per_second)
    smallest = min(found, key=lambda one: one.most_memory)
    if not own.as_given:
        caption = (
            f"{len(found)} layouts tried: {len(found) - len(fitting)} do not fit in "
            f"{usable / report.GIB:.0f} GiB and are left out, {refused} more are refused by "
            "training's own checks"
        )
        title = "layouts, fastest first"
        console.print(report.layout_table(ranked[: own.top], device, title, caption))
    best = (ranked or [smallest])[0]
    console.print("arguments: " + " ".join(best.layout.arguments()), highlight=False)
    console.print(report.memory_table(best, usable))
    console.print(report.time_table(best, device))
    require(
        bool(fitting),
        f"--gpus {own.gpus}: no layout fits in {usable / report.GIB:.0f} GiB a GPU, the smallest, "
        f"above, takes {smallest.most_memory / report.GIB:.0f}; pipeline stages must divide "
        "--num-layers and the GPUs",
    )


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
    if args.vocab_size is not None:
        require(args.vocab_size > 0, f"--vocab-size {args.vocab_size}: must be positive")
        return args.vocab_size
    require(
        args.tokenizer_model is not None,
        "--vocab-size is missing: give the tokenizer's size, or the tokenizer by --tokenizer-model",
    )
    from megatron_lowbit.data.tokenizer import load_tokenizer

    return load_tokenizer(args.tokenizer_type, args.tokenizer_model, None).vocab_size
