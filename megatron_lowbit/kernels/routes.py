"""Table of GEMM routes on a GPU: tensor cores for each pair of formats, and forms of operands.

The first route that takes both formats on a device is the pair's; ``gemm.py`` carries it out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch

from megatron_lowbit.numerics import Request
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor, FP8Tile
from megatron_lowbit.numerics.block_formats.fp8_row import FP8Row
from megatron_lowbit.numerics.formats import E5M2


class Form(Enum):
    """Form in which a quantized operand is written. The value is the bits of an element."""

    CODES = 0
    """Codes and scales of its format, which says how many bits they take."""
    BF16 = 16
    """Exact BF16 numbers, with a scale a tensor."""
    FOLDED = 8
    """FP8 with a scale a tensor (``numerics/folding.py``)."""


Format = BlockFormat | None
"""A format, or None for an operand in BF16."""
MIN_CAPABILITY = (8, 9)
"""From here on GPUs cast to FP8 and multiply it; before, everything is dequantized."""


@dataclass(frozen=True)
class Route:
    """One way to multiply.

    ``takes(lhs, rhs, capability)`` says for which formats and devices. ``form`` is that in which
    its operands are best written.
    """

    name: str
    accumulation: str
    takes: Callable[[Format, Format, tuple[int, int]], bool]
    form: Form = Form.CODES

    def __str__(self) -> str:
        return f"{self.name}, {self.accumulation}"


def _takes_tiles(lhs: Format, rhs: Format, capability: tuple[int, int]) -> bool:
    both = isinstance(lhs, FP8Tile) and isinstance(rhs, FP8Tile)
    return (
        both
        and capability[0] == 9
        and lhs.block == rhs.block == TILE
        and 1 in (lhs.block_rows, rhs.block_rows)
        and not lhs.element == rhs.element == E5M2
    )


def _takes_tensors(lhs: Format, rhs: Format, capability: tuple[int, int]) -> bool:
    both = isinstance(lhs, FP8Tensor) and isinstance(rhs, FP8Tensor)
    return both and not lhs.element == rhs.element == E5M2


def _takes_rows(lhs: Format, rhs: Format, capability: tuple[int, int]) -> bool:
    # cuBLAS has scales a row on Hopper alone; elsewhere torch's kernel gives no FP32 product.
    both = isinstance(lhs, FP8Row) and isinstance(rhs, FP8Row)
    return both and capability[0] == 9 and not lhs.element == rhs.element == E5M2


def _takes_folded(lhs: Format, rhs: Format, capability: tuple[int, int]) -> bool:
    both = all(f is not None and (f.folds or isinstance(f, FP8Tensor)) for f in (lhs, rhs))
    if not both or lhs.element == rhs.element == E5M2:
        return False
    # cuBLAS multiplies 1x128 with 128x128 tiles at nine tenths of the speed, 1x128 with 1x128 at
    # seven. Folding E5M2 with weights loses nothing; inputs in E4M3 would, beside outliers.
    wide = E5M2 in (lhs.element, rhs.element)
    return wide or not _takes_tiles(lhs, rhs, capability) or lhs.block_rows == rhs.block_rows


def _takes_exact(lhs: Format, rhs: Format, capability: tuple[int, int]) -> bool:
    return all(format is None or format.exact_in_bf16 for format in (lhs, rhs))


TILES = Route("FP8 tiles", "FP32, promoted every 128 products", _takes_tiles)
TENSORS = Route("FP8 tensors", "FP8 tensor cores' sums, promoted", _takes_tensors)
ROWS = Route("FP8 rows", "FP8 tensor cores' sums, promoted", _takes_rows)
FOLDED = Route(
    "folded to FP8 tensors", "FP8 tensor cores' sums, promoted", _takes_folded, Form.FOLDED
)
EXACT = Route("exact BF16", "FP32", _takes_exact, Form.BF16)
DEQUANTIZED = Route("dequantized to FP32", "FP32", lambda *_: True)


@cache
def route(lhs: Format, rhs: Format, capability: tuple[int, int], folding: bool = True) -> Route:
    """Return the route of a pair of formats, one of them at least quantized, in any order.

    Without ``folding`` operands are multiplied as they are.
    """
    if capability < MIN_CAPABILITY:
        return DEQUANTIZED
    folded = (FOLDED,) if folding else ()
    table = (TENSORS, ROWS, *folded, TILES, EXACT, DEQUANTIZED)
    return next(one for one in table if one.takes(lhs, rhs, capability))


def _form(kind: Request, dtype: torch.dtype, capability: tuple[int, int]) -> Form:
    """Return the form that the GEMM takes; beside an operand in FP32, codes."""
    if kind.partner is None and dtype is not torch.bfloat16:
        return Form.CODES
    return route(kind.quantizer.format, kind.partner, capability, kind.folding).form


@cache
def written_form(kind: Request | None, dtype: torch.dtype, capability: tuple[int, int]) -> Form:
    """Return the form to write an operand in, for a request's kind and the matrix's dtype.

    Codes where the GEMM's form is too large, or codes are asked for.
    """
    if kind is None or kind.needs_codes:
        return Form.CODES
    form, format = _form(kind, dtype, capability), kind.quantizer.format
    if form is Form.FOLDED and not format.folds:
        return Form.CODES  # it is FP8 with a scale a tensor already
    return Form.CODES if kind.saved and form.value > format.bits_per_element else form


class Forms(NamedTuple):
    """Forms of both sides' operands.

    ``shared``: one operand serves both, which is quantized along columns, whose blocks stay within
    a thread.
    """

    row: Form
    col: Form
    shared: bool


@cache
def forms_of(
    row: Request | None,
    col: Request | None,
    same: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> Forms | None:
    """Return the forms in which kernels write both sides of a matrix; None without kernels.

    ``row`` and ``col`` are requests' kinds. ``same``: both sides are of one request, for square
    blocks, whose column operand is that of the transpose.
    """
    if any(kind is not None and not kind.quantizer.has_kernel for kind in (row, col)):
        return None
    if same and row is not None:
        col = row.of_transpose.kind
        first, second = (_form(kind, dtype, capability) for kind in (row, col))
        if first is second is Form.BF16:
            form = written_form(row, dtype, capability)
            return Forms(form, form, True)
    return Forms(written_form(row, dtype, capability), written_form(col, dtype, capability), False)


@cache
def form_of_many(kind: Request | None, dtype: torch.dtype, capability: tuple[int, int]) -> Form:
    """Return the form to write many operands in: what is saved is folded now.

    Later it would take a launch for each.
    """
    if kind is not None and _form(kind, dtype, capability) is Form.FOLDED:
        kind = replace(kind, saved=False).kind
    return written_form(kind, dtype, capability)
