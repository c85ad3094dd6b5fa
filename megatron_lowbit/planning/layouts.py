"""Layouts of a model over GPUs: which there are, and the training arguments that ask for one."""

from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.model import check_plannable
from megatron_lowbit.planning.training_arguments import TrainingArguments

_SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_OF_A_LAYOUT = (
    "--tensor-model-parallel-size", "--sequence-parallel", "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--expert-model-parallel-size", "--recompute-granularity", "--recompute-method",
    "--recompute-num-layers", "--fused-allreduce-norm", *_SHARDED,
)  # fmt: skip
_MOST_IN_A_BATCH = 16
_PARTLY = (0.25, 0.5)
"""Shares of a stage's layers that are worth recomputing, beside none and all of them."""


class Layout(NamedTuple):
    """Ranks of each kind of parallelism, sequences of a microbatch, layers recomputed in a stage.

    ``virtual`` stages on a rank of each pipeline stage, 1 without interleaving; ``recomputed``
    layers of the ``layers`` of a stage; ``microbatches`` in a step of one replica.
    """

    tensor: int
    pipeline: int
    virtual: int
    data: int
    expert: int
    micro_batch: int
    microbatches: int
    recomputed: int
    layers: int

    @property
    def recompute(self) -> str:
        """None, all, or how many of a stage's layers."""
        if self.recomputed == 0:
            return "-"
        return "all" if self.recomputed == self.layers else f"{self.recomputed} of {self.layers}"

    def arguments(self) -> list[str]:
        """Return the training arguments that ask for the layout."""
        found = ["--micro-batch-size", str(self.micro_batch)]
        if self.tensor > 1:
            found += ["--tensor-model-parallel-size", str(self.tensor), "--sequence-parallel"]
        if self.pipeline > 1:
            found += ["--pipeline-model-parallel-size", str(self.pipeline)]
        if self.virtual > 1:
            chunk = self.layers // self.virtual
            found += ["--num-layers-per-virtual-pipeline-stage", str(chunk)]
        if self.expert > 1:
            found += ["--expert-model-parallel-size", str(self.expert)]
        if self.data > 1:
            found += list(_SHARDED)
        if self.recomputed:
            method = "uniform" if self.recomputed == self.layers else "block"
            number = 1 if method == "uniform" else self.recomputed
            found += ["--recompute-granularity", "full", "--recompute-method", method]
            found += ["--recompute-num-layers", str(number)]
        return found


class Candidate(NamedTuple):
    """A layout, and the arguments that training would have in it."""

    layout: Layout
    args: Namespace


def candidate_of(args: Namespace, gpus: int) -> Candidate:
    """Return the layout that the arguments themselves ask for.

    Raises UserError where the GPUs or the global batch do not divide.
    """
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if gpus % ranks:
        raise UserError(
            f"--gpus {gpus} is not divisible by --tensor-model-parallel-size x "
            f"--pipeline-model-parallel-size {ranks}"
        )
    data, expert = gpus // ranks, args.expert_model_parallel_size
    if data % expert:
        raise UserError(
            f"--expert-model-parallel-size {expert}: {data} data-parallel ranks are no multiple"
        )
    step = data * args.micro_batch_size
    batch = args.global_batch_size or step
    if batch % step:
        raise UserError(
            f"--global-batch-size {batch} is not divisible by --micro-batch-size "
            f"{args.micro_batch_size} x {data} data-parallel ranks"
        )
    layers = args.num_layers // args.pipeline_model_parallel_size
    layout = Layout(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size or 1, data, expert, args.micro_batch_size,
        batch // step, _recomputed(args, layers), layers,
    )  # fmt: skip
    return Candidate(layout, args)


def _recomputed(args: Namespace, layers: int) -> int:
    # "selective" recomputes attention alone, which keeps no scores here: as if nothing were.
    if args.recompute_granularity != "full":
        return 0
    return layers if args.recompute_method == "uniform" else min(layers, args.recompute_num_layers)


def candidates(
    training: TrainingArguments, gpus: int, gpus_per_node: int
) -> Iterator[Candidate | str]:
    """Yield every layout to try of training's arguments; a text where training refuses one.

    Tensor parallelism stays within a node, sequence parallelism goes with it, data parallelism
    shards the optimizer. What the arguments say of the layout themselves is left out.
    """
    training.remove(*_OF_A_LAYOUT, "--micro-batch-size", "--global-batch-size")
    args = training.parse(gpus, ["--micro-batch-size", "1"])
    for bare in _ranks(args, gpus, gpus_per_node):
        try:
            parsed = training.parse(gpus, bare.arguments())
            check_plannable(parsed)
        except UserError as error:
            yield str(error)
            continue
        parsed.global_batch_size = training.flags.global_batch_size
        yield from _batches(parsed, bare)


def _ranks(args: Namespace, gpus: int, gpus_per_node: int) -> Iterator[Layout]:
    """Yield every division of the GPUs, one sequence a microbatch, without recomputation."""
    gpt = args.hybrid_layer_pattern is None
    experts = _powers(gpus) if args.num_experts is not None else [1]
    for tensor in _powers(min(gpus, gpus_per_node)):
        for pipeline in _divisors(args.num_layers):
            if gpus % (tensor * pipeline):
                continue
            data, layers = gpus // (tensor * pipeline), args.num_layers // pipeline
            interleaved = _divisors(layers) if gpt and pipeline > 1 else [1]
            for expert in (n for n in experts if data % n == 0):
                for virtual in interleaved:
                    yield Layout(tensor, pipeline, virtual, data, expert, 1, 1, 0, layers)


def _batches(parsed: Namespace, bare: Layout) -> Iterator[Candidate]:
    """Yield the same ranks with every size of a microbatch and every extent of recomputation."""
    whole = parsed.global_batch_size or bare.data * _MOST_IN_A_BATCH
    shares = {1.0} if bare.virtual > 1 else {1.0, *_PARTLY}
    if parsed.hybrid_layer_pattern is not None:
        shares = set()
    extents = {0, *(max(1, round(share * bare.layers)) for share in shares)}
    for size in _powers(_MOST_IN_A_BATCH):
        microbatches = whole // (bare.data * size)
        # Interleaved stages take their microbatches in groups of as many as there are stages.
        if whole % (bare.data * size) or (bare.virtual > 1 and microbatches < bare.pipeline):
            continue
        for recomputed in sorted(extents):
            layout = bare._replace(
                micro_batch=size, microbatches=microbatches, recomputed=recomputed
            )
            copied = Namespace(**vars(parsed))
            copied.micro_batch_size, copied.global_batch_size = size, whole
            yield Candidate(layout, copied)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]
