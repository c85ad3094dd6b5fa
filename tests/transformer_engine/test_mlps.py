"""MLPs and norms of Transformer Engine's layers as functions of autograd, on stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import operands, sharding
from megatron_lowbit.megatron.features.logs import Measurement
from megatron_lowbit.megatron.layers import state as layer_state
from megatron_lowbit.megatron.layers.state import LayerPlan
from megatron_lowbit.recipes import Layer, load_recipe
from tests.layers.test_mlp import SwiGLU
from tests.transformer_engine.stand_in import (
    ColumnLinear,
    NormColumnLinear,
    RowLinear,
    rmsnorm_fwd,
    use_stand_ins,
)

# isort: split
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

WIDTH, HIDDEN = 64, 96
PATH = "decoder.layers.4.mlp"
CONFIG = {
    "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
    "use_te_activation_func": False, "activation_func_fp8_input_store": False, "bf16": True,
    "bias_activation_fusion": True, "add_bias_linear": False, "cpu_offloading": False,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0,
}  # fmt: skip
RANKS = SimpleNamespace(rank=lambda: 1, size=lambda: 2)


@pytest.fixture
def layers(monkeypatch):
    """Return this project's module of layers; ``fused`` counts what is computed by one function."""
    monkeypatch.setattr(layer_state, "microbatch_key", lambda is_expert: 7)
    layers = use_stand_ins(monkeypatch)
    layers.fused = []
    lowbit_mlp = layers.lowbit_mlp

    def counted(*arguments):
        layers.fused.append(arguments)
        return lowbit_mlp(*arguments)

    monkeypatch.setattr(layers, "lowbit_mlp", counted)
    return layers


def mlp_of(
    layers, recipes=("nvfp4", "nvfp4"), fc1: type = NormColumnLinear, evaluates=False, parallel=(),
    **config,
) -> MLP:  # fmt: skip
    torch.manual_seed(0)
    mlp = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = SimpleNamespace(**CONFIG | config)
    mlp.activation_func = mlp.config.activation_func
    mlp.linear_fc1, mlp.linear_fc2 = fc1(WIDTH, 2 * HIDDEN), RowLinear(HIDDEN, WIDTH)
    for name, recipe in zip(("linear_fc1", "linear_fc2"), recipes, strict=True):
        module, layer = mlp.get_submodule(name), Layer(f"{PATH}.{name}", 4, 10)
        vars(module).update(parallel)
        precision = load_recipe(recipe).precision_for(layer)
        plan = LayerPlan(layer, precision, ReferenceEngine("tests"), False, None, evaluates)
        layers.take_over(module, plan)
    layers.fuse_mlps(torch.nn.ModuleList([mlp]))
    return mlp


def tokens(count: int = 32) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, WIDTH, generator=draws).bfloat16()


def one_by_one(mlp: MLP, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    gate_up, _ = mlp.linear_fc1(x)
    return mlp.linear_fc2(SwiGLU.apply(gate_up, ReferenceEngine("tests")))


def results(mlp: MLP, forward) -> list[torch.Tensor]:
    """Return the product and all gradients of a forward and a backward pass."""
    mlp.zero_grad()
    x = tokens().requires_grad_()
    y, bias = forward(x)
    assert bias is None
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
    return [y.detach(), x.grad, *(parameter.grad for parameter in mlp.parameters())]


@pytest.mark.parametrize("fc1", [ColumnLinear, NormColumnLinear])
@pytest.mark.parametrize("recipe", ["fp8-tile", "nvfp4", "fp8-delayed"])
def test_an_mlp_gives_what_its_layers_give(layers, fc1, recipe):
    mlp = mlp_of(layers, (recipe, recipe), fc1)
    together = results(mlp, mlp)
    assert len(layers.fused) == 1
    apart = results(mlp, lambda x: one_by_one(mlp, x))
    assert len(layers.fused) == 1 and len(together) == 4 + (fc1 is NormColumnLinear)
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


def test_gate_and_up_are_those_of_megatron_lms_mlp(layers):
    """It rounds twice here, without its compiler."""
    mlp = mlp_of(layers)
    found, expected = results(mlp, mlp), results(mlp, lambda x: MLP.forward(mlp, x))
    assert len(layers.fused) == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= 0.1 * theirs.double().norm()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ranks_of_an_mlp_sum_its_product(layers, monkeypatch, sequence_parallel):
    """Tokens of its input where it is split, and of its product again."""
    asked = []

    def scatter(y, factor):
        return 3 * y[: len(y) // 2] if sequence_parallel else factor * y

    def reduce_dgrad(shards, dgrad):
        asked.append((shards.sequence_parallel, shards.allreduce_dgrad))
        return scatter(dgrad, 5) if any(asked[-1]) else dgrad, None

    monkeypatch.setattr(
        sharding, "_start_gather", lambda all, group: lambda: [torch.stack((x, x)) for x in all]
    )
    monkeypatch.setattr(operands, "reduce_dgrad", reduce_dgrad)
    for name in ("reduce_from_tensor_model", "reduce_scatter_to_sequence"):
        monkeypatch.setattr(layers, f"{name}_parallel_region", lambda y, group: scatter(y, 7))
    parallel = {"tp_size": 2, "tp_group": RANKS, "sequence_parallel": sequence_parallel}
    mlp = mlp_of(layers, ("fp8-tile", "fp8-tile"), parallel=parallel)
    together, apart = results(mlp, mlp), results(mlp, lambda x: one_by_one(mlp, x))
    assert len(layers.fused) == 1 and together[0].shape == tokens().shape
    assert asked == 2 * [(False, False), (sequence_parallel, not sequence_parallel)]
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


def upstream_calls(layers, mlp: MLP, *arguments, **options) -> int:
    """Return the number of runs of Megatron-LM's forward pass in one call, 1 or 0."""
    calls, forward = [], mlp.forward.upstream
    mlp.forward.upstream = lambda *given, **named: calls.append(named) or forward(*given, **named)
    before = len(layers.fused)
    mlp(*arguments, **options)
    assert len(calls) + len(layers.fused) - before == 1
    mlp.forward.upstream = forward
    return len(calls)


@pytest.mark.parametrize("recipes", [("bf16", "nvfp4"), ("nvfp4", "bf16"), ("bf16", "bf16")])
def test_a_layer_in_bf16_runs_by_itself(layers, recipes):
    assert upstream_calls(layers, mlp_of(layers, recipes), tokens()) == 1


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_evaluation_runs_as_training_does_if_it_is_quantized(layers, evaluates):
    mlp = mlp_of(layers, evaluates=evaluates).eval()
    with torch.no_grad():
        assert upstream_calls(layers, mlp, tokens()) == (not evaluates)


@pytest.mark.parametrize("name", ["linear_fc1", "linear_fc2"])
def test_a_layer_that_transformer_engine_computes_runs_by_itself(layers, name):
    mlp = mlp_of(layers)
    module = mlp.get_submodule(name)
    module.layer_state.native = "a recipe of Transformer Engine"
    module.forward.upstream = lambda x: (x.new_ones(*x.shape[:-1], module.out_features), None)
    assert upstream_calls(layers, mlp, tokens()) == 1


def test_weights_of_tokens_and_empty_inputs_are_megatron_lms(layers):
    mlp = mlp_of(layers)
    assert upstream_calls(layers, mlp, tokens(), padding_mask=None) == 0
    rows = tokens()[:, 0]
    assert upstream_calls(layers, mlp, rows, per_token_scale=torch.ones(32)) == 1
    assert upstream_calls(layers, mlp, rows[:0]) == 1


@pytest.mark.parametrize(
    ("name", "register"),
    [
        ("linear_fc1", lambda layer, hook: layer.register_forward_hook(hook)),
        ("linear_fc2", lambda layer, hook: layer.register_forward_pre_hook(hook)),
        ("linear_fc2", lambda layer, hook: layer.register_full_backward_hook(hook)),
        ("linear_fc1", lambda layer, hook: layer.register_full_backward_pre_hook(hook)),
    ],
)
def test_hooks_see_the_layers_of_an_mlp(layers, name, register):
    mlp, seen = mlp_of(layers), []
    handle = register(mlp.get_submodule(name), lambda *given: seen.append(given) and None)
    results(mlp, mlp)
    assert len(seen) == 1 and not layers.fused
    handle.remove()
    assert upstream_calls(layers, mlp, tokens()) == 0


@pytest.mark.parametrize("group", [SimpleNamespace(rank=lambda: 0), None])
def test_quantization_logs_measure_the_layers_of_an_mlp(layers, group, monkeypatch):
    """Projections to latents, which every rank has whole, are in no tensor-parallel group."""
    mlp = mlp_of(layers)
    mlp.linear_fc2.tp_group = group
    monkeypatch.setattr("megatron_lowbit.megatron.features.logs.gather_from_ranks", lambda x: [x])
    measurement = Measurement([mlp], 0)
    results(mlp, mlp)
    (path,) = measurement.end()
    assert path == f"{PATH}.linear_fc2" and not layers.fused


def test_the_layers_of_a_graph_run_before_they_are_captured(layers, monkeypatch):
    """Transformer Engine's hooks, which find its modules, are there only in the passes before."""
    mlp = mlp_of(layers)
    monkeypatch.setattr(layers, "is_graph_capturing", lambda: True)
    handle = mlp.linear_fc1.register_forward_hook(lambda module, inputs, outputs: None)
    assert upstream_calls(layers, mlp, tokens()) == 0
    handle.remove()
    assert upstream_calls(layers, mlp, tokens()) == 0


def test_parameters_are_gathered_before_they_are_read(layers, monkeypatch):
    """By the hooks of --overlap-param-gather: once for each layer, before its weight is read."""
    mlp, gathered = mlp_of(layers), []
    whole = {parameter: parameter.detach().clone() for parameter in mlp.parameters()}
    expected = results(mlp, mlp)

    class Gathering:
        def __init__(self, parameter: torch.nn.Parameter) -> None:
            self.parameter = parameter
            parameter.data = torch.full_like(parameter, torch.nan)

        def finish_param_sync(self, skip_next_bucket_dispatch: bool) -> None:
            gathered.append(self.parameter)
            self.parameter.data = whole[self.parameter]

    ddp = SimpleNamespace(
        use_forward_hook=True, module=mlp, remove_forward_pre_hook_handles={},
        ddp_config=SimpleNamespace(align_param_gather=False),
        overlap_param_gather_with_optimizer_step=False,
        param_to_bucket_group={parameter: Gathering(parameter) for parameter in whole},
    )  # fmt: skip
    ddp._make_forward_pre_hook = lambda: DistributedDataParallel._make_forward_pre_hook(ddp)
    DistributedDataParallel.enable_forward_pre_hook(ddp)
    for state in (mlp.linear_fc1.layer_state, mlp.linear_fc2.layer_state):
        state.forget_weight()

    found = results(mlp, mlp)

    assert len(layers.fused) == 2
    assert sorted(map(id, gathered)) == sorted(map(id, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "other",
    [
        {"gated_linear_unit": False},
        {"activation_func": torch.nn.functional.gelu},
        {"use_te_activation_func": True},
        {"activation_func_fp8_input_store": True},
        {"bf16": False},
        {"bias_activation_fusion": False},
        {"add_bias_linear": True},
        {"cpu_offloading": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_activations_are_megatron_lms(layers, other):
    assert "forward" in vars(mlp_of(layers))
    assert "forward" not in vars(mlp_of(layers, **other))


def test_megatron_lms_fused_swiglu_clamps_nothing(layers):
    """Nor does this project's."""
    clamped = mlp_of(layers, activation_func_clamp_value=0.1)
    plain = mlp_of(layers)
    for forward in (lambda mlp: mlp, lambda mlp: lambda x: MLP.forward(mlp, x)):
        found, expected = (results(mlp, forward(mlp)) for mlp in (clamped, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_other_mlps_are_left_alone(layers):
    """Shared experts, which are a class of their own, and layers that no recipe reaches."""

    class Shared(MLP):
        pass

    mlp = mlp_of(layers)
    del mlp.forward
    mlp.__class__ = Shared
    layers.fuse_mlps(mlp)
    assert "forward" not in vars(mlp)
    mlp.__class__ = MLP
    del mlp.linear_fc2.forward
    layers.fuse_mlps(mlp)
    assert "forward" not in vars(mlp)


class Attention(torch.nn.Module):
    """Attention that only projects its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = NormColumnLinear(WIDTH, WIDTH)


def block_of(layers, recipe: str = "nvfp4", fuse: bool = True) -> TransformerLayer:
    """Return a block as Megatron-LM makes it where norms are their linear layers'."""
    block = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(block)
    block.mlp, block.self_attention = mlp_of(layers, (recipe, recipe)), Attention()
    block.input_layernorm, block.pre_mlp_layernorm = IdentityOp(), IdentityOp()
    layer = Layer("decoder.layers.4.self_attention.linear_qkv", 4, 10)
    precision = load_recipe(recipe).precision_for(layer)
    plan = LayerPlan(layer, precision, ReferenceEngine("tests"), False, None, False)
    layers.take_over(block.self_attention.linear_qkv, plan)
    if fuse:
        layers.fuse_norms(torch.nn.ModuleList([block]))
    return block


def block_forward(block: TransformerLayer, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Compute what Megatron-LM's block does without attention's core."""
    for norm, linear in (
        (block.input_layernorm, block.self_attention.linear_qkv),
        (block.pre_mlp_layernorm, block.mlp),
    ):
        y = norm(x)
        y, residual = y if isinstance(y, tuple) else (y, x)
        x = residual + linear(y)[0]
    return x, None


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_norms_take_the_gradients_of_residuals(layers, recipe):
    """One rounding of the sum in place of one of each summand; in BF16 nothing changes."""
    fused, plain = block_of(layers, recipe), block_of(layers, recipe, fuse=False)
    tensors = [results(block, lambda x, b=block: block_forward(b, x)) for block in (fused, plain)]
    assert torch.equal(tensors[0][0], tensors[1][0])
    for found, expected in zip(*tensors, strict=True):
        if expected is None:  # of a norm's weight: the stand-in has no norm in BF16
            assert found is None and recipe == "bf16"
            continue
        error = (found.float() - expected.float()).norm()
        # Gradients are quantized again behind the first sum.
        assert error <= (0 if recipe == "bf16" else 0.05) * expected.float().norm()
    norm = fused.input_layernorm
    x = tokens().requires_grad_()
    y = norm(x)
    assert isinstance(y, tuple) == (recipe != "bf16")
    if recipe != "bf16":
        first, second = torch.randn(2, *x.shape).bfloat16()
        (alone,) = torch.autograd.grad(y[0], x, first, retain_graph=True)
        (both,) = torch.autograd.grad(y, x, [first, second])
        bound = 2.0**-8 * (alone.float().abs() + both.float().abs())
        assert ((both.float() - alone.float() - second.float()).abs() <= bound).all()


def test_a_product_behind_its_norm_takes_the_amax_that_it_gave(layers, monkeypatch):
    """No amaxes for other rows, such as a recomputed layer's."""
    block = block_of(layers)
    linear, seen = block.self_attention.linear_qkv, []

    def rms_norm(self, x, gain, eps):
        y, _, inverse = rmsnorm_fwd(x, gain, eps, None, None, x.dtype, 0, False)
        return y, inverse, y.float().abs().amax()

    monkeypatch.setattr(ReferenceEngine, "rms_norm", rms_norm)
    monkeypatch.setattr(
        layers, "lowbit_linear", lambda x, weight, context, bias, amax: seen.append(amax) or x
    )
    for change in (lambda y: y, lambda y: y, torch.clone):
        y, residual = block.input_layernorm(tokens())
        assert torch.equal(residual, tokens())
        linear(change(y))
    expected = y.float().abs().amax()
    assert seen[0] == seen[1] == expected and seen[2] is None


def test_a_watched_layer_normalizes_its_own_input(layers):
    """Its hooks see what they saw without the fused norm."""
    block, seen = block_of(layers), []
    linear, x = block.self_attention.linear_qkv, tokens()
    handle = linear.register_forward_hook(lambda module, given, y: seen.append(given[0]))
    watched = block_forward(block, x)[0]
    assert seen[0] is x
    handle.remove()
    assert torch.equal(watched, block_forward(block, x)[0])


def test_norms_with_modules_of_their_own_are_left_alone(layers):
    class Norm(IdentityOp):
        pass

    block = block_of(layers, fuse=False)
    block.input_layernorm = Norm()
    block.mlp = IdentityOp()
    layers.fuse_norms(block)
    for norm in (block.input_layernorm, block.pre_mlp_layernorm):
        assert "forward" not in vars(norm)
    assert not block.self_attention.linear_qkv.forward.follows_norm
