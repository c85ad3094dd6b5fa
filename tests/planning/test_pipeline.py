"""Division of layers over pipeline stages, against the models that Megatron-LM builds."""

import shlex

import pytest
from built import EXAMPLES, parameter_count, parse

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.estimate import padded_vocabulary
from megatron_lowbit.planning.layouts import (
    candidates,
    chunk_arguments,
    divisions,
    layout_of,
    model_chunks,
)
from megatron_lowbit.planning.model import parameters, stages
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import load_recipe

# isort: split
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

LLAMA_405B = f"@{EXAMPLES}/llama3-405b.args --vocab-size 128256"
HYBRID_TINY = f"@{EXAMPLES}/hybrid-tiny.args --vocab-size 100"
GPT = "@llama3-tiny --num-layers 5 --pipeline-model-parallel-size"
HYBRID = "@hybrid-tiny --pipeline-model-parallel-size 2 --hybrid-layer-pattern"
UNEQUAL = {
    f"{GPT} 2 --decoder-first-pipeline-num-layers 1": (1, 4),
    f"{GPT} 3 --decoder-last-pipeline-num-layers 1": (2, 2, 1),
    f"{GPT} 3 --account-for-embedding-in-pipeline-split": (1, 2, 2),
    f"{GPT} 2 --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 1": (
        1, 1, 1, 1, 1, 0,
    ),
    f"{GPT} 2 --pipeline-model-parallel-layout Ett|t|t|tL": (2, 1, 1, 1),
    # Three layers over two stages of two chunks each: the last chunk has none.
    "@llama3-tiny --num-layers 3 --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout Et*1|(t*1|)*2t*0L": (1, 1, 1, 0),
    f"{HYBRID} M*|-M-": (2, 3),
    f"{HYBRID} M|*|-M|-": (1, 1, 2, 1),
    f"{HYBRID} M*-M- --decoder-last-pipeline-num-layers 1": (4, 1),
}  # fmt: skip


@pytest.mark.parametrize(("text", "chunks"), UNEQUAL.items(), ids=UNEQUAL)
def test_unequal_stages_have_the_parameters_of_the_models_that_are_built(text, chunks):
    args = parse(text)
    assert model_chunks(args) == chunks
    pipeline, padded = args.pipeline_model_parallel_size, padded_vocabulary(args, 1000, 1)
    for stage, parts in enumerate(stages(args, load_recipe("bf16"), pipeline, chunks)):
        count = parameters(args, parts, padded, stage == 0, stage == pipeline - 1)
        assert count.all == parameter_count(args, padded, stage)


def test_divisions_are_as_equal_as_they_can_be_and_megatron_lm_reads_them():
    for layers in (1, 5, 12, 61, 126):
        for pipeline in range(1, layers + 1):
            divided = list(divisions(layers, pipeline, interleaved=True))
            assert len(divided) == len(set(divided)) and len(divided[0]) == pipeline
            for chunks in divided:
                totals = [sum(chunks[stage::pipeline]) for stage in range(pipeline)]
                assert sum(chunks) == layers and max(totals) - min(totals) <= 1
                assert layers % pipeline or len(set(chunks)) == 1
                asked = chunk_arguments(chunks, pipeline, None)
                if asked and asked[0] == "--pipeline-model-parallel-layout":
                    layout = PipelineParallelLayerLayout(asked[1], pipeline)
                    layout.validate_layer_layout(layers, None)
                    read = [layout.layout[i % pipeline][i // pipeline] for i in range(len(chunks))]
                    assert tuple(row.count(LayerType.decoder) for row in read) == chunks
    # 126 layers of Llama 3 405B as its paper has them: one less in the first and the last stage.
    assert (7, *[8] * 14, 7) in divisions(126, 16, interleaved=False)
    asked = ["--pipeline-model-parallel-layout", "Et*1|(t*1|)*2t*0L"]
    assert chunk_arguments((1, 1, 1, 0), 2, None) == asked


@pytest.mark.parametrize(("model", "gpus"), [(LLAMA_405B, 1024), (HYBRID_TINY, 6)])
def test_a_search_tries_stages_that_do_not_divide_the_layers(model, gpus):
    words = TrainingArguments(shlex.split(model))
    tried, _ = candidates(words, gpus, 8, interleaved=False)
    unequal = [(layout, args) for layout, args in tried if len(set(layout.chunks)) > 1]
    assert unequal
    for layout, args in unequal[::40]:
        asked = [*layout.arguments(args.hybrid_layer_pattern), "--global-batch-size"]
        parsed = words.parse(gpus, [*asked, str(args.global_batch_size)])
        assert layout_of(parsed, gpus) == layout


def test_a_search_tries_only_whole_groups_of_microbatches_in_virtual_stages():
    words = TrainingArguments(shlex.split(f"{LLAMA_405B} --global-batch-size 48"))
    tried, _ = candidates(words, 16, 8)
    numbers = {(layout.pipeline, layout.microbatches) for layout, _ in tried if layout.virtual > 1}
    assert numbers == {(2, 6), (2, 12), (2, 24), (2, 48), (4, 12), (4, 24), (4, 48), (8, 24),
                       (8, 48), (16, 48)}  # fmt: skip


def test_bars_of_a_hybrid_are_part_of_its_layout():
    words = TrainingArguments(shlex.split(f"{HYBRID_TINY} --hybrid-layer-pattern M|*|-M|-"))
    tried, _ = candidates(words, 2, 8)
    assert {layout.chunks for layout, _ in tried} == {(5,), (3, 2)}


@pytest.mark.parametrize("size", ["0", "6", "-1"])
def test_stages_that_cannot_hold_the_layers_are_refused(size):
    with pytest.raises(UserError, match="--decoder-first-pipeline-num-layers"):
        model_chunks(parse(f"{GPT} 2 --decoder-first-pipeline-num-layers={size}"))
