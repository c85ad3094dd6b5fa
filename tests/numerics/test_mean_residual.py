"""Mean-residual splitting: golden vectors, and what a quantized tensor with a mean can do."""

import pickle

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import Quantizer, Request, format_by_name, gemm, tensor_amaxes
from megatron_lowbit.numerics.mean_residual import split_mean
from tests.numerics.conftest import codes_of

QUANTIZER = Quantizer(format_by_name("nvfp4"), splits_mean=True)


@pytest.mark.parametrize("name", ["gauss", "outlier", "grad"])
def test_golden(lab, name):
    """The mean, and NVFP4's bits of the residual from it."""
    x, key = lab.x(name), f"{name}/averis"
    q = QUANTIZER(x)
    np.testing.assert_array_equal(q.mean.numpy(), lab[f"{key}/mean"])
    codes = codes_of(q)
    np.testing.assert_array_equal(np.where(codes == 8, 0, codes), lab.codes(key))
    np.testing.assert_array_equal(q.scales.view(torch.uint8).numpy(), lab[f"{key}/scales"])
    _, residual = split_mean(x)
    amax, _ = tensor_amaxes(x, Request(QUANTIZER), None)
    assert amax == residual.abs().amax() == lab[f"{key}/amax"]
    if f"{key}/dq" in lab:
        np.testing.assert_array_equal(q.dequantize().numpy(), lab[f"{key}/dq"])


def test_products_have_the_mean():
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(rows, 48, generator=generator) + 5 for rows in (7, 9))
    q = QUANTIZER(x)
    values = Quantizer(q.format)(split_mean(x)[1]).dequantize() + q.mean
    assert torch.equal(gemm(q, weight), values @ weight.t())


def test_shapes_and_ragged_sizes():
    """All leading axes are tokens; no tokens have the mean 0."""
    x = torch.randn(3, 5, 37, generator=torch.Generator().manual_seed(3))
    q = QUANTIZER(x)
    flat = QUANTIZER(x.view(15, 37))
    assert q.mean.shape == (37,) and q.dequantize().shape == x.shape
    assert torch.equal(q.dequantize().view(15, 37), flat.dequantize())
    empty = QUANTIZER(torch.empty(0, 32))
    assert empty.dequantize().shape == (0, 32) and not empty.mean.any()


def test_pickles_and_bytes():
    q = QUANTIZER(torch.randn(4, 32, generator=torch.Generator().manual_seed(4)) + 3)
    other = pickle.loads(pickle.dumps(q))
    assert torch.equal(other.mean, q.mean) and torch.equal(other.dequantize(), q.dequantize())
    assert q.nbytes == 4 * 16 + 4 * 2 + 4 + 32 * 4


def test_no_transpose():
    square = Quantizer(format_by_name("nvfp4-2d"), splits_mean=True)
    with pytest.raises(ValueError, match="mean of its rows"):
        square(torch.randn(16, 16)).transpose()
