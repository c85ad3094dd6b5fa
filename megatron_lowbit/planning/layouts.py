"""Layouts of a model over GPUs: which there are, and the training arguments that ask for one."""

from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.planning.model import check_plannable
from megatron_lowbit.planning.pipeline import chunk_arguments, divisions, model_chunks
from megatron_lowbit.planning.training_arguments import TrainingArguments

_SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_OF_A_LAYOUT = (
    "--tensor-model-parallel-size", "--sequence-parallel", "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--pipeline-model-parallel-layout", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--expert-model-parallel-size", "--recompute-granularity", "--recompute-method",
    "--recompute-num-layers", "--fused-allreduce-norm", *_SHARDED,
)  # fmt: skip
_MOST_IN_A_BATCH = 16
_MOST_LAYERS = 1024
"""Layers of a model whose layouts are searched: their number grows with it."""
_PARTLY = (0.25, 0.5)
"""Shares of a stage's layers that are worth recomputing, beside none and all of them."""


class Layout(NamedTuple):
    """Ranks of each kind of parallelism, sequences of a microbatch, layers of each model chunk.

    ``virtual``: model chunks on a rank of each pipeline stage, 1 without interleaving.
    ``microbatches``: those of one replica in a step. ``recomputed``: layers that are recomputed in
    each chunk, if it has as many. ``chunks``: layers of each chunk, as in :mod:`.pipeline`.
    """

    tensor: int
    pipeline: int
    virtual: int
    data: int
    expert: int
    micro_batch: int
    microbatches: int
    recomputed: int
    chunks: tuple[int, ...]

    def layers(self, stage: int) -> int:
        """Return the layers of a pipeline stage."""
        return sum(self.chunks[stage :: self.pipeline])

    def recomputed_layers(self, stage: int) -> int:
        """Return the layers of a pipeline stage that are recomputed."""
        return sum(min(self.recomputed, size) for size in self.chunks[stage :: self.pipeline])

    def recomputed_share(self, stage: int) -> float:
        """Return the recomputed share of a pipeline stage's layers."""
        return self.recomputed_layers(stage) / max(1, self.layers(stage))

    @property
    def recompute(self) -> str:
        """None, all, or how many of the layers of the stage that recomputes most."""
        if self.recomputed == 0:
            return "-"
        stage = max(range(self.pipeline), key=self.recomputed_layers)
        recomputed, layers = self.recomputed_layers(stage), self.layers(stage)
        return "all" if recomputed == layers else f"{recomputed} of {layers}"

    def arguments(self, pattern: str | None = None) -> list[str]:
        """Return the training arguments that ask for the layout; ``pattern``: a hybrid's blocks."""
        found = ["--micro-batch-size", str(self.micro_batch)]
        if self.tensor > 1:
            found += ["--tensor-model-parallel-size", str(self.tensor), "--sequence-parallel"]
        if self.pipeline > 1:
            found += ["--pipeline-model-parallel-size", str(self.pipeline)]
            found += chunk_arguments(self.chunks, self.pipeline, pattern)
        if self.expert > 1:
            found += ["--expert-model-parallel-size", str(self.expert)]
        if self.data > 1:
            found += list(_SHARDED)
        if self.recomputed:
            method = "uniform" if self.recomputed == max(self.chunks) else "block"
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
    chunks = model_chunks(args)
    layout = Layout(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size or 1, data, expert, args.micro_batch_size,
        batch // step, _recomputed(args, max(chunks)), chunks,
    )  # fmt: skip
    return Candidate(layout, args)


def _recomputed(args: Namespace, layers: int) -> int:
    # "selective" recomputes attention alone, which keeps no scores here: as if nothing were.
    if args.recompute_granularity != "full":
        return 0
    return layers if args.recompute_method == "uniform" else min(layers, args.recompute_num_layers)


def candidates(
    training: TrainingArguments, gpus: int, gpus_per_node: int, interleaved: bool = True
) -> Iterator[Candidate | str]:
    """Yield every layout to try of training's arguments; a text where training refuses one.

    Tensor parallelism stays within a node, sequence parallelism goes with it, data parallelism
    shards the optimizer. What the arguments say of the layout themselves is left out.
    ``interleaved``: try several model chunks on a rank, too.
    """
    training.remove(*_OF_A_LAYOUT, "--micro-batch-size", "--global-batch-size")
    training.join_pattern()
    args = training.parse(gpus, ["--micro-batch-size", "1"])
    require(
        args.num_layers <= _MOST_LAYERS,
        f"--num-layers {args.num_layers}: layouts of at most {_MOST_LAYERS} are searched; "
        "--as-given plans one layout",
    )
    for bare in _ranks(args, gpus, gpus_per_node, interleaved):
        try:
            parsed = training.parse(gpus, bare.arguments(args.hybrid_layer_pattern))
            check_plannable(parsed)
        except UserError as error:
            yield str(error)
            continue
        parsed.global_batch_size = training.flags.global_batch_size
        yield from _batches(parsed, bare)


def _ranks(args: Namespace, gpus: int, gpus_per_node: int, interleaved: bool) -> Iterator[Layout]:
    """Yield every division of the GPUs, one sequence a microbatch, without recomputation."""
    interleaved = interleaved and args.hybrid_layer_pattern is None
    experts = _powers(gpus) if args.num_experts is not None else [1]
    for tensor in _powers(min(gpus, gpus_per_node)):
        for pipeline in range(1, args.num_layers + 1):
            if gpus % (tensor * pipeline):
                continue
            data = gpus // (tensor * pipeline)
            for expert in (n for n in experts if data % n == 0):
                for chunks in divisions(args.num_layers, pipeline, interleaved):
                    virtual = len(chunks) // pipeline
                    yield Layout(tensor, pipeline, virtual, data, expert, 1, 1, 0, chunks)


def _batches(parsed: Namespace, bare: Layout) -> Iterator[Candidate]:
    """Yield the same ranks with every size of a microbatch and every extent of recomputation."""
    whole = parsed.global_batch_size or bare.data * _MOST_IN_A_BATCH
    shares = {1.0} if bare.virtual > 1 else {1.0, *_PARTLY}
    if parsed.hybrid_layer_pattern is not None:
        shares = set()
    extents = {0, *(max(1, round(share * max(bare.chunks))) for share in shares)}
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


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]
