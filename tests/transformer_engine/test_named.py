"""Factories that Megatron-LM's own scripts import by name, on a stand-in for Transformer Engine."""

import argparse
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.fp8_utils import _resolve_callable_from_python_import_path
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import global_vars
from megatron.training.arguments import add_megatron_arguments

from megatron_lowbit import factories
from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.layers.autograd_state import flatten
from megatron_lowbit.layers.operands import quantize_dgrad_weight, quantize_grad, quantize_weight
from megatron_lowbit.megatron.run.load_source import check_extra_states
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.plan import Source
from megatron_lowbit.numerics.randomness import derive_key, layer_key, microbatch_key
from megatron_lowbit.recipes import load_precision, load_recipe
from tests.transformer_engine.stand_in import QuantizedLinear, use_stand_ins
from tests.transformer_engine.stand_in import Role as TERole

RECIPES = ["nvfp4", "mxfp8", "fp8-tile", "torchao-v2", "mxfp4-backward"]
SEED, LAYER = 11, "Layer_1"


@pytest.fixture
def run(monkeypatch):
    """Arguments and ranks of Megatron-LM's script: the first of two data-parallel ranks."""
    use_stand_ins(monkeypatch)
    factories.__getattr__.cache_clear()
    args = SimpleNamespace(seed=SEED, curr_iteration=5, gradient_accumulation_fusion=False)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    set_ranks(monkeypatch)
    yield args
    factories.__getattr__.cache_clear()


def set_ranks(patch, data=0, context=0, pipeline=0):
    patch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    patch.setattr(parallel_state, "get_data_parallel_rank", lambda: data)
    patch.setattr(parallel_state, "get_context_parallel_rank", lambda: context)
    patch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: pipeline)


def named(recipe):
    return _resolve_callable_from_python_import_path(
        f"megatron_lowbit.factories.{recipe.replace('-', '_')}"
    )


def key(iteration, microbatch, data=0, context=0, pipeline=0):
    number = microbatch_key(SEED, iteration, 2 * microbatch + data, context)
    return layer_key(number, derive_key(LAYER, pipeline))


def parts(operand):
    """Return codes and scales, or the tensor that is not quantized."""
    tensors = []
    flatten(operand, tensors)
    assert tensors
    return tensors


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("microbatch", [0, 1])
def test_codes_and_scales_are_those_of_our_layers(run, recipe, microbatch):
    factory, precision = named(recipe), load_precision(recipe)
    factory.engine = engine = ReferenceEngine("tests")
    draws = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=draws).bfloat16() for shape in ((32, 64), (96, 64), (32, 96))
    )
    by_input, by_weight, by_grad = (
        factory(TERole(LAYER, name)) for name in ("input", "weight", "grad_output")
    )
    for _ in range(microbatch + 1):
        one, other = by_input(x), by_weight(weight)
        tensors, rest = other.prepare_for_saving()
    rest.restore_from_saved(tensors)
    gradient = by_grad(grad)

    context = LinearContext(precision, engine, key(5, microbatch) if precision.stochastic else 0)
    assert gradient.context.key == one.context.key == context.key
    row, col = context.quantize(x, Role.INPUT, Gemm.FPROP, Gemm.WGRAD)
    assert context.plan()[Gemm.WGRAD, Role.INPUT].source is Source.TENSOR
    assert equal(one.row, row) and equal(one.col, col)
    row, col = quantize_weight(context, lambda: weight)
    assert equal(other.row, row)
    if col is not None:
        assert equal(other.col, col)
    else:
        assert equal(
            quantize_dgrad_weight(gradient.context, other.col.weight),
            quantize_dgrad_weight(context, weight),
        )
    row, col = quantize_grad(context, grad, True, True)
    assert equal(gradient.row, row) and equal(gradient.col, col)


def test_random_numbers_are_a_function_of_seed_iteration_and_ranks(run, monkeypatch):
    factory = named("nvfp4")
    seen = [factory.key(LAYER) for _ in range(2)]
    run.curr_iteration = 6
    seen += [factory.key(LAYER), factory.key(LAYER)]
    assert seen == [key(5, 0), key(5, 1), key(6, 0), key(6, 1)]
    for ranks in ({"data": 1}, {"context": 1}, {"pipeline": 1}):
        set_ranks(monkeypatch, **ranks)
        run.curr_iteration += 1
        seen.append(factory.key(LAYER))
        assert seen[-1] == key(run.curr_iteration, 0, **ranks)
    assert factory.key("Layer_2") not in seen and len(set(seen)) == len(seen)


def test_a_resumed_run_draws_what_the_whole_run_does(run):
    whole = named("nvfp4")
    for run.curr_iteration in (5, 6):
        drawn = [whole.key(LAYER) for _ in range(3)]
    factories.__getattr__.cache_clear()
    resumed = named("nvfp4")
    assert resumed is not whole and [resumed.key(LAYER) for _ in range(3)] == drawn


def test_outside_of_a_script_keys_are_of_the_default_generator(run, monkeypatch):
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    torch.manual_seed(3)
    drawn = named("nvfp4").key(LAYER)
    torch.manual_seed(3)
    assert drawn == int(torch.randint(2**63 - 1, ()))


def test_a_recomputed_call_gives_the_gradients_of_its_last_pass(run):
    """Full recomputation runs a forward pass without gradients, then the same with them."""
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    factory = named("nvfp4")
    factory.engine = ReferenceEngine("tests")
    layers = [QuantizedLinear(weight.clone(), factory) for _ in range(2)]
    first = layers[0](x, True)
    with torch.no_grad():
        assert torch.equal(layers[1](x, True), first)
    again = layers[1](x.clone().requires_grad_(), False)
    again.backward(torch.ones_like(again))
    assert torch.equal(again, first) and layers[1].weight.grad.isfinite().all()


def test_factories_of_a_name_are_one_object_that_pickles_by_name(run, tmp_path):
    factory = named("nvfp4")
    assert named("nvfp4") is factory and pickle.loads(pickle.dumps(factory)) is factory
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert type(factory.engine) is type(select_engine(device))
    state = torch.frombuffer(bytearray(pickle.dumps({"recipe": factory})), dtype=torch.uint8)
    check_extra_states(tmp_path / "x", "layer._extra_state", [state])


def test_unknown_and_refused_names_say_so(run):
    with pytest.raises(ValueError, match="'nvfp5' not found"):
        named("nvfp5")
    with pytest.raises(UserError, match="recipe nvfp4-late-bf16 has switches"):
        named("nvfp4-late-bf16")


def test_grouped_experts_and_captures_are_refused(run, monkeypatch):
    factory = named("nvfp4")
    with pytest.raises(UserError, match="--moe-grouped-gemm"):
        factory(TERole(LAYER, "input", "grouped_linear"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match="--cuda-graph-impl"):
        factory.context(LAYER)


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("gradient_accumulation_fusion", "add --no-gradient-accumulation-fusion"),
        ("fp8_param_gather", "omit --fp8-param-gather"),
        ("fp4_param_gather", "omit --fp4-param-gather"),
    ],
)
def test_arguments_that_custom_quantizers_cannot_serve_are_refused(run, argument, advice):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert hasattr(parser.parse_args([]), argument)
    setattr(run, argument, True)
    with pytest.raises(UserError, match=advice):
        named("mxfp8")(TERole(LAYER, "input"))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_experts_that_are_split_over_other_ranks_are_refused(run, sizes):
    """Ranks of one expert would draw different random numbers."""
    run.num_experts = 4
    run.tensor_model_parallel_size, run.expert_tensor_parallel_size = sizes
    is_refused = sizes[0] != sizes[1]
    message = f"expert_tensor_parallel_size {sizes[1]}: must be {sizes[0]}"
    with pytest.raises(UserError, match=message) if is_refused else nullcontext():
        named("mxfp8")(TERole(LAYER, "input"))


@pytest.mark.parametrize(("bits", "form"), [("fp8", "hybrid"), ("fp4", "e2m1")])
def test_megatron_takes_a_factory_by_name(run, bits, form):
    words = f"--{bits}-format {form} --{bits}-recipe custom --{bits}-quantizer-factory "
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args((words + "megatron_lowbit.factories.nvfp4").split())
    given = {
        name: getattr(args, name) for name in (bits, f"{bits}_recipe", f"{bits}_quantizer_factory")
    }
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, **given)
    path = getattr(config, f"{bits}_quantizer_factory")
    assert callable(_resolve_callable_from_python_import_path(path))


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("nemotron3-super", "several precisions"),
        ("nvfp4-late-bf16", "changes"),
        ("bf16", "nothing"),
    ],
)
def test_to_te_recipe_takes_one_precision(run, recipe, named):
    from megatron_lowbit.transformer_engine.recipe import to_te_recipe

    with pytest.raises(UserError, match=named):
        to_te_recipe(load_recipe(recipe))
