"""Search of the layouts of a training run."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.planning.device import Device
from megatron_lowbit.planning.estimate import Estimate, estimate
from megatron_lowbit.planning.hardware import SCANS, gpu
from megatron_lowbit.planning.layouts import SHARDED, Candidate, candidates, layout_of
from megatron_lowbit.planning.model import Part, check_plannable, layers, stages
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import Recipe, load_recipes

MOST_GPUS = 3 << 15
"""GPUs up to which a run that does not fit is tried on more."""
_CHANGES = (
    ("--moe-grouped-gemm",),
    ("--cuda-graph-impl", "local"),
    ("--cross-entropy-loss-fusion",),
    ("--grad-reduce-in-bf16",),
    ("--quantized-param-gather",),
    SHARDED,
    ("--sequence-parallel",),
    ("--transformer-impl", "transformer_engine"),
)
"""Arguments outside a layout that change memory or time."""


class Plan(NamedTuple):
    """Estimates of a run under one recipe.

    Attributes:
        training: arguments of the run, without the arguments of a layout if layouts were searched.
        gpus: number of GPUs.
        as_given: only the layout of the arguments was planned.
        args: arguments of the run on one GPU.
        parts: parts of the full model, on one GPU.
        vocabulary: the tokenizer's size, without padding.
        estimates: of every layout.
        refused: number of divisions of the GPUs that training refuses.
        tokens: tokens of the whole run; None if the arguments do not say it.
    """

    training: TrainingArguments
    gpus: int
    as_given: bool
    args: Namespace
    recipe: Recipe
    parts: Counter[Part]
    vocabulary: int
    device: Device
    estimates: list[Estimate]
    refused: int
    tokens: float | None

    def fits(self, estimate: Estimate) -> bool:
        """Return True if every rank of a layout has the memory."""
        return estimate.most_memory <= self.device.usable_bytes

    @property
    def ranked(self) -> list[Estimate]:
        """The layouts that fit, fastest first."""
        return _fastest_first(filter(self.fits, self.estimates))

    @property
    def best(self) -> Estimate:
        """The fastest layout that fits, or else the smallest."""
        return (self.ranked or [min(self.estimates, key=lambda each: each.most_memory)])[0]

    def arguments(self, estimate: Estimate) -> list[str]:
        """Return the training arguments that ask for a layout and its batch; none as given."""
        if self.as_given:
            return []
        batch = str(estimate.tokens // self.args.seq_length)
        words = estimate.layout.arguments(self.args.hybrid_layer_pattern)
        return [*words, "--global-batch-size", batch]


def _fastest_first(estimates: Iterable[Estimate]) -> list[Estimate]:
    return sorted(estimates, key=lambda each: -each.tokens_per_second)


def plan_run(
    words: Sequence[str], gpu_name: str, gpus: int, gpus_per_node: int = 8, as_given: bool = False,
    scan: str = SCANS[0], tokens: float | None = None,
) -> Plan:  # fmt: skip
    """Estimate the layouts of a run under the recipe of its arguments ``words``.

    ``gpu_name``: a name of :func:`gpu`. ``as_given``: only the layout that the arguments ask for.
    ``tokens``: tokens of the run (default: from the arguments). Raises UserError for an
    argument that is wrong.
    """
    figures, training = gpu(gpu_name), TrainingArguments(words)
    if as_given:
        args = training.parse(gpus)
        check_plannable(args)
        tried, refusals = [(layout_of(args, gpus), args)], list[str]()
    else:
        tried, refusals = candidates(training, gpus, gpus_per_node)
        if refusals and not tried:
            raise UserError(f"--gpus {gpus}: no layout is possible; {refusals[0]}")
        args = tried[0][1] if tried else training.parse(gpus, ["--micro-batch-size", "1"])
    vocabulary = vocabulary_size(args)
    recipe = load_recipes(args.precision_recipe, args.recipe_set)
    recipe.check_matchers(layers(args))
    native = args.transformer_impl == "transformer_engine"
    device = Device(figures, native, scan, gpus_per_node=gpus_per_node)
    estimates = plan(tried, recipe, vocabulary, device)
    one_gpu = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
    args = Namespace(**vars(args) | one_gpu)
    (parts,) = stages(args, recipe)
    return Plan(
        training, gpus, as_given, args, recipe, parts, vocabulary, device, estimates,
        len(refusals), tokens or training.tokens,
    )  # fmt: skip


def plan(
    tried: Sequence[Candidate], recipe: Recipe, vocabulary: int, device: Device
) -> list[Estimate]:
    """Estimate every candidate, in their order."""
    divided: dict[tuple[object, ...], list[Counter[Part]]] = {}
    estimates = []
    for layout, args in tried:
        key = layout.tensor, layout.expert, layout.pipeline, layout.chunks
        if key not in divided:
            divided[key] = stages(args, recipe, layout.pipeline, layout.chunks)
        estimates.append(estimate(layout, args, divided[key], recipe, vocabulary, device))
    return estimates


def vocabulary_size(args: Namespace) -> int:
    """Return the tokenizer's size, without padding.

    Raises UserError where no argument says it.
    """
    if size := args.padded_vocab_size or args.vocab_size:
        return int(size)
    require(
        args.tokenizer_model is not None,
        "--vocab-size is missing: give the tokenizer's size, or the tokenizer by --tokenizer-model",
    )
    from megatron_lowbit.data.tokenizer import load_tokenizer

    return load_tokenizer(args.tokenizer_type, args.tokenizer_model).vocab_size


def enough_gpus(run: Plan) -> int | None:
    """Return the smallest number of GPUs tried on which a run fits; None if none is enough.

    Tried are powers of two and three times those from ``run.gpus`` on, beyond a host whole hosts.
    """
    weights = sum(
        number * linear.weights for part, number in run.parts.items() for linear in part.linears
    )
    per_node, context = run.device.gpus_per_node, run.args.context_parallel_size
    for gpus in sorted(size << power for power in range(16) for size in (1, 3)):
        # A weight has 4 bits at least, whatever the layout.
        may_fit = weights / 2 <= gpus * run.device.usable_bytes
        if gpus < run.gpus or gpus % min(gpus, per_node) or gpus % context or not may_fit:
            continue
        tried, _ = candidates(run.training, gpus, per_node, interleaved=False)
        smallest = [
            (layout, args)
            for layout, args in tried
            if layout.micro_batch == 1 and layout.recompute in ("all", "-")
        ]
        if any(map(run.fits, plan(smallest, run.recipe, run.vocabulary, run.device))):
            return gpus
    return None


def changes(run: Plan) -> Iterator[str]:
    """Yield a line for each argument that changes speed or memory of the best layout by a tenth.

    The layouts tried are the best ones without the argument for each division of the ranks, or the
    layout as given; the fastest of them counts.
    """
    before, others = run.best, _representatives(run)
    more = [] if run.as_given else ["--micro-batch-size", "1"]
    base = vars(run.training.parse(run.gpus, more))
    for change in _CHANGES:
        try:
            parsed = vars(run.training.parse(run.gpus, [*more, *change]))
        except UserError:
            continue
        new = {name: value for name, value in parsed.items() if value != base[name]}
        native = parsed["transformer_impl"] == "transformer_engine"
        device = run.device._replace(transformer_engine=native)
        tried = [(each.layout, Namespace(**vars(each.args) | new)) for each in others]
        estimates = plan(tried, run.recipe, run.vocabulary, device) if new else []
        after = next((each for each in _fastest_first(estimates) if _is_taken(run, each, change)),
                     None)  # fmt: skip
        if after is None:
            continue
        speed = after.tokens_per_second / before.tokens_per_second
        memory = estimates[0].most_memory / before.most_memory
        if max(abs(speed - 1), abs(memory - 1)) >= 0.1:
            where = "" if after.layout == before.layout else " in another layout"
            yield (
                f"{' '.join(change)}: {speed:.2f}x the tokens/s{where}, "
                f"{memory:.2f}x the memory of this layout"
            )


def _representatives(run: Plan) -> list[Estimate]:
    """Return the best layout, and for each division of the ranks the fastest and a larger one."""
    chosen: dict[tuple[object, ...], Estimate] = {(): run.best}
    for each in _fastest_first(run.estimates):
        # An argument may make a layout fit that needs a little more.
        if each.most_memory <= 1.3 * run.device.usable_bytes:
            ranks = each.layout.tensor, each.layout.pipeline, each.layout.expert
            chosen.setdefault((*ranks, run.fits(each)), each)
    return list(chosen.values())


def _is_taken(run: Plan, estimate: Estimate, change: Sequence[str]) -> bool:
    """Return True if a layout fits and training takes it with the change."""
    if not run.fits(estimate):
        return False
    try:
        check_plannable(run.training.parse(run.gpus, [*run.arguments(estimate), *change]))
    except UserError:
        return False
    return True
