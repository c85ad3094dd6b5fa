"""Search of the layouts of a training run."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.planning.communication import Cluster
from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.estimate import Estimate, estimate
from megatron_lowbit.planning.hardware import gpu
from megatron_lowbit.planning.layouts import Candidate, candidate_of, candidates
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.model import Part, check_plannable, layers, stages
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import Recipe, load_recipes

MOST_GPUS = 3 << 15
"""GPUs up to which a run that does not fit is tried on more."""


class Plan(NamedTuple):
    """Estimates of a run under one recipe.

    Attributes:
        training: arguments of the run as given.
        words: the same, without those of a layout if layouts were searched.
        parts: those of the whole model.
        found: estimates of the layouts ``tried``, in their order.
        refused: number of rank layouts that training refuses.
        tokens: tokens of the whole run; None if the arguments do not say it.
    """

    training: Sequence[str]
    words: TrainingArguments
    args: Namespace
    recipe: Recipe
    parts: Counter[Part]
    vocabulary: int
    device: Device
    cluster: Cluster
    tried: list[Candidate]
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
        args = words.parse(own.gpus)
        check_plannable(args)
        tried, refused = [candidate_of(args, own.gpus)], 0
    else:
        tried, refused = _search(words, own.gpus, cluster.gpus_per_node)
    args = tried[0].args if tried else words.parse(own.gpus, ["--micro-batch-size", "1"])
    vocabulary = vocabulary_size(args)
    recipe = load_recipes(args.precision_recipe, args.recipe_set)
    recipe.check_matchers(layers(args))
    device = Device(kind, args.transformer_impl == "transformer_engine", own.scan)
    found = plan(tried, recipe, vocabulary, device, cluster)
    (parts,) = stages(args, recipe)
    tokens = own.tokens or words.tokens
    return Plan(
        training, words, args, recipe, parts, vocabulary, device, cluster, tried, found, refused,
        tokens,
    )  # fmt: skip


def plan(
    tried: Sequence[Candidate], recipe: Recipe, vocabulary: int, device: Device, cluster: Cluster
) -> list[Estimate]:
    """Estimate every candidate, in their order."""
    made: dict[tuple, list] = {}
    found = []
    for layout, args in tried:
        key = layout.pipeline, layout.chunks
        if key not in made:
            made[key] = stages(args, recipe, *key)
        found.append(estimate(args, made[key], layout, vocabulary, device, cluster))
    return found


def _search(words: TrainingArguments, gpus: int, per_node: int) -> tuple[list[Candidate], int]:
    """Return the candidates, and how many rank layouts training refuses."""
    tried = list(candidates(words, gpus, per_node))
    refusals = [one for one in tried if isinstance(one, str)]
    good = [one for one in tried if not isinstance(one, str)]
    if refusals and not good:
        raise UserError(f"--gpus {gpus}: no layout is possible; {refusals[0]}")
    return good, len(refusals)


def enough_gpus(own: Namespace, found: Plan) -> int | None:
    """Return the smallest number of GPUs tried on which a run fits; None if none is enough.

    Tried are powers of two and three times those from ``own.gpus`` on, beyond a host whole hosts.
    """
    words, device = TrainingArguments(found.training), found.device
    weights = sum(
        number * linear.elements(1) for part, number in found.parts.items() for linear in part[1:]
    )
    for gpus in sorted(size << power for power in range(16) for size in (1, 3)):
        per_node = min(own.gpus_per_node, gpus)
        # A weight has 4 bits at least, whatever the layout.
        fits = weights / 2 <= gpus * usable_bytes(device)
        if gpus < own.gpus or gpus % per_node or not fits:
            continue
        tried = [
            one
            for one in candidates(words, gpus, per_node, interleaved=False)
            if not isinstance(one, str)
            and one.layout.micro_batch == 1
            and one.layout.recompute in ("all", "-")
        ]
        cluster = Cluster(device.gpu, per_node)
        estimates = plan(tried, found.recipe, found.vocabulary, device, cluster)
        if any(one.most_memory <= usable_bytes(device) for one in estimates):
            return gpus
    return None


def vocabulary_size(args: Namespace) -> int:
    """Return the tokenizer's size, without padding.

    Raises UserError where no argument says it.
    """
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    if args.vocab_size is not None:
        return int(args.vocab_size)
    require(
        args.tokenizer_model is not None,
        "--vocab-size is missing: give the tokenizer's size, or the tokenizer by --tokenizer-model",
    )
    from megatron_lowbit.data.tokenizer import load_tokenizer

    return load_tokenizer(args.tokenizer_type, args.tokenizer_model, None).vocab_size


_CHANGES = (
    ("--moe-grouped-gemm",),
    ("--cuda-graph-impl", "local", "--eval-precision", "recipe"),
    ("--cross-entropy-loss-fusion",),
    ("--grad-reduce-in-bf16",),
    ("--quantized-param-gather",),
    ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ("--sequence-parallel",),
    ("--transformer-impl", "transformer_engine"),
)
"""Arguments outside a layout that change memory or time."""
_A_TENTH = 0.1
_NEARLY = 1.3
"""Memory, of what a GPU has, of layouts that an argument may make fit."""


def layout_arguments(found: Plan, one: Estimate) -> list[str]:
    """Return the training arguments that ask for a layout and its batch."""
    batch = str(one.tokens // found.args.seq_length)
    return [
        *one.layout.arguments(found.args.hybrid_layer_pattern), "--global-batch-size", batch,
    ]  # fmt: skip


def changes(found: Plan, gpus: int, as_given: bool) -> Iterator[str]:
    """Yield a line for each argument that changes speed or memory of the best layout by a tenth.

    The speed is that of the fastest layout with the argument, of those that were best for their
    numbers of ranks without it. ``as_given``: only of the layout that the training arguments name.
    """
    before, tried = found.best, _representatives(found)
    more = [] if as_given else ["--micro-batch-size", "1"]
    base = vars(found.words.parse(gpus, more))
    for change in _CHANGES:
        try:
            parsed = vars(found.words.parse(gpus, [*more, *change]))
        except UserError:
            continue
        new = {name: value for name, value in parsed.items() if value != base[name]}
        native = parsed["transformer_impl"] == "transformer_engine"
        device = found.device._replace(transformer_engine=native)
        changed = [Candidate(one.layout, Namespace(**vars(one.args) | new)) for one in tried]
        estimates = plan(changed, found.recipe, found.vocabulary, device, found.cluster)
        after = _fastest(found, estimates, gpus, [] if as_given else None, change) if new else None
        if after is None:
            continue
        speed = after.tokens_per_second / before.tokens_per_second
        memory = estimates[0].most_memory / before.most_memory
        if max(abs(speed - 1), abs(memory - 1)) >= _A_TENTH:
            where = "" if after.layout == before.layout else " in another layout"
            yield (
                f"{' '.join(change)}: {speed:.2f}x the tokens/s{where}, "
                f"{memory:.2f}x the memory of this layout"
            )


def _representatives(found: Plan) -> list[Candidate]:
    """Return the best layout, and for each division of the ranks the fastest and a larger one."""
    usable, best = usable_bytes(found.device), found.best
    chosen: dict[tuple, int] = {(): found.found.index(best)}
    order = sorted(range(len(found.found)), key=lambda i: -found.found[i].tokens_per_second)
    for number in order:
        one = found.found[number]
        share = one.most_memory / usable
        if share <= _NEARLY:
            ranks = one.layout.tensor, one.layout.pipeline, one.layout.expert
            chosen.setdefault((*ranks, share <= 1), number)
    return [found.tried[number] for number in chosen.values()]


def _fastest(
    found: Plan, estimates: list[Estimate], gpus: int, layout: list[str] | None, change: tuple
) -> Estimate | None:
    """Return the fastest that fits and that training takes with the change."""
    usable = usable_bytes(found.device)
    for one in sorted(estimates, key=lambda one: -one.tokens_per_second):
        if one.most_memory <= usable:
            asked = layout_arguments(found, one) if layout is None else layout
            try:
                found.words.parse(gpus, [*asked, *change])
            except UserError:
                continue
            return one
    return None
