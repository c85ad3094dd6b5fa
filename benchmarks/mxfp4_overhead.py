"""Cost of the Hadamard transform and of stochastic rounding in an MXFP4 backward pass.

    python -m benchmarks mxfp4_overhead --sweep    a layer of Llama-2-7B, one of Llama-2-70B

``mxfp4-backward`` with both, without either and without both, and a BF16 backward pass. The
overhead of a technique is the time that the backward pass with both takes longer than without it,
as a share of the time without it. "Training LLMs with MXFP4" (arXiv 2502.20586, section 4.2) has
for the transform 9.7% of an FP8 GEMM of a 7B model's size and 1.6% of a 70B model's, on an H100;
for stochastic rounding less than 2% of a BF16 GEMM, on a Trainium that has it in hardware.

The counted overhead assumes that neither technique moves a byte more than quantization does, and
that its operations add to the time: of the transform, one product and log2(64) sums in FP32 an
element; of rounding, a quarter of a block of Philox4x32-10 per element, ten rounds of some eight
32-bit integer operations for four elements. The rates are an H100 SXM's by its data sheet. What is
hidden behind memory accesses costs less.
"""

from collections.abc import Sequence
from functools import partial

from benchmarks import linear, runner
from benchmarks.linear import Contender, Size, bound, middle_precision
from benchmarks.timing import Ceilings

SIZES = [Size(16384, 4096, 11008), Size(16384, 8192, 28672)]
_BOTH = "mxfp4-backward"
_NO_TRANSFORM = " dgrad.hadamard=null wgrad.hadamard=null"
_NEAREST = " input.rounding=nearest weight.rounding=nearest grad.rounding=nearest"
VARIANTS = {
    "RHT and SR": _BOTH,
    "SR": _BOTH + _NO_TRANSFORM,
    "RHT": _BOTH + _NEAREST,
    "neither": _BOTH + _NO_TRANSFORM + _NEAREST,
}
CONTENDERS = {"BF16": linear.CONTENDERS["BF16"]} | {
    name: Contender(partial(linear.with_recipe, recipe), recipe)
    for name, recipe in VARIANTS.items()
}
WITHOUT = {"rht": "SR", "sr": "RHT"}
"""Contender that lacks one technique."""

_FP32_PER_SECOND = 33.5e12
_INT32_PER_SECOND = 16.7e12
_TRANSFORM_OPERATIONS = 1 + 6
_PHILOX_OPERATIONS = 10 * 8 / 16


def quantized_elements(size: Size) -> int:
    """Count the elements that the backward pass quantizes: the gradient for both of its GEMMs."""
    tokens, inputs, outputs = size
    return 2 * tokens * outputs + inputs * outputs + tokens * inputs


def counted_ms(size: Size) -> dict[str, float]:
    """Return milliseconds of each technique's operations, at the rates of the data sheet."""
    elements = quantized_elements(size)
    return {
        "rht": 1e3 * elements * _TRANSFORM_OPERATIONS / _FP32_PER_SECOND,
        "sr": 1e3 * elements * _PHILOX_OPERATIONS / _INT32_PER_SECOND,
    }


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list[dict]:
    """Measure one size; the row of both techniques has their overheads, measured and counted."""
    rows = linear.run(size, names, limits, seconds, CONTENDERS)
    times = {row["contender"]: row["backward"]["median_ms"] for row in rows if "backward" in row}
    both = next((row for row in rows if row["contender"] == "RHT and SR"), None)
    if both is None or "backward" not in both:
        return rows
    both["overhead"] = {
        technique: round(times["RHT and SR"] / times[other] - 1, 4)
        for technique, other in WITHOUT.items()
        if other in times
    }
    if (least := bound(middle_precision(_BOTH), size, limits)) is not None:
        counted = counted_ms(size)
        total = least["backward"] + sum(counted.values())
        both["counted_overhead"] = {
            technique: round(time / (total - time), 4) for technique, time in counted.items()
        }
    return rows


COLUMNS = {
    "backward ms": "backward", "x BF16": "times_bf16.backward", "over bound": "over_bound.backward",
    "RHT costs": "overhead.rht", "counted": "counted_overhead.rht",
    "SR costs": "overhead.sr", "counted ": "counted_overhead.sr",
}  # fmt: skip
main = runner.over_sizes("mxfp4_overhead", __doc__, CONTENDERS, SIZES, run, COLUMNS)
