"""Parameters and state of a rank against the models and optimizers that training builds."""

import pytest
from built import EXAMPLES, parameter_count, parse, state_bytes

from megatron_lowbit.planning.estimate import padded_vocabulary
from megatron_lowbit.planning.memory import state
from megatron_lowbit.planning.model import Parameters, parameters, stages
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
SMALL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --normalization RMSNorm --position-embedding-type rope
    --train-iters 1 --lr 1 --eval-interval 1
"""
# Megatron-LM takes ten seconds to build 6144 experts, also on the meta device, and three to build
# layers of which there are fewer in llama3-70b; those of the 405B are counted below.
SLOW = {"qwen3-30b-a3b", "llama3-70b", "llama3-405b"}
MODELS = [
    *[
        pytest.param(f"@{path.stem}", marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in sorted(EXAMPLES.glob("*.args"))
    ],
    *[
        pytest.param(f"@{name} {layout}", marks=[pytest.mark.slow] * (name != "hybrid-8b"))
        for name in ("gpt-345m", "llama3-8b", "hybrid-8b")
        for layout in SPLIT.values()
    ],
    *[f"{EXPERTS} {more}" for more in ("", "--expert-model-parallel-size 4", SPLIT["TP2"])],
    # gpt-oss
    f"{SMALL} --num-experts 4 --quick-geglu --softmax-type learnable",
    # Gemma 3
    f"{SMALL} --geglu --sandwich-norm --qk-layernorm --apply-layernorm-1p --disable-bias-linear",
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_every_stage_has_the_parameters_of_the_model_that_is_built(model):
    args = parse(model)
    pipeline = args.pipeline_model_parallel_size
    padded = padded_vocabulary(args, VOCABULARY, args.tensor_model_parallel_size)
    for stage, parts in enumerate(stages(args, load_recipe("bf16"), pipeline)):
        count = parameters(args, parts, padded, stage == 0, stage == pipeline - 1)
        assert count.all == parameter_count(args, padded, stage)


def test_llama_3_405b_counted_by_hand():
    layer = 16384 * (16384 + 2 * 8 * 128) + 16384 * 16384 + 3 * 16384 * 53248 + 2 * 16384
    args = parse("@llama3-405b")
    count = parameters(args, stages(args, load_recipe("bf16"))[0], 128256).all
    assert count == 126 * layer + 2 * 128256 * 16384 + 16384
    assert count == pytest.approx(405e9, rel=0.01)


def test_interleaved_stages_hold_every_so_many_blocks():
    args = parse("@llama3-tiny")
    # Block 0 and block 3, the last, stay in BF16: pieces 0 and 2 are stage 0's, 1 and 3 stage 1's.
    for stage in stages(args, load_recipe("nvfp4"), 2, (1, 1, 1, 1)):
        quantized = [part.first.precision.quantized for part in stage]
        assert sorted(quantized) == [False, False, True, True]


@pytest.mark.parametrize(
    ("model", "replicas"),
    [
        ("@llama3-tiny", 1),
        ("@llama3-tiny", 4),
        ("@llama3-tiny --use-distributed-optimizer", 4),
        ("@hybrid-tiny --use-distributed-optimizer", 2),
        # Float16Module makes A_log and D BF16; their main parameters and gradients are FP32.
        ("@hybrid-tiny", 1),
        ("@llama3-tiny --num-experts 4 --moe-ffn-hidden-size 384 --use-distributed-optimizer", 4),
        ("@llama3-tiny --num-experts 4 --moe-ffn-hidden-size 384 --use-distributed-optimizer "
         "--expert-model-parallel-size 2", 2),
    ],
)  # fmt: skip
def test_state_is_as_large_as_after_a_step(model, replicas):
    ranks = 2 * replicas if "--expert-model-parallel-size" in model else replicas
    args = parse(f"{model} --bf16", ranks)
    count = parameters(args, stages(args, load_recipe("bf16"))[0], 1024)
    # Buffers are padded to a few hundred numbers, of one replica to none.
    tolerance = 0.01 if replicas > 1 else 0
    measured = state_bytes(args, 1024, replicas)
    assert state(args, count) == pytest.approx(measured, rel=tolerance)


def test_18_bytes_a_parameter_of_which_12_are_sharded():
    args = parse("@llama3-tiny --use-distributed-optimizer", 4)
    expected = {"weights": 2000, "main gradients": 4000, "optimizer": 3000}
    assert state(args, Parameters(1000, 0)) == expected
    assert sum(state(parse("@llama3-tiny"), Parameters(1, 0)).values()) == 18
