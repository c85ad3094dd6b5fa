"""Operands of GEMMs: the same numbers as the codes and scales, exactly or counted."""

from dataclasses import replace

import pytest
import torch

from megatron_lowbit.kernels import amaxes, operands, sides
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.launch import quantize_both
from megatron_lowbit.kernels.operands import Transposed, exact_values, fold, rounded_values
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.support import kernel_of
from megatron_lowbit.layers.autograd_state import flatten
from megatron_lowbit.numerics import FORMATS, Draw, Hadamard, Quantizer, Request, Rounding
from megatron_lowbit.numerics.folding import fold as reference_fold
from megatron_lowbit.numerics.folding import folded_format
from tests.marks import others_slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POW2 = {
    f"{name} {block}": FORMATS[name].with_options(scale_format="pow2", block=block)
    for name in ("fp8-1x128-e4m3", "fp8-128x128-e5m2")
    for block in (128, 64, 16)
}
POW2_E5M2 = {"fp8-1x128-e5m2 128": FORMATS["fp8-1x128-e5m2"].with_options(scale_format="pow2")}
EXACT = {name: format for name, format in FORMATS.items() if format.exact_in_bf16} | POW2
# Four-over-six leaves codes and scales of NVFP4, which any kernel decodes.
EXACT["nvfp4 4/6"] = FORMATS["nvfp4"].with_options(four_over_six="mse", max_scale=256)
EXACT["ue5m3 one level"] = FORMATS["nvfp4-ue5m3"].with_options(tensor_scaled=False)
EXACT["nvfp4 rows"] = FORMATS["nvfp4"].with_options(row_scaled=True)
EXACT["ms-eden torchao"] = FORMATS["ms-eden"].with_options(arithmetic="torchao")
EXACT["nvfp4-2d 4/6"] = FORMATS["nvfp4-2d"].with_options(four_over_six="mae")


def values(rows=48, columns=200, spread=2.0):
    generator = torch.Generator().manual_seed(rows)
    x, wide = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    return (x * torch.exp(spread * wide)).bfloat16().to(DEVICE)


def numbers(operand) -> torch.Tensor:
    """Return an operand's FP32 numbers."""
    scale = 1.0 if operand.tensor_scale is None else operand.tensor_scale
    return operand.values.float() * scale


def test_which_formats_are_exact():
    """Power-of-two scales, NVFP4's, and a scale for the tensor; no others."""
    names = {name for name in EXACT if not name.startswith(("mx", "fp8-tensor"))} - POW2.keys()
    scales = {"nvfp4", "nvfp4-2d", "nvfp4-ue5m3", "nvfp4-ue5m3-2d", "quartet2", "ms-eden"}
    options = {"nvfp4 4/6", "nvfp4-2d 4/6", "nvfp4 rows", "ue5m3 one level", "ms-eden torchao"}
    assert names == scales | options


@pytest.mark.parametrize("name", EXACT)
def test_bf16_numbers_are_exact(name):
    q = Quantizer(EXACT[name])(values())
    seen = exact_values(q)
    if name == "quartet2":
        # It decodes by the product of both scales: the same numbers for a tensor scale of 1.
        q = replace(q, tensor_scale=torch.ones_like(q.tensor_scale))
        seen = replace(seen, tensor_scale=q.tensor_scale)
    assert torch.equal(numbers(seen), q.dequantize())


@pytest.mark.parametrize("name", [name for name, format in EXACT.items() if kernel_of(format)])
def test_operands_next_to_bf16_are_written(name):
    """In whichever form the engine chooses, of a matrix and of its transpose."""
    x, quantizer = values(16, 72), Quantizer(EXACT[name])
    made = FusedEngine((9, 0)).quantize(x, Request(quantizer), Request(quantizer))
    for operand, source in zip(made, (x, x.t()), strict=True):
        expected = quantizer(source).dequantize()
        found = numbers(exact_values(operand))[:, : source.shape[1]]
        # Quartet's reference multiplies by the product of both scales.
        close = 2.0**-23 * expected.abs() if name == "quartet2" else 0.0
        assert ((found - expected).abs() <= close).all()


WITH_KERNELS = [name for name, format in FORMATS.items() if kernel_of(format)]
# Formats with scales of blocks, of rows, of two levels, and of blocks and the tensor.
QUICK = ("fp8-128x128-e4m3", "fp8-row-e4m3", "tetrajet2", "nvfp4")


@pytest.mark.parametrize("name", others_slow(WITH_KERNELS, QUICK))
def test_training_may_follow_inference(name):
    """The first call allocates shared tensors, and autograd saves them in a later one."""
    x, quantizer = values(16, 72), Quantizer(FORMATS[name])
    sides._unit.cache_clear()
    engine, request = FusedEngine((9, 0)), Request(quantizer)
    with torch.inference_mode():
        engine.quantize(x, request, request)
    saved: list[torch.Tensor] = []
    for operand in engine.quantize(x, request, request):
        flatten(operand, saved)
    assert saved and not any(tensor.is_inference() for tensor in saved)


def test_zeros_that_inference_fills_serve_training():
    with torch.inference_mode():
        zeros = amaxes.filled((2,), torch.device("cpu"))
    assert not any(zero.is_inference() for zero in zeros)


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp4-2d", "nvfp4"])
def test_a_format_without_kernels_is_decoded_by_its_own_code(name, monkeypatch):
    """Formats of an extension need none."""
    monkeypatch.setattr(operands, "kernel_of", lambda format: None)
    q = Quantizer(EXACT[name])(values())
    assert torch.equal(numbers(exact_values(q)), q.dequantize())
    assert torch.equal(rounded_values(q), q.dequantize().bfloat16())


@pytest.mark.parametrize("name", [n for n in EXACT if "tensor" not in n and n != "nvfp4 rows"])
def test_numbers_rounded_to_bf16(name):
    """Those of dequantize, in each format's order of products."""
    q = Quantizer(EXACT[name])(values(spread=6.0))
    assert torch.equal(rounded_values(q), q.dequantize().bfloat16())


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
    x = values(16, 32)
    x[3, 5] = value
    tiles = ("fp8-1x128-e4m3 64", "fp8-128x128-e5m2 16")
    blocks = ("nvfp4", "nvfp4-ue5m3", "mxfp4", "mxfp8-e4m3", "mxfp8-e5m2", *tiles)
    for name in (*blocks, "nvfp4 4/6", "quartet2", "ms-eden", "ms-eden torchao"):
        quantizer = Quantizer(EXACT[name])
        expected = quantizer(x).dequantize()
        at_once, _ = quantize_both(x, Request(quantizer), None, forms=(Form.BF16, Form.CODES))
        for seen in (exact_values(quantizer(x)), at_once):
            assert expected.isnan().any()
            assert torch.equal(expected.isnan(), numbers(seen).isnan())


WHOLE_AT_ONCE = ("nvfp4", "mxfp8-e4m3")
AT_ONCE = [
    ("nvfp4", None), ("nvfp4", Hadamard(16)), ("mxfp8-e4m3", None), ("mxfp4-2d", None),
    ("nvfp4 4/6", Hadamard(128)), ("nvfp4-2d 4/6", None), ("ms-eden", Hadamard(128)),
    ("ms-eden torchao", Hadamard(32)), ("nvfp4-ue5m3", Hadamard(16)), ("nvfp4-ue5m3-2d", None),
    ("fp8-1x128-e4m3 16", None), ("fp8-128x128-e5m2 64", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hadamard", "rounding"),
    [
        # In make test, the roundings by turns.
        pytest.param(
            *case,
            rounding,
            marks=[pytest.mark.slow] * ((number + turn) % 2 or case[1] == Hadamard(128)),
        )
        for number, case in enumerate(AT_ONCE)
        for turn, rounding in enumerate(Rounding)
    ],
    ids=str,
)
def test_quantized_to_numbers_at_once(name, hadamard, rounding):
    x, quantizer = values(64, 128), Quantizer(EXACT[name], rounding)
    draw = Draw(5) if rounding is Rounding.STOCHASTIC else None
    request = Request(quantizer, hadamard, draw=draw)
    # Whole tiles for a format of each kind of scales.
    for tensor in (x, x[:50, :120]) if name in WHOLE_AT_ONCE else (x[:50, :120],):
        at_once = quantize_both(tensor, request, request, forms=(Form.BF16, Form.BF16))
        packed = quantize_both(tensor, request, request)
        for seen, codes in zip(at_once, packed, strict=True):
            assert torch.equal(numbers(seen), codes.dequantize())


FOLDS = {name: format for name, format in EXACT.items() if format.folds} | {
    "mxfp4 three quarters": FORMATS["mxfp4"].with_options(three_quarters=True),
    "mxfp8 rceil": FORMATS["mxfp8-e4m3"].with_options(scale_rounding="rceil"),
    **{
        f"{name} {scales}": FORMATS[name].with_options(block_scales=scales)
        for name in ("nvfp4", "nvfp4-2d")
        for scales in ("foldable", "foldable-up")
    },
}


def check_folded(seen, expected) -> None:
    columns = expected.shape[-1]
    codes = seen.codes.view(torch.uint8)[:, :columns].cpu()
    assert torch.equal(codes, expected.codes.view(torch.uint8).cpu())
    assert torch.equal(seen.tensor_scale.cpu(), expected.tensor_scale.cpu())
    assert seen.format == expected.format and seen.shape == expected.shape


WHOLE = ("mxfp8 rceil", "mxfp4-2d", "fp8-1x128-e4m3 128")
"""Formats that are also folded in whole tiles, on lanes of each kind."""
RARER = ("mxfp6-e2m3-2d", "mxfp6-e3m2-2d", "mxfp8-e5m2-2d", "mxfp6-e3m2", "mxfp8-e4m3-2d",
         "fp8-1x128-e4m3 64", "fp8-128x128-e5m2 64")  # fmt: skip
"""Formats of which each part is folded with others: elements, square blocks, tiles' sizes."""
WIDE = ("mxfp4", "mxfp4 three quarters", "mxfp6-e3m2")
"""Formats that fold to E5M2 in a left operand."""


@pytest.mark.parametrize(
    ("name", "rows", "columns", "left"),
    [
        *(
            pytest.param(name, 48, 136, False, marks=[pytest.mark.slow] * (name in RARER))
            for name in FOLDS
        ),
        *((name, 64, 128, False) for name in WHOLE),
        *((name, 48, 136, True) for name in WIDE),
    ],
)
def test_folded_tensors_are_the_references(name, rows, columns, left):
    """Both sides at once, and from codes, with blocks of zeros and a wide range of scales."""
    x, quantizer = values(rows, columns, spread=4.0), Quantizer(FOLDS[name])
    x[:32, :128] = 0
    partner = FORMATS["mxfp4"]
    target = folded_format(quantizer.format, left, partner)
    assert (target.element.name == "e5m2") == (left or "e5m2" in name)
    expected = [reference_fold(quantizer(side), target) for side in (x, x.t())]
    request = Request(quantizer, partner=partner, left=left)
    at_once = quantize_both(x, request, request, forms=(Form.FOLDED, Form.FOLDED))
    for seen, reference in zip(at_once, expected, strict=True):
        check_folded(seen, reference)
    inexact = torch.zeros((), dtype=torch.int64, device=DEVICE)
    check_folded(fold(quantizer(x), target, inexact), expected[0])
    wrong = expected[0].dequantize() != quantizer(x).dequantize()
    assert int(inexact) == wrong.sum() and (wrong.any() or "mxfp8-e4m3" not in name)


def test_a_single_row_of_square_blocks():
    """The reference's scales of it are not contiguous."""
    quantized = Quantizer(FORMATS["mxfp8-e4m3-2d"])(values(24, 136, spread=4.0))
    assert quantized.scales.stride() == (0, 1)
    target = folded_format(quantized.format, False, FORMATS["mxfp4"])
    check_folded(fold(quantized, target), reference_fold(quantized, target))
    decoded = exact_values(Quantizer(FORMATS["mxfp4-2d"])(values(24, 136)))
    expected = Quantizer(FORMATS["mxfp4-2d"])(values(24, 136)).dequantize()
    assert torch.equal(decoded.values.float(), expected)


@pytest.mark.parametrize(
    "name", ["mxfp4 three quarters", "mxfp8-e4m3", "fp8-1x128-e4m3 128", "nvfp4 foldable-up"]
)
def test_folding_what_is_transformed_and_rounded_stochastically(name):
    x, quantizer = values(64, 128), Quantizer(FOLDS[name], Rounding.STOCHASTIC)
    request = Request(quantizer, Hadamard(16), draw=Draw(3))
    seen, _ = quantize_both(x, request, None, forms=(Form.FOLDED, Form.CODES))
    # No larger number comes out of the transform; NVFP4 measures what does.
    amax = x.abs().amax().float() * 1.01 * 4
    check_folded(seen, reference_fold(request.quantize(x), amax=amax))


def test_e5m2_holds_mxfp4_over_28_binades():
    """The left operand of a product; in the right one E4M3 rounds the smaller half of them."""
    x = 2.0 ** torch.arange(28, device=DEVICE).repeat_interleave(32)[None, :]
    x[:, ::3] *= 1.5
    q = Quantizer(FORMATS["mxfp4"])(x)
    for left, exact in ((True, 28), (False, 14)):
        inexact = torch.zeros((), dtype=torch.int64, device=DEVICE)
        target = folded_format(q.format, left, q.format)
        same = fold(q, target, inexact).dequantize() == q.dequantize()
        assert same[0, -exact * 32 :].all() and bool(inexact) == (exact < 28)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp4", "fp8-1x128-e5m2 128", "nvfp4 foldable"])
def test_a_folded_tensor_with_a_value_that_is_not_finite_is_nan(name, value):
    x, quantizer = values(64, 128), Quantizer((FOLDS | POW2_E5M2)[name])
    x[3, 5] = value
    seen, _ = quantize_both(x, Request(quantizer), None, forms=(Form.FOLDED, Form.CODES))
    for folded in (seen, fold(quantizer(x), folded_format(quantizer.format))):
        assert folded.dequantize().isnan().all()


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "fp8-1x128-e4m3 128", "nvfp4 foldable"])
def test_folding_zeros_to_a_tensor(name):
    quantizer = Quantizer(FOLDS[name])
    x = torch.zeros(64, 128, device=DEVICE)
    seen, _ = quantize_both(x, Request(quantizer), None, forms=(Form.FOLDED, Form.CODES))
    check_folded(seen, reference_fold(quantizer(x)))
    codes = quantizer(x)
    check_folded(fold(codes, folded_format(codes.format)), reference_fold(codes))
