"""Choice of kernels on a GPU, without Triton: the GEMM of each pair of formats, forms of operands.

:func:`route` is the table of GEMMs; ``gemm.py`` has a function for each route.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
from torch import Tensor

from megatron_lowbit.kernels.support import has_kernel
from megatron_lowbit.numerics import Request, Rounding
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor, FP8Tile
from megatron_lowbit.numerics.block_formats.fp8_row import FP8Row
from megatron_lowbit.numerics.block_formats.tetrajet2 import TetraJet2
from megatron_lowbit.numerics.formats import E5M2
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.rmsnorm import RMSNorm


class Form(Enum):
    """Form in which a quantized operand is written. The value is the bits of an element."""

    CODES = 0
    """Codes and scales of its format, which says how many bits they take."""
    BF16 = 16
    """Exact BF16 numbers, with a scale per tensor."""
    FOLDED = 8
    """FP8 with a scale per tensor (``numerics/folding.py``)."""


Format = BlockFormat | None
"""A format, or None for an operand in BF16."""
MIN_CAPABILITY = (8, 9)
"""From here on GPUs cast to FP8 and multiply it; before, everything is dequantized."""
NARROWEST_ROW, WIDEST_ROW = 2**5, 2**15
"""Columns that a program of a norm can hold."""


@dataclass(frozen=True)
class Route:
    """A GEMM of quantized operands.

    ``form`` is the form in which its operands are best written.
    """

    name: str
    accumulation: str
    form: Form = Form.CODES

    def __str__(self) -> str:
        return f"{self.name}, {self.accumulation}"


TILES = Route("FP8 tiles", "sums promoted to FP32 every 128 products")
TENSORS = Route("FP8 tensors", "sums of FP8 tensor cores promoted to FP32")
ROWS = Route("FP8 rows", TENSORS.accumulation)
FOLDED = Route("folded to FP8 tensors", TENSORS.accumulation, Form.FOLDED)
BLOCKS = Route("BF16 blocks", TILES.accumulation)
EXACT = Route("exact BF16", "FP32 sums", Form.BF16)
DEQUANTIZED = Route("dequantized to FP32", "FP32 sums")


@cache
def route(lhs: Format, rhs: Format, capability: tuple[int, int], folding: bool = True) -> Route:
    """Return the route of a pair of formats, one of them at least quantized, in any order.

    Without ``folding`` operands are multiplied as they are.
    """

    def both(*types: type) -> bool:
        return isinstance(lhs, types) and isinstance(rhs, types)

    hopper, supported = capability[0] == 9, capability >= MIN_CAPABILITY
    quantized = both(BlockFormat) and supported
    # No tensor core multiplies E5M2 with E5M2.
    fp8 = quantized and not lhs.element == rhs.element == E5M2
    tiles = fp8 and hopper and both(FP8Tile) and lhs.block == rhs.block == TILE
    tiles = tiles and 1 in (lhs.block_rows, rhs.block_rows)
    # cuBLAS multiplies 1x128 with 128x128 tiles at nine tenths of the speed, 1x128 with 1x128 at
    # seven. Folding E5M2 with weights loses nothing; inputs in E4M3 would, next to outliers.
    wide = fp8 and E5M2 in (lhs.element, rhs.element)
    folds = fp8 and (wide or not tiles or lhs.block_rows == rhs.block_rows)
    table = {
        TENSORS: fp8 and both(FP8Tensor),
        # cuBLAS has scales per row only on Hopper; elsewhere torch's kernel gives no FP32 product.
        ROWS: fp8 and hopper and both(FP8Row),
        FOLDED: folding and folds and all(f.folds or isinstance(f, FP8Tensor) for f in (lhs, rhs)),
        TILES: tiles,
        BLOCKS: hopper and both(TetraJet2),
        EXACT: supported and all(f is None or f.exact_in_bf16 for f in (lhs, rhs)),
        DEQUANTIZED: True,
    }
    return next(name for name, takes in table.items() if takes)


def _gemm_form(request: Request, dtype: torch.dtype, capability: tuple[int, int]) -> Form:
    """Return the form that the GEMM takes: codes next to an operand in FP32.

    Formats without blocks have codes where the GEMM takes BF16: kernels write no others.
    """
    format = request.quantizer.format
    if request.partner is None and dtype is not torch.bfloat16:
        return Form.CODES
    form = route(format, request.partner, capability, request.folding).form
    return Form.CODES if form is Form.BF16 and format.block == 1 else form


@cache
def written_form(
    request: Request | None, dtype: torch.dtype, capability: tuple[int, int], many: bool = False
) -> Form:
    """Return the form to write an operand in, for a request without keys and the matrix's dtype.

    Codes where they are asked for, or are saved and smaller than the GEMM's form. Of ``many``
    operands those that are saved are folded now: later it would take a launch for each.
    """
    if request is None or request.needs_codes:
        return Form.CODES
    form, format = _gemm_form(request, dtype, capability), request.quantizer.format
    if form is Form.FOLDED and not format.folds:
        return Form.CODES  # it is FP8 with a scale per tensor already
    saves_codes = request.saved and not (many and form is Form.FOLDED)
    return Form.CODES if saves_codes and form.value > format.bits_per_element else form


@cache
def forms_of(
    row: Request | None,
    col: Request | None,
    same: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    many: bool = False,
) -> tuple[Form, Form, bool] | None:
    """Return the forms in which kernels write both sides of a matrix; None without kernels.

    ``row`` and ``col`` are requests without keys. ``same``: both sides are of one request, for
    square blocks, whose column operand is the transpose. ``many`` is as for :func:`written_form`.

    Returns:
        Both sides' forms, and True if one operand serves both, which is quantized along columns,
        whose blocks stay within a thread.
    """
    if any(side is not None and not has_kernel(side.quantizer) for side in (row, col)):
        return None
    shared = False
    if same and row is not None:
        col = row.of_transpose.keyless
        shared = all(_gemm_form(side, dtype, capability) is Form.BF16 for side in (row, col))
    form = written_form(row, dtype, capability, many)
    return form, form if shared else written_form(col, dtype, capability, many), shared


def takes_norm(x: Tensor, norm: MXNorm | RMSNorm, request: Request) -> bool:
    """Check whether one kernel normalizes and quantizes x (R, C).

    It takes the usual norms, blocks of one row, rounding to nearest, and no tensor scales of rows.
    """
    quantizer = request.quantizer
    return (
        (isinstance(norm, RMSNorm) or norm.p in (1, 2))
        and quantizer.rounding is Rounding.NEAREST_EVEN
        and has_kernel(quantizer)
        and quantizer.format.block_rows == 1
        and not quantizer.format.scales_tensor_rows
        and request.hadamard is None
        and x.numel() > 0
        and NARROWEST_ROW <= x.shape[1] <= WIDEST_ROW
        and x.shape[1] % quantizer.format.block == 0
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )
