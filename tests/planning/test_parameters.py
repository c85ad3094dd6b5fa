"""Parameters of a rank against the models that training builds."""

import pytest
from built import EXAMPLES, parameter_count, parse

from megatron_lowbit.planning.estimate import ends, padded_vocabulary
from megatron_lowbit.planning.model import parameters, stages
from megatron_lowbit.recipes import load_recipe

VOCABULARY = 50257
SPLIT = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "TP2 without SP": "--tensor-model-parallel-size 2",
    "PP2": "--pipeline-model-parallel-size 2",
    "TP2 PP2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
}
EXPERTS = (
    "@llama3-tiny --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq 2"
)


def planned(args, stage: int = 0) -> int:
    pipeline = args.pipeline_model_parallel_size
    parts = stages(args, load_recipe("bf16"), pipeline)[stage]
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    padded = padded_vocabulary(args, VOCABULARY, tensor)
    return parameters(args, parts, padded, tensor, expert, ends(stage, pipeline)).all


def built(args, stage: int = 0) -> int:
    tensor = args.tensor_model_parallel_size
    padded = padded_vocabulary(args, VOCABULARY, tensor)
    return parameter_count(args, padded, stage)


# Megatron-LM takes ten seconds to build 6144 experts, also on the meta device, and three to build
# layers of which there are fewer in llama3-70b; those of the 405B are counted below.
SLOW = {"qwen3-30b-a3b", "llama3-405b"}


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in sorted(EXAMPLES.glob("*.args"))
    ],
)
def test_of_every_preset(preset):
    args = parse(f"@{preset}")
    assert planned(args) == built(args)


@pytest.mark.parametrize("layout", SPLIT.values(), ids=SPLIT)
@pytest.mark.parametrize("preset", ["gpt-345m", "llama3-8b", "hybrid-8b"])
def test_of_every_stage_of_a_layout(preset, layout):
    args = parse(f"@{preset} {layout}")
    for stage in range(args.pipeline_model_parallel_size):
        assert planned(args, stage) == built(args, stage)


@pytest.mark.parametrize("layout", ["", "--expert-model-parallel-size 4", SPLIT["TP2"]])
def test_of_experts(layout):
    args = parse(f"{EXPERTS} {layout}")
    assert planned(args) == built(args)


SMALL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --normalization RMSNorm --position-embedding-type rope
    --train-iters 1 --lr 1 --eval-interval 1
"""
FAMILIES = {
    "gpt-oss": "--num-experts 4 --quick-geglu --softmax-type learnable",
    "Gemma 3": "--geglu --sandwich-norm --qk-layernorm --apply-layernorm-1p --disable-bias-linear",
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_of_families_with_other_layers(family):
    args = parse(f"{SMALL} {family}")
    assert planned(args) == built(args)


def test_of_llama_3_405b_counted_by_hand():
    layer = 16384 * (16384 + 2 * 8 * 128) + 16384 * 16384 + 3 * 16384 * 53248 + 2 * 16384
    args = parse("@llama3-405b")
    parts = stages(args, load_recipe("bf16"))[0]
    found = parameters(args, parts, 128256, 1, 1, "first last").all
    assert found == 126 * layer + 2 * 128256 * 16384 + 16384
    assert found == pytest.approx(405e9, rel=0.01)


def test_interleaved_stages_hold_every_so_many_blocks():
    args = parse("@llama3-tiny")
    first, second = stages(args, load_recipe("nvfp4"), 2, (1, 1, 1, 1))
    # Block 0 and block 3, the last, stay in BF16: pieces 0 and 2 are stage 0's, 1 and 3 stage 1's.
    for stage in (first, second):
        kinds = [part.first.precision.quantized for part in stage]
        assert sorted(kinds) == [False, False, True, True]
