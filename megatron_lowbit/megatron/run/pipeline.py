"""Stages of a pipeline that read batches or hold the embedding as multi-token prediction does."""

from argparse import Namespace

from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


def has_mtp(args: Namespace, vp_stage: int | None) -> bool:
    """Return True if this rank's stage has multi-token prediction."""
    layout, layers = _layout(args), args.mtp_num_layers
    return mtp_on_this_rank(layout, layers, ignore_virtual=False, vp_stage=vp_stage)


def embedding_ranks(args: Namespace, ranks: list[int]) -> list[int]:
    """Return the ranks that share the embedding, of the ``ranks`` of a pipeline's stages in order.

    Megatron-LM's default omits multi-token prediction before the last stage.
    """
    output = [] if args.untie_embeddings_and_output_weights else ranks[-1:]
    config = Namespace(
        mtp_num_layers=args.mtp_num_layers, pipeline_model_parallel_layout=_layout(args)
    )
    return sorted({ranks[0], *output, *get_mtp_ranks(ranks, config)})


def _layout(args: Namespace) -> PipelineParallelLayerLayout | None:
    """Return ``--pipeline-model-parallel-layout``, of which ``args`` hold the text."""
    text, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    return text and PipelineParallelLayerLayout(text, stages)
