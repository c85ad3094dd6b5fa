"""Compute the tables of docs/research/fp8.md: error by tile size, outliers and accumulator.

    python docs/generate/fp8.py

The reference arithmetic on a CPU, from fixed seeds, in seconds; renews what stands between the
page's markers. Only the sums of Hopper's FP8 tensor cores are a model of this script.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from render import ROOT, parser, replace_sections, table
from torch import Tensor

from megatron_lowbit.numerics import FORMATS, Accumulation, QuantizedTensor, Quantizer, gemm
from megatron_lowbit.numerics.block_format import BlockFormat

SIZE = 512
"""Rows and columns of the tensor that is quantized."""
FACTORS = (1, 10, 100, 1e3, 1e4, 1e5)
PLACES = ("none", "one element", "0.01%", "0.1%", "1%", "one column")
LENGTH, OUTPUTS = 4096, 16
"""Products in a sum, and rows and columns of sums."""
STEP, FRACTION_BITS = 32, 13
"""Products that a tensor core adds at once, and bits below the largest one's that it keeps."""
UNIT = 2.0**-7
"""Factor of the codes for sums in FP8: the largest number is about 4 then."""
INNER = {"tensor core": "14 bits", "bf16": "BF16", "fp8": "FP8"}
"""Accumulators, and their names in the table."""
INTERVALS = (None, 1024, 512, 256, 128, 64, 32)


def tiles(block: int, square: bool = False) -> BlockFormat:
    """Return E4M3 in tiles of any size, also one that recipes do not offer."""
    name = "fp8-128x128-e4m3" if square else "fp8-1x128-e4m3"
    return replace(FORMATS[name], block=block, block_rows=block if square else 1)


SCALES = {
    "the tensor": FORMATS["fp8-tensor-e4m3"],
    "the tensor, E5M2": FORMATS["fp8-tensor-e5m2"],
    **{f"{n}x{n}": tiles(n, square=True) for n in (256, 128, 64, 32)},
    **{f"1x{n}": tiles(n) for n in (256, 128, 64, 32, 16)},
}
"""Elements that share a scale, and the format."""


def normal(seed: int, *shape: int) -> Tensor:
    """Return N(0, 1) from numpy, whose stream is the same everywhere."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def outliers(place: str) -> Tensor:
    """Return the places of the outliers, bool (SIZE, SIZE)."""
    where = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    if place == "one element":
        where[100, 200] = True
    elif place == "one column":
        where[:, 200] = True
    elif place != "none":
        share = float(place.rstrip("%")) / 100
        drawn = np.random.default_rng(1).permutation(SIZE * SIZE)[: round(share * SIZE * SIZE)]
        where.view(-1)[torch.from_numpy(drawn)] = True
    return where


def others_error(format: BlockFormat, place: str, factor: float) -> tuple[float, float]:
    """Measure the quantization of the elements that are no outliers.

    Args:
        format: the format that the tensor is quantized to.
        place: which elements are outliers, one of ``PLACES``.
        factor: what outliers are multiplied by.

    Returns:
        The norm of the error over the norm of the elements; the share that became zero.
    """
    x, where = normal(0, SIZE, SIZE), outliers(place)
    made = Quantizer(format)(torch.where(where, x * factor, x)).dequantize()[~where]
    zeros = (made == 0).double().mean().item()
    return relative_error(made, x[~where].double()), zeros


def by_factor() -> str:
    """Tabulate errors over the factor of one outlier in a thousand."""
    rows = []
    for shared, format in SCALES.items():
        errors = (_percent(others_error(format, "0.1%", factor)[0]) for factor in FACTORS)
        rows.append([shared, f"{format.bits_per_element:.4g}", *errors])
    return table(["a scale for", "bits", *(f"x {factor:,.0f}" for factor in FACTORS)], rows)


def by_place() -> str:
    """Tabulate the share of elements that become zero next to outliers of 100,000 times."""
    rows = [
        [shared, *(_percent(others_error(format, place, 1e5)[1]) for place in PLACES)]
        for shared, format in SCALES.items()
    ]
    return table(["a scale for", *PLACES], rows)


def tensor_core_sums(lhs: Tensor, rhs: Tensor, promote_every: int | None) -> Tensor:
    """Compute lhs @ rhs.T as Hopper's FP8 tensor cores sum, promoted to FP32 or never.

    Source: "DeepSeek-V3 Technical Report", section 3.5.2: 32 products and the sum so far are
    aligned to the largest of them and cut off, and the sum is kept in as many bits.

    Args:
        lhs: (M, K), K a multiple of 32, values of FP8 numbers.
        rhs: (N, K).
        promote_every: products after which the sum moves to FP32, a multiple of 32; None: never.

    Returns:
        FP32 (M, N).
    """
    products = lhs.double().unsqueeze(1) * rhs.double()
    outer = torch.zeros(products.shape[:2])
    for interval in products.split(promote_every or products.shape[2], dim=2):
        inner = torch.zeros_like(products[..., :1])
        for step in interval.split(STEP, dim=2):
            terms = torch.cat([inner, step], dim=2)
            largest = terms.abs().amax(2, keepdim=True)
            inner = _cut_off(_cut_off(terms, largest).sum(2, keepdim=True))
        outer += inner.squeeze(2).float()
    return outer


def _cut_off(x: Tensor, largest: Tensor | None = None) -> Tensor:
    """Round x towards zero, to FRACTION_BITS below the leading bit of ``largest`` (default x's)."""
    exponent = torch.frexp(x if largest is None else largest).exponent - 1
    unit = torch.ldexp(torch.ones_like(x), exponent - FRACTION_BITS)
    return (x / unit).trunc() * unit


def matrices(one_sign: bool) -> list[Tensor]:
    """Return two matrices (OUTPUTS, LENGTH) from N(0, 1), or their absolute values."""
    drawn = (normal(seed, OUTPUTS, LENGTH) for seed in (2, 3))
    return [x.abs() if one_sign else x for x in drawn]


def operands(one_sign: bool) -> list[QuantizedTensor]:
    """Return the same matrices in E4M3, with a scale each."""
    return [Quantizer(FORMATS["fp8-tensor-e4m3"])(x) for x in matrices(one_sign)]


def sum_error(one_sign: bool, inner: str, promote_every: int | None) -> float:
    """Return error of sums of products of E4M3 numbers, as its norm over the norm of exact sums."""
    # A scale multiplies the whole sum: tensor cores add products of codes.
    left, right = (operand.codes.float() for operand in operands(one_sign))
    exact = left.double() @ right.double().t()
    if inner == "tensor core":
        return relative_error(tensor_core_sums(left, right, promote_every), exact)
    # Sums in FP8 would saturate: 448 * 448 is the largest product.
    accumulation = Accumulation(inner, promote_every)
    made = gemm(left * UNIT, right * UNIT, accumulation=accumulation)
    return relative_error(made, exact * UNIT**2)


def quantization_error(one_sign: bool) -> float:
    """Return the error of exact sums of products of E4M3 numbers against their sources."""
    left, right = (operand.dequantize().double() for operand in operands(one_sign))
    a, b = (x.double() for x in matrices(one_sign))
    return relative_error(left @ right.t(), a @ b.t())


def relative_error(made: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over the norm of what is exact, float64."""
    return ((made.double() - exact).norm() / exact.norm()).item()


def by_accumulator() -> str:
    """Tabulate errors of sums over the interval of promotion, by accumulators."""
    rows = []
    for interval in INTERVALS:
        cells = [
            _percent(sum_error(one_sign, inner, interval))
            for one_sign in (False, True)
            for inner in INNER
        ]
        rows.append(["never" if interval is None else interval, *cells])
    for name, error in (
        ("FP32 throughout", partial(sum_error, inner="fp32", promote_every=None)),
        ("quantization alone", quantization_error),
    ):
        rows.append([name, _percent(error(False)), None, None, _percent(error(True)), None, None])
    headings = [f"{signs}: {name}" for signs in ("N(0, 1)", "abs") for name in INNER.values()]
    return table(["promoted every", *headings], rows)


def _percent(share: float) -> str:
    """Show three digits, and nothing below a hundred-thousandth."""
    return "0" if share == 0 else "< 0.001%" if share < 1e-5 else f"{100 * share:.3g}%"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    document = (
        parser(__doc__, document=ROOT / "docs" / "research" / "fp8.md").parse_args(argv).document
    )
    sections = {"factors": by_factor(), "places": by_place(), "accumulators": by_accumulator()}
    replace_sections(document, sections)


if __name__ == "__main__":
    main()
