"""Forms of a quantized operand on a GPU."""

from enum import Enum


class Form(Enum):
    """Form in which a quantized operand is written."""

    CODES = "codes and scales of its format"
    VALUES = "exact BF16 numbers, with a scale a tensor"
    FOLDED = "FP8 with a scale a tensor (``numerics/folding.py``)"

    @property
    def bits(self) -> int:
        """Bits an element takes; 0 of codes, whose format says."""
        return {Form.CODES: 0, Form.VALUES: 16, Form.FOLDED: 8}[self]
