"""Tokens sent to experts of other ranks as codes: the bits of tokens that are quantized there."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.megatron.features.expert_dispatch import ExpertDispatch
from megatron_lowbit.megatron.layers import experts
from megatron_lowbit.megatron.layers.state import layer_states
from megatron_lowbit.megatron.run.steps import set_microbatch_key
from megatron_lowbit.numerics import Operand
from megatron_lowbit.recipes import Layer, load_recipe
from tests.marks import others_slow
from tests.megatron.test_expert_counts import built_moe_layer
from tests.megatron.tiny_models import TINY

# isort: split
from megatron.core.transformer.moe.moe_layer import MoELayer

RANKS, HIDDEN = 2, 128
ARGUMENTS = f"""
    {TINY} --num-layers 1 --hidden-size {HIDDEN} --swiglu --position-embedding-type rope
    --transformer-impl local --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
    --no-gradient-accumulation-fusion --expert-model-parallel-size {RANKS}
    --recipe-set wgrad.input.requantize=true
"""
TILES, TILE_SCALES = "--precision-recipe fp8-tile --num-experts 6", HIDDEN // 128 * 4
MODELS = {
    "fp8-tile": (TILES, TILE_SCALES),
    "fp8-tile, recomputed": (
        f"{TILES} --recompute-granularity selective --recompute-modules moe", TILE_SCALES
    ),
    "fp8-tile, shared expert": (
        f"{TILES} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap", TILE_SCALES
    ),
    "mxfp8, an expert a rank": ("--precision-recipe mxfp8 --num-experts 2", HIDDEN // 32),
    "fp8-row": ("--precision-recipe fp8-row --num-experts 4", 4),
}  # fmt: skip
"""Arguments, and the bytes of the scales of a token."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds models on the CPU")
@pytest.mark.parametrize("model", others_slow(MODELS, ["fp8-tile", "mxfp8, an expert a rank"]))
def test_codes_are_those_of_tokens_quantized_after_the_exchange(model, run_ranks):
    """Outputs and all gradients, too; and evaluation in BF16 sends BF16."""
    run_ranks(__file__, RANKS, model, timeout=120, CUDA_DEVICE_MAX_CONNECTIONS="1")


def layers_of(block: int) -> list[Layer]:
    paths = [f"mlp.experts.local_experts.{number}.linear_fc1" for number in range(2)]
    paths += ["self_attention.linear_qkv", "mlp.experts.local_experts.0.linear_fc2"]
    return [Layer(f"decoder.layers.{block}.{path}", block, 4) for path in paths]


def check_recipe(name: str, *overrides: str, requantizes: bool = True) -> None:
    changes = ["wgrad.input.requantize=true"] if requantizes else []
    recipe = load_recipe(name, [*changes, *overrides])
    run = SimpleNamespace(recipe=recipe, engine=ReferenceEngine("tests"))
    ExpertDispatch(run).check([layer for block in range(4) for layer in layers_of(block)])


OF_SEVERAL = "fprop.input has a tensor scale, or codes that depend on several tokens"


@pytest.mark.parametrize(
    ("recipe", "overrides", "reason"),
    [
        ("fp8-tensorwise", [], OF_SEVERAL),
        ("nvfp4", ["input.row_scaled=true"], OF_SEVERAL),
        ("mxfp8", ["fprop.input.split_mean=true"], OF_SEVERAL),
        ("mxfp8", ["input.rounding=stochastic"], OF_SEVERAL),
        ("mxfp8", ["dgrad.weight.requantize=true"], "its experts are computed one by one"),
        ("fp8-tile", ["switches.late={iteration: 4, to: mxfp8}"], "wgrad.input is made from"),
    ],
)  # fmt: skip
def test_recipes_whose_codes_are_not_of_a_token_are_refused(recipe, overrides, reason):
    path = r"decoder.layers.\d.mlp.experts.local_experts.0.linear_fc1"
    with pytest.raises(
        UserError, match=f"^--quantized-expert-dispatch: recipe .*, {path}: {reason}"
    ):
        check_recipe(recipe, *overrides)


def test_recipes_that_send_codes_say_so():
    for name in ("fp8-tile", "mxfp8", "fp8-row", "fp8-tile-e4m3"):
        check_recipe(name)
        with pytest.raises(UserError, match=r"add --recipe-set wgrad\.input\.requantize=true$"):
            check_recipe(name, requantizes=False)
    with pytest.raises(UserError, match=r"experts\.1\.linear_fc1: .*; give them one$"):
        check_recipe("fp8-tile", "matchers.linears.pattern='*local_experts.1*'")
    check_recipe("fp8-tile", "switches.late={iteration: 4, to: bf16}")
    with pytest.raises(UserError, match="--quantized-expert-dispatch has no effect"):
        check_recipe("bf16", requantizes=False)


def moe_layer(model: str) -> MoELayer:
    """Build a model without the feature; return its MoE layer."""
    dist.init_process_group("gloo")
    return built_moe_layer(ARGUMENTS + MODELS[model][0]).bfloat16()


class Seen:
    """Records fc1's inputs, and bytes per token of each exchange between ranks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.inputs: list[Operand | torch.Tensor] = []
        self.bytes: list[int] = []
        self.linear, self.exchange = experts.lowbit_grouped_linear, dist.all_to_all_single
        patch.setattr(experts, "lowbit_grouped_linear", self.multiply)
        patch.setattr(dist, "all_to_all_single", self.send)

    def multiply(self, x, weights, *others):
        if weights[0].shape[1] == HIDDEN:
            self.inputs.append(x)
        return self.linear(x, weights, *others)

    def send(self, received, sent, **options):
        self.bytes.append(sent.nbytes // len(sent))
        return self.exchange(received, sent, **options)


def results(layer: MoELayer, rank: int) -> tuple[dict[str, torch.Tensor], Seen]:
    """Return output and all gradients of a training pass, and what was seen."""
    for state in layer_states([layer]):
        state.forget_weight()
    layer.zero_grad()
    draws = torch.Generator().manual_seed(3 + rank)
    x = torch.randn(16, 2, HIDDEN, generator=draws).bfloat16().requires_grad_()
    set_microbatch_key(1, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        y = layer(x)[0]
        if layer.training:
            y.backward(torch.randn(y.shape, generator=draws).to(y.dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    tensors = {"y": y, "x": x.grad, **gradients} if layer.training else {"y": y}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, seen


def check(model: str, rank: int) -> None:
    layer = moe_layer(model)
    expected, plain = results(layer, rank)
    layer.eval()
    evaluated, _ = results(layer, rank)
    ExpertDispatch(SimpleNamespace(chunks=[layer])).install()
    check_same(results(layer.eval(), rank)[0], evaluated)
    found, seen = results(layer.train(), rank)
    assert "router.weight" in found and "experts.linear_fc1.0.weight" in found
    check_same(found, expected)
    quantizer = next(layer_states([layer])).plan.precision.fprop.lhs
    for operand, tokens in zip(seen.inputs, plain.inputs, strict=True):
        wanted = quantizer(tokens.detach())
        assert operand.row.shape == wanted.shape and len(tokens) > 0
        assert torch.equal(operand.row.codes.float(), wanted.codes.float())
        assert torch.equal(operand.row.scales.float(), wanted.scales.float())
        assert operand.source.untyped_storage().nbytes() == 2
    # Forward sends codes, probabilities and scales; the rest is as before.
    (tokens, probs, *_), scales = plain.bytes, MODELS[model][1]
    assert tokens == 2 * HIDDEN and seen.bytes[:3] == [HIDDEN, probs, scales]
    saved = len(plain.inputs) * (HIDDEN - scales)
    assert sum(seen.bytes) == sum(plain.bytes) - saved


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        assert values.any(), name


if __name__ == "__main__":
    check(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
