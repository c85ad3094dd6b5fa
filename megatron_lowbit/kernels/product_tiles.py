"""Tiles of products of many matrices: their sizes, their order, and factors of their sums."""

from typing import NamedTuple

import triton
import triton.language as tl

from megatron_lowbit.kernels.sections import entry

_NEIGHBOURS = tl.constexpr(8)
"""Row tiles computed one after another with the same columns, which stay in the cache."""


class Tile(NamedTuple):
    """Rows, columns and terms that a program computes at a time, and its launch."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


@triton.jit
def place_of_tile(tile, rows, columns, TM: tl.constexpr, TN: tl.constexpr):
    """Return the first row and column of a tile of a product (rows, columns)."""
    band = _NEIGHBOURS * tl.cdiv(columns, TN)
    first = tile // band * _NEIGHBOURS
    height = tl.minimum(tl.cdiv(rows, TM) - first, _NEIGHBOURS)
    return (first + tile % band % height) * TM, tile % band // height * TN


@triton.jit
def factor_of(table, section, PLACE: tl.constexpr, COUNT: tl.constexpr):
    """Return a factor in FP32; 1 without an address."""
    at = entry(table, section, PLACE, COUNT)
    return tl.load(at.to(tl.pointer_type(tl.float32)), mask=at != 0, other=1.0)
