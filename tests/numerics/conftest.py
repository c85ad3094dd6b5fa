"""Shared parts of the format tests: golden inputs, and a scalar rounding to a grid."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lowbit.numerics import QuantizedTensor

GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "quantizers.npz"
INPUTS = ("gauss", "heavy", "rows", "tiny", "huge", "zeros", "ties", "pairs")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bytes_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes of a matrix of bytes, one per byte."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


class Golden:
    """The golden arrays by key; ``x`` gives an input as BF16."""

    def __init__(self) -> None:
        self.arrays = np.load(GOLDEN_FILE)
        self.keys = tuple(self.arrays.files)

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    def x(self, name: str) -> torch.Tensor:
        bits = self.arrays[f"{name}/input_bf16_bits"].view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden()


class Lab:
    """Golden arrays of the newer FP4 methods by key, and the random numbers they were made with."""

    INPUTS = ("gauss", "outlier", "grad", "tiny", "zeros", "ties")

    def __init__(self) -> None:
        self.arrays = np.load(GOLDEN_FILE.with_name("fp4_lab.npz"))

    def __contains__(self, key: str) -> bool:
        return key in self.arrays.files

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    def x(self, name: str, array: str = "bits") -> torch.Tensor:
        """Return a matrix of BF16 bit patterns in FP32."""
        return torch.from_numpy(self[f"{name}/{array}"]).view(torch.bfloat16).float()

    def codes(self, key: str) -> np.ndarray:
        """Return codes, one per byte."""
        return nibbles(self[f"{key}/codes"])

    def draws(self, shape: tuple[int, ...], k: int) -> torch.Tensor:
        """Return the uniform numbers of stream ``k``, FP32: 16 bits of a hash of the index."""
        index = np.arange(np.prod(shape), dtype=np.uint64)
        mask = np.uint64(0xFFFFFFFF)
        h = (index * 2654435761 + k * 2246822519 + 374761393) & mask
        h ^= h >> np.uint64(15)
        h = (h * 2246822519) & mask
        h ^= h >> np.uint64(13)
        u = ((h >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-16
        return torch.from_numpy(u.astype(np.float32).reshape(shape))


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture(params=Lab.INPUTS)
def lab_name(request) -> str:
    return request.param


@pytest.fixture(params=INPUTS)
def golden_name(request) -> str:
    return request.param


def magnitudes(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """Return every finite magnitude of a format in code order, from its fields."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        lead = 1 if exponent else 0
        value = (lead + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias)
        if value <= largest:
            values.append(value)
    return np.array(values)


GRIDS = {
    "e2m1": magnitudes(2, 1, 6),
    "e2m3": magnitudes(2, 3, 7.5),
    "e3m2": magnitudes(3, 2, 28),
    "e4m3": magnitudes(4, 3, 448),
    "e5m2": magnitudes(5, 2, 57344),
}


def nearest_codes(scaled: np.ndarray, element) -> np.ndarray:
    """Encode float64 values: the nearest grid value, the even code at a midpoint, saturating."""
    grid = GRIDS[element.name]
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = np.abs(scaled)
    below = np.searchsorted(middle, magnitude, side="left")
    above = np.searchsorted(middle, magnitude, side="right")
    codes = np.where(below % 2 == 0, below, above)
    return (codes + 2 ** (element.bits - 1) * np.signbit(scaled)).astype(np.uint8)


def codes_of(q: QuantizedTensor) -> np.ndarray:
    """Return the codes of a quantized tensor as uint8, one per byte, whatever the width."""
    codes = bytes_of(q.codes)
    return nibbles(codes) if q.format.element.bits == 4 else codes


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    """Compare codes, scales and tensor scale bit by bit, and format and shape."""
    for name in ("codes", "scales", "tensor_scale"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert torch.equal(bits(ours), bits(theirs)), name
    assert (a.format, a.shape) == (b.format, b.shape)
