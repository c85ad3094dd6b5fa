"""The fused CPU functions against the reference, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from megatron_lowbit.kernels import compiled
from megatron_lowbit.numerics import FORMATS, Draw, Hadamard, Quantizer, Rounding, gemm
from megatron_lowbit.numerics.philox import uniform

pytestmark = pytest.mark.skipif(
    compiled.missing_compiler() is not None, reason=str(compiled.missing_compiler())
)

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "quantizers.npz")
INPUTS = ("gauss", "heavy", "rows", "tiny", "huge", "zeros", "ties", "pairs")
# Rows and quads of a shard in the middle of a larger tensor.
SHARD = Draw(2**64 - 3, torch.arange(128) + 2**31, (torch.arange(64) + 5) * 7)
CASES = {
    "nearest": {},
    "hadamard": {"hadamard": Hadamard()},
    "stochastic": {"draw": Draw(0xFEDC_BA98_7654_3210)},
    "stochastic shard": {"draw": SHARD},
    "stochastic hadamard": {"draw": SHARD, "hadamard": Hadamard()},
}


def golden_input(name):
    bits = GOLDEN[f"{name}/input_bf16_bits"].view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def quantizer(format, options):
    stochastic = "draw" in options
    return Quantizer(FORMATS[format], Rounding.STOCHASTIC if stochastic else Rounding.NEAREST_EVEN)


def assert_same(x, format, options):
    expected = quantizer(format, options)(x, **options)
    result = compiled.quantize(quantizer(format, options), x, **options)
    assert torch.equal(result.codes, expected.codes)
    assert torch.equal(result.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(result.tensor_scale, expected.tensor_scale)
    assert result.scales.dtype == torch.float8_e4m3fn
    assert (result.format, result.shape) == (expected.format, expected.shape)
    arithmetic = compiled.arithmetic(type(expected.format))
    values = result.dequantize(arithmetic).view(torch.int32)
    assert torch.equal(values, expected.dequantize().view(torch.int32))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", FORMATS)
def test_golden_inputs(format, case):
    for name in INPUTS:
        assert_same(golden_input(name), format, CASES[case])


@pytest.mark.parametrize("name", INPUTS)
def test_golden_codes(name):
    """Straight against the golden arrays: no step of ours in between."""
    for key, format in (("nvfp4_1x16", "nvfp4"), ("nvfp4_16x16", "nvfp4-2d")):
        q = compiled.quantize(Quantizer(FORMATS[format]), golden_input(name))
        np.testing.assert_array_equal(q.codes.numpy(), GOLDEN[f"{name}/{key}/row_codes"])
        scales = q.scales.contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(scales, GOLDEN[f"{name}/{key}/row_scales_e4m3"])


@pytest.mark.parametrize("shape", [(5, 17), (3, 7, 40), (130, 257)])
@pytest.mark.parametrize("format", FORMATS)
def test_ragged(format, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6)) * 1e3
    assert_same(x, format, {})
    assert_same(x, format, {"draw": Draw(12)})
    assert_same(x.movedim(-1, 0), format, {"draw": Draw(13)})


@pytest.mark.parametrize("exponent", [-44, -38, -30, 30, 38])
def test_subnormals_and_overflow(exponent):
    """Fused C++ must not flush subnormals nor reassociate where a product over- or underflows."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    x = (x * 10.0**exponent).clamp(-3e38, 3e38).float()
    for format in FORMATS:
        assert_same(x, format, {})


def test_uniform():
    draw = SHARD
    arguments = (draw.key_words(torch.device("cpu")), draw.rows, draw.quads)
    fused = compiled.arithmetic(type(FORMATS["nvfp4"])).uniform(*arguments)
    assert torch.equal(fused, uniform(*arguments))


def test_gemm():
    """Same operands, same matmul: equal, not close."""
    a = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    b = torch.randn(30, 50, generator=torch.Generator().manual_seed(2))
    left = compiled.quantize(Quantizer(FORMATS["nvfp4"]), a)
    right = compiled.quantize(Quantizer(FORMATS["nvfp4-2d"]), b)
    for operands in ((left, right), (left, b), (a, right), (a, b)):
        assert torch.equal(compiled.gemm(*operands), gemm(*operands))
    assert compiled.gemm(a.bfloat16(), b.bfloat16()).dtype == torch.bfloat16


def test_other_sizes_and_views_do_not_recompile():
    """Sizes are dynamic, keys are data, and how a tensor came about does not matter."""
    stochastic = Quantizer(FORMATS["nvfp4"], Rounding.STOCHASTIC)

    def use(x, key):
        compiled.quantize(stochastic, x, draw=Draw(key)).dequantize(
            compiled.arithmetic(type(stochastic.format))
        )

    use(torch.ones(48, 96), 1)
    use(torch.ones(64, 112), 2)
    before = counters["stats"]["unique_graphs"]
    use(torch.ones(80, 160), 3)
    use(torch.ones(37, 51), 4)
    use(torch.ones(96, 48).t(), 5)
    use(torch.ones(160, 80)[::2, 16:], 6)
    use(torch.ones(32, 64, requires_grad=True), 7)
    assert counters["stats"]["unique_graphs"] == before > 0
