"""``quantize``, Quantizer and QuantizedTensor: arguments, shapes, errors, sizes."""

import pytest
import torch

from megatron_lowbit.numerics import (
    FORMATS,
    Draw,
    Hadamard,
    Quantizer,
    Request,
    Rounding,
    format_by_name,
    gemm,
    quantize,
    tensor_amaxes,
)
from tests.numerics.conftest import assert_same, randn


@pytest.mark.parametrize("format", FORMATS)
def test_leading_axes_are_rows(format):
    x = randn(3, 8, 40)
    q = quantize(x, format)
    flat = quantize(x.reshape(24, 40), format)
    assert q.shape == (3, 8, 40) and q.dequantize().shape == (3, 8, 40)
    assert torch.equal(q.codes, flat.codes)
    assert torch.equal(q.dequantize(), flat.dequantize().view(3, 8, 40))
    one = quantize(x[0, 0], format)
    assert one.shape == (40,)
    assert torch.equal(one.dequantize(), quantize(x[0, :1], format).dequantize()[0])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_axis_becomes_the_last(axis):
    x = randn(16, 24, 32)
    moved = x.movedim(axis, -1)
    assert_same(quantize(x, "nvfp4", axis=axis), quantize(moved.contiguous(), "nvfp4"))


@pytest.mark.parametrize("format", FORMATS)
def test_bf16_and_any_strides(format):
    x = randn(32, 48).bfloat16()
    expected = quantize(x.float(), format)
    assert_same(quantize(x, format), expected)
    strided = torch.stack([x, x], dim=-1).flatten(1)[:, ::2]
    assert not strided.is_contiguous()
    assert_same(quantize(strided, format), expected)
    assert_same(quantize(x.t().contiguous().t(), format), expected)


def test_input_is_not_changed():
    x = randn(5, 20)
    before = x.clone()
    quantize(x, "nvfp4-2d", rounding="stochastic", hadamard=16)
    assert torch.equal(x, before)


@pytest.mark.parametrize("columns, size", [(20, 16), (33, 16), (40, 64)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_hadamard_of_ragged_columns_keeps_the_whole_block(columns, size, rounding):
    """A transform spreads the last elements over the padded block: the product needs all of it."""
    a, b = randn(7, columns), randn(5, columns, seed=1)
    padded = [torch.nn.functional.pad(t, (0, -columns % size)) for t in (a, b)]

    def product(lhs, rhs):
        lhs = Quantizer(FORMATS["nvfp4"], Rounding(rounding))(
            lhs, hadamard=Hadamard(size), draw=Draw(5)
        )
        return gemm(lhs, quantize(rhs, "nvfp4", hadamard=size))

    torch.testing.assert_close(product(a, b), product(*padded), rtol=1e-5, atol=1e-5)


def test_generator_seeds_the_draw():
    x = randn(64, 64)

    def drawn(seed):
        return quantize(
            x, "nvfp4", rounding="stochastic", generator=torch.Generator().manual_seed(seed)
        )

    assert_same(drawn(1), drawn(1))
    assert not torch.equal(drawn(1).codes, drawn(2).codes)
    generator = torch.Generator().manual_seed(1)
    first = quantize(x, "nvfp4", rounding="stochastic", generator=generator)
    second = quantize(x, "nvfp4", rounding="stochastic", generator=generator)
    assert_same(first, drawn(1))
    assert not torch.equal(second.codes, first.codes)
    torch.manual_seed(3)
    default = quantize(x, "nvfp4", rounding="stochastic")
    torch.manual_seed(3)
    assert_same(default, quantize(x, "nvfp4", rounding="stochastic"))


def test_nearest_draws_nothing():
    state = torch.get_rng_state()
    quantize(randn(4, 16), "nvfp4", hadamard=16)
    assert torch.equal(state, torch.get_rng_state())


SCALE_BYTES = {  # of (32, 64), (3, 17) and (130, 257): a byte a block, two a group, four a tile
    "nvfp4": (128, 6, 130 * 17),
    "mx": (64, 3, 130 * 9),
    "fp8-1x128": (32 * 4, 3 * 4, 130 * 3 * 4),
    "fp8-128x128": (4, 4, 2 * 3 * 4),
    "fp8-tensor": (0, 0, 0),
    "fp8-row": (32 * 4, 3 * 4, 130 * 4),
    "tetrajet2": (32 * 12, 3 * 12, 130 * 3 * 12),  # twelve for 128 elements
    "int4-1x32": (64 * 2, 3 * 2, 130 * 9 * 2),
    "int4-1x128": (32 * 2, 3 * 2, 130 * 3 * 2),
}
SCALE_BYTES |= dict.fromkeys(("quartet2", "ms-eden", "if4"), SCALE_BYTES["nvfp4"])
PADDED = {"nvfp4": (64, 32, 272), "mx": (64, 32, 288), "fp8-tensor": (64, 17, 257)}
PADDED |= {"fp8-row": PADDED["fp8-tensor"], "int4-1x32": PADDED["mx"]}
PADDED["quartet2"] = PADDED["ms-eden"] = PADDED["if4"] = PADDED["nvfp4"]
FOUR_BITS = ("nvfp4", "mxfp4", "quartet2", "ms-eden", "tetrajet2", "int4", "if4")


@pytest.mark.parametrize("format", FORMATS)
def test_nbytes(format):
    """Codes of whole blocks (4-bit ones two a byte), block scales, four bytes of tensor scale."""
    family = next(name for name in SCALE_BYTES if format.startswith(name))
    padded = PADDED.get(family, (128, 128, 384))
    four_bits = format.startswith(FOUR_BITS)
    for shape, columns, scales in zip(
        ((32, 64), (3, 17), (130, 257)), padded, SCALE_BYTES[family], strict=True
    ):
        q = quantize(randn(*shape), format)
        assert q.nbytes == shape[0] * columns // (2 if four_bits else 1) + scales + 4


def test_no_rows():
    q = quantize(torch.empty(0, 32), "nvfp4")
    assert q.shape == q.dequantize().shape == (0, 32)
    assert q.tensor_scale == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_other_dtypes(dtype):
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        quantize(torch.ones(16, 16).to(dtype), "nvfp4")


def test_bad_arguments():
    x = torch.ones(16, 16)
    with pytest.raises(ValueError, match="at least one axis"):
        quantize(torch.tensor(1.0), "nvfp4")
    with pytest.raises(ValueError, match=r"'up'; use one of nearest, stochastic"):
        quantize(x, "nvfp4", rounding="up")
    with pytest.raises(ValueError, match="hadamard size 24"):
        quantize(x, "nvfp4", hadamard=24)
    with pytest.raises(IndexError):
        quantize(x, "nvfp4", axis=2)
    with pytest.raises(ValueError, match="needs a Draw"):
        Quantizer(FORMATS["nvfp4"], Rounding.STOCHASTIC)(x)


def test_unknown_format_lists_near_names():
    with pytest.raises(ValueError, match=r"'nvfp4-2D'; did you mean nvfp4-2d"):
        format_by_name("nvfp4-2D")
    with pytest.raises(ValueError) as caught:
        quantize(torch.ones(16), "zz")
    assert str(caught.value).endswith(f"there are {', '.join(FORMATS)}")


def test_reduced_amax_makes_the_tensor_scale():
    """Max over shards: each shard is then quantized as the slice of the whole."""
    whole = randn(32, 64)
    parts = [whole[:, :32].contiguous() * 3, whole[:, 32:].contiguous()]
    joined = torch.cat(parts, dim=1)
    expected = quantize(joined, "nvfp4")
    quantizer = Quantizer(FORMATS["nvfp4"])
    amaxes = [tensor_amaxes(part, Request(quantizer), None)[0] for part in parts]
    assert amaxes == [part.abs().max() for part in parts]
    shards = [quantizer(part, torch.stack(amaxes).amax()) for part in parts]
    assert torch.equal(torch.cat([s.codes for s in shards], dim=1), expected.codes)
    assert all(s.tensor_scale == expected.tensor_scale for s in shards)


def test_amax_is_taken_after_the_transform():
    request = Request(Quantizer(FORMATS["nvfp4"]), hadamard=Hadamard())
    amax, _ = tensor_amaxes(torch.ones(1, 16), request, None)
    # ones through +-1/4: the largest sum of the 16 signed terms, over 4
    signs = Hadamard().sign_vector()
    sums = [sum(s * (-1) ** bin(i & j).count("1") for i, s in enumerate(signs)) for j in range(16)]
    assert amax == max(abs(s) for s in sums) / 4
