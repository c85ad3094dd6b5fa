"""NVFP4 bit for bit: Transformer Engine's golden vectors and a scalar derivation in numpy.

torchao's NVFP4 is no further source: it divides the amax by 6 first, clamps block scales from below
and multiplies by (1 / tensor scale) / block scale, which gives other bits.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import Draw, Quantizer, Rounding, quantize
from megatron_lowbit.numerics.block_formats import nvfp4

FORMATS = {format.name: format for format in nvfp4.FORMATS}
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "quantizers.npz")
INPUTS = ("gauss", "heavy", "rows", "tiny", "huge", "zeros", "ties", "pairs")
VARIANTS = {  # golden key -> our format; the transform belongs to the columns only
    "nvfp4_1x16": "nvfp4",
    "nvfp4_16x16": "nvfp4-2d",
    "nvfp4_1x16_rht": "nvfp4",
}
F32 = np.float32
FLT_MAX = np.finfo(F32).max
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def golden_input(name: str) -> torch.Tensor:
    bits = GOLDEN[f"{name}/input_bf16_bits"].view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def bytes_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def encode_scale(amax: np.float32) -> np.float32:
    """Return s_enc, as the golden implementation's global amax gives it."""
    if amax == 0:
        return F32(1)
    with np.errstate(over="ignore"):
        s_enc = min(F32(2688) / amax, FLT_MAX)
    return F32(1) if s_enc == 0 else s_enc


def nearest_code(grid: np.ndarray, magnitude: float) -> int:
    """Return code of the nearest grid value, at a midpoint the even one; float64 is exact here."""
    low = int(np.searchsorted(grid, magnitude, side="right")) - 1
    if low == len(grid) - 1:
        return low
    middle = (grid[low] + grid[low + 1]) / 2
    if magnitude == middle:
        return low + low % 2
    return low + int(magnitude > middle)


def slow_nvfp4(x: np.ndarray, block_rows: int):
    """Return codes (R, K) and scale codes (R, K/16), one FP32 operation at a time on scalars."""
    rows, columns = x.shape
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((rows, columns // 16), np.uint8)
    s_enc = encode_scale(np.abs(x).max())
    sixth = F32(1) / F32(6)
    s_dec = F32(1) / s_enc
    with np.errstate(over="ignore", divide="ignore", under="ignore"):
        for r in range(0, rows, block_rows):
            for k in range(0, columns, 16):
                tile = x[r : r + block_rows, k : k + 16]
                scaled = np.abs(tile).max() * (s_enc * sixth)
                scale = nearest_code(E4M3, float(min(scaled, F32(448))))
                scales[r : r + block_rows, k // 16] = scale
                encode = min(F32(1) / (F32(E4M3[scale]) * s_dec), FLT_MAX)
                for i, j in np.ndindex(tile.shape):
                    value = min(abs(tile[i, j]) * encode, F32(6))
                    sign = 8 * int(np.signbit(tile[i, j]))
                    codes[r + i, k + j] = nearest_code(E2M1, float(value)) + sign
    return codes, scales, s_dec


def unpacked(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)


def test_the_tables_of_this_test():
    assert len(E4M3) == 127 and E4M3[-1] == 448 and E4M3[1] == 2**-9
    assert [nearest_code(E2M1, v) for v in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)] == [
        0, 2, 2, 4, 4, 6, 6,
    ]  # fmt: skip


@pytest.mark.parametrize("direction", ["row", "col"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", INPUTS)
def test_golden(name, variant, direction):
    key = f"{name}/{variant}"
    transform = 16 if variant.endswith("rht") and direction == "col" else None
    axis = -1 if direction == "row" else 0
    x = golden_input(name)
    for dtype in (torch.bfloat16, torch.float32):
        q = quantize(x.to(dtype), VARIANTS[variant], axis=axis, hadamard=transform)
        np.testing.assert_array_equal(bytes_of(q.codes), GOLDEN[f"{key}/{direction}_codes"])
        scales = GOLDEN[f"{key}/{direction}_scales_e4m3"]
        assert q.scales.dtype == torch.float8_e4m3fn
        np.testing.assert_array_equal(bytes_of(q.scales), scales)
        amax = GOLDEN[f"{key}/global_amax_{direction}"][0]
        assert q.tensor_scale.dtype == torch.float32 and q.tensor_scale.shape == ()
        assert q.tensor_scale.item() == F32(1) / encode_scale(amax)


def test_every_golden_array_of_nvfp4_is_used():
    used = {f"{name}/{variant}" for name in INPUTS for variant in VARIANTS}
    assert {key.rsplit("/", 1)[0] for key in GOLDEN.files if "/nvfp4" in key} == used


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("exponent", [-37, -20, 0, 20, 37])
def test_against_scalars_on_random_data(format, exponent):
    """Full FP32 mantissas, block amplitudes over eight decades: scales normal, subnormal and 0."""
    rng = np.random.default_rng(exponent % 100)
    amplitude = 10.0 ** rng.uniform(-8, 0, (32, 4)).repeat(16, axis=1)
    x = (rng.standard_normal((32, 64)) * amplitude * 10.0**exponent).astype(F32)
    codes, scales, s_dec = slow_nvfp4(x, FORMATS[format].block_rows)
    q = quantize(torch.from_numpy(x), format)
    np.testing.assert_array_equal(unpacked(bytes_of(q.codes)), codes)
    np.testing.assert_array_equal(bytes_of(q.scales), scales)
    assert q.tensor_scale.item() == s_dec
    if format == "nvfp4":
        assert scales.min() == 0  # an underflowed block
    if exponent > -37:  # there S_enc is FLT_MAX, less than the largest block would need
        assert scales.max() == 0x7E


@pytest.mark.parametrize("format", FORMATS)
def test_decoded_values(format):
    """code x scale is exact in FP32, so one rounding: float64 holds the whole product."""
    for name in INPUTS:
        q = quantize(golden_input(name), format)
        codes = unpacked(bytes_of(q.codes))
        values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
        scales = E4M3[bytes_of(q.scales)].repeat(16, axis=1)
        expected = (values * scales * np.float64(q.tensor_scale.item())).astype(F32)
        assert q.dequantize().dtype == torch.float32
        np.testing.assert_array_equal(q.dequantize().numpy(), expected)


def test_order_of_operations_shows():
    """amax / 6 * S_enc, the wrong order, lands on other scales in the golden ``pairs``."""
    x = golden_input("pairs").float().numpy()
    s_enc = encode_scale(np.abs(x).max())
    amax = np.abs(x).reshape(128, 16, 16).max(-1)
    wrong = np.minimum(amax / F32(6) * s_enc, F32(448))
    wrong = np.vectorize(lambda v: nearest_code(E4M3, float(v)))(wrong)
    scales = GOLDEN["pairs/nvfp4_1x16/row_scales_e4m3"]
    assert (wrong != scales).sum() > 0


@pytest.mark.parametrize("format", FORMATS)
def test_zero_tensor_and_zero_blocks(format):
    x = torch.zeros(16, 32)
    x[0, 1], x[3, 4] = -0.0, -0.0
    q = quantize(x, format)
    assert q.tensor_scale == 1 and not bytes_of(q.scales).any()
    assert torch.equal(q.dequantize(), x)
    x[:, 16:] = 1.0
    q = quantize(x, format)
    assert not bytes_of(q.scales)[:, 0].any() and (bytes_of(q.scales)[:, 1] == 0x7E).all()
    assert torch.equal(q.dequantize(), x)


def test_underflowed_block_stores_scale_zero():
    """No lower clamp: the block's codes are those of x * FLT_MAX, its values zero."""
    x = torch.zeros(1, 32)
    x[0, 16:] = 1.0
    x[0, :4] = torch.tensor([1e-6, -1e-6, 1e-30, 0.0])
    q = quantize(x, "nvfp4")
    assert bytes_of(q.scales).tolist() == [[0, 0x7E]]
    assert unpacked(bytes_of(q.codes))[0, :4].tolist() == [7, 15, 7, 0]
    assert torch.equal(q.dequantize()[0, :16].abs(), torch.zeros(16))
    # Half of E4M3's smallest value ties to even, zero; anything above stores code 1.
    smallest = 2**-9 / 448
    for factor, code in ((0.499, 0), (0.501, 1), (1.0, 1)):
        x[0, :16] = 1.0 * smallest * factor
        assert bytes_of(quantize(x, "nvfp4").scales)[0, 0] == code


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_anywhere_is_nan_everywhere(format, value):
    x = torch.ones(16, 64)
    x[5, 40] = value
    q = quantize(x, format)
    assert q.tensor_scale.isnan() and q.scales.float().isnan().all()
    assert q.dequantize().isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_block_is_nan_whatever_the_given_amax(value):
    x = torch.ones(1, 64)
    x[0, 40] = value
    q = Quantizer(FORMATS["nvfp4"])(x, torch.tensor(1.0))
    assert q.dequantize().isnan().view(4, 16).all(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (16, 40), (33, 16), (47, 250)])
def test_ragged_is_the_zero_padded_tensor_sliced(format, shape):
    rows, columns = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(columns))
    padded = torch.nn.functional.pad(x, (0, -columns % 16, 0, -rows % 16))
    ragged, whole = quantize(x, format), quantize(padded, format)
    assert ragged.shape == shape
    assert torch.equal(ragged.codes, whole.codes[:rows])
    assert np.array_equal(bytes_of(ragged.scales), bytes_of(whole.scales)[:rows])
    assert torch.equal(ragged.tensor_scale, whole.tensor_scale)
    assert torch.equal(ragged.dequantize(), whole.dequantize()[:rows, :columns])


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (5, 17), (33, 40)])
def test_square_blocks_transpose_to_the_quantized_transpose(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    q = quantize(x, "nvfp4-2d").transpose()
    other = quantize(x, "nvfp4-2d", axis=0)
    assert q.shape == other.shape == shape[::-1]
    assert torch.equal(q.codes, other.codes)
    assert np.array_equal(bytes_of(q.scales), bytes_of(other.scales))
    assert torch.equal(q.dequantize(), quantize(x, "nvfp4-2d").dequantize().t())
    back = q.transpose()
    assert torch.equal(back.codes, quantize(x, "nvfp4-2d").codes)


def test_rows_of_blocks_do_not_transpose():
    with pytest.raises(ValueError, match="nvfp4 has no square blocks"):
        quantize(torch.ones(16, 16), "nvfp4").transpose()


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_codes(format):
    """The scalars' unrounded values, rounded by the Philox numbers of the Draw."""
    key = 0x1234_5678_9ABC_DEF0
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 64)).astype(F32)
    quantizer = Quantizer(FORMATS[format], Rounding.STOCHASTIC)
    q = quantizer(torch.from_numpy(x), draw=Draw(key))
    _, scales, s_dec = slow_nvfp4(x, FORMATS[format].block_rows)
    encode = F32(1) / (E4M3[scales].astype(F32) * s_dec)
    scaled = np.minimum(np.abs(x) * encode.repeat(16, axis=1), F32(6)).astype(np.float64)
    low = np.searchsorted(E2M1, scaled, side="right") - 1
    high = np.minimum(low + 1, 7)
    step = np.where(high > low, E2M1[high] - E2M1[low], 1)
    uniform = philox_uniform(key, 32, 64)
    expected = low + (uniform < (scaled - E2M1[low]) / step) + 8 * np.signbit(x)
    np.testing.assert_array_equal(bytes_of(q.scales), scales)
    np.testing.assert_array_equal(unpacked(bytes_of(q.codes)), expected)


def philox_uniform(key: int, rows: int, columns: int) -> np.ndarray:
    """Return Philox4x32-10 in numpy's uint64, one byte an element, as centred numbers."""
    mask = np.uint64(0xFFFFFFFF)
    row, col = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    c = [(col // 16).astype(np.uint64), row.astype(np.uint64), 0 * row.astype(np.uint64)]
    c.append(c[2])
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        left, right = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (right >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            right & mask,
            (left >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            left & mask,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    word = np.choose(col % 16 // 4, c)
    byte = (word >> (col % 4 * 8).astype(np.uint64)) & np.uint64(0xFF)
    return 1 - (byte.astype(np.float64) + 0.5) / 256


def test_stochastic_tensor_is_unbiased_where_nothing_clips():
    """4000 draws of one row; clipped elements (|x * enc_b| > 6) are biased down, and only they."""
    draws = 4000
    row = torch.randn(1, 128, generator=torch.Generator().manual_seed(8))
    quantizer = Quantizer(FORMATS["nvfp4"], Rounding.STOCHASTIC)
    q = quantizer(row.expand(draws, -1), draw=Draw(77))
    values = q.dequantize().double()
    _, scales, s_dec = slow_nvfp4(row.numpy(), 1)
    decode = E4M3[scales].repeat(16, axis=1)[0] * np.float64(s_dec)
    scaled = np.abs(row.double().numpy()[0]) / decode
    low = np.searchsorted(E2M1, np.minimum(scaled, 6), side="right") - 1
    step = np.append(np.diff(E2M1), 0)[low]
    part = np.where(step > 0, (scaled - E2M1[low]) / np.where(step > 0, step, 1), 0)
    error = np.abs(values.mean(0).numpy() - row.double().numpy()[0])
    # 2**-20 relative: FP32 rounding of x * enc_b and of the decoded values.
    bound = 4 * decode * step * np.sqrt(part * (1 - part) / draws)
    bound += 2.0**-20 * np.abs(row.numpy()[0])
    inside = scaled <= 6
    assert inside.sum() > 115 and (~inside).any()
    assert (error[inside] < bound[inside]).all()
    # What is lost is what lies beyond 6, up to the noise of FP32 rounding: 2**-20 of values near 3.
    np.testing.assert_allclose(
        error[~inside], (scaled - 6)[~inside] * decode[~inside], rtol=1e-3, atol=3 * 2**-20
    )
