"""Quantized tensors survive copies, pickles and files, bit for bit."""

import copy
import io
import pickle

import pytest
import torch

from megatron_lowbit.numerics import FORMATS, QuantizedTensor, format_by_name, quantize
from tests.numerics.conftest import assert_same

OTHERS = {
    "nvfp4": {},
    "mxfp4": {"three_quarters": True},
    "fp8-1x128-e4m3": {"scale_format": "pow2"},
}


def made(name: str, **options) -> QuantizedTensor:
    x = torch.randn(3, 43, 257, generator=torch.Generator().manual_seed(2))
    return quantize(x, name, **options)


def through_a_file(q: QuantizedTensor) -> QuantizedTensor:
    file = io.BytesIO()
    torch.save({"weight": q}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["weight"]


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "torch.save": through_a_file,
}


def check(q: QuantizedTensor, other: QuantizedTensor) -> None:
    assert type(other) is QuantizedTensor and type(other.shape) is tuple
    assert_same(q, other)
    assert torch.equal(q.dequantize(), other.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_equal_bits(name):
    """Pickled as by the other ways, and read by what allows few classes."""
    q = made(name)
    check(q, through_a_file(q))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_options_and_transforms(name, way):
    q = made(name, hadamard=16, **OTHERS[name])
    assert q.format == format_by_name(name, **OTHERS[name])
    check(q, WAYS[way](q))


@pytest.mark.parametrize("way", WAYS)
def test_transposed_tiles_keep_their_bits(way):
    q = quantize(torch.randn(130, 257), "fp8-128x128-e4m3").transpose()
    check(q, WAYS[way](q))


def test_a_deep_copy_shares_nothing():
    q = made("nvfp4")
    other, before = copy.deepcopy(q), q.dequantize()
    for name in ("codes", "scales", "tensor_scale"):
        bits_of = getattr(other, name).flatten().view(torch.uint8)
        bits_of.fill_(1)
    assert torch.equal(q.dequantize(), before)
