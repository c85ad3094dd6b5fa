"""Quantization: a BF16 matrix into the operands of its GEMMs, by recipe and by the peers.

    python -m benchmarks quantize            16384 x 14336, a gradient's size
    python -m benchmarks quantize --sweep    four more sizes, one of them ragged

A case is what a recipe asks of one tensor in a block in the middle of a model: an operand with
blocks along rows and one with blocks along columns, from one call of the engine. Bytes are the
input's, read once, and the results', written once, counted from the tensors that come back; the
second read that a tensor scale's amax takes is counted apart. The bound is both at the rate of a
copy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import runner, timing
from benchmarks.linear import middle_precision
from benchmarks.timing import Ceilings, Step
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.numerics import Draw, Request, Rounding
from megatron_lowbit.numerics.gemms import GEMM_ROLES


class Size(NamedTuple):
    """Size of a matrix."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"


DEFAULT = Size(16384, 14336)
SWEEP = [DEFAULT, Size(4096, 1024), Size(16384, 4096), Size(65536, 8192), Size(4001, 4104)]
# The GEMMs that take a tensor with blocks along its rows and along its columns.
_USES = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad": ("dgrad", "wgrad")}


class Contender(NamedTuple):
    """Function that makes a quantizer for a matrix, and a description of its result.

    ``amax_passes`` are reads of the input other than the one that quantizes.
    """

    make: Callable[[Tensor], Callable[[], Any]]
    makes: str
    amax_passes: int = 0
    compiled: bool = False


def request(recipe: str, role: str, gemm: str) -> Request:
    """Return a recipe's request for a tensor in one of its GEMMs."""
    precision = middle_precision(recipe).gemms[gemm]
    sides = [precision.lhs, precision.rhs]
    quantizer = sides.pop(GEMM_ROLES[gemm].index(role))
    random = quantizer.rounding is Rounding.STOCHASTIC
    return Request(
        quantizer,
        hadamard=precision.hadamard,
        sign_key=1234,
        draw=Draw(5678) if random else None,
        needs_codes=(gemm, role) == ("wgrad", "input"),
        partner=sides[0].format if sides[0] is not None else None,
    )


def _ours(recipe: str, role: str) -> Contender:
    row, col = (request(recipe, role, gemm) for gemm in _USES[role])

    def make(x: Tensor) -> Callable[[], Any]:
        return partial(select_engine(x.device).quantize, x, row, col)

    sides = [
        " ".join(
            [str(side.quantizer.format)]
            + ([f"RHT-{side.hadamard.size}"] if side.hadamard else [])
            + (["SR"] if side.draw else [])
            + (["kept"] if side.needs_codes else [])
        )
        for side in (row, col)
    ]
    scaled = any(side.quantizer.format.tensor_scaled for side in (row, col))
    return Contender(make, f"rows {sides[0]}; columns {sides[1]}", int(scaled))


def _te_block(dimensions: int, x: Tensor) -> Callable[[], Any]:
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    quantizer = te.Float8BlockQuantizer(
        tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions
    )
    return partial(quantizer, x)


def _te_mxfp8(x: Tensor) -> Callable[[], Any]:
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex

    return partial(te.MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True), x)


def _torchao_mx(element: torch.dtype, x: Tensor) -> Callable[[], Any]:
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    return partial(torch.compile(to_mx, dynamic=False), x, element, 32)


def _tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the plainest quantizer to 1x128 tiles of E4M3."""
    tiles = x.float().unflatten(-1, (-1, 128))
    scales = tiles.abs().amax(-1, keepdim=True) / 448
    return (tiles / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def _compiled_tiles(x: Tensor) -> Callable[[], Any]:
    return partial(torch.compile(_tiles, dynamic=False), x)


CONTENDERS = {
    "fp8-tile grad": _ours("fp8-tile", "grad"),
    "fp8-tile weight": _ours("fp8-tile", "weight"),
    "mxfp8 grad": _ours("mxfp8", "grad"),
    "mxfp4-backward grad": _ours("mxfp4-backward", "grad"),
    "nvfp4 grad": _ours("nvfp4", "grad"),
    "nvfp4 input": _ours("nvfp4", "input"),
    "nvfp4 weight": _ours("nvfp4", "weight"),
    "TE block 1x128": Contender(partial(_te_block, 1), "rows and columns, FP8 1x128"),
    "TE block 128x128": Contender(partial(_te_block, 2), "rows and columns, FP8 128x128"),
    "TE MXFP8": Contender(_te_mxfp8, "rows and columns, MXFP8"),
    "torchao MXFP8": Contender(
        partial(_torchao_mx, torch.float8_e4m3fn), "rows alone, MXFP8", compiled=True
    ),
    "torchao MXFP4": Contender(
        partial(_torchao_mx, torch.float4_e2m1fn_x2), "rows alone, MXFP4", compiled=True
    ),
    "torch.compile 1x128": Contender(_compiled_tiles, "rows alone, FP8 1x128", compiled=True),
}


def tensors(result: Any) -> Iterator[Tensor]:
    """Return all tensors that a result of a quantizer, ours or a peer's, holds."""
    if type(result) is Tensor:
        yield result
    elif isinstance(result, tuple):
        for entry in result:
            yield from tensors(entry)
    elif is_dataclass(result):
        for field in fields(result):
            yield from tensors(getattr(result, field.name))
    else:  # Transformer Engine's tensors hold their parts as attributes
        attributes = getattr(result, "__dict__", {}).values()
        yield from (value for value in attributes if type(value) is Tensor)


def stored_bytes(result: Any) -> int:
    """Return bytes that a result takes: each piece of memory once."""
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors(result)}.values())


def run(size: Size, names: Sequence[str], limits: Ceilings, seconds: float) -> list:
    """Measure one size: time, bytes and rate of each case, or why it refuses."""
    x = torch.randn(size, dtype=torch.bfloat16, device=timing.device())
    written: dict[str, int] = {}

    def builder(name: str) -> Step:
        contender = CONTENDERS[name]
        if contender.compiled and size != DEFAULT:
            raise RuntimeError(f"compiled for {DEFAULT} only")
        quantize = contender.make(x)
        written[name] = stored_bytes(quantize())
        return lambda mark: quantize()

    builders = {name: partial(builder, name) for name in names}
    row = lambda name, laps: _row(name, x, written[name], laps, limits)  # noqa: E731
    rows = runner.rows_of(builders, row, {"size": list(size)}, seconds)
    return [{"makes": CONTENDERS[row["contender"]].makes} | row for row in rows]


def _row(name: str, x: Tensor, written: int, laps: list[list[float]], limits: Ceilings) -> dict:
    time_spread = timing.spread(sum(lap) for lap in laps)
    seconds = time_spread["median_ms"] / 1e3
    passed, amax = x.nbytes + written, CONTENDERS[name].amax_passes * x.nbytes
    bound = (passed + amax) / limits.copy
    if seconds < 0.8 * bound:
        # Transformer Engine's MXFP8 quantizer does so where the device has no MXFP8.
        return {"refused": f"{1e3 * seconds:.2f} ms: cannot have written it all"}
    return {
        **time_spread,
        "bytes": passed,
        "amax_bytes": amax,
        "tb_per_s": round(passed / seconds / 1e12, 4),
        "of_copy": round(passed / seconds / limits.copy, 3),
        "of_copy_with_amax": round((passed + amax) / seconds / limits.copy, 3),
        "bound_ms": round(1e3 * bound, 4),
        "over_bound": round(seconds / bound, 3),
    }


COLUMNS = {
    "makes": "makes", "ms": "", "TB/s": "tb_per_s", "of a copy": "of_copy",
    "with amax": "of_copy_with_amax",
}  # fmt: skip
main = runner.over_sizes("quantize", __doc__, CONTENDERS, SWEEP, run, COLUMNS)
