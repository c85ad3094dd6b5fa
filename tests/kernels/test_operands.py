"""Operands of GEMMs: the same numbers as the codes and scales, exactly or counted."""

import pytest
import torch

from megatron_lowbit.kernels.launch import quantize_both
from megatron_lowbit.kernels.operands import Transposed, exact_values, fold
from megatron_lowbit.numerics import FORMATS, Draw, Hadamard, Quantizer, Request, Rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POW2 = {
    f"{name} {block}": FORMATS[name].with_options(scale_format="pow2", block=block)
    for name in ("fp8-1x128-e4m3", "fp8-128x128-e5m2")
    for block in (128, 64, 16)
}
OTHERS = [name for name in FORMATS if not name.startswith(("fp8-1x128", "fp8-128", "fp8-row"))]
EXACT = {name: FORMATS[name] for name in OTHERS} | POW2


def values(rows=48, columns=200, spread=2.0):
    generator = torch.Generator().manual_seed(rows)
    x, wide = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    return (x * torch.exp(spread * wide)).bfloat16().to(DEVICE)


def numbers(operand) -> torch.Tensor:
    """Return an operand's FP32 numbers."""
    scale = 1.0 if operand.tensor_scale is None else operand.tensor_scale
    return operand.values.float() * scale


def folding(operand):
    """Fold; return the operand and how many values were rounded."""
    inexact = torch.zeros((), dtype=torch.int64, device=DEVICE)
    return fold(operand, inexact), int(inexact)


@pytest.mark.parametrize("name", EXACT)
def test_bf16_numbers_are_exact(name):
    q = Quantizer(EXACT[name])(values())
    assert torch.equal(numbers(exact_values(q)), q.dequantize())


def test_bf16_numbers_of_tiles_at_both_ends_of_fp32():
    """Scales down to 2**-127, and elements that BF16 still holds; codes with a row each."""
    for amax in (2.0**-118, 2.0**127):
        x = torch.zeros(40, 128, device=DEVICE)
        x[:, ::8], x[:, 1::8] = amax, -amax / 64
        q = Quantizer(POW2["fp8-1x128-e4m3 64"])(x)
        assert torch.equal(numbers(exact_values(q)), q.dequantize())
        assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize("name", ["nvfp4-2d", "fp8-128x128-e5m2 64"])
def test_square_blocks_serve_the_transpose(name):
    q = Quantizer(EXACT[name])(values())
    assert torch.equal(numbers(exact_values(Transposed(q))), q.dequantize().t())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_a_number(value):
    """From codes and at once: NaN where the reference has it."""
    x = values(32, 128)
    x[3, 5] = value
    tiles = ("fp8-1x128-e4m3 64", "fp8-128x128-e5m2 16")
    for name in ("nvfp4", "mxfp4", "mxfp8-e4m3", "mxfp8-e5m2", *tiles):
        quantizer = Quantizer(EXACT[name])
        expected = quantizer(x).dequantize()
        at_once, _ = quantize_both(x, Request(quantizer), None, values=(True, False))
        for seen in (exact_values(quantizer(x)), at_once):
            assert expected.isnan().any()
            assert torch.equal(expected.isnan(), numbers(seen).isnan())


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize(
    "name, hadamard",
    [("nvfp4", None), ("nvfp4", Hadamard(16)), ("mxfp8-e4m3", None), ("mxfp4-2d", None),
     ("fp8-1x128-e4m3 16", None), ("fp8-128x128-e5m2 64", None)],
    ids=str,
)  # fmt: skip
def test_quantized_to_numbers_at_once(name, hadamard, rounding):
    x, quantizer = values(64, 128), Quantizer(EXACT[name], rounding)
    draw = Draw(5) if rounding is Rounding.STOCHASTIC else None
    request = Request(quantizer, hadamard, draw=draw)
    for tensor in (x, x[:50, :120]):
        at_once = quantize_both(tensor, request, request, values=(True, True))
        packed = quantize_both(tensor, request, request)
        for seen, codes in zip(at_once, packed, strict=True):
            assert torch.equal(numbers(seen), codes.dequantize())


@pytest.mark.parametrize("three_quarters", [False, True])
@pytest.mark.parametrize("columns", [256, 200])
def test_folding_is_exact_in_a_row_of_like_magnitudes(three_quarters, columns):
    format = FORMATS["mxfp4"].with_options(three_quarters=three_quarters)
    q = Quantizer(format)(values(48, columns, spread=0.5))
    folded, inexact = folding(q)
    seen = folded.codes.float()[:, :columns] * folded.scales
    assert torch.equal(seen, q.dequantize())
    assert inexact == 0


def test_folding_counts_what_it_rounds():
    x = values(48, 256)
    x[::2, :32] *= 2.0**12
    x[1::3, 64:96] *= 2.0**-20
    q = Quantizer(FORMATS["mxfp4"])(x)
    folded, inexact = folding(q)
    wrong = folded.codes.float() * folded.scales != q.dequantize()
    assert inexact == wrong.sum() > 0
    largest = q.scales.amax(1, keepdim=True).int() - q.scales.int()
    assert not wrong.unflatten(1, (-1, 32)).any(2)[largest <= 14].any()


def test_folding_a_row_that_is_not_a_number():
    x = values(16, 64)
    x[3, 5] = torch.nan
    folded, _ = folding(Quantizer(FORMATS["mxfp4"])(x))
    rows = (folded.codes.float() * folded.scales).isnan()
    assert rows[3].all() and not rows[:3].any() and not rows[4:].any()


def test_folding_zeros():
    folded, _ = folding(Quantizer(FORMATS["mxfp4"])(torch.zeros(4, 64, device=DEVICE)))
    assert not (folded.codes.float() * folded.scales).any()
