"""Stages with multi-token prediction, which a layout may put before the last one."""

from argparse import Namespace

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lowbit.arguments import compatibility, front_parser
from megatron_lowbit.arguments.rows import refuse
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.pretrain import teardown
from megatron_lowbit.megatron.run.pipeline import embedding_ranks, has_mtp

# isort: split
from megatron.core import parallel_state

LAYOUTS = {
    # Layout, stages: the chunks with multi-token prediction, by stage and chunk.
    (None, 2): [(1, 0)],
    ("Ett|tmL", 2): [(1, 0)],
    ("Ett|t|m|L", 4): [(2, 0)],
    ("Et|t|t|t|m|L", 3): [(1, 1)],
    ("Etm|L", 2): [(0, 0)],
}


def arguments(layout: str | None, stages: int, **more: object) -> Namespace:
    given = {"pipeline_model_parallel_layout": layout, "pipeline_model_parallel_size": stages}
    return Namespace(**{**vars(front_parser().parse_args([])), **given, **more})


def chunks_with_mtp(args: Namespace) -> list[tuple[int, int]]:
    """Ask every rank of a pipeline about each of its chunks."""
    stages, found = args.pipeline_model_parallel_size, []
    virtual = ((args.pipeline_model_parallel_layout or "").count("|") + 1) // stages
    for rank in range(stages):
        with teardown():
            store = FakeStore()
            torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=stages)
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=stages,
                virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
                create_gloo_process_groups=False,
            )
            chunks = range(virtual) if virtual > 1 else [None]
            found += [(rank, chunk or 0) for chunk in chunks if has_mtp(args, chunk)]
    return found


@pytest.mark.parametrize(("layout", "stages"), LAYOUTS)
def test_batches_and_embeddings_reach_the_stages_of_multi_token_prediction(layout, stages):
    args = arguments(layout, stages, mtp_num_layers=1)
    chunks = LAYOUTS[layout, stages]
    assert chunks_with_mtp(args) == chunks
    ranks = [10 + stage for stage in range(stages)]
    with_mtp = {10 + stage for stage, _ in chunks}
    args.untie_embeddings_and_output_weights = True
    assert embedding_ranks(args, ranks) == sorted({10} | with_mtp)
    args.untie_embeddings_and_output_weights = False
    assert embedding_ranks(args, ranks) == sorted({10, ranks[-1]} | with_mtp)


@pytest.mark.parametrize("layout", [None, "Ett|tL", "Et|t|t|tL"])
def test_stages_without_multi_token_prediction(layout):
    args = arguments(layout, 2)
    assert chunks_with_mtp(args) == []
    args.untie_embeddings_and_output_weights = True
    assert embedding_ranks(args, [0, 1]) == [0]


def test_two_chunks_of_a_stage_share_no_embedding():
    args = arguments("Ett|tt|ttm|L", 2, mtp_num_layers=1)
    with pytest.raises(UserError, match=r"layout Ett\|tt\|ttm\|L: m cannot follow E"):
        refuse(compatibility.pipeline(args))
    for layout, stages in LAYOUTS:
        refuse(compatibility.pipeline(arguments(layout, stages, mtp_num_layers=1)))
