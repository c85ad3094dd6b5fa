"""Random keys of one linear layer in one microbatch: for each operand's draws and GEMM's signs.

They derive from the layer's key, a number; or come as a table in the memory of a device, which
is filled anew for each microbatch where a CUDA graph replays what was launched for another one.
"""

from torch import Tensor

from megatron_lowbit.numerics import randomness
from megatron_lowbit.recipes.precision import GEMM_ROLES, OPERANDS

_GEMMS = list(GEMM_ROLES)
_ROLES = ("input", "weight", "grad")

Key = int | Tensor
"""A layer's key of 64 bits, or its table: int64, as :func:`key_table` lists it."""


def operand_key(key: Key, gemm: str, role: str) -> Key:
    """Return the key of an operand's draws."""
    if isinstance(key, Tensor):
        return key[OPERANDS.index((gemm, role))]
    return randomness.operand_key(key, _GEMMS.index(gemm), _ROLES.index(role))


def sign_key(key: Key, gemm: str) -> Key:
    """Return the key of fresh signs, which both operands of a GEMM share."""
    if isinstance(key, Tensor):
        return key[len(OPERANDS) + _GEMMS.index(gemm)]
    return randomness.sign_key(key, gemm)


def key_table(key: int) -> list[int]:
    """Return the keys of all operands, then of all GEMMs' signs, as signed numbers of 64 bits."""
    keys = [operand_key(key, *operand) for operand in OPERANDS]
    keys += [sign_key(key, gemm) for gemm in _GEMMS]
    return [int(one) - ((int(one) >> 63) << 64) for one in keys]
