"""MLPs with SwiGLU under a recipe: against two linear layers, and SwiGLU against FP64."""

import pytest
import torch

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.layers import LinearContext, lowbit_linear, lowbit_mlp, mlp
from megatron_lowbit.layers.context import AmaxHistory
from megatron_lowbit.numerics.gemms import OPERANDS
from megatron_lowbit.recipes import load_precision
from tests.kernels.test_gemm import stand_ins  # noqa: F401  products of the fused engine on a CPU

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOPPER = FusedEngine((9, 0))
WIDTH, HIDDEN = 64, 96


def random(*shape, seed=0, dtype=torch.bfloat16):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws).to(DEVICE, dtype)


class SwiGLU(torch.autograd.Function):
    """SwiGLU by an engine, between two layers of their own."""

    @staticmethod
    def forward(ctx, gate_up, engine):
        ctx.engine = engine
        ctx.save_for_backward(gate_up)
        return engine.swiglu(gate_up)[0]

    @staticmethod
    def backward(ctx, grad):
        by_input = ctx.saved_tensors[0].clone()
        ctx.engine.swiglu_grad(by_input, grad)
        return by_input, None


def apart(x, fc1, fc2, first, second):
    gate_up = lowbit_linear(x, fc1, first)
    h = SwiGLU.apply(gate_up.flatten(0, -2), second.engine)
    return lowbit_linear(h, fc2, second).view(*x.shape[:-1], len(fc2))


def results(mlp, contexts, frozen=(), tokens=64):
    """Return the product and all gradients, including weights' from their main gradients."""
    x = random(2, tokens // 2, WIDTH)
    fc1, fc2 = random(2 * HIDDEN, WIDTH, seed=1) / 8, random(WIDTH, HIDDEN, seed=2) / 8
    tensors = {"x": x, "fc1": fc1, "fc2": fc2}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name not in frozen)
        if name != "x" and contexts[0].accumulate_main_grad:
            tensor.main_grad = torch.ones_like(tensor, dtype=torch.float32)
    y = mlp(x, fc1, fc2, *contexts)
    y.backward(random(*y.shape, seed=3))
    grads = [getattr(tensor, "main_grad", tensor.grad) for tensor in tensors.values()]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def contexts_of(recipe, engine, **options):
    precision = load_precision(recipe)

    def context(key):
        history = None
        if precision.history_length:
            history = AmaxHistory(len(OPERANDS), precision.history_length, DEVICE)
        return LinearContext(precision, engine, key, amax_history=history, **options)

    return context(7), context(8)


@pytest.mark.parametrize(
    ("recipe", "accumulates"),
    [("fp8-delayed", True),
     *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("mxfp8", "nvfp4")),
     *(pytest.param(name, False, marks=pytest.mark.slow)
       for name in ("averis", "mxfp8", "nvfp4-fold", "fp8-row", "fp8-tile"))],
)  # fmt: skip
@pytest.mark.parametrize("engine", [ReferenceEngine("tests"), HOPPER], ids=["reference", "fused"])
def test_an_mlp_gives_what_two_layers_give(engine, recipe, accumulates):
    options = {"accumulate_main_grad": accumulates}
    together = results(lowbit_mlp, contexts_of(recipe, engine, **options))
    one_by_one = results(apart, contexts_of(recipe, engine, **options))
    assert len(together) == 4
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [("x",), ("fc1",), ("fc2",), ("x", "fc1"), ("fc1", "fc2")])
def test_only_gradients_that_are_wanted_are_computed(frozen):
    contexts = contexts_of("mxfp8", ReferenceEngine("tests"))
    together, one_by_one = (results(mlp, contexts, frozen) for mlp in (lowbit_mlp, apart))
    assert len(together) == 4 - len(frozen)
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=0)


def test_a_weight_that_changed_before_backward_is_an_error():
    x, fc1 = random(64, WIDTH).requires_grad_(), random(2 * HIDDEN, WIDTH, seed=1)
    fc2 = random(WIDTH, HIDDEN, seed=2)
    y = lowbit_mlp(x, fc1, fc2, *contexts_of("mxfp8", ReferenceEngine("tests")))
    fc2.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("engine", [ReferenceEngine("tests"), HOPPER], ids=["reference", "fused"])
def test_the_gradient_of_gate_and_up_takes_their_memory(engine, monkeypatch):
    """A second backward pass would read it as gate and up: autograd refuses that."""
    written, read = [], []
    swiglu, backward = engine.swiglu, mlp.backward_linear

    def keep(gate_up):
        written.append(gate_up.data_ptr())
        return swiglu(gate_up)

    def watch(context, weight, saved, grad, *rest):
        read.append(grad.data_ptr())
        return backward(context, weight, saved, grad, *rest)

    monkeypatch.setattr(engine, "swiglu", keep)
    monkeypatch.setattr(mlp, "backward_linear", watch)
    x, fc1 = random(64, WIDTH).requires_grad_(), random(2 * HIDDEN, WIDTH, seed=1)
    fc2 = random(WIDTH, HIDDEN, seed=2)
    y = lowbit_mlp(x, fc1, fc2, *contexts_of("mxfp8", engine))
    y.sum().backward(retain_graph=True)
    assert read[1:] == written
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 96), (9, 1500)])
@pytest.mark.parametrize("engine", [ReferenceEngine("tests"), HOPPER], ids=["reference", "fused"])
def test_swiglu_and_its_gradient_are_those_of_float64(engine, rows, columns, dtype):
    """FP32 has some ten roundings, and a GPU's exponential of d an error of (4 + 3 d) 2^-24."""
    gate_up = 8 * random(rows, 2 * columns, dtype=dtype)
    grad = random(rows, columns, seed=1, dtype=dtype)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(grad.double())
    eps = 2.0**-8 if dtype is torch.bfloat16 else (16 + 4 * gate.abs()) * 2.0**-24

    y, amax = engine.swiglu(gate_up)
    by_input = gate_up.clone()
    grad_amax = engine.swiglu_grad(by_input, grad)

    assert y.dtype is by_input.dtype is dtype
    tiny = 2.0**-100
    assert ((y - expected).abs() <= 1.01 * eps * expected.abs() + tiny).all()
    # 1 + gate (1 - sigmoid) is near zero for gates around -1.3.
    terms = (grad.double() * up).abs().repeat(1, 2)
    slack = 2.0**-17 * torch.cat((terms[:, :columns], torch.zeros_like(terms[:, columns:])), 1)
    eps = eps if dtype is torch.bfloat16 else eps.repeat(1, 2)
    bound = 1.01 * eps * exact.grad.abs() + slack + tiny
    assert ((by_input - exact.grad).abs() <= bound).all()
    for tensor, known in ((y, amax), (by_input, grad_amax)):
        assert known is None if engine is not HOPPER else known == tensor.abs().amax()


def test_an_amax_is_nan_where_an_element_is():
    gate_up, grad = random(4, 64), random(4, 32, seed=1)
    gate_up[2, 3] = torch.nan
    assert HOPPER.swiglu(gate_up)[1].isnan()
    assert HOPPER.swiglu_grad(gate_up, grad).isnan()


@pytest.mark.slow
def test_no_pass_takes_an_amax_that_the_activation_gave(monkeypatch):
    from megatron_lowbit.kernels import launch

    measured = set()
    take = launch.scale_amaxes

    def counted(x, row, col, known, take_amaxes):
        if known == (None, None):
            measured.add(tuple(x.shape))
        return take(x, row, col, known, take_amaxes)

    monkeypatch.setattr(launch, "scale_amaxes", counted)
    results(lowbit_mlp, contexts_of("mxfp8", HOPPER), tokens=128)
    assert measured == {(128, WIDTH), (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)}
