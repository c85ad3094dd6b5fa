"""Quartet II's forward format and MS-EDEN: golden vectors, and unbiased gradients."""

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import (
    Draw,
    Hadamard,
    Quantizer,
    Rounding,
    derive_key,
    format_by_name,
    gemm,
    hadamard_transform,
)
from megatron_lowbit.numerics.block_format import blocks
from megatron_lowbit.numerics.block_formats.ms_eden import _torchao

FORWARD, GRADIENT = format_by_name("quartet2"), format_by_name("ms-eden")
TORCHAO = format_by_name("ms-eden", arithmetic="torchao")
ROTATIONS = [("gauss", 32), *((name, 128) for name in ("gauss", "outlier", "grad"))]
ROTATIONS += [(name, 128) for name in ("tiny", "zeros", "ties")]


def compare(lab, key: str, encoded) -> None:
    """Compare codes without the sign of zeros, scales and the tensor scale with golden ones."""
    codes, scales, tensor_scale = encoded
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy(), lab[f"{key}/scales"])
    np.testing.assert_array_equal(np.where(codes == 8, 0, codes), lab.codes(key))
    assert tensor_scale.item() == lab[f"{key}/s_dec"]


def test_forward(lab, lab_name):
    x, key = lab.x(lab_name), f"{lab_name}/quartet2_fwd"
    encoded = FORWARD.encode(x, x.abs().amax(), None)
    compare(lab, key, encoded)
    if f"{key}/dq" in lab:
        values = FORWARD.decode(*encoded).flatten(1).numpy()
        np.testing.assert_array_equal(values, lab[f"{key}/dq"])


@pytest.mark.parametrize(("name", "points"), ROTATIONS)
def test_rotation(lab, name, points):
    """The signs of the vectors, put on x, for a transform without any of its own."""
    x, signs = lab.x(name), torch.from_numpy(lab[f"signs{points}"]).float()
    rotated = hadamard_transform(x * signs.repeat(128 // points), Hadamard(points, "none"))
    assert torch.equal(rotated, lab.x(name, f"rot{points}/bits"))


@pytest.mark.parametrize(("name", "points"), ROTATIONS)
def test_ms_eden(lab, name, points):
    """Codes, corrected scales and their stochastic rounding, by the vectors' own draws."""
    x, key = lab.x(name, f"rot{points}/bits"), f"{name}/mseden_rot{points}_group16"
    uniform = lab.draws((len(x), x.shape[1] // 16), 3).repeat_interleave(16, 1)
    encoded = GRADIENT.encode(x, x.abs().amax(), uniform)
    compare(lab, key, encoded)
    nearest = GRADIENT.encode(x, x.abs().amax(), None)[1]
    corrected = torch.from_numpy(lab[f"{key}/corrected"]).to(torch.float8_e4m3fn)
    assert torch.equal(nearest.float(), corrected.float())
    if f"{key}/dq" in lab:
        values = GRADIENT.decode(*encoded).flatten(1).numpy()
        np.testing.assert_array_equal(values, lab[f"{key}/dq"])


@pytest.mark.parametrize(("name", "points"), ROTATIONS)
def test_ms_eden_of_torchao(lab, name, points):
    """It adds its bits to the scale's: up where 1 - u is below the fraction of the interval."""
    x, key = lab.x(name, f"rot{points}/bits"), f"{name}/mseden_rot{points}_k1536"
    uniform = 1 - lab.draws((len(x), x.shape[1] // 16), 3).repeat_interleave(16, 1)
    compare(lab, key, TORCHAO.encode(x, x.abs().amax(), uniform))
    _, corrected, _ = _torchao(blocks(x, 1, 16), x.abs().amax())
    np.testing.assert_array_equal(corrected.squeeze(), lab[f"{key}/corrected"])


def test_a_draw_is_a_scale_s(lab):
    """Scales alone are drawn: keys change them, codes are nearest."""
    x = lab.x("gauss")
    first, second = (Quantizer(GRADIENT, Rounding.STOCHASTIC)(x, draw=Draw(key)) for key in (1, 2))
    assert torch.equal(first.codes, second.codes)
    different = (first.scales.float() != second.scales.float()).float().mean()
    assert 0.1 < different < 0.9


def mean_products(a, b, rotations: int, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard error of products over fresh signs and draws, both (M, N)."""
    hadamard, quantizer = Hadamard(128, "fresh"), Quantizer(GRADIENT, rounding)
    products = []
    for number in range(rotations):
        key = derive_key("quartet2", number)
        left, right = (
            quantizer(x, hadamard=hadamard, sign_key=key, draw=Draw(derive_key(key, side)))
            for side, x in enumerate((a, b))
        )
        products.append(gemm(left, right).double())
    stacked = torch.stack(products)
    return stacked.mean(0), stacked.std(0) / rotations**0.5


def test_products_are_unbiased():
    """Both operands share each key's signs: each mean is within 4 standard errors.

    All rows have a part in common, so that no product is near 0: scales that are rounded to nearest
    shrink them by more than that.
    """
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(512, generator=generator)
    a, b = (common + torch.randn(rows, 512, generator=generator) / 2 for rows in (6, 8))
    exact = a.double() @ b.double().t()
    for rounding, unbiased in ((Rounding.STOCHASTIC, True), (Rounding.NEAREST_EVEN, False)):
        mean, error = mean_products(a, b, 80, rounding)
        assert ((mean - exact).abs() < 4 * error).all() == unbiased
