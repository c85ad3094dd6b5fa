"""Kernels that an amax decides about: delayed scaling in the cast, and the fallback product."""

import math

import pytest
import torch

from megatron_lowbit.kernels import launch
from megatron_lowbit.kernels.amaxes import matrix_amax
from megatron_lowbit.kernels.conditional import recompute
from megatron_lowbit.numerics import (
    FORMATS,
    AmaxHistory,
    DelayedAmax,
    DelayedScaling,
    Hadamard,
    Quantizer,
    Request,
    quantize_both,
)
from tests.kernels.test_quantize import DEVICE, bits, check_same, values

ROW, COL = Request(Quantizer(FORMATS["fp8-tensor-e4m3"])), Request(
    Quantizer(FORMATS["fp8-tensor-e5m2"])
)  # fmt: skip
RULE = DelayedScaling(2, just_in_time=1)


def run(function, x, requests, entries, record=True):
    """Quantize both sides with histories of their own; return operands and recorded amaxes."""
    history = AmaxHistory(2, 2, x.device)
    history.entries = torch.tensor(entries, device=x.device)
    sides = (0, 0) if requests[0] is requests[1] else (0, 1)
    amaxes = [
        None if request is None else history.amax(side, RULE, record)
        for side, request in zip(sides, requests, strict=True)
    ]
    made = function(x, *requests, tuple(amaxes))
    return made, history.step


def check(x, requests, entries, record=True):
    expected, steps = run(quantize_both, x, requests, entries, record)
    made, recorded = run(launch.quantize_both, x.to(DEVICE), requests, entries, record)
    for mine, reference in zip(made, expected, strict=True):
        if reference is not None:
            check_same(mine, reference)
    assert torch.equal(bits(recorded.cpu()), bits(steps))
    return expected, steps


KNOWN, UNKNOWN, LARGE = [1.0, 0.5], [-1.0, -1.0], [-1.0, 900.0]


@pytest.mark.parametrize(
    "entries", [(KNOWN, LARGE), (UNKNOWN, UNKNOWN), (KNOWN, UNKNOWN), (UNKNOWN, LARGE)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_and_not(entries, dtype):
    x = values(24, 200, dtype)
    made, steps = check(x, (ROW, COL), entries)
    assert steps.tolist() == [x.abs().max().item()] * 2
    own = x.float().abs().max().item()
    for one, known in zip(made, entries, strict=True):
        amax = max(known) if max(known) > 0 else own
        assert one.tensor_scale.item() == pytest.approx(amax / one.format.element.max, rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("entries", [(KNOWN, LARGE), (KNOWN, UNKNOWN)], ids=str)
def test_not_finite(value, entries):
    """All of it becomes NaN, as by a scale of its own, and nothing is recorded."""
    x = values(24, 200, torch.bfloat16)
    x[17, 133] = value
    made, steps = check(x, (ROW, COL), entries)
    assert steps.tolist() == [-1.0, -1.0]
    assert all(one.dequantize().isnan().all() for one in made)


@pytest.mark.parametrize("requests", [(ROW, None), (None, COL), (ROW, ROW)])
def test_one_side_and_one_request(requests):
    check(values(24, 72, torch.bfloat16), requests, (KNOWN, KNOWN))


def test_evaluation_records_nothing():
    _, steps = check(values(24, 72, torch.bfloat16), (ROW, COL), (KNOWN, UNKNOWN), record=False)
    assert steps.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    "side",
    [
        Request(Quantizer(FORMATS["nvfp4"])),
        Request(Quantizer(FORMATS["fp8-tensor-e4m3"]), Hadamard(16)),
        Request(Quantizer(FORMATS["fp8-tensor-e4m3"]), Hadamard(256)),
    ],
    ids=["blocks", "transform", "transform in a launch of its own"],
)
@pytest.mark.parametrize("rows", [24, 0])
def test_what_the_cast_cannot_take(side, rows):
    """A pass before the quantization gives the amax there, of both sides."""
    check(values(24, 80, torch.bfloat16)[:rows], (ROW, side), (KNOWN, KNOWN))


def test_an_amax_that_is_there_already():
    """One side's scale may be reduced over ranks, the other's not."""
    x, given = values(24, 72, torch.bfloat16), torch.tensor(3.0)
    entries = torch.tensor(2.0)
    expected = quantize_both(x, ROW, COL, (given, DelayedAmax(entries, None)))
    amaxes = given.to(DEVICE), DelayedAmax(entries.to(DEVICE), None)
    for mine, reference in zip(
        launch.quantize_both(x.to(DEVICE), ROW, COL, amaxes), expected, strict=True
    ):
        check_same(mine, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [None, torch.nan, -torch.inf])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fallback(dtype, bad, has_bias):
    """Integers: all sums are exact, in any order."""
    if DEVICE == "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of BF16 numbers")
    generator = torch.Generator().manual_seed(1)
    lhs = torch.randint(-4, 5, (70, 50), generator=generator).to(dtype).to(DEVICE)
    rhs = torch.randint(-4, 5, (50, 90), generator=generator).to(dtype).to(DEVICE).t()
    bias = torch.arange(90, dtype=dtype, device=DEVICE) if has_bias else None
    y = torch.randn(70, 90, generator=generator).to(dtype).to(DEVICE)
    before = y.clone()
    if bad is not None:
        y[3, 80] = bad
    amax = matrix_amax(y)
    recompute(y, amax, lhs, rhs, bias)
    right = lhs.double() @ rhs.double().t() + (0 if bias is None else bias.double())
    assert torch.equal(y, before if bad is None else right.to(dtype))
    assert amax.isfinite() == (bad is None)
