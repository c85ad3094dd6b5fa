"""Division of a model's layers into model chunks.

Chunk ``i`` is on pipeline stage ``i % stages``.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby

from megatron_lowbit.errors import require
from megatron_lowbit.planning.training_arguments import one_line_errors

# isort: split
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build


def model_chunks(args: Namespace) -> tuple[int, ...]:
    """Return the layers of each model chunk in order, as Megatron-LM divides them.

    Raises:
        UserError: the arguments do not divide the layers.
    """
    pipeline, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    numbers = range(virtual) if virtual else [None]
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if "|" in (args.hybrid_layer_pattern or ""):
        return tuple(map(len, args.hybrid_layer_pattern.split("|")))
    with one_line_errors():
        if args.pipeline_model_parallel_layout:
            layout = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, pipeline)
            layout.validate_layer_layout(args.num_layers, args.mtp_num_layers)
            return tuple(
                layout.layout[stage][number or 0].count(LayerType.decoder)
                for number in numbers
                for stage in range(pipeline)
            )
        config = Namespace(
            **vars(args),
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        chunks = tuple(
            get_num_layers_to_build(config, number, stage)
            for number in numbers
            for stage in range(pipeline)
        )
    require(
        sum(chunks) == args.num_layers and min(chunks) >= 0 and 0 not in (first, last),
        f"--decoder-first-pipeline-num-layers {first}, --decoder-last-pipeline-num-layers {last}: "
        f"{pipeline} pipeline stages cannot have --num-layers {args.num_layers} so",
    )
    return chunks


def divisions(layers: int, pipeline: int, interleaved: bool) -> Iterator[tuple[int, ...]]:
    """Yield the divisions of layers into model chunks that differ by one layer at most.

    The last chunk, which computes the loss, and then the first ones have the layer less. Stages of
    as many layers each have equal chunks; other stages differ by one layer at most, too.
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
    """Return the training arguments that ask for model chunks.

    Args:
        chunks: layers of each chunk.
        pipeline: number of pipeline stages.
        pattern: blocks of a hybrid, however they are divided.
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
