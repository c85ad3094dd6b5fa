"""FP8 tiles and tensors: Transformer Engine's golden vectors, torchao, and a scalar derivation."""

import ast
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from megatron_lowbit.numerics import FORMATS, Quantizer, format_by_name, quantize
from tests.numerics.conftest import bytes_of, nearest_codes

GOLDEN_FORMATS = {"fp8_1x128": "fp8-1x128-e4m3", "fp8_128x128": "fp8-128x128-e4m3"}
ALL = [name for name in FORMATS if name.startswith("fp8") and "row" not in name]
SCALE_FORMATS = ("fp32", "pow2")
BLOCKS = (128, 64, 32, 16)
F32 = np.float32
FLT_MAX = np.finfo(F32).max
EPS = 1e-12  # torchao's lower bound of an amax


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("key", GOLDEN_FORMATS)
def test_golden(golden, golden_name, key, scale_format):
    x, format = golden.x(golden_name), GOLDEN_FORMATS[key]
    arrays = f"{golden_name}/{key}_{scale_format}"
    for source in (x, x.float(), x.t().contiguous().t()):
        q = quantize(source, format, scale_format=scale_format)
        np.testing.assert_array_equal(bytes_of(q.codes), golden[f"{arrays}/codes"])
        np.testing.assert_array_equal(q.scales.numpy(), golden[f"{arrays}/scales"])
        assert q.codes.dtype == torch.float8_e4m3fn and q.scales.dtype == torch.float32
        assert q.tensor_scale == 1
    column = quantize(x, format, scale_format=scale_format, axis=0)
    expected = quantize(x.t().contiguous(), format, scale_format=scale_format)
    assert np.array_equal(bytes_of(column.codes), bytes_of(expected.codes))
    assert torch.equal(column.scales, expected.scales)
    if key == "fp8_128x128":  # square tiles: the golden arrays transposed
        np.testing.assert_array_equal(bytes_of(column.codes), golden[f"{arrays}/codes"].T)
        np.testing.assert_array_equal(column.scales.numpy(), golden[f"{arrays}/scales"].T)


def test_every_golden_array_is_used(golden):
    """Each family of the file is read by a test of its own: a new key needs one too."""
    used = {f"{key}_{scale_format}" for key in GOLDEN_FORMATS for scale_format in SCALE_FORMATS}
    found = [key.split("/") for key in golden.keys if "/fp8" in key]
    assert {(format, array) for _, format, array in found} == {
        (format, array) for format in used for array in ("codes", "scales")
    }
    families = {"input": 8, "nvfp4": 8 * 3 * 6, "fp8": 8 * 4 * 2, "mxfp4": 64, "mxfp8": 128}
    counted = dict.fromkeys(families, 0)
    for key in golden.keys:
        counted[key.split("/")[1].split("_")[0]] += 1
    assert counted == families and len(golden.keys) == 408


def random_tiles(seed: int, rows: int, columns: int, lowest: int = -152) -> torch.Tensor:
    """Draw each 128x128 tile and each row of it elsewhere between both ends of FP32; some zero."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // 128, 128)
    row = rng.integers(0, 12, (rows, columns // 128, 1))
    tile = rng.integers(lowest, 128, (-(-rows // 128), columns // 128, 1)).repeat(128, 0)[:rows]
    tile[: 128 * (seed % 2), 0] = 127  # the upper end itself
    exponent = tile - row - rng.integers(0, 18, shape)
    x = rng.choice([-1, 1], shape) * np.ldexp(rng.uniform(1, 2, shape), np.maximum(exponent, -160))
    x[rng.random(shape) < 0.05] = 0
    x[rng.random(shape[:2]) < 0.05] = 0
    return torch.from_numpy(np.clip(x, -FLT_MAX, FLT_MAX).astype(F32).reshape(rows, columns))


def scalar_scales(amax: np.ndarray, largest: float, scale_format: str):
    """Encode and decode scales of FP32 amaxes, each operation rounded to FP32 once."""
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        encode = np.minimum(F32(largest) / amax, FLT_MAX)
        encode = np.where(amax == 0, F32(1), encode).astype(F32)
        if scale_format == "pow2":
            exponent = np.frexp(encode.astype(np.float64))[1] - 1
            encode = np.ldexp(F32(1), exponent).astype(F32)
        return encode, (F32(1) / encode).astype(F32)


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize(
    "format, block",
    [(name, block) for name in ALL for block in (() if "tensor" in name else BLOCKS)]
    + [(name, None) for name in ALL if "tensor" in name],
)
def test_against_scalars(format, block, scale_format):
    """Rounded by table from float64, which holds each FP32 product; scales by numpy's FP32."""
    options = {"scale_format": scale_format} | ({} if block is None else {"block": block})
    f = format_by_name(format, **options)
    seen = []
    for seed in range(4):
        x = random_tiles(seed, 256, 384)
        q = Quantizer(f)(x)
        if f.tensor_scaled:
            amax = x.abs().max().reshape(1, 1).numpy()
            stored, spread = q.tensor_scale.reshape(1, 1), (256, 384)
            assert q.scales.shape == (256, 0)
        else:
            height = block if "128x128" in format else 1
            tiles = x.view(256 // height, height, 384 // block, block).abs()
            amax = tiles.amax(-1).amax(1).numpy()
            stored, spread = q.scales, (height, block)
            assert stored.shape == (256 // height, 384 // block)
        encode, decode = scalar_scales(amax, f.element.max, scale_format)
        np.testing.assert_array_equal(stored.numpy(), decode)
        with np.errstate(over="ignore", under="ignore"):
            scaled = (x.numpy() * np.kron(encode, np.ones(spread, F32))).astype(F32)
        codes = nearest_codes(scaled.astype(np.float64), f.element)
        np.testing.assert_array_equal(bytes_of(q.codes), codes)
        with np.errstate(over="ignore"):  # 448 * decode may exceed FP32 by a rounding
            values = q.codes.float().numpy() * np.kron(decode, np.ones(spread, F32))
        np.testing.assert_array_equal(q.dequantize().numpy(), values)
        seen.append(amax.flatten())
    seen = np.concatenate(seen)
    if not f.tensor_scaled and f.block_rows == 1:
        assert (seen == 0).any() and (seen[seen > 0].min() < 1e-39) and seen.max() > 1e37


@pytest.mark.parametrize("format", ALL)
def test_scalar_scales_at_every_exponent(format):
    """amax at and next to each power of two and each quotient that is one, over all of FP32."""
    element = FORMATS[format].element
    amax = []
    for exponent in range(-149, 128):
        for factor in (1.0, element.max):
            value = F32(min(factor * 2.0**exponent, float(FLT_MAX)))
            amax += [np.nextafter(value, F32(0)), value, np.nextafter(value, FLT_MAX)]
    amax = np.array(amax, F32)
    for scale_format in SCALE_FORMATS:
        f = format_by_name(format, scale_format=scale_format)
        _, expected = scalar_scales(amax, element.max, scale_format)
        assert np.isfinite(expected).all() and (expected > 0).all()
        if f.tensor_scaled:
            stored = [f.encode(torch.ones(1, 1), torch.tensor(a), None)[2] for a in amax[::13]]
            np.testing.assert_array_equal(torch.stack(stored).numpy(), expected[::13])
        else:
            x = torch.zeros(len(amax) * f.block_rows, 128)
            x[:: f.block_rows, 77] = -torch.from_numpy(amax)
            rows = x if f.block_rows == 1 else x[: 128 * 40]
            stored = Quantizer(f)(rows).scales[:, 0].numpy()
            np.testing.assert_array_equal(stored, expected[: len(stored)])


def torchao_functions() -> dict:
    """Return torchao's eager tile quantizers from its source, whose import needs Triton."""
    package = find_spec("torchao").submodule_search_locations[0]
    path = Path(package) / "prototype" / "blockwise_fp8_training" / "kernels.py"
    wanted = ("torch_blockwise_scale_act_quant_lhs", "torch_blockwise_scale_weight_quant")
    tree = ast.parse(path.read_text())
    body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert len(body) == 2
    names = {"torch": torch, "EPS": EPS, "e4m3_dtype": torch.float8_e4m3fn}
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return {"fp8-1x128": names[wanted[0]], "fp8-128x128": names[wanted[1]]}


TORCHAO = torchao_functions()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("tile", TORCHAO)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), bf16=st.booleans())
def test_tiles_against_torchao(tile, element, seed, bf16):
    """torchao divides in float64 and rounds to FP32, which is FP32's own quotient.

    It takes an amax below 1e-12 for 1e-12, where ours is what Transformer Engine does without an
    epsilon: such tiles are ignored.
    """
    f = FORMATS[f"{tile}-{element}"]
    x = random_tiles(seed, 256, 256, lowest=-24)
    x = x.bfloat16().clamp(-3.38e38, 3.38e38) if bf16 else x
    codes, scales = TORCHAO[tile](x, dtype=f.element.dtype)
    q = quantize(x, f.name)
    tiles = x.float().view(256 // f.block_rows, f.block_rows, 2, 128).abs()
    compared = (tiles.amax(-1).amax(1) >= EPS).numpy()
    assert compared.mean() > 0.5
    np.testing.assert_array_equal(q.scales.numpy()[compared], scales.numpy()[compared])
    ours, theirs = (
        c.reshape(256 // f.block_rows, f.block_rows, 2, 128).transpose(0, 2, 1, 3)[compared]
        for c in (bytes_of(q.codes), bytes_of(codes))
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 126))
def test_tensors_against_torchao(element, scale_format, seed, exponent):
    """torchao's tensorwise scaling; its pow2 rounds log2, wrongly next to a power of two."""
    f = format_by_name(f"fp8-tensor-{element}", scale_format=scale_format)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    x = x / x.abs().max() * 2.0**exponent
    scale = amax_to_scale(x.abs().max(), f.element.dtype, scale_format == "pow2")
    codes = to_fp8_saturated(x * scale, f.element.dtype)
    q = Quantizer(f)(x)
    assert q.tensor_scale == 1 / scale
    assert np.array_equal(bytes_of(q.codes), bytes_of(codes))


@pytest.mark.parametrize(
    ("format", "share"),
    [("fp8-tensor-e4m3", 0.97), ("fp8-128x128-e4m3", 0.97 / 16), ("fp8-1x128-e4m3", 0.97 / 2048)],
)
def test_an_outlier_makes_zeros_of_what_shares_its_scale(format, share):
    """One of a million times the others' size: 97% of the tensor, and of its tile alone."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    x[100, 200] = 1e6
    zeros = (quantize(x, format).dequantize() == 0).float().mean()
    assert zeros.item() == pytest.approx(share, rel=0.03)
