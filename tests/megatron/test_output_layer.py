"""The output layer in a model of Transformer Engine's layers, which is Megatron-LM's own there."""

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.megatron import layers, recipe_hook
from megatron_lowbit.recipes import Layer, load_recipe

# isort: split
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

CONFIG = dict(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
ARGS = Namespace(transformer_impl="transformer_engine", eval_precision="bf16", mxnorm=False)
ENGINE = ReferenceEngine("tests")


@pytest.fixture
def without_layers_in_blocks(monkeypatch):
    """Transformer Engine, as far as the hook asks for a chunk's layers, of which there are none."""
    nothing = lambda chunk: None  # noqa: E731
    stand_in = SimpleNamespace(linears_of=lambda chunk: {}, fuse_mlps=nothing, fuse_norms=nothing)
    name = f"{layers.__name__}.transformer_engine"
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(layers, "transformer_engine", stand_in, raising=False)


def taken(recipe, tied=False):
    """Return a chunk whose output layer a hook has taken over, and the states of its layers."""
    config = TransformerConfig(**CONFIG)
    output = ColumnParallelLinear(
        64, 128, config=config, init_method=torch.nn.init.normal_, bias=False,
        skip_weight_param_allocation=tied,
    )  # fmt: skip
    chunk = SimpleNamespace(config=config, post_process=True, output_layer=output)
    hook = recipe_hook.RecipeHook.__new__(recipe_hook.RecipeHook)
    hook.recipe = hook.current = recipe
    hook.args, hook.engine = ARGS, ENGINE
    return chunk, [*hook._take_over(chunk)]


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_taken_over(single_process, without_layers_in_blocks, tied):
    recipe = load_recipe("nvfp4", "output_layer=fp8-tile")
    chunk, (state,) = taken(recipe, tied)
    assert state.plan.layer == Layer.output(2)
    draws = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=draws) for n in (32, 128))
    output = chunk.output_layer
    weight = weight.requires_grad_() if tied else output.weight
    y, bias = output(x[:, None], weight=weight if tied else None)
    precision = recipe.configs["fp8-tile"]
    assert bias is None
    assert torch.equal(y[:, 0], lowbit_linear(x, weight, LinearContext(precision, ENGINE, 0)))
    output.eval()
    assert torch.equal(output(x, weight)[0], torch.nn.functional.linear(x, weight))


def test_without_the_key_it_stays_megatron_lms(single_process, without_layers_in_blocks):
    chunk, states = taken(load_recipe("nvfp4"))
    assert states == [] and not hasattr(chunk.output_layer, "layer_state")


def test_its_kernels_are_this_projects(monkeypatch):
    """Even where Transformer Engine's compute the same precision in blocks."""
    native = SimpleNamespace(
        kernels=lambda precision, capability: "Transformer Engine's x",
        misfits=lambda weights, capability: set(),
    )
    monkeypatch.setitem(sys.modules, "megatron_lowbit.transformer_engine.native", native)
    recipe = load_recipe("mxfp8", "output_layer=mxfp8")
    block = Layer("decoder.layers.1.mlp.linear_fc1", 1, 2)
    lines = [*recipe_hook._describe(recipe, ENGINE, [block, Layer.output(2)], ARGS, (10, 0))]
    assert lines[-2:] == ["  mxfp8: Transformer Engine's x kernels",
                          "  output_layer: this project's kernels"]  # fmt: skip
