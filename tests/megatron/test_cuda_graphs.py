"""CUDA graphs under a recipe: what is refused, keys in memory, passes that are thrown away."""

from argparse import Namespace
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers.keys import key_table
from megatron_lowbit.megatron import cuda_graphs, layer_state
from megatron_lowbit.megatron.layer_plan import LayerPlan
from megatron_lowbit.megatron.layer_state import LayerState
from megatron_lowbit.megatron.pretrain import free_cuda_graphs
from megatron_lowbit.numerics.randomness import microbatch_key
from megatron_lowbit.recipes import Layer, load_recipe
from tests.megatron.test_recipe_hook import FINE

ARGS = {
    **FINE, "cuda_graph_impl": "local", "eval_precision": "recipe", "eval_iters": 10,
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cuda_graph_impl": "full_iteration"}, "which it replays as one; use local"),
        ({"eval_precision": "bf16"}, "use --eval-precision recipe"),
        (
            {"eval_precision": "bf16", "eval_iters": 0, "full_validation": True},
            "use --eval-precision recipe",
        ),
        ({"fused_allreduce_norm": True}, "--fused-allreduce-norm counts"),
        (
            {"recompute_granularity": "selective", "pipeline_model_parallel_size": 2},
            "another microbatch's random keys",
        ),
    ],
)
def test_what_is_refused(change, reason):
    recipe = load_recipe("nvfp4")
    cuda_graphs.check(recipe, Namespace(**ARGS))
    with pytest.raises(UserError, match=f"^--cuda-graph-impl .* under a recipe: .*{reason}"):
        cuda_graphs.check(recipe, Namespace(**{**ARGS, **change}))


def test_the_next_run_in_a_process_has_no_graphs_yet(monkeypatch):
    monkeypatch.setattr(_CudagraphGlobalRecord, "cudagraph_created", True)
    free_cuda_graphs()
    assert not _CudagraphGlobalRecord.cudagraph_created


def test_signs_that_no_kernel_draws_are_refused():
    """TetraJet-v2's format has none; with fixed signs nothing of a GPU's memory is read."""
    fresh = [f"{gemm}.hadamard.signs=fresh" for gemm in ("dgrad", "wgrad")]
    with pytest.raises(UserError, match="fresh signs of a format without kernels"):
        cuda_graphs.check(load_recipe("tetrajet2", fresh), Namespace(**ARGS))
    for name in ("tetrajet2", "quartet2", "mxfp4-backward"):
        cuda_graphs.check(load_recipe(name), Namespace(**ARGS))


def test_runs_without_evaluation_need_no_precision_for_it():
    cuda_graphs.check(
        load_recipe("nvfp4"), Namespace(**{**ARGS, "eval_precision": "bf16", "eval_iters": 0})
    )


@pytest.mark.parametrize(
    "change", [{"cuda_graph_impl": "transformer_engine"}, {"num_experts": 4}], ids=str
)
def test_switches_that_are_refused(change):
    recipe = SimpleNamespace(switches=("a switch",), precisions=tuple)
    cuda_graphs.check(recipe, Namespace(**ARGS))
    with pytest.raises(UserError, match="where the recipe switches"):
        cuda_graphs.check(recipe, Namespace(**{**ARGS, **change}))


def states(*recipes):
    """Return states of layers in the middle of models, each under its recipe."""
    made = []
    for number, recipe in enumerate(recipes):
        layer = Layer(f"decoder.layers.{number + 2}.mlp.linear_fc1", number + 2, 10)
        plan = LayerPlan(layer, load_recipe(recipe).precision_for(layer), ReferenceEngine("tests"),
                         accumulate_main_grad=False)  # fmt: skip
        made.append(LayerState(plan, CPU))
    return made


@pytest.fixture
def graphs(monkeypatch):
    """Return graphs of three layers, and a function that begins a microbatch."""
    current = []
    monkeypatch.setattr(cuda_graphs, "get_num_microbatches", lambda: 2)
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: current[-1])
    layers = states("nvfp4", "mxfp4-backward", "fp8-delayed")
    made = cuda_graphs.Graphs([], layers, Namespace(**ARGS))

    def begin(microbatch):
        current.append(microbatch_key(1, 0, microbatch))
        made.fill_keys()
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


def test_a_graph_quantizes_weights_each_time(graphs):
    (first, _, _), begin = graphs
    begin(0)
    assert first.context(first.shards()).weight_cache is None


class Captured(torch.nn.Module):
    """Stand-in for a layer that makes its manager of graphs anew; its forward pass is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.made = "configuration", []

    def create_mcore_cudagraph_manager(self, config):
        self.made.append(config)

    @lru_cache  # noqa: B019  as Megatron-LM's rotary embeddings
    def forward(self, length):
        return torch.zeros(length)


def test_a_switch_makes_managers_and_cached_inputs_anew(monkeypatch):
    """Modules without managers of their own, as Megatron-LM's blocks, are left alone."""
    monkeypatch.setattr(cuda_graphs, "get_num_microbatches", lambda: 2)
    monkeypatch.setattr(cuda_graphs, "delete_cuda_graphs", lambda: None)
    layer = Captured()
    block = torch.nn.Sequential(layer)
    block.cudagraph_manager = None
    made = cuda_graphs.Graphs([block], states("nvfp4"), Namespace(**ARGS))
    before = layer(3)
    made.begin_step(switched=False)
    assert layer.made == [] and layer(3) is before
    made.begin_step(switched=True)
    assert layer.made == ["configuration"] and layer(3) is not before


def test_passes_before_a_capture_record_nothing(graphs, monkeypatch):
    (_, _, delayed), begin = graphs
    begin(0)
    rule = delayed.plan.precision.fprop.delayed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for warming_up in (True, False):
        monkeypatch.setattr(layer_state, "is_graph_capturing", lambda: warming_up)  # noqa: B023
        delayed.call_history().amax(0, rule).resolve(torch.tensor(7.0))
        assert (delayed.amax_history.step[0] == 7.0) == (not warming_up)
