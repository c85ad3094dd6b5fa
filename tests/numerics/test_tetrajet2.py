"""TetraJet-v2's double-block format: golden vectors, and what zeros and NaN become."""

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import Draw, Quantizer, Rounding, format_by_name

FORMAT = format_by_name("tetrajet2")
KEYS = [(name, "tetrajet") for name in ("gauss", "outlier", "grad", "tiny", "zeros", "ties")]
KEYS += [("gauss", "tetrajet_sr"), ("grad", "tetrajet_sr")]


@pytest.mark.parametrize(("name", "kind"), KEYS)
def test_golden(lab, name, kind):
    """Codes under the inner scale 0 are not compared: their values are 0."""
    x, key = lab.x(name), f"{name}/{kind}"
    uniform = lab.draws(x.shape, 1) if kind.endswith("sr") else None
    codes, scales, tensor_scale = FORMAT.encode(x, x.abs().amax(), uniform)
    outer, inner = scales[:, :4].contiguous().view(torch.float32).numpy(), scales[:, 4:].numpy()
    np.testing.assert_array_equal(outer, lab[f"{key}/outer"])
    np.testing.assert_array_equal(inner, lab[f"{key}/inner"])
    shown = (inner > 0).repeat(16, 1)
    unsigned = np.where(codes == 8, 0, codes)
    np.testing.assert_array_equal(unsigned[shown], lab.codes(key)[shown])
    values = FORMAT.decode(codes, scales, tensor_scale).flatten(1)
    assert tensor_scale == 1 and not values[~torch.from_numpy(shown)].any()
    if f"{key}/dq" in lab:
        np.testing.assert_array_equal(values.numpy(), lab[f"{key}/dq"])


def test_underflowed_blocks():
    """Nearest: an inner scale of 0 and zeros. Stochastic: the smallest inner scale instead."""
    x = torch.ones(1, 128)
    x[:, 16:] = 1e-9
    nearest = Quantizer(FORMAT)(x)
    drawn = Quantizer(FORMAT, Rounding.STOCHASTIC)(x, draw=Draw(1))
    assert not nearest.scales[:, 5:].any() and not nearest.dequantize()[:, 16:].any()
    assert (drawn.scales[:, 5:] == 1).all()  # the byte of 2**-9
