"""UE5M3 scales: the golden table, golden vectors, and scalars from the fields of a byte."""

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import format_by_name
from megatron_lowbit.numerics.block_formats.ue5m3 import decode_ue5m3, encode_ue5m3

KINDS = {
    "ue5m3": format_by_name("nvfp4-ue5m3"),
    "ue5m3_1level": format_by_name("nvfp4-ue5m3", tensor_scaled=False),
}
ALL = torch.arange(256).to(torch.uint8)


def value(byte: int) -> float:
    """Return the value of a byte: 5 bits of exponent with bias 15, 3 of mantissa, no sign."""
    exponent, mantissa = divmod(byte, 8)
    return (1 + mantissa / 8) * 2.0 ** (exponent - 15) if exponent else mantissa / 8 * 2.0**-14


def test_table(lab):
    """0xFF is NaN, every other byte a number."""
    table = decode_ue5m3(ALL)
    np.testing.assert_array_equal(table.numpy(), lab["ue5m3/decode"])
    assert table[:-1].tolist() == [value(byte) for byte in range(255)] and table[-1].isnan()
    assert torch.equal(encode_ue5m3(table), ALL)
    inputs, outputs = (lab[f"ue5m3/{name}"] for name in ("encode_in", "encode_out"))
    np.testing.assert_array_equal(encode_ue5m3(torch.from_numpy(inputs)).numpy(), outputs)


def test_rounding():
    """Around every middle of two neighbours: the nearer one, the even byte at the middle itself."""
    values = np.array([value(byte) for byte in range(255)])
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)  # exact
    below, above = (np.nextafter(middle, np.float32(side)) for side in (0, 1e9))
    lower = np.arange(254)
    for x, expected in ((middle, lower + lower % 2), (below, lower), (above, lower + 1)):
        seen = encode_ue5m3(torch.from_numpy(x)).numpy()
        np.testing.assert_array_equal(seen, expected)
    assert encode_ue5m3(torch.tensor([3e38, torch.inf])).tolist() == [254, 254]


@pytest.mark.parametrize("kind", KINDS)
def test_golden(lab, lab_name, kind):
    """Codes under the scale 0 are not compared: their values are 0."""
    x, key = lab.x(lab_name), f"{lab_name}/{kind}"
    codes, scales, tensor_scale = KINDS[kind].encode(x, x.abs().amax(), None)
    np.testing.assert_array_equal(scales.numpy(), lab[f"{key}/scales"])
    assert tensor_scale.item() == lab[f"{key}/s_dec"]
    shown = (scales > 0).repeat_interleave(16, 1).numpy()
    codes = np.where(codes == 8, 0, codes)
    np.testing.assert_array_equal(codes[shown], lab.codes(key)[shown])


def test_one_level_needs_no_tensor_amax():
    """Blocks stand alone: what else the tensor holds, NaN included, changes none of their bits."""
    format = KINDS["ue5m3_1level"]
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[0, 0], other[1, 63] = 1e4, torch.nan
    codes, scales, tensor_scale = format.encode(x, torch.tensor(torch.nan), None)
    before = format.decode(codes, scales, tensor_scale).flatten(1)
    after = format.decode(*format.encode(other, torch.tensor(torch.nan), None)).flatten(1)
    assert before.isfinite().all() and tensor_scale == 1
    assert torch.equal(after[0, 16:], before[0, 16:]) and torch.equal(after[1, :48], before[1, :48])
    assert after[1, 48:].isnan().all()
