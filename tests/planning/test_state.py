"""Weights, gradients and optimizer states against those of megatron-core's optimizers."""

import pytest
from built import parse, state_bytes

from megatron_lowbit.planning.layouts import Layout
from megatron_lowbit.planning.memory import state
from megatron_lowbit.planning.model import parameters, stages
from megatron_lowbit.recipes import load_recipe

VOCABULARY = 1024
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 384"


@pytest.mark.parametrize(
    ("model", "replicas", "expert"),
    [
        ("@llama3-tiny", 1, 1),
        ("@llama3-tiny", 4, 1),
        ("@llama3-tiny --use-distributed-optimizer", 4, 1),
        ("@hybrid-tiny --use-distributed-optimizer", 2, 1),
        ("@hybrid-tiny", 1, 1),
        (f"@llama3-tiny {EXPERTS} --use-distributed-optimizer", 4, 1),
        (f"@llama3-tiny {EXPERTS} --use-distributed-optimizer", 2, 2),
    ],
)
def test_state_is_as_large_as_after_a_step(model, replicas, expert):
    args = parse(f"{model} --bf16 --expert-model-parallel-size {expert}")
    (parts,) = stages(args, load_recipe("bf16"))
    count = parameters(args, parts, VOCABULARY, 1, expert, "first last")
    layout = Layout(1, 1, 1, replicas * expert, expert, 1, 1, 0, (args.num_layers,))
    measured = state_bytes(args, VOCABULARY, replicas)
    # Buffers are padded to a few hundred numbers.
    assert state(args, count, layout) == pytest.approx(measured, rel=0.01)


def test_a_mixer_keeps_no_parameter_in_fp32():
    """Float16Module makes A_log and D BF16; their main parameters and gradients are FP32."""
    args = parse("@hybrid-tiny --bf16")
    (parts,) = stages(args, load_recipe("bf16"))
    count = parameters(args, parts, VOCABULARY, 1, 1, "first last")
    found = state(args, count, Layout(1, 1, 1, 1, 1, 1, 1, 0, (args.num_layers,)))
    assert found == state_bytes(args, VOCABULARY, 1)
