"""CUDA graphs under a recipe: keys in memory, weights, passes that are thrown away."""

from argparse import Namespace
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs as upstream_graphs
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import UNSHARDED, lowbit_linear
from megatron_lowbit.layers.autograd_state import flatten
from megatron_lowbit.megatron.features import cuda_graphs
from megatron_lowbit.megatron.features.cuda_graphs import CudaGraphs
from megatron_lowbit.megatron.layers import state as layer_state
from megatron_lowbit.megatron.layers.state import LayerPlan, LayerState
from megatron_lowbit.megatron.pretrain import free_cuda_graphs, teardown
from megatron_lowbit.numerics import FORMATS
from megatron_lowbit.numerics.randomness import key_table, microbatch_key
from megatron_lowbit.recipes import HIGH_PRECISION, Layer, load_recipe
from tests.megatron.test_compatibility import GRAPHS

CPU = torch.device("cpu")


def test_the_next_run_in_a_process_has_no_graphs_yet(monkeypatch):
    monkeypatch.setattr(_CudagraphGlobalRecord, "cudagraph_created", True)
    free_cuda_graphs()
    assert not _CudagraphGlobalRecord.cudagraph_created


def test_the_next_run_in_a_process_chooses_generators_again(monkeypatch):
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    with teardown():
        pass
    assert not random._CUDA_RNG_STATE_TRACKER_INITIALIZED


def states(*recipes):
    """Return states of layers in the middle of models, each under its recipe."""
    made = []
    for number, recipe in enumerate(recipes):
        layer = Layer(f"decoder.layers.{number + 2}.mlp.linear_fc1", number + 2, 10)
        plan = LayerPlan(layer, load_recipe(recipe).precision_for(layer), ReferenceEngine("tests"),
                         accumulate_main_grad=False)  # fmt: skip
        made.append(LayerState(plan, CPU))
    return made


@pytest.fixture(autouse=True)
def two_microbatches(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "get_num_microbatches", lambda: 2)


def installed(states, chunks=(), **changes) -> CudaGraphs:
    """Return the graphs of layers."""
    args = Namespace(**{**GRAPHS, **changes})
    graphs = CudaGraphs(
        SimpleNamespace(args=args, states=states, chunks=chunks, current="the recipe")
    )
    graphs.install()
    return graphs


@pytest.fixture
def graphs(monkeypatch):
    """Return graphs of three layers, and a function that begins a microbatch."""
    current = []
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: current[-1])
    layers = states("nvfp4", "mxfp4-backward", "fp8-delayed")
    made = installed(layers)

    def begin(microbatch):
        current.append(microbatch_key(1, 0, microbatch))
        made.begin_pass()
        return [state.microbatch_key() for state in layers]

    return layers, begin


def test_layers_find_the_keys_of_their_microbatch(graphs):
    (first, second, plain), begin = graphs
    keys = begin(0)
    taken = first.call_key()
    assert taken.tolist() == key_table(keys[0])
    assert second.call_key().tolist() == key_table(keys[1])
    assert plain.call_key() == 0  # draws nothing
    begin(1)
    assert taken.tolist() == key_table(keys[0])  # its backward pass may come later
    assert first.call_key().tolist() != taken.tolist()


@pytest.mark.parametrize(
    "change", [{}, {"mtp_num_layers": 1}, {"mlp_chunks_for_training": 2}], ids=str
)
def test_only_gradients_of_a_steps_one_microbatch_are_written(change, monkeypatch):
    """Gradients of layers that may run several times in a microbatch are always added."""
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: 7)
    layer, expert = states("nvfp4", "nvfp4")
    expert.is_expert = True
    made = installed([layer, expert], **change)
    betas, deleted = [], []
    monkeypatch.setattr(made, "_delete_graphs", lambda: deleted.append(len(betas)))
    for microbatches in (2, 4, 1, 1, 3):
        monkeypatch.setattr(cuda_graphs, "get_num_microbatches", lambda: microbatches)  # noqa: B023
        made.begin_step(0, training=True)
        made.begin_pass()
        betas.append(layer.context(UNSHARDED).main_grad_beta)
    assert betas == ([True] * 5 if change else [True, True, False, False, True])
    assert deleted == ([] if change else [2, 4])
    assert expert.context(UNSHARDED).main_grad_beta is None


def test_the_output_layer_is_left_out(monkeypatch):
    """It is not captured, and keeps its quantized weight for a whole step."""
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: 7)
    (layer,) = states("nvfp4")
    output = LayerState(replace(layer.plan, layer=Layer.output(10)), CPU)
    made = installed([output, layer])
    made.begin_step(0, training=True)
    made.begin_pass()
    context = output.context(UNSHARDED)
    assert context.main_grad_beta is None and isinstance(context.key, int)
    assert context.weight_cache is output.weight_cache
    assert layer.context(UNSHARDED).weight_cache is None


ROUTER = [CudaGraphModule.moe_router]
PREPROCESS = [*ROUTER, CudaGraphModule.moe_preprocess]


@pytest.mark.parametrize(
    ("implementation", "pattern", "modules", "captured"),
    [
        ("transformer_engine", None, [CudaGraphModule.attn], "qkv"),
        ("transformer_engine", None, [CudaGraphModule.attn, *ROUTER], "qkv shared"),
        ("transformer_engine", None, PREPROCESS, "shared fc1_latent_proj"),
        ("transformer_engine", None, [CudaGraphModule.moe], "expert shared latent"),
        ("transformer_engine", None, [], "qkv expert shared latent"),
        ("local", None, [CudaGraphModule.attn], "qkv expert shared latent"),  # the whole block
        ("local", "*E", [CudaGraphModule.attn], "qkv"),
        ("local", "*E", PREPROCESS, "shared latent"),
        ("local", "*E", [], "qkv expert shared latent"),
    ],
)
def test_graphs_of_parts_of_blocks_leave_the_others_their_keys(
    monkeypatch, implementation, pattern, modules, captured
):
    captured = captured.replace(" latent", " fc1_latent_proj fc2_latent_proj").split()
    names = ("qkv", "expert", "shared", "fc1_latent_proj", "fc2_latent_proj")
    block = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(block)
    block.is_moe_layer, block.mlp = True, MoELayer.__new__(MoELayer)
    torch.nn.Module.__init__(block.mlp)
    block.config = SimpleNamespace(
        cuda_graph_modules=modules, moe_shared_expert_intermediate_size=64,
        moe_shared_expert_overlap=False,
    )  # fmt: skip
    made = dict(zip(names, states(*["nvfp4"] * len(names)), strict=True))
    made["expert"].is_expert = True
    layers = {name: Linear(state) for name, state in made.items()}
    for name in ("input_layernorm", "pre_cross_attn_layernorm", "cross_attention"):
        setattr(block, name, IdentityOp())
    block.pre_mlp_layernorm, block.mlp.router = IdentityOp(), torch.nn.Identity()
    block.self_attention, block.mlp.experts = layers["qkv"], layers["expert"]
    block.mlp.shared_experts = layers["shared"]
    for name in names[3:]:
        setattr(block.mlp, name, layers[name])
    chunk = torch.nn.ModuleList([block])
    chunk.config = block.config
    monkeypatch.setattr(cuda_graphs, "captured", captured_on_cpu)
    graphs = installed(
        list(made.values()), [chunk], cuda_graph_impl=implementation, cuda_graph_modules=modules,
        hybrid_layer_pattern=pattern,
    )  # fmt: skip
    graphs.begin_step(0, training=True)
    for name, state in made.items():
        assert (state.graph_keys is not None) == (name in captured)
        assert state.weight_cache.stored == (name in captured and name != "expert")


class Linear(torch.nn.Module):
    """Linear layer with a state."""

    def __init__(self, state: LayerState) -> None:
        super().__init__()
        self.layer_state, draws = state, torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(32, 64, generator=draws))

    def forward(self, x):
        state = self.layer_state
        return lowbit_linear(x, self.weight, state.context(state.shards()))


def captured_on_cpu(function):
    """Return the result of a function on a CPU, and a function that rewrites it in its memory."""
    made = function()

    def replay():
        old, new = [], []
        for pairs, tensors in ((made, old), (function(), new)):
            flatten([list(pair) for pair in pairs], tensors)
        for one, other in zip(old, new, strict=True):
            one.copy_(other)

    return made, replay


@pytest.fixture
def layers(monkeypatch):
    """Return a layer under each of three recipes, in graphs and not: the last two draw bits."""
    monkeypatch.setattr(cuda_graphs, "captured", captured_on_cpu)
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: 7)
    names = ("fp8-tile", "nvfp4", "mxfp4-backward")
    made, plain = ([Linear(state) for state in states(*names)] for _ in range(2))
    return torch.nn.Sequential(*made), plain


def of_layers(made, **changes) -> CudaGraphs:
    graphs = installed([layer.layer_state for layer in made], [made], **changes)
    graphs.begin_pass()
    return graphs


def passes(layer):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y))]


def test_weights_are_quantized_once_a_step_where_graphs_read_them(layers):
    made, plain = layers
    weights = of_layers(made)
    codes = []
    for step in range(3):
        for layer, twin in zip(made, plain, strict=True):
            with torch.no_grad():
                layer.weight.add_(step)
                twin.weight.copy_(layer.weight)
            layer.layer_state.forget_weight()
            twin.layer_state.forget_weight()
        weights.begin_step(step, training=True)
        for layer, twin in zip(made, plain, strict=True):
            torch.testing.assert_close(passes(layer), passes(twin), rtol=0, atol=0)
        caches = [layer.layer_state.context(UNSHARDED).weight_cache for layer in made]
        codes.append([cache and cache.operands[0].codes.data_ptr() for cache in caches])
    assert codes[0] == codes[1] == codes[2]
    assert codes[0][0] and codes[0][1] and codes[0][2] is None  # drawn in each microbatch


def test_a_switch_has_its_weights_quantized_again(layers):
    made, _ = layers
    weights = of_layers(made)
    weights.begin_step(0, training=True)
    first, second, _ = (layer.layer_state for layer in made)
    before = first.weight_cache
    first.set_precision(second.plan.precision)
    second.set_precision(HIGH_PRECISION)
    weights.begin_step(1, training=True)
    assert first.weight_cache is not before and first.weight_cache.stored
    assert first.weight_cache.operands[0].format == FORMATS["nvfp4-2d"]
    assert not second.weight_cache.stored


@pytest.mark.parametrize(
    "gathered", ["overlap_param_gather", "use_megatron_fsdp", "use_torch_fsdp2"]
)
def test_weights_that_are_still_gathered_are_left_to_each_graph(layers, gathered):
    made, _ = layers
    weights = of_layers(made, **{gathered: True})
    weights.begin_step(0, training=True)
    for layer in made:
        assert layer.layer_state.context(UNSHARDED).weight_cache is None


class Captured(torch.nn.Module):
    """Stand-in for a layer that makes its manager of graphs again; its forward pass is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.made = "configuration", []

    def create_mcore_cudagraph_manager(self, config):
        self.made.append(config)

    @lru_cache  # noqa: B019  as Megatron-LM's rotary embeddings
    def forward(self, length):
        return torch.zeros(length)


def test_a_switch_replaces_managers_and_cached_inputs(monkeypatch):
    """Modules without managers of their own, as Megatron-LM's blocks, do not change."""
    monkeypatch.setattr(cuda_graphs, "delete_cuda_graphs", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layer = Captured()
    block = torch.nn.Sequential(layer)
    block.cudagraph_manager = None
    made = installed(states("nvfp4"), [block], overlap_param_gather=True)
    before = layer(3)
    made.begin_step(0, training=True)
    assert layer.made == [] and layer(3) is before
    made.run.current = "another recipe"
    made.begin_step(1, training=True)
    assert layer.made == ["configuration"] and layer(3) is not before


@pytest.mark.parametrize("precision", ["recipe", "bf16"])
def test_evaluation_in_high_precision_replays_nothing(precision):
    layer = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(cuda_graph_impl="local")
    layer.cudagraph_manager = lambda *_: "replayed"
    layer.forward = lambda x: "computed"
    made = installed(
        states("nvfp4"), [torch.nn.Sequential(layer)], eval_precision=precision,
        overlap_param_gather=True,
    )  # fmt: skip
    found = []
    for training in (True, False, True):
        made.begin_step(0, training)
        found.append(layer(3))
    assert found == ["replayed", "replayed" if precision == "recipe" else "computed", "replayed"]


def test_a_switch_replaces_managers_of_parts(monkeypatch):
    """Each calls the layer's own function, as Megatron-LM's manager does, not the one before."""

    class Manager(torch.nn.Module):
        def __init__(self, config, layer, function_name):
            super().__init__()
            function = getattr(layer, function_name)
            setattr(layer, function_name, lambda x: ("graph", function(x)))

    layer = MoETransformerLayer.__new__(MoETransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(
        cuda_graph_impl="local", cuda_graph_modules=PREPROCESS, recompute_granularity=None
    )
    parts = ("router", "postprocess")
    monkeypatch.setattr(upstream_graphs, "CudaGraphManager", Manager)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    monkeypatch.setattr(cuda_graphs, "delete_cuda_graphs", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for part in parts:
        monkeypatch.setattr(MoETransformerLayer, f"_forward_mlp_{part}", lambda self, x: x)
    layer.create_mcore_cudagraph_manager(layer.config)
    before = dict(layer.named_children())
    graphs = installed(states("nvfp4"), [torch.nn.Sequential(layer)], overlap_param_gather=True)
    graphs.run.current = "another recipe"
    graphs.begin_step(1, training=True)
    after = dict(layer.named_children())
    assert before.keys() == after.keys() == {f"cudagraph_manager_{part}" for part in parts}
    for part in parts:
        assert after[f"cudagraph_manager_{part}"] is not before[f"cudagraph_manager_{part}"]
        assert getattr(layer, f"_forward_mlp_{part}")(3) == ("graph", 3)


def test_passes_before_a_capture_record_nothing(graphs, monkeypatch):
    (_, _, delayed), begin = graphs
    begin(0)
    rule = delayed.plan.precision.fprop.delayed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for warming_up in (True, False):
        monkeypatch.setattr(layer_state, "is_graph_capturing", lambda: warming_up)  # noqa: B023
        delayed.call_history().amax(0, rule).resolve(torch.tensor(7.0))
        assert (delayed.amax_history.step[0] == 7.0) == (not warming_up)
