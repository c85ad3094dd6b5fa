"""The linear layer: high precision against F.linear, quantized against products written here."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from recording_engine import RecordingEngine
from torch.utils.checkpoint import checkpoint

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import UNSHARDED, LinearContext, lowbit_linear, operands
from megatron_lowbit.layers.context import draw_key
from megatron_lowbit.layers.linear import context_of
from megatron_lowbit.numerics import Operand, derive_key, quantize
from megatron_lowbit.recipes import HIGH_PRECISION, GemmPrecision, load_recipe

ENGINE = ReferenceEngine("tests")
KEY = 2**63 + 12345  # keys are unsigned 64-bit
NVFP4 = load_recipe("nvfp4").configs["nvfp4"]
NEAREST = load_recipe("nvfp4", ["grad.rounding=nearest"]).configs["nvfp4"]
ROWS = load_recipe("nvfp4", ["weight.format=nvfp4"]).configs["nvfp4"]
OF_FPROP = ("wgrad.hadamard=null", "weight.axis=fprop", "input.axis=fprop")
SAME_AXIS, SAME_BITS = (
    load_recipe("nvfp4", [*OF_FPROP, *more]).configs["nvfp4"]
    for more in (["weight.format=nvfp4"], ["weight.rounding=stochastic"])
)
STOCHASTIC = load_recipe(
    "nvfp4", ["input.rounding=stochastic", "weight.rounding=stochastic"]
).configs["nvfp4"]
PLAIN_WGRAD = load_recipe("nvfp4", ["wgrad.hadamard=null"]).configs["nvfp4"]


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(m=(48,), n=32, k=64, dtype=torch.float32):
    """Return x, weight, bias as leaves, and a gradient of y."""
    tensors = [randn(*m, k, seed=1), randn(n, k, seed=2) / k**0.5, randn(n, seed=3)]
    x, weight, bias = (t.to(dtype).requires_grad_() for t in tensors)
    return x, weight, bias, randn(*m, n, seed=4, dtype=dtype)


def run(x, weight, precision, dy, bias=None, **options):
    """Return (y, dX, dW[, db])."""
    context = LinearContext(precision, **{"engine": ENGINE, "key": KEY} | options)
    y = lowbit_linear(x, weight, context, bias=bias)
    inputs = [x, weight] + ([bias] if bias is not None else [])
    return (y.detach(), *torch.autograd.grad(y, inputs, dy))


def assert_equal(results, expected):
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [(33,), (3, 11), (2, 3, 4)])
def test_high_precision_is_f_linear(m, bias, dtype):
    x, weight, b, dy = leaves(m, 24, 40, dtype)
    b = b if bias else None
    results = run(x, weight, HIGH_PRECISION, dy, b)
    y = F.linear(x, weight, b)
    inputs = [x, weight] + ([b] if bias else [])
    expected = (y.detach(), *torch.autograd.grad(y, inputs, dy))
    assert_equal(results, expected)


def test_another_gpu_than_the_current_one_is_refused(monkeypatch):
    """Kernels would run on the current one's stream."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    with pytest.raises(ValueError, match="input is on cuda:1, but the current device is cuda:0"):
        context_of("mxfp8", x)


def test_a_vector_is_one_row():
    x, weight, _, _ = leaves((), 24, 40)
    for precision in (HIGH_PRECISION, NEAREST):
        y = lowbit_linear(x, weight, LinearContext(precision, ENGINE, 0))
        rows = lowbit_linear(x[None], weight, LinearContext(precision, ENGINE, 0))
        assert y.shape == (24,) and torch.equal(y, rows[0])


def test_no_tokens():
    """An expert may get none: zero weight gradient, empty output."""
    x, weight, _, dy = leaves((0,))
    y, dx, dw = run(x, weight, NVFP4, dy)
    assert y.shape == (0, 32) and dx.shape == (0, 64)
    assert torch.equal(dw, torch.zeros_like(weight))


def product(lhs, rhs):
    """Multiply independently: float64 on dequantized values."""
    return lhs.dequantize().double() @ rhs.dequantize().double().t()


def zero_pad(x, multiple=16):
    """Pad to whole blocks of tokens, which the transform spreads over."""
    return F.pad(x, (0, -x.shape[1] % multiple))


def by_hand(x, weight, dy, precision):
    """Return Y, dX, dW in float64 from operands that the recipe's own quantizers make."""
    x, weight, dy = (t.detach().reshape(-1, t.shape[-1]) for t in (x, weight, dy))

    def q(gemm, role, t):
        quantizer = next(z for g, r, z in precision.operands() if (g, r) == (gemm, role))
        transform = getattr(precision, gemm).hadamard
        t = t if transform is None else zero_pad(t, transform.size)
        return quantizer(t, hadamard=transform, draw=UNSHARDED.draw(KEY, gemm, role, 0))

    if precision.dgrad.rhs_of_fprop:  # figure 14 (1) of the NVFP4 paper, of weights and activations
        rows, columns = (
            q("fprop", "input", x).dequantize(),
            q("fprop", "weight", weight).dequantize(),
        )
        return (
            rows.double() @ columns.double().t(),
            q("dgrad", "grad", dy).dequantize().double() @ columns.double(),
            q("wgrad", "grad", dy.t()).dequantize().double() @ rows.double(),
        )
    return (
        product(q("fprop", "input", x), q("fprop", "weight", weight)),
        product(q("dgrad", "grad", dy), q("dgrad", "weight", weight.t())),
        product(q("wgrad", "grad", dy.t()), q("wgrad", "input", x.t())),
    )


SHAPES = [((48,), 32, 64), ((4, 8), 48, 80), ((20,), 24, 40), ((5, 7), 17, 33), ((1,), 16, 16)]


@pytest.mark.parametrize(
    ("precision", "m", "n", "k"),
    [
        *((NVFP4, *shape) for shape in SHAPES),
        *((one, *SHAPES[3]) for one in (NEAREST, STOCHASTIC, ROWS, PLAIN_WGRAD)),
        *((one, *shape) for one in (SAME_AXIS, SAME_BITS) for shape in SHAPES[2:4]),
    ],
)
def test_quantized_products(precision, m, n, k):
    """Within FP32 accumulation, (K + 2) * 2**-24 of sum |a||b| <= 2**-22 K amax amax."""
    x, weight, _, dy = leaves(m, n, k)
    results = run(x, weight, precision, dy)
    assert results[0].shape == (*m, n)
    for result, expected in zip(results, by_hand(x, weight, dy, precision), strict=True):
        assert result.dtype == torch.float32
        # Sums of at most 80 terms of size <= 20 here; another rounding anywhere is 1000x larger.
        torch.testing.assert_close(
            result.double().reshape(expected.shape), expected, rtol=1e-5, atol=2e-5
        )


def test_draws_are_from_the_documented_key():
    """derive_key(key, GEMM number, role number): dY rounds differently in dgrad and wgrad."""
    roles = {"input": 0, "weight": 1, "grad": 2}
    gemms = {"fprop": 0, "dgrad": 1, "wgrad": 2}
    keys = set()
    for gemm, role in [
        ("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad"),
        ("dgrad", "weight"), ("wgrad", "grad"), ("wgrad", "input"),
    ]:  # fmt: skip
        draw = UNSHARDED.draw(KEY, gemm, role, 5)
        assert draw.key == derive_key(KEY, gemms[gemm], roles[role])
        assert draw.rows is None and draw.groups is None
        keys.add(draw.key)
    assert len(keys) == 6


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_one_gemm_in_high_precision(gemm):
    """The other two do not change by a bit; the one is F.linear's."""
    x, weight, _, dy = leaves()
    precision = dataclasses.replace(NVFP4, **{gemm: GemmPrecision()})
    all_three = run(x, weight, NVFP4, dy)
    results = run(x, weight, precision, dy)
    high = run(x, weight, HIGH_PRECISION, dy)
    for i, name in enumerate(("fprop", "dgrad", "wgrad")):
        assert torch.equal(results[i], high[i] if name == gemm else all_three[i])
        assert not torch.equal(high[i], all_three[i])


@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_one_operand_in_high_precision(gemm, side):
    x, weight, _, dy = leaves()
    mixed = dataclasses.replace(getattr(NEAREST, gemm), hadamard=None, **{side: None})
    results = run(x, weight, dataclasses.replace(NEAREST, **{gemm: mixed}), dy)
    operands = {
        "fprop": (x, weight), "dgrad": (dy, weight.t()), "wgrad": (dy.t(), x.t())
    }[gemm]  # fmt: skip
    dense = [
        t.double() if z is None else z(t.detach()).dequantize().double()
        for t, z in zip(operands, (mixed.lhs, mixed.rhs), strict=True)
    ]
    i = ("fprop", "dgrad", "wgrad").index(gemm)
    torch.testing.assert_close(
        results[i].double(), (dense[0] @ dense[1].t()).detach(), rtol=1e-5, atol=2e-5
    )


@pytest.mark.parametrize("quantized, plain", [("input", "weight"), ("weight", "input")])
def test_values_of_fprop_beside_bf16_gradients(quantized, plain):
    """The study nvfp4-consistency: of all operands one is quantized, and keeps fprop's bits."""
    settings = ["wgrad.hadamard=null", "grad.format=null", f"{plain}.format=null"]
    settings += [f"{quantized}.format=nvfp4", f"{quantized}.axis=fprop"]
    precision = load_recipe("nvfp4", settings).configs["nvfp4"]
    x, weight, _, dy = leaves(dtype=torch.bfloat16)
    _, dx, dw = run(x, weight, precision, dy)
    inputs, weights = x.detach().float(), weight.detach().float()
    if quantized == "input":
        inputs = quantize(x.detach(), "nvfp4").dequantize()
    else:
        weights = quantize(weight.detach(), "nvfp4").dequantize()
    expected = dy.double() @ weights.double(), dy.double().t() @ inputs.double()
    for result, right in zip((dx, dw), expected, strict=True):
        # Rounding to BF16 at last, 2**-9 of the result, beside sums in FP32.
        torch.testing.assert_close(result.double(), right, rtol=2**-8, atol=1e-4)


def test_what_meets_values_of_fprop_is_codes():
    """An engine's own forms, such as BF16 numbers, do not multiply with FP32 ones."""
    x, weight, _, dy = leaves()
    seen = RecordingEngine()
    run(x, weight, SAME_AXIS, dy, engine=seen)
    # Input and weight for fprop, gradients for dgrad and wgrad, and nothing else.
    assert [name for name, _ in seen.quantized] == ["nvfp4"] * 4
    assert all(request.needs_codes for request in seen.requests)


@pytest.mark.parametrize("precision", [SAME_AXIS, SAME_BITS, ROWS, NVFP4])
def test_a_weight_may_be_quantized_in_backward(precision):
    """As where a layer keeps a weight from an evaluation: dgrad multiplies the same values."""
    x, weight, _, dy = leaves()
    _, dx, _ = run(x, weight, precision, dy)
    context = LinearContext(precision, ENGINE, KEY)
    operand = operands.quantize_dgrad_weight(context, weight.detach())
    grad, _ = operands.quantize_grad(context, dy, True, False)
    assert torch.equal(context.gemm("dgrad", grad, operand, dx.dtype), dx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes(dtype):
    """Input and square weight are packed, 4.5 bits per element: nothing is in high precision."""
    x, weight, _, _ = leaves((512,), 64, 256, dtype)
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lowbit_linear(x, weight, LinearContext(NVFP4, ENGINE, KEY))
    packed_weight = weight.numel() * (0.5 + 1 / 16) + 4
    assert sum(saved.values()) - packed_weight <= 0.6 * x.numel()
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lowbit_linear(x, weight, LinearContext(HIGH_PRECISION, ENGINE, KEY))
    assert sum(saved.values()) >= x.nbytes  # the counter does count


def test_keys():
    x, weight, _, dy = leaves()
    first, second = (run(x, weight, NVFP4, dy) for _ in range(2))
    assert_equal(first, second)
    other = run(x, weight, NVFP4, dy, key=KEY + 1)
    assert torch.equal(first[0], other[0])  # forward is nearest-rounded
    assert not torch.equal(first[1], other[1]) and not torch.equal(first[2], other[2])
    assert_equal(run(x, weight, NEAREST, dy), run(x, weight, NEAREST, dy, key=KEY + 1))


def test_without_a_key_torchs_generator_seeds():
    x, weight, _, dy = leaves()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(x, weight, NVFP4, dy, key=draw_key(NVFP4)))
    assert_equal(results[0], results[1])
    assert not torch.equal(results[0][1], results[2][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_same_rounding(reentrant):
    x, weight, _, dy = leaves()

    def layer(x):
        context = LinearContext(STOCHASTIC, ENGINE, draw_key(STOCHASTIC))
        return lowbit_linear(x, weight, context).tanh()

    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        y = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        x.grad = weight.grad = None
        torch.rand(3)  # later draws must not reach the recomputation
        y.backward(dy)
        results.append((y.detach(), x.grad.clone(), weight.grad.clone()))
    assert_equal(*results)


def test_main_grad_accumulates():
    x, weight, _, dy = leaves()
    _, _, dw = run(x, weight, NVFP4, dy)
    start = randn(*weight.shape, seed=9)
    for zero in (False, True):
        weight.main_grad = start.clone()
        weight.grad_added_to_main_grad = True
        weight.zero_out_wgrad = zero
        _, _, placeholder_grad = run(x, weight, NVFP4, dy, accumulate_main_grad=True)
        assert torch.equal(weight.main_grad, start + dw)
        assert weight.grad_added_to_main_grad
        assert placeholder_grad.shape == weight.shape and placeholder_grad.dtype == weight.dtype
        if zero:
            assert not placeholder_grad.any()
    _, _, again = run(x, weight, NVFP4, dy, accumulate_main_grad=False)
    assert torch.equal(again, dw) and torch.equal(weight.main_grad, start + dw)
    del weight.main_grad
    assert torch.equal(run(x, weight, NVFP4, dy, accumulate_main_grad=True)[2], dw)


@pytest.mark.parametrize("name", ["grad_added_to_main_grad", "overwrite_main_grad"])
@pytest.mark.parametrize("precision", [NVFP4, HIGH_PRECISION], ids=["nvfp4", "high precision"])
def test_main_grad_is_not_read_where_nothing_was_added(precision, name):
    """DistributedDataParallel notes the first dW of a step; Megatron-FSDP wants each written."""
    x, weight, _, dy = leaves()
    _, _, dw = run(x, weight, precision, dy)
    for dtype in (torch.float32, torch.bfloat16):
        weight.main_grad = torch.full_like(weight, torch.nan, dtype=dtype)
        setattr(weight, name, name == "overwrite_main_grad")
        run(x, weight, precision, dy, accumulate_main_grad=True)
        assert torch.equal(weight.main_grad, dw.to(dtype))
        assert weight.grad_added_to_main_grad


@pytest.mark.parametrize("parts", [p for p in itertools.product([True, False], repeat=2)])
def test_operand(parts):
    """Quantized ahead, for fprop, wgrad or both: the same bits, gradients to its source."""
    x, weight, _, dy = leaves()
    expected = run(x, weight, NVFP4, dy)
    source = x.detach()
    operand = Operand(
        quantize(source, "nvfp4") if parts[0] else None,
        quantize(source, "nvfp4", axis=0, hadamard=16) if parts[1] else None,
        x,
    )
    seen = RecordingEngine()
    y = lowbit_linear(operand, weight, LinearContext(NVFP4, seen, KEY))
    assert_equal((y.detach(), *torch.autograd.grad(y, [x, weight], dy)), expected)
    assert len(seen.quantized) == 5 - sum(parts)


def test_operand_is_what_is_multiplied():
    """Not its source: an operand of another tensor shows in the products."""
    x, weight, _, dy = leaves()
    other = 2 * x.detach()
    operand = Operand(quantize(other, "nvfp4"), quantize(other, "nvfp4", axis=0, hadamard=16), x)
    y = lowbit_linear(operand, weight, LinearContext(NVFP4, ENGINE, KEY))
    _, dw = torch.autograd.grad(y, [x, weight], dy)
    expected = run(x, weight, NVFP4, dy)
    assert torch.equal(y, 2 * expected[0]) and torch.equal(dw, 2 * expected[2])


def test_frozen_weight():
    x, weight, _, dy = leaves()
    expected = run(x, weight, NVFP4, dy)
    seen, saved = RecordingEngine(), []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = lowbit_linear(x, weight.detach(), LinearContext(NVFP4, seen, KEY))
    (dx,) = torch.autograd.grad(y, [x], dy)
    assert_equal((y.detach(), dx), expected[:2])
    assert len(seen.quantized) == 3  # x, the weight, dY: nothing for wgrad
    assert sum(saved) <= 0.6 * weight.numel() + 4


def test_input_without_gradient():
    x, weight, _, dy = leaves()
    expected = run(x, weight, NVFP4, dy)
    seen = RecordingEngine()
    y = lowbit_linear(x.detach(), weight, LinearContext(NVFP4, seen, KEY))
    (dw,) = torch.autograd.grad(y, [weight], dy)
    assert torch.equal(dw, expected[2]) and len(seen.multiplied) == 2


def test_no_grad_saves_nothing():
    x, weight, _, _ = leaves()
    seen = RecordingEngine()
    with torch.no_grad():
        y = lowbit_linear(x, weight, LinearContext(NVFP4, seen, KEY))
    assert not y.requires_grad and len(seen.quantized) == 2


def test_bias_is_added_in_high_precision():
    x, weight, bias, dy = leaves((5, 7))
    y, dx, dw, db = run(x, weight, NVFP4, dy, bias)
    plain = run(x, weight, NVFP4, dy)
    assert_equal((y, dx, dw), (plain[0] + bias.detach(), *plain[1:]))
    assert torch.equal(db, dy.reshape(-1, 32).sum(0))


def test_bf16():
    """The FP32 layer on the same values, each result rounded to BF16 once."""
    x, weight, _, dy = leaves((4, 12), dtype=torch.bfloat16)
    results = run(x, weight, NVFP4, dy)
    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    expected = run(*wide, NVFP4, dy.float())
    assert_equal(results, [t.bfloat16() for t in expected])


def test_engine_is_chosen_by_device(monkeypatch):
    """Without an engine, the table's for x's device."""
    x, weight, _, dy = leaves()
    seen, devices = RecordingEngine(), []

    def select(device):
        devices.append(device)
        return seen

    monkeypatch.setattr("megatron_lowbit.layers.linear.select_engine", select)
    y = lowbit_linear(x, weight, NVFP4)
    torch.autograd.grad(y, [x, weight], dy)
    assert devices == [torch.device("cpu")] and len(seen.quantized) == 5


@pytest.mark.parametrize("precision", [NVFP4, HIGH_PRECISION], ids=["nvfp4", "high precision"])
def test_autocast_has_no_effect(precision):
    x, weight, bias, dy = leaves()
    expected = run(x, weight, precision, dy, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(run(x, weight, precision, dy, bias), expected)
