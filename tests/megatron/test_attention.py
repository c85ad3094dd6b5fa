"""Fused attention against megatron-core's own, alone and in a model."""

from argparse import Namespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lowbit.megatron.attention import TorchAttention
from megatron_lowbit.megatron.config import transformer_config
from megatron_lowbit.megatron.models import build_model
from megatron_lowbit.kernels.engine import select_engine
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.training.arguments import parse_arguments

# isort: split
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="counts on the CPU's kernel, in FP32"),
    pytest.mark.usefixtures("single_process"),
]

SEQUENCE, BATCH, HEADS, CHANNELS, VOCABULARY = 24, 2, 4, 8, 96
MODEL = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads {HEADS} --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 40 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --seq-length {SEQUENCE}
    --micro-batch-size {BATCH} --train-iters 1 --lr 1 --data-path unread
"""


def config(groups: int = HEADS, **options) -> TransformerConfig:
    options = {"attention_dropout": 0.0, **options}
    return TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        masked_softmax_fusion=False,
        **options,
    )


def attention(kind, config, scale=None):
    return kind(
        config=config,
        layer_number=2,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=scale,
        pg_collection=None,
    )


def qkv(groups: int) -> list[torch.Tensor]:
    """Query, key and value as SelfAttention cuts them from one tensor."""
    generator = torch.Generator().manual_seed(3)
    shape = (SEQUENCE, BATCH, groups, (HEADS // groups + 2) * CHANNELS)
    mixed = torch.randn(shape, generator=generator, requires_grad=True)
    query, key, value = mixed.split([HEADS // groups * CHANNELS, CHANNELS, CHANNELS], 3)
    return [mixed, query.reshape(SEQUENCE, BATCH, HEADS, CHANNELS), key, value]


def run(layer, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and gradient of query, key and value together."""
    mixed, *tensors = qkv(groups)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    output = layer(*tensors, None)
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    return output.detach(), mixed.grad


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize(
    ("scale", "options"),
    [
        (None, {}),
        (0.7, {}),
        (None, {"apply_query_key_layer_scaling": True}),
        (None, {"attention_dropout": 0.3}),
    ],
)
def test_same_as_megatrons(groups, scale, options):
    expected = run(attention(DotProductAttention, config(groups, **options), scale), groups)
    results = run(attention(TorchAttention, config(groups, **options), scale), groups)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-5, atol=1e-5)


def test_full_attention_where_it_is_asked_for():
    layer = attention(TorchAttention, config())
    _, query, key, value = qkv(HEADS)
    output = layer(query, key[:5], value[:5], None, attn_mask_type=AttnMaskType.no_mask)
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key[:5]) / CHANNELS**0.5
    expected = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value[:5])
    torch.testing.assert_close(output, expected.flatten(2))


def test_dropout_draws_from_the_tensor_parallel_state():
    layer = attention(TorchAttention, config(attention_dropout=0.5))
    _, *tensors = qkv(HEADS)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    outside = torch.get_rng_state()
    first, second = layer(*tensors, None), layer(*tensors, None)
    assert torch.equal(torch.get_rng_state(), outside)
    assert not torch.equal(first, second)
    tensor_parallel.model_parallel_cuda_manual_seed(11, tp_rank=1)
    assert not torch.equal(layer(*tensors, None), first)
    layer.eval()
    assert torch.equal(layer(*tensors, None), layer(*tensors, None))


def test_neither_copies_its_output_nor_keeps_the_qkv_layers():
    mixed, query, key, value = qkv(2)
    # The key as rope leaves it, not a view of the layer's output.
    tensors = (query, key.clone(), value)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda packed: packed):
        output = attention(TorchAttention, config(2))(*tensors, None)
    assert output.is_contiguous() and output._is_view()
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert mixed.untyped_storage().data_ptr() not in storages
    # Query, key, value, output, and one number of softmax for each query.
    assert sum(tensor.numel() for tensor in kept) == SEQUENCE * BATCH * (12 * CHANNELS + HEADS)


@pytest.mark.parametrize(
    "options",
    [{"context_parallel_size": 2}, {"window_size": (3, 0)}, {"softmax_type": "learnable"}],
    ids=lambda options: next(iter(options)),
)
def test_refused_configurations(options):
    whole = vars(config()) | options
    with pytest.raises(ValueError, match=next(iter(options))):
        TorchAttention(Namespace(**whole), attn_mask_type=AttnMaskType.causal)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, SEQUENCE, SEQUENCE).bool()}, "takes no mask"),
        ({"attention_bias": torch.zeros(1)}, "bias"),
        ({"packed_seq_params": PackedSeqParams()}, "packed"),
        ({"attn_mask_type": AttnMaskType.padding}, "causal"),
        ({"query": torch.zeros(1, BATCH, HEADS, CHANNELS)}, "causal"),
    ],
    ids=["mask", "bias", "packed", "padding", "one query"],
)
def test_refused_calls(changes, message):
    _, query, key, value = qkv(HEADS)
    arguments = {"query": query, "key": key, "value": value, "attention_mask": None} | changes
    with pytest.raises(ValueError, match=message):
        attention(TorchAttention, config())(**arguments)


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(result) if torch.is_tensor(x)}
        return result


def losses_and_gradients(*options: str) -> list[torch.Tensor]:
    """Token losses of the tiny model, and its gradients, from the same weights."""
    args = parse_arguments([*MODEL.split(), *options])
    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    engine = select_engine(torch.device("cpu"), "reference")
    model_config = transformer_config(args, torch.float32)
    (gpt,) = build_model(args, model_config, load_recipe("bf16", []), engine, VOCABULARY)
    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, -1) % VOCABULARY
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    losses = gpt(tokens, positions, attention_mask=None, labels=tokens.roll(-1, 1))
    losses.mean().backward()
    return [losses.detach(), *(parameter.grad for parameter in gpt.parameters())]


def test_no_mask_and_no_scores_are_ever_made():
    with Shapes() as shapes:
        losses_and_gradients()
    assert (SEQUENCE, BATCH, VOCABULARY) in shapes.seen
    assert not [shape for shape in shapes.seen if shape[-2:] == (SEQUENCE, SEQUENCE)]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_selective_recomputation_changes_nothing(dropout):
    dropped = ("--attention-dropout", str(dropout))
    expected = losses_and_gradients(*dropped)
    recomputed = losses_and_gradients(*dropped, "--recompute-granularity", "selective")
    assert all(torch.equal(a, b) for a, b in zip(recomputed, expected, strict=True))
