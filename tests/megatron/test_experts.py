"""Experts: global numbers and replicas on several ranks; grouped experts.

Grouped experts are specs of local layers, and Transformer Engine's modules by a stand-in.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import DeviceCounts, GroupContext, lowbit_linear
from megatron_lowbit.layers.counts import Permutation
from megatron_lowbit.megatron.layers import state as layer_state
from megatron_lowbit.megatron.layers.experts import Expert, take_over_expert, with_grouped_experts
from megatron_lowbit.megatron.layers.state import LayerPlan, layer_of, layer_states
from megatron_lowbit.recipes import Layer, load_recipe

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP


@pytest.fixture
def place(monkeypatch):
    """Function that sets this process's position in Megatron-LM's layout."""

    def put(**answers: object) -> None:
        for name, answer in answers.items():
            monkeypatch.setattr(parallel_state, name, lambda answer=answer, **_: answer)

    return put


@pytest.mark.parametrize(("rank", "first"), [(0, 0), (1, 4), (3, 12)])
def test_the_first_local_expert(place, rank, first):
    place(get_expert_model_parallel_rank=rank, get_expert_model_parallel_world_size=4)
    assert layer_state.first_local_expert(SimpleNamespace(num_moe_experts=16)) == first
    assert layer_state.first_local_expert(SimpleNamespace(num_moe_experts=None)) == 0


def test_places_among_replicas(place):
    place(
        get_tensor_model_parallel_rank=1,
        get_data_parallel_rank=2,
        get_expert_tensor_parallel_rank=3,
        get_expert_data_parallel_rank=4,
        get_tensor_and_data_parallel_group="all",
        get_expert_tensor_parallel_group="tensor",
        get_expert_data_parallel_group="data",
    )
    assert layer_state.replica_id(is_expert=False) == (1, 2)
    assert layer_state.replica_id(is_expert=True) == (3, 4)
    assert layer_state.replica_groups(is_expert=False) == ["all"]
    assert layer_state.replica_groups(is_expert=True) == ["tensor", "data"]


class Block(torch.nn.Module):
    """Block of Megatron-LM with its global number, from 1."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number


@pytest.fixture
def chunk() -> torch.nn.Module:
    """Blocks 5 and 6 of 8, and one of multi-token prediction."""
    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(num_layers=8)
    for name, numbers in (("decoder", (6, 7)), ("mtp", (1,))):
        part = torch.nn.Module()
        part.layers = torch.nn.ModuleList(map(Block, numbers))
        chunk.add_module(name, part)
    return chunk


@pytest.mark.parametrize(("local", "seen"), [(0, 4), (1, 5), (10, 14)])
def test_rules_see_global_numbers(chunk, local, seen):
    path = f"decoder.layers.1.mlp.experts.local_experts.{local}.linear_fc1"
    layer = layer_of(chunk, path, first_expert=4)
    assert layer.path == f"decoder.layers.6.mlp.experts.local_experts.{seen}.linear_fc1"
    assert (layer.block, layer.num_blocks) == (6, 8)


def test_blocks_of_multi_token_prediction_come_last(chunk):
    layer = layer_of(chunk, "mtp.layers.0.transformer_layer.mlp.linear_fc1", first_expert=0)
    assert layer.path == "mtp.layers.0.transformer_layer.mlp.linear_fc1"
    assert (layer.block, layer.num_blocks) == (8, 8)


def test_what_is_in_no_block_is_no_rules_business(chunk):
    assert layer_of(chunk, "output_layer", first_expert=0) is None


# -- grouped experts -------------------------------------------------------------------------------

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
def test_rules_see_grouped_experts_as_if_they_were_not(chunk, part):
    layer = layer_of(chunk, f"decoder.layers.0.mlp.experts.{part}.1", first_expert=4)
    assert layer.path == f"decoder.layers.5.mlp.experts.local_experts.5.{part}"


class Grouped(torch.nn.Module):
    """Stand-in for Transformer Engine's grouped linear layer of three experts."""

    def __init__(self, skips_bias: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.use_bias, self.te_return_bias, self.num_gemms = True, skips_bias, len(TOKENS)
        self.delay_wgrad_compute = False
        self.config = SimpleNamespace(gated_linear_unit=True, expert_gtp_weight_remat_size=1)
        self._tp_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        for number in range(len(TOKENS)):
            for name, shape in (("weight", (32, 64)), ("bias", (32,))):
                value = torch.randn(shape, generator=generator)
                setattr(self, f"{name}{number}", torch.nn.Parameter(value))

    def forward(self, x, tokens_per_expert):
        return "high precision", tokens_per_expert


def taken_over(recipe: str, skips_bias: bool = False, **change: Any) -> Grouped:
    grouped = Grouped(skips_bias)
    for name, value in change.items():
        setattr(grouped if hasattr(grouped, name) else grouped.config, name, value)
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


def test_codes_take_the_place_of_the_tokens():
    grouped = taken_over("nvfp4", skips_bias=True)
    states, x = list(layer_states([grouped])), torch.randn(sum(TOKENS), 64)
    recipe = load_recipe("fp8-tile", "wgrad.input.requantize=true")
    for state in states:
        state.set_precision(recipe.precision_for(state.plan.layer))
    y, _ = grouped(x, TOKENS)
    without_values = torch.full_like(x, torch.nan)
    states[0].set_input_codes(without_values, states[0].plan.precision.fprop.lhs(x))
    assert torch.equal(grouped(without_values, TOKENS)[0], y) and y.any()


def test_high_precision_is_left_to_the_module():
    x = torch.zeros(sum(TOKENS), 64)
    assert taken_over("bf16")(x, TOKENS) == ("high precision", TOKENS)
    assert taken_over("nvfp4").eval()(x, TOKENS) == ("high precision", TOKENS)
    counts = DeviceCounts(torch.tensor(TOKENS), sum(TOKENS))
    assert taken_over("bf16")(x, counts) == ("high precision", TOKENS)
    order, given = torch.arange(sum(TOKENS), dtype=torch.int32) // 2, []
    counts.permutation = Permutation(order, lambda rows: rows)
    module = taken_over("bf16")
    module.forward.high_precision = lambda x, _: given.append(x)
    tokens = torch.randn(sum(TOKENS) // 2, 64)
    module(tokens, counts)
    assert torch.equal(given[0], tokens.repeat_interleave(2, 0))


@pytest.mark.parametrize(
    "change", [{}, {"delay_wgrad_compute": True}, {"expert_gtp_weight_remat_size": 2}], ids=str
)
def test_a_module_with_later_gradients_or_parts_of_weights_computes_bf16_itself(
    change, monkeypatch
):
    monkeypatch.setattr(ReferenceEngine, "multiplies_groups", True)
    grouped = taken_over("bf16", skips_bias=True, **change).bfloat16()
    x = torch.zeros(sum(TOKENS), 64, dtype=torch.bfloat16)
    assert (grouped(x, TOKENS)[0] == "high precision") is bool(change)


def test_experts_in_bf16_are_multiplied_together_where_kernels_do(monkeypatch):
    states, quantized = (list(layer_states([taken_over(name)])) for name in ("bf16", "nvfp4"))
    for training in (True, False):
        assert layer_state.expert_contexts(states, training, in_bf16=True) is None
    monkeypatch.setattr(ReferenceEngine, "multiplies_groups", True)
    for training in (True, False):
        group = layer_state.expert_contexts(states, training, in_bf16=True)
        assert isinstance(group, GroupContext) and not group.context.precision.quantized
        assert layer_state.expert_contexts(states, training, in_bf16=False) is None
        assert layer_state.expert_contexts(states, training, True, has_bias=True) is None
    # An evaluation that is not quantized is of weights that training quantizes.
    assert layer_state.expert_contexts(quantized, False, in_bf16=True) is None
