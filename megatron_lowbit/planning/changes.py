"""Training arguments outside a layout that would change the answer of a search by a tenth."""

from argparse import Namespace
from collections.abc import Iterator

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.estimate import Estimate
from megatron_lowbit.planning.layouts import Candidate
from megatron_lowbit.planning.memory import usable_bytes
from megatron_lowbit.planning.search import Plan, plan

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

    Its speed is the fastest layout's with the argument, of those that were best for their numbers
    of ranks without it; its memory the best layout's.

    Args:
        found: layouts that were searched.
        gpus: number of GPUs.
        as_given: the plan is of the layout that the training arguments ask for.
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
