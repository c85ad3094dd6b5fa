"""Model FLOPs against what torch counts in a real forward and backward pass."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_lowbit.megatron.config import transformer_config
from megatron_lowbit.megatron.models import build_model
from megatron_lowbit.kernels.engine import select_engine
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.distributed import initialize_distributed, shutdown
from megatron_lowbit.training.flops import sample_flops

VOCABULARY, BATCH = 96, 2
SHAPE = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --kv-channels 24 --seq-length 32 "
    "--position-embedding-type rope --data-path unread --vocab-size 96 --micro-batch-size 2 "
    "--train-iters 1 --lr 1 "
)
MODELS = {
    "plain": "--ffn-hidden-size 160",
    "gated, grouped queries": "--swiglu --ffn-hidden-size 96 --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --disable-bias-linear",
    "experts in every second layer": "--num-experts 4 --moe-router-topk 2 --swiglu "
    "--moe-ffn-hidden-size 48 --moe-layer-freq 2 --disable-bias-linear",
    "experts in the last layer": "--num-experts 4 --moe-layer-freq [0,0,1] --disable-bias-linear",
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_flops_are_those_of_a_forward_and_backward_pass(model):
    args = parse_arguments((SHAPE + model).split())
    initialize_distributed(args)
    try:
        counted = count_flops(args)
    finally:
        shutdown()
    # The masked half of the scores is computed here: two forward and four backward GEMMs.
    width = args.num_attention_heads * args.kv_channels
    masked = 6 * 2 * args.num_layers * args.seq_length**2 * width / 2
    assert sample_flops(args, VOCABULARY) == counted / BATCH - masked


def count_flops(args) -> int:
    config = transformer_config(args, torch.float32)
    engine = select_engine(torch.device("cpu"), "reference")
    (gpt,) = build_model(args, config, load_recipe("bf16", []), engine, VOCABULARY)
    tokens = torch.arange(BATCH * args.seq_length).view(BATCH, -1) % VOCABULARY
    positions = torch.arange(args.seq_length).expand(BATCH, -1)
    # In separate GEMMs: the counter knows nothing of the CPU's fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(tokens, positions, attention_mask=None, labels=tokens).mean().backward()
    return counter.get_total_flops()


def test_a_hybrid_by_its_blocks():
    """Against a GPT of the same attentions and MLPs, and the weights and scan of Mamba-2 alone."""
    blocks = "--ffn-hidden-size 160 --squared-relu --disable-bias-linear --num-layers"
    gpt = parse_arguments(f"{SHAPE} {blocks} 2".split())
    mamba = "--mamba-state-dim 16 --mamba-head-dim 8 --mamba-num-groups 4"
    hybrid = parse_arguments(
        f"{SHAPE} {blocks} 7 --hybrid-override-pattern M*-MM*- {mamba}".split()
    )
    # Inner size 128, 16 heads: z and x, B and C, a step for each head; then back.
    weights = 64 * (128 + 128 + 4 * 16 + 4 * 16 + 16) + 128 * 64
    extra = 3 * (6 * weights + 3 * 7 * 128 * 16) * hybrid.seq_length
    assert sample_flops(hybrid, VOCABULARY) - sample_flops(gpt, VOCABULARY) == extra


def test_a_gpt_with_175_billion_parameters():
    """Within 1% of 6 FLOPs a parameter and token, plus attention, as papers reckon it."""
    shape = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048"
    other = "--data-path unread --micro-batch-size 1 --train-iters 1 --lr 1"
    args = parse_arguments(f"{shape} {other}".split())
    expected = 2048 * (6 * 175e9 + 6 * 96 * 2048 * 12288)
    assert sample_flops(args, 51200) == pytest.approx(expected, rel=0.01)
