"""The block Hadamard transform, against a float64 matrix product."""

import math

import pytest
import torch

from megatron_lowbit.numerics.hadamard import FIXED_SIGNS_16, Hadamard, hadamard_transform
from megatron_lowbit.numerics.randomness import derive_key, philox4x32

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


def matrix(hadamard: Hadamard) -> torch.Tensor:
    """Return diag(s) @ H / sqrt(n) in float64, H by Sylvester's rule: (-1)**popcount(i & j)."""
    n = hadamard.size
    h = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])
    signs = torch.tensor(hadamard.sign_vector(), dtype=torch.float64)
    return signs[:, None] * h.double() / math.sqrt(n)


def exact_product(x: torch.Tensor, hadamard: Hadamard) -> torch.Tensor:
    x = x.double()
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % hadamard.size))
    return (x.unflatten(-1, (-1, hadamard.size)) @ matrix(hadamard)).flatten(-2)


def test_signs_of_16_points():
    assert FIXED_SIGNS_16 == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    assert Hadamard().sign_vector() == FIXED_SIGNS_16
    assert Hadamard(signs="none").sign_vector() == (1,) * 16


@pytest.mark.parametrize("size", [s for s in SIZES if s != 16])
def test_signs_of_other_sizes_are_philox_bits(size):
    """Sign i is word i % 4 of the block at counter (i // 4, size, 0, 0), key 0: + below 2**31."""
    signs = []
    for i in range(size):
        counter = tuple(torch.tensor(c) for c in (i // 4, size, 0, 0))
        word = philox4x32(counter, (torch.tensor(0), torch.tensor(0)))[i % 4]
        signs.append(1 if int(word) < 2**31 else -1)
    assert Hadamard(size).sign_vector() == tuple(signs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signs", ["fixed", "none"])
def test_exact_where_fp32_is(size, signs):
    """Small integers: every partial sum is exact, so only the last product rounds, to FP32.

    The factor is FP32's 1 / sqrt(n); for even powers of two it is a power of two, and the BF16
    output then is the float64 product rounded once.
    """
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-127, 128, (5, 3 * size - 1), generator=generator).float()  # zero-padded
    hadamard = Hadamard(size, signs=signs, output="fp32")
    factor = torch.tensor(1 / math.sqrt(size), dtype=torch.float32)
    sums = (exact_product(x, hadamard) * math.sqrt(size)).round()
    expected = sums.float() * factor
    assert torch.equal(hadamard_transform(x, hadamard), expected)
    bf16 = hadamard_transform(x, Hadamard(size, signs=signs))
    assert torch.equal(bf16, expected.bfloat16().float())
    assert torch.equal(hadamard_transform(x.bfloat16(), hadamard), expected)


@pytest.mark.parametrize("size", SIZES)
def test_butterfly_order(size):
    """Distances 1, 2, 4, ...: the order is part of the definition, so FP32 bits are."""
    x = (
        torch.randn(3, size, generator=torch.Generator().manual_seed(3))
        * 10.0 ** torch.arange(-3, 3).repeat(size)[:size]
    )
    hadamard = Hadamard(size, output="fp32")
    points = x.numpy() * torch.tensor(hadamard.sign_vector(), dtype=torch.float32).numpy()
    for level in range(int(math.log2(size))):
        pairs = points.reshape(3, -1, 2, 2**level)
        low, high = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        points = torch.stack(
            [torch.from_numpy(low + high), torch.from_numpy(low - high)], dim=2
        ).numpy()
    expected = torch.from_numpy(points.reshape(3, size)) * torch.tensor(1 / math.sqrt(size))
    assert torch.equal(hadamard_transform(x, hadamard), expected)


@pytest.mark.parametrize("size", SIZES)
def test_fresh_signs_differ_by_key_and_only_by_key(size):
    hadamard = Hadamard(size, signs="fresh", output="fp32")
    vectors = [hadamard.sign_vector(derive_key("signs", i)) for i in range(64)]
    assert vectors == [hadamard.sign_vector(derive_key("signs", i)) for i in range(64)]
    distinct = len(set(vectors))
    assert distinct == 64 if size >= 32 else distinct > min(2**size, 64) / 2
    x = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(0))
    same, again = (hadamard_transform(x, hadamard, derive_key("signs", 1)) for _ in range(2))
    assert torch.equal(same, again)
    key = next(i for i in range(2, 64) if vectors[i] != vectors[1])
    other = hadamard_transform(x, hadamard, derive_key("signs", key))
    assert not torch.equal(same, other)


def test_an_integer_seeds_one_vector():
    vectors = {seed: Hadamard(64, signs=seed).sign_vector() for seed in (0, 1, 2, -1, 2**40)}
    assert len(set(vectors.values())) == 5
    assert Hadamard(64).sign_vector() not in vectors.values()  # the fixed one is no seed's
    for signs in (1, "fixed", "none"):
        assert Hadamard(64, signs).sign_vector(key=99) == Hadamard(64, signs).sign_vector()


@pytest.mark.parametrize("size", [0, 1, 3, 12, 48, 512, -16])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match=f"hadamard size {size} is not a power of two"):
        Hadamard(size)


def test_bad_names():
    with pytest.raises(ValueError, match=r"'random'.*fixed, fresh, none"):
        Hadamard(signs="random")
    with pytest.raises(ValueError, match=r"True is not one of .* integer seed"):
        Hadamard(signs=True)
    with pytest.raises(ValueError, match=r"'fp16'.*bf16, fp32"):
        Hadamard(output="fp16")
