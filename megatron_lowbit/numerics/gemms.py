"""The three GEMMs of a linear layer, and the roles of their operands."""

from enum import StrEnum


class Gemm(StrEnum):
    """GEMM of a linear layer."""

    FPROP = "fprop"
    """Y (M, N) = X . W^T"""
    DGRAD = "dgrad"
    """dX (M, K) = dY . W"""
    WGRAD = "wgrad"
    """dW (N, K) = dY^T . X"""


class Role(StrEnum):
    """Tensor of a linear layer that GEMMs take."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD = "grad"


GEMM_ROLES = {
    Gemm.FPROP: (Role.INPUT, Role.WEIGHT),
    Gemm.DGRAD: (Role.GRAD, Role.WEIGHT),
    Gemm.WGRAD: (Role.GRAD, Role.INPUT),
}
"""Roles of the left and the right operand of each GEMM. Blocks run along the contracted axis."""

OPERANDS = tuple((gemm, role) for gemm, roles in GEMM_ROLES.items() for role in roles)
"""The six (GEMM, role) pairs of a linear layer, in the order of all state that each has."""
