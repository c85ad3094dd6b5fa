"""What a recipe says of one linear layer: how each operand of its three GEMMs is quantized."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_lowbit.numerics import Hadamard, Quantizer, Rounding

GEMM_ROLES = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad", "weight"),
    "wgrad": ("grad", "input"),
}
"""Left and right operand of each GEMM, by role. Blocks run along the axis they contract."""


@dataclass(frozen=True)
class GemmPrecision:
    """One GEMM: a quantizer for each operand (None: high precision) and one Hadamard transform.

    The transform goes to both operands with the same signs or the product is another one, so it
    needs both to be quantized.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    hadamard: Hadamard | None = None

    def __post_init__(self) -> None:
        if self.hadamard is not None and (self.lhs is None or self.rhs is None):
            raise ValueError("a hadamard transform needs both operands of its GEMM quantized")

    def __str__(self) -> str:
        if self.lhs is None and self.rhs is None:
            return "bf16"
        sides = " x ".join(_side(quantizer) for quantizer in (self.lhs, self.rhs))
        return sides + (f", RHT-{self.hadamard.size}" if self.hadamard else "")


def _side(quantizer: Quantizer | None) -> str:
    if quantizer is None:
        return "bf16"
    return quantizer.format.name + (" SR" if quantizer.rounding is Rounding.STOCHASTIC else "")


@dataclass(frozen=True)
class LinearPrecision:
    """One linear layer.

    ``tensor_scale`` says which amax makes the scale of a tensor that tensor parallelism shards:
    the local ``shard``'s, or the maximum over the ``group``, which gives every layout the same
    quantized bits for one more small all-reduce an operand.
    """

    fprop: GemmPrecision = GemmPrecision()
    dgrad: GemmPrecision = GemmPrecision()
    wgrad: GemmPrecision = GemmPrecision()
    tensor_scale: Literal["shard", "group"] = "shard"

    @property
    def quantized(self) -> bool:
        """Whether any operand is."""
        return any(quantizer is not None for _, _, quantizer in self.operands())

    @property
    def stochastic(self) -> bool:
        """Whether any operand is rounded stochastically."""
        return any(
            quantizer is not None and quantizer.rounding is Rounding.STOCHASTIC
            for _, _, quantizer in self.operands()
        )

    def operands(self) -> Iterator[tuple[str, str, Quantizer | None]]:
        """(GEMM, role, quantizer) of all six operands."""
        for gemm, (left, right) in GEMM_ROLES.items():
            precision: GemmPrecision = getattr(self, gemm)
            yield gemm, left, precision.lhs
            yield gemm, right, precision.rhs


HIGH_PRECISION = LinearPrecision()
