"""Transforms in the linear layer: both operands of a GEMM take the same signs, and which."""

import dataclasses

import one_layer
import pytest
import torch
from one_layer import ENGINE

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import Shards
from megatron_lowbit.layers.context import draw_key
from megatron_lowbit.numerics import (
    FORMATS,
    Hadamard,
    QuantizedTensor,
    Quantizer,
    derive_key,
    hadamard_transform,
)
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.formats import ElementFormat
from megatron_lowbit.recipes import GemmPrecision, LinearPrecision, load_recipe
from tests.numerics.conftest import assert_same

KEY = 2**63 + 77
GEMMS = ("fprop", "dgrad", "wgrad")


def leaves(m=64, n=96, k=128):
    return one_layer.leaves(m, n, k, seed=11)


@dataclasses.dataclass(frozen=True)
class Exact(BlockFormat):
    """A format without error, which shows only the other parts of a layer."""

    block = 1
    scale_bits = 0

    def encode(self, x, amax, uniform):
        return x, x.new_empty((len(x), 0)), torch.ones_like(amax)

    def decode(self, codes, scales, tensor_scale):
        return codes


EXACT = Exact("exact", ElementFormat("fp32", 8, 23, 3.4e38, 2.0**-126, torch.float32), 1)


def run(x, weight, dy, precision, **options):
    return one_layer.run(x, weight, dy, precision, **{"key": KEY} | options)


def exact(x, weight, dy):
    x, weight = x.detach().double(), weight.detach().double()
    return x @ weight.t(), dy.double() @ weight, dy.double().t() @ x


def everywhere(transform, format=EXACT) -> LinearPrecision:
    """Return the transform on all three GEMMs."""
    quantizer = Quantizer(format)
    gemm = GemmPrecision(quantizer, quantizer, transform)
    return LinearPrecision(gemm, gemm, gemm)


@pytest.mark.parametrize(
    ("size", "signs"),
    [(2, "fresh"), (16, "fixed"), (32, "none"), (64, 5), (128, "fresh"), (256, "fresh")],
)
def test_transforms_leave_the_exact_product(size, signs):
    """Without quantization the three products equal the operands' up to FP32's error.

    Entries are of size 1, sums of at most 128 terms, and 8 levels of FP32 butterflies.
    """
    tensors = leaves()
    results = run(*tensors, everywhere(Hadamard(size, signs, "fp32")))
    for result, expected in zip(results, exact(*tensors), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("m, n, k", [(50, 36, 20), (1, 4, 300)])
def test_ragged_transforms(m, n, k):
    """A last block that is padded changes no product either."""
    tensors = leaves(m, n, k)
    results = run(*tensors, everywhere(Hadamard(64, "fresh", "fp32")))
    for result, expected in zip(results, exact(*tensors), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=4e-4)


def test_other_signs_on_one_side_give_another_product():
    """The checks above can fail: one operand under another key, and the product is wrong."""
    x, weight, dy = leaves()
    wrong = iter(range(6))

    def respelled(side):
        return side and dataclasses.replace(side, sign_key=derive_key(side.sign_key, next(wrong)))

    def quantize(x, row, col, amaxes):
        return ENGINE.quantize(x, respelled(row), respelled(col), amaxes)

    spoiled = ReferenceEngine("tests")
    spoiled.quantize = quantize
    results = run(x, weight, dy, everywhere(Hadamard(64, "fresh", "fp32")), engine=spoiled)
    for result, expected in zip(results, exact(x, weight, dy), strict=True):
        assert (result - expected).norm() > expected.norm()


@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp4"])
def test_quantized_products_under_fresh_signs(name):
    """The product's relative error is at most as large as with two independent operands.

    M mantissa bits round to within 2**-(M+1) of a value, and ``floor`` clips E2M1's by no more.
    """
    bound = 2**0.5 * 2.0 ** -(FORMATS[name].element.mantissa_bits + 1)
    tensors = leaves()
    results = run(*tensors, everywhere(Hadamard(32, "fresh", "fp32"), FORMATS[name]))
    for result, expected in zip(results, exact(*tensors), strict=True):
        error = (result - expected).norm() / expected.norm()
        assert 0.2 * bound < error < bound


def keys_of(precision, **options):
    """Return the sign keys that each GEMM's operands are quantized with."""
    keys = []

    def quantize(x, row, col, amaxes):
        keys.extend(side.sign_key for side in (row, col) if side)
        return ENGINE.quantize(x, row, col, amaxes)

    engine = ReferenceEngine("tests")
    engine.quantize = quantize
    run(*leaves(), precision, engine=engine, **options)
    # In forward the input for fprop and wgrad, then the weight; in backward both grads first.
    inputs, kept, weight, dgrad_grad, wgrad_grad, dgrad_weight = keys
    return {
        "fprop": (inputs, weight),
        "dgrad": (dgrad_grad, dgrad_weight),
        "wgrad": (wgrad_grad, kept),
    }


def test_sign_keys():
    """Alike for both operands, different for each GEMM and for each key of a call.

    That is so for wgrad too, whose input is transformed in forward and its gradient in backward.
    """
    precision = everywhere(Hadamard(32, "fresh"))
    keys = keys_of(precision)
    for gemm in GEMMS:
        assert keys[gemm] == (derive_key(KEY, "signs", gemm),) * 2
    others = keys_of(precision, key=KEY + 1)
    assert len({pair[0] for found in (keys, others) for pair in found.values()}) == 6
    transform = Hadamard(32, "fresh")
    signs = {transform.sign_vector(pair[0]) for found in (keys, others) for pair in found.values()}
    assert len(signs) == 6


def test_calls_without_a_key_take_new_signs():
    """Fresh signs alone draw a key from torch's generator, nearest-rounded as everything is."""
    precision = everywhere(Hadamard(32, "fresh"))
    torch.manual_seed(3)
    first, second = (keys_of(precision, key=draw_key(precision)) for _ in range(2))
    torch.manual_seed(3)
    again = keys_of(precision, key=draw_key(precision))
    assert first == again and first != second
    for keys in (first, second):
        assert all(left == right for left, right in keys.values())


@pytest.mark.parametrize("signs", ["fixed", "none", 5])
def test_signs_that_are_not_fresh_ignore_the_key(signs):
    tensors = leaves()
    precision = everywhere(Hadamard(32, signs))
    first, second = (run(*tensors, precision, key=key) for key in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    run(*tensors, precision, key=None)
    assert torch.equal(torch.get_rng_state(), state)  # no key drawn that nothing uses
    # Layers pass no key to these transforms, so products cannot show that a key decides signs.
    for transform in (Hadamard(size, signs) for size in (16, 32)):
        assert transform.sign_vector(1) == transform.sign_vector(2)


def test_mxfp4_backward_is_unbiased():
    """Its gradients average to the exact ones: 16 keys bring the error down as 1 / sqrt(16)."""
    x, weight, dy = leaves(64, 64, 64)
    precision = load_recipe("mxfp4-backward").configs["mxfp4"]
    samples = [run(x, weight, dy, precision, key=key)[1:] for key in range(16)]
    for i, expected in enumerate(exact(x, weight, dy)[1:]):
        drawn = torch.stack([sample[i].double() for sample in samples])
        one = (drawn[0] - expected).norm() / expected.norm()
        mean = (drawn.mean(0) - expected).norm() / expected.norm()
        assert 0.1 < one < 1 and mean < 1.25 * one / 4


def multiplied(precision, **options):
    """Return the quantized operands of the three GEMMs."""
    found, engine = [], ReferenceEngine("tests")

    def gemm(lhs, rhs, *rest):
        found.append((lhs, rhs))
        return ENGINE.gemm(lhs, rhs, *rest)

    engine.gemm = gemm
    run(*leaves(64, 48, 80), precision, engine=engine, **options)
    return found


def test_2d_weights_under_a_transform():
    """Transformed for each GEMM, then quantized: a transform is along one axis only."""
    _, weight, _ = leaves(64, 48, 80)
    precision = load_recipe(
        "nvfp4", ["fprop.hadamard={size: 16}", "dgrad.hadamard={size: 32, signs: fresh}"]
    ).configs["nvfp4"]
    (_, forward), (_, backward), _ = multiplied(precision)
    square = Quantizer(FORMATS["nvfp4-2d"])
    key = derive_key(KEY, "signs", "dgrad")
    for found, expected in (
        (forward, square(hadamard_transform(weight.detach(), Hadamard(16)))),
        (backward, square(hadamard_transform(weight.detach().t(), Hadamard(32, "fresh"), key))),
    ):
        assert_same(found, expected)


def test_ragged_transforms_of_shards_draw_random_bits_for_their_padding():
    """48 features in transforms of 64, rounded stochastically: as many draws as points.

    Numbered from zero, a shard of everything has the bits of the unsplit layer.
    """
    overrides = ["fprop.hadamard={size: 64}", "input.rounding=stochastic"]
    precision = load_recipe(
        "nvfp4", [*overrides, "weight.rounding=stochastic", "dgrad.hadamard={size: 64}"]
    ).configs["nvfp4"]
    shards = Shards(in_features=torch.arange(80), out_features=torch.arange(48))
    alone = multiplied(precision)
    split = multiplied(precision, shards=shards)
    other = multiplied(
        precision, shards=dataclasses.replace(shards, in_features=torch.arange(80) + 80)
    )
    for i in range(3):
        for a, b in zip(alone[i], split[i], strict=True):
            assert isinstance(a, QuantizedTensor) and torch.equal(a.codes, b.codes)
    assert not torch.equal(alone[0][0].codes, other[0][0].codes)
