"""Counts of experts' tokens that stay on the device: the bits of Megatron-LM's own dispatcher."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.split import RowSlices
from megatron_lowbit.layers import grouped
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.features import expert_counts
from megatron_lowbit.megatron.features.expert_counts import ExpertCounts
from megatron_lowbit.megatron.layers.state import layer_states
from megatron_lowbit.megatron.run.steps import set_microbatch_key
from tests.marks import others_slow
from tests.megatron.tiny_models import TINY, built, one_rank
from tests.short_runs import steps

# isort: split
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEFlexTokenDispatcher,
)

ARGUMENTS = f"""
    {TINY} --swiglu --transformer-impl local --num-experts 6 --moe-ffn-hidden-size 32
    --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --no-gradient-accumulation-fusion
"""
NVFP4 = "--precision-recipe nvfp4 --recipe-set bf16_blocks=none"
GPT = "--num-layers 1 --position-embedding-type rope"
RECOMPUTED = "--recompute-granularity selective --recompute-modules moe"
SHARED = "--moe-shared-expert-intermediate-size 32"
MODELS = {
    "nvfp4": f"{GPT} {NVFP4}",
    "bf16": f"{GPT} --precision-recipe bf16 --bf16",
    "nvfp4, recomputed": f"{GPT} {NVFP4} --bf16 {RECOMPUTED}",
    "bf16, shared expert": f"{GPT} --precision-recipe bf16 --bf16 {SHARED}",
    "nvfp4, shared expert, overlapped": f"{GPT} {NVFP4} {SHARED} --moe-shared-expert-overlap",
    "nvfp4, hybrid": f"--hybrid-layer-pattern ME --mamba-state-dim 8 --mamba-head-dim 16 "
    f"--mamba-num-groups 2 --position-embedding-type none {NVFP4}",
}
BY_KERNELS = {
    "fp8-tile": f"{GPT} --precision-recipe fp8-tile --bf16",
    "nvfp4, kernels": f"{GPT} {NVFP4} --bf16",
    "nvfp4, recomputed": MODELS["nvfp4, recomputed"],
}
ALL = MODELS | BY_KERNELS
OVERRIDDEN = {"_maybe_dtoh_and_synchronize", "dispatch_postprocess", "combine_preprocess"}

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="builds models on the CPU")


def built_moe_layer(arguments: str) -> MoELayer:
    """Build a model on the ranks of the default process group; return its MoE layer."""
    (layer,) = (module for module in built(arguments).modules() if isinstance(module, MoELayer))
    return layer


@contextmanager
def moe_layer(model: str):
    """Build the model of arguments under a recipe, without the feature; yield its MoE layer."""
    with pytest.MonkeyPatch.context() as patch, one_rank():
        patch.setattr(ExpertCounts, "is_on", lambda args, recipe: False)
        patch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
        yield built_moe_layer(ARGUMENTS + model)


def install(layer: MoELayer) -> ExpertCounts:
    feature = ExpertCounts(SimpleNamespace(chunks=[layer]))
    feature.install()
    feature.wrap([layer])
    return feature


def use_kernels(layer: MoELayer) -> None:
    """Let experts compute in BF16 by kernels, in Triton's interpreter."""
    layer.config.params_dtype = torch.bfloat16
    set_engine(layer.bfloat16(), FusedEngine((9, 0)))


def set_engine(layer: MoELayer, engine) -> None:
    for state in layer_states([layer.experts]):
        state.plan = replace(state.plan, engine=engine)


@pytest.fixture
def gathered(monkeypatch) -> list[torch.Tensor]:
    """Tokens that are quantized in the order of experts, in the end."""
    tokens: list[torch.Tensor] = []

    def gather(x, rows, numbers=None):
        if numbers is not None:
            assert len(numbers) == 2 * len(x)
            tokens.append(x)
        return RowSlices(x, rows, numbers)

    monkeypatch.setattr(grouped, "RowSlices", gather)
    return tokens


def overridden(layer: MoELayer) -> set[str]:
    return OVERRIDDEN & vars(layer.token_dispatcher).keys()


def forward(
    layer: MoELayer, draws: torch.Generator, function=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and output of a new step's forward pass, by a function or the layer's own."""
    for state in layer_states([layer]):
        state.forget_weight()
    x = torch.randn(16, 2, 32, generator=draws).to(layer.config.params_dtype).requires_grad_()
    set_microbatch_key(1, 2, 3)
    return x, function(x) if function else layer(x)[0]


def results(layer: MoELayer, function=None) -> dict[str, torch.Tensor]:
    """Return output, gradient of the input and gradients of all parameters of a training pass.

    ``function``: in place of the layer's own forward pass.
    """
    layer.zero_grad()
    draws = torch.Generator().manual_seed(3)
    x, y = forward(layer, draws, function)
    y.backward(torch.randn(y.shape, generator=draws).to(y.dtype))
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and "router.weight" in found
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        assert values.any(), name


@on_a_cpu
@pytest.mark.parametrize("model", MODELS)
def test_outputs_and_gradients_are_the_dispatchers_to_the_bit(model):
    with moe_layer(ALL[model]) as layer:
        expected = results(layer)
        assert not overridden(layer)
        install(layer)
        assert overridden(layer) == OVERRIDDEN
        check_same(results(layer), expected)


@on_a_cpu
@pytest.mark.slow  # tests/layers/test_grouped.py has the same kernels in fewer programs
@pytest.mark.parametrize("model", BY_KERNELS)
def test_tokens_are_quantized_without_permuted_copies(model, gathered):
    """Kernels take them in the order of experts, with the bits of permuted tokens."""
    with moe_layer(ALL[model]) as layer:
        use_kernels(layer)
        expected = results(layer)
        install(layer)
        check_same(results(layer), expected)
        assert len(gathered) == 1 + ("recomputed" in model)


@on_a_cpu
@pytest.mark.slow
def test_permutation_by_fused_kernels(gathered, monkeypatch):
    """They map tokens to rows by other numbers than tokens have."""

    def permute(x, probs, routing_map, num_out_tokens):
        assert x.requires_grad  # otherwise probabilities may have no gradient
        rows, permuted_probs, order, *_ = moe_utils.permute(x, routing_map, probs, num_out_tokens)
        return rows, permuted_probs, -order

    def unpermute(rows, row_map, merging_probs, restore_shape, **_):
        return moe_utils.unpermute(rows, -row_map, restore_shape)

    with moe_layer(ALL["fp8-tile"]) as layer:
        use_kernels(layer)
        expected = results(layer)
        install(layer)
        monkeypatch.setattr(moe_utils, "HAVE_TE", True)
        monkeypatch.setattr(moe_utils, "fused_permute_with_probs", permute)
        monkeypatch.setattr(moe_utils, "fused_unpermute", unpermute)
        monkeypatch.setattr(layer.config, "moe_permute_fusion", True)
        check_same(results(layer), expected)
        assert len(gathered) == 1


@on_a_cpu
@pytest.mark.slow  # as above, without the kernels
def test_tokens_of_other_passes_are_permuted(gathered):
    """They are in BF16, have experts without kernels, or go to one expert each."""
    with moe_layer(ALL["fp8-tile"]) as layer:
        use_kernels(layer)
        set_engine(layer, ReferenceEngine("tests"))
        expected = results(layer)
        set_engine(layer, FusedEngine((9, 0)))
        feature = install(layer)
        set_engine(layer, ReferenceEngine("tests"))  # after a step has begun
        check_same(results(layer), expected)
        hook = layer.experts.linear_fc1[0].register_forward_hook(lambda *_: None)
        check_same(results(layer), expected)  # called one by one
        hook.remove()
        set_engine(layer, FusedEngine((9, 0)))
        assert expert_counts._takes_tokens(layer, training=True)
        assert not expert_counts._takes_tokens(layer, training=False)
        for owner, name, value in (
            (layer.config, "moe_router_topk", 1), (layer.token_dispatcher, "shared_experts", "any"),
        ):  # fmt: skip
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, value)
                assert not expert_counts._takes_tokens(layer, training=True)
        feature.begin_step(1, training=False)
        forward(layer, torch.Generator().manual_seed(3))
        assert not gathered


@on_a_cpu
@pytest.mark.parametrize("model", others_slow(["nvfp4", "fp8-tile"], ["nvfp4"]))
def test_experts_need_no_more_than_a_graph_of_the_router_returns(model, gathered):
    """Graphs of other passes change what else the dispatcher keeps."""
    with moe_layer(ALL[model]) as layer:
        if model in BY_KERNELS:
            use_kernels(layer)
        expected = results(layer)
        install(layer)
        dispatcher = layer.token_dispatcher

        def in_graphs(x):
            layer.fwd_execution_map = "route"
            hidden, probs, shared = layer(x, intermediate_tensors=())
            kept = {name: getattr(dispatcher, name) for name in dispatcher.cudagraph_attrs}
            layer(x.flip(0).roll(1, 2), intermediate_tensors=())
            assert not torch.equal(dispatcher.tokens_per_expert, kept["tokens_per_expert"])
            for name, value in kept.items():
                if torch.is_tensor(value):
                    setattr(dispatcher, name, value)
            layer.fwd_execution_map = "expert_compute"
            output, _ = layer(None, intermediate_tensors=(hidden, probs))
            layer.fwd_execution_map = "postprocess"
            return layer(None, intermediate_tensors=(output, shared))

        check_same(results(layer, in_graphs), expected)
        assert bool(gathered) is (model in BY_KERNELS)


class Watched(torch.Tensor):
    """Tensor that notes the names of functions that read it."""

    calls: list[str]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@on_a_cpu
@pytest.mark.parametrize(("model", "passes"), [("nvfp4", 1), ("bf16", 1), ("nvfp4, recomputed", 2)])
def test_counts_are_read_once_a_forward_pass(model, passes, monkeypatch):
    """Two linear layers need them, and their backward passes."""
    Watched.calls, made, reads = [], [], []

    class Counts(expert_counts.DeviceCounts):
        def __init__(self, counts, rows, permutation):
            super().__init__(counts.as_subclass(Watched), rows, permutation)
            assert counts.sum() == rows
            made.append(self)

        def on_host(self):
            reads.append(self)
            return super().on_host()

    monkeypatch.setattr(expert_counts, "DeviceCounts", Counts)
    with moe_layer(ALL[model]) as layer:
        install(layer)
        results(layer)
        assert not hasattr(layer.token_dispatcher, "d2h_event")
    assert len(made) == passes
    assert reads == [counts for counts in made for _ in ("fc1", "fc2")]
    assert Watched.calls == ["tolist"] * passes


@on_a_cpu
def test_a_layer_in_parts_waits_only_for_copies_that_are_made():
    """Megatron-LM waits on its event; only with another dispatcher there is something to copy."""
    with moe_layer(ALL["nvfp4"]) as layer:
        block = torch.nn.Module()
        block.mlp, block._router_dtoh_event = layer, (event := object())
        for experts, waits in ((2, True), (1, False)):
            layer.token_dispatcher.ep_size = experts
            ExpertCounts(SimpleNamespace(chunks=[block])).install()
            assert (block._router_dtoh_event is event) == waits
        block._router_dtoh_event.record()
        block._router_dtoh_event.synchronize()


EXCLUDED = [
    ("token_dispatcher.ep_size", 2),
    ("token_dispatcher.tp_size", 2),
    ("token_dispatcher.__class__", MoEAllGatherTokenDispatcher),
    ("token_dispatcher.__class__", MoEFlexTokenDispatcher),
    ("experts.__class__", SequentialMLP),
    ("config.moe_expert_capacity_factor", 1.0),
    ("config.fp8", "hybrid"),
    ("config.fp4", "e2m1"),
    ("config.add_bias_linear", True),
    ("config.use_transformer_engine_op_fuser", True),
    ("config.fine_grained_activation_offloading", True),
]


@on_a_cpu
def test_other_dispatchers_and_experts_are_left_alone():
    with moe_layer(ALL["nvfp4"]) as layer:
        for name, value in EXCLUDED:
            owner, _, attribute = name.partition(".")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(getattr(layer, owner), attribute, value)
                install(layer)
            assert not overridden(layer), name
        install(layer)
        assert overridden(layer)


@on_a_cpu
@pytest.mark.parametrize("model", others_slow(MODELS, ["bf16"]))
def test_training_has_the_bits_of_megatron_lms_dispatcher(model, tmp_path, monkeypatch):
    """Two steps of two micro batches: losses and gradient norms."""
    calls, postprocess = [], expert_counts._dispatch_postprocess

    def count(*given):
        calls.append(None)
        return postprocess(*given)

    monkeypatch.setattr(expert_counts, "_dispatch_postprocess", count)
    arguments = [*(ARGUMENTS + MODELS[model]).split(), "--save"]
    pretrain.main([*arguments, str(tmp_path / "with")])
    assert len(calls) == 4 * (1 + ("recomputed" in model))
    calls.clear()
    monkeypatch.setattr(ExpertCounts, "is_on", lambda args, recipe: False)
    pretrain.main([*arguments, str(tmp_path / "without")])
    assert not calls and len(steps(tmp_path / "with")) == 2
    assert steps(tmp_path / "with") == steps(tmp_path / "without")
