"""Layouts of a model over GPUs, and the training arguments that ask for each."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from megatron_lowbit.arguments.upstream import translate_refusals
from megatron_lowbit.arguments.values import check_microbatches
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.planning.model import check_plannable
from megatron_lowbit.planning.training_arguments import TrainingArguments

# isort: split
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build

SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_OF_A_LAYOUT = (
    "--tensor-model-parallel-size", "--sequence-parallel", "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--pipeline-model-parallel-layout", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--expert-model-parallel-size", "--recompute-granularity", "--recompute-method",
    "--recompute-num-layers", "--fused-allreduce-norm", *SHARDED,
    "--micro-batch-size", "--global-batch-size",
)  # fmt: skip
_LARGEST_BATCH = 16
"""Sequences of a microbatch, and microbatches where no global batch is given."""
MOST_LAYERS = 1024
"""Layers of a model whose layouts are searched: their number grows with it."""


class Layout(NamedTuple):
    """Ranks of each kind of parallelism, sequences of a microbatch, layers of each model chunk.

    ``virtual``: model chunks on a rank of each pipeline stage, 1 without interleaving.
    ``microbatches``: microbatches of one replica in a step. ``recomputed``: layers that are
    recomputed in each chunk, if it has as many. ``chunks``: layers of each chunk; chunk ``i`` is on
    stage ``i % pipeline``.
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
        return self.recomputed_groups(stage, 1)

    def recomputed_groups(self, stage: int, layers: int) -> int:
        """Return the groups of up to so many layers that are recomputed in a pipeline stage."""
        sizes = (min(self.recomputed, size) for size in self.chunks[stage :: self.pipeline])
        return sum(-(-size // layers) for size in sizes)

    def recomputed_share(self, stage: int) -> float:
        """Return the recomputed share of a pipeline stage's layers."""
        return self.recomputed_layers(stage) / max(1, self.layers(stage))

    @property
    def recompute(self) -> str:
        """None, all, or the number of recomputed layers of the stage with the most."""
        if self.recomputed == 0:
            return "-"
        stage = max(range(self.pipeline), key=self.recomputed_layers)
        recomputed, layers = self.recomputed_layers(stage), self.layers(stage)
        return "all" if recomputed == layers else f"{recomputed} of {layers}"

    def arguments(self, pattern: str | None = None) -> list[str]:
        """Return the training arguments that ask for the layout; ``pattern``: a hybrid's blocks."""
        words = ["--micro-batch-size", str(self.micro_batch)]
        if self.tensor > 1:
            words += ["--tensor-model-parallel-size", str(self.tensor), "--sequence-parallel"]
        if self.pipeline > 1:
            words += ["--pipeline-model-parallel-size", str(self.pipeline)]
            words += chunk_arguments(self.chunks, self.pipeline, pattern)
        if self.expert > 1:
            words += ["--expert-model-parallel-size", str(self.expert)]
        if self.data > 1:
            words += SHARDED
        if self.recomputed:
            method = "uniform" if self.recomputed == max(self.chunks) else "block"
            number = 1 if method == "uniform" else self.recomputed
            words += ["--recompute-granularity", "full", "--recompute-method", method]
            words += ["--recompute-num-layers", str(number)]
        return words


Candidate = tuple[Layout, Namespace]
"""A layout, and the arguments that training would have in it."""


def layout_of(args: Namespace, gpus: int) -> Layout:
    """Return the layout that the arguments themselves ask for.

    Raises UserError where the data-parallel ranks or the global batch do not divide, or virtual
    stages cannot take the microbatches.
    """
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, expert = args.context_parallel_size, args.expert_model_parallel_size
    data = gpus // (tensor * pipeline * context)
    require(
        data * context % expert == 0,
        f"--expert-model-parallel-size {expert}: {data * context} ranks of data and context "
        "parallelism are no multiple",
    )
    step = data * args.micro_batch_size
    batch = args.global_batch_size or step
    require(
        batch % step == 0,
        f"--global-batch-size {batch} is not divisible by --micro-batch-size "
        f"{args.micro_batch_size} x {data} data-parallel ranks",
    )
    check_microbatches(args)
    chunks = model_chunks(args)
    recomputed = 0  # layers; "selective" recomputes only attention
    if args.recompute_granularity == "full":
        uniform = args.recompute_method == "uniform"
        recomputed = max(chunks) if uniform else min(max(chunks), args.recompute_num_layers)
    virtual = args.virtual_pipeline_model_parallel_size or 1
    return Layout(
        tensor, pipeline, virtual, data, expert, args.micro_batch_size, batch // step, recomputed,
        chunks,
    )  # fmt: skip


def candidates(
    training: TrainingArguments, gpus: int, gpus_per_node: int, interleaved: bool = True
) -> tuple[list[Candidate], list[str]]:
    """Return every layout to try in place of the arguments' own, and why training refuses others.

    Tensor parallelism stays within a node, sequence parallelism goes with it, data parallelism
    shards the optimizer. ``interleaved``: try several model chunks on a rank, too.
    """
    training.remove(*_OF_A_LAYOUT)
    training.join_pattern()
    args = training.parse(gpus, ["--micro-batch-size", "1"])
    require(
        args.num_layers <= MOST_LAYERS,
        f"--num-layers {args.num_layers}: layouts of at most {MOST_LAYERS} are searched; "
        "--as-given plans one layout",
    )
    tried: list[Candidate] = []
    refusals = []
    for ranks in _divided_gpus(args, gpus, gpus_per_node, interleaved):
        try:
            parsed = training.parse(gpus, ranks.arguments(args.hybrid_layer_pattern))
            check_plannable(parsed)
        except UserError as error:
            refusals.append(str(error))
        else:
            parsed.global_batch_size = training.flags.global_batch_size
            tried += _batches(parsed, ranks)
    return tried, refusals


def _divided_gpus(
    args: Namespace, gpus: int, gpus_per_node: int, interleaved: bool
) -> Iterator[Layout]:
    """Yield every division of the GPUs, with microbatches of one sequence, none recomputed."""
    interleaved = interleaved and args.hybrid_layer_pattern is None
    experts = _powers(gpus) if args.num_experts is not None else [1]
    context = args.context_parallel_size
    for tensor in _powers(min(gpus, gpus_per_node)):
        for pipeline in range(1, args.num_layers + 1):
            if gpus % (tensor * pipeline * context):
                continue
            data = gpus // (tensor * pipeline * context)
            for expert in (n for n in experts if data * context % n == 0):
                for chunks in divisions(args.num_layers, pipeline, interleaved):
                    virtual = len(chunks) // pipeline
                    yield Layout(tensor, pipeline, virtual, data, expert, 1, 1, 0, chunks)


def _batches(parsed: Namespace, ranks: Layout) -> Iterator[Candidate]:
    """Yield the same ranks with every size of a microbatch and every extent of recomputation."""
    batch = parsed.global_batch_size or ranks.data * _LARGEST_BATCH
    extents = {0}
    if parsed.hybrid_layer_pattern is None:
        shares = [1.0] if ranks.virtual > 1 else [1.0, 0.25, 0.5]
        extents |= {max(1, round(share * max(ranks.chunks))) for share in shares}
    for size in _powers(_LARGEST_BATCH):
        microbatches, rest = divmod(batch, ranks.data * size)
        if rest:
            continue
        changed = {"micro_batch_size": size, "global_batch_size": batch}
        args = Namespace(**vars(parsed) | changed)
        layout = ranks._replace(micro_batch=size, microbatches=microbatches)
        with suppress(UserError):  # Virtual stages do not take every number of microbatches.
            check_microbatches(args)
            for recomputed in sorted(extents):
                yield layout._replace(recomputed=recomputed), args


def _powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length())]


def model_chunks(args: Namespace) -> tuple[int, ...]:
    """Return the layers of each model chunk in order, as Megatron-LM divides them, or UserError."""
    pipeline, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    numbers = range(virtual) if virtual else [None]
    order = [(number, stage) for number in numbers for stage in range(pipeline)]
    if "|" in (args.hybrid_layer_pattern or ""):
        return tuple(map(len, args.hybrid_layer_pattern.split("|")))
    with translate_refusals():
        if args.pipeline_model_parallel_layout:
            given = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, pipeline)
            given.validate_layer_layout(args.num_layers, args.mtp_num_layers)
            blocks = given.layout
            return tuple(blocks[stage][n or 0].count(LayerType.decoder) for n, stage in order)
        config = Namespace(
            **vars(args),
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        chunks = tuple(get_num_layers_to_build(config, number, stage) for number, stage in order)
    require(
        sum(chunks) == args.num_layers and min(chunks) >= 0 and 0 not in (first, last),
        f"--decoder-first-pipeline-num-layers {first}, --decoder-last-pipeline-num-layers {last}: "
        f"{pipeline} pipeline stages cannot have --num-layers {args.num_layers} so",
    )
    return chunks


def divisions(layers: int, pipeline: int, interleaved: bool) -> Iterator[tuple[int, ...]]:
    """Yield the divisions of layers into model chunks that differ by one layer at most.

    The last chunk, which computes the loss, and then the first ones have the layer less. Stages
    differ by one layer at most, too.
    """
    per_stage = -(-layers // pipeline)
    for virtual in range(1, per_stage + 1 if interleaved and pipeline > 1 else 2):
        number = pipeline * virtual
        larger = -(-layers // number)
        smaller = number * larger - layers
        if smaller > (pipeline if layers % pipeline else 0):
            continue
        fewer = {number - 1, *range(smaller - 1)} if smaller else set()
        yield tuple(larger - (chunk in fewer) for chunk in range(number))


def chunk_arguments(chunks: Sequence[int], pipeline: int, pattern: str | None) -> list[str]:
    """Return the training arguments that ask for model chunks of so many layers.

    ``pattern``: blocks of a hybrid, however they are divided.
    """
    if len(set(chunks)) == 1:
        virtual = len(chunks) > pipeline
        return ["--num-layers-per-virtual-pipeline-stage", str(chunks[0])] if virtual else []
    if pattern is not None:
        blocks = iter(pattern.replace("|", ""))
        divided = ("".join(next(blocks) for _ in range(size)) for size in chunks)
        return ["--hybrid-layer-pattern", "|".join(divided)]
    first, *middle, last = chunks
    runs = "".join(f"(t*{size}|)*{len(list(run))}" for size, run in groupby(middle))
    return ["--pipeline-model-parallel-layout", f"Et*{first}|{runs}t*{last}L"]
