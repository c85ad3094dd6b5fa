"""Grouped experts: specs of local layers, and Transformer Engine's modules by a stand-in."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import lowbit_linear
from megatron_lowbit.megatron.layers import state as layer_state
from megatron_lowbit.megatron.layers.local import with_grouped_experts
from megatron_lowbit.megatron.layers.state import LayerPlan, layer_of, layer_states
from megatron_lowbit.megatron.layers.transformer_engine import Expert, take_over_expert
from megatron_lowbit.recipes import Layer, load_recipe
from tests.megatron.test_experts import chunk  # noqa: F401

# isort: split
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

TOKENS = [3, 0, 5]


def experts_of(spec) -> partial:
    return spec.submodules.mlp.keywords["submodules"].experts


def test_a_spec_groups_the_experts_and_nothing_else():
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=True)
    assert experts_of(spec).func is SequentialMLP
    changed = with_grouped_experts(spec)
    assert experts_of(changed).func is TEGroupedMLP
    assert changed.submodules.self_attention == spec.submodules.self_attention
    dense = get_gpt_layer_local_spec()
    assert with_grouped_experts(dense).submodules.mlp.func is dense.submodules.mlp.func


@pytest.mark.parametrize("part", ["linear_fc1", "linear_fc2"])
def test_rules_see_grouped_experts_as_if_they_were_not(chunk, part):  # noqa: F811
    layer = layer_of(chunk, f"decoder.layers.0.mlp.experts.{part}.1", first_expert=4)
    assert layer.path == f"decoder.layers.5.mlp.experts.local_experts.5.{part}"


class Grouped(torch.nn.Module):
    """Stand-in for Transformer Engine's grouped linear layer of three experts."""

    def __init__(self, skips_bias: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.use_bias, self.te_return_bias, self.num_gemms = True, skips_bias, len(TOKENS)
        self.config = SimpleNamespace(gated_linear_unit=True)
        self._tp_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        for number in range(len(TOKENS)):
            for name, shape in (("weight", (32, 64)), ("bias", (32,))):
                value = torch.randn(shape, generator=generator)
                setattr(self, f"{name}{number}", torch.nn.Parameter(value))

    def forward(self, x, tokens_per_expert):
        return "high precision", tokens_per_expert


def taken_over(recipe: str, skips_bias: bool = False) -> Grouped:
    grouped = Grouped(skips_bias)
    for number in range(len(TOKENS)):
        path = f"decoder.layers.4.mlp.experts.local_experts.{number}.linear_fc1"
        layer = Layer(path, 4, 10)
        plan = LayerPlan(layer, load_recipe(recipe).precision_for(layer), ReferenceEngine("tests"),
                         accumulate_main_grad=False, evaluates=False)  # fmt: skip
        take_over_expert(Expert(grouped, number), plan, is_column=True)
    return grouped


@pytest.fixture(autouse=True)
def one_microbatch(monkeypatch):
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: 7)


@pytest.mark.parametrize("skips_bias", [False, True])
def test_each_expert_computes_as_a_layer_of_its_own(skips_bias):
    grouped = taken_over("nvfp4", skips_bias)
    states = list(layer_states([grouped]))
    x = torch.randn(sum(TOKENS), 64, requires_grad=True)
    y, biases = grouped(x, TOKENS)
    y.sum().backward()
    other = x.detach().requires_grad_()
    for number, part in enumerate(other.split(TOKENS)):
        if not len(part):
            continue
        weight = getattr(grouped, f"weight{number}").detach().requires_grad_()
        bias = getattr(grouped, f"bias{number}").detach()
        context = states[number].context(states[number].shards())
        product = lowbit_linear(part, weight, context, None if skips_bias else bias)
        assert torch.equal(product, y.split(TOKENS)[number])
        product.sum().backward()
        assert torch.equal(weight.grad, getattr(grouped, f"weight{number}").grad)
    assert torch.equal(other.grad, x.grad)
    assert not grouped.weight1.grad.any()  # no token came to the second expert
    assert (biases is not None) == skips_bias


def test_high_precision_is_left_to_the_module():
    x = torch.zeros(sum(TOKENS), 64)
    assert taken_over("bf16")(x, TOKENS) == ("high precision", TOKENS)
    assert taken_over("nvfp4").eval()(x, TOKENS) == ("high precision", TOKENS)
