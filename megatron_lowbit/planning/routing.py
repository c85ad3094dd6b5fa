"""Tensor cores of a GEMM on a kind of GPU, by the engine's own table."""

from functools import cache

from megatron_lowbit.kernels import routes
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tile
from megatron_lowbit.recipes import LinearPrecision
from megatron_lowbit.transformer_engine.native import folds_on_hopper, native_recipe

_MEASURED = {
    routes.TENSORS: "fp8 per tensor",
    routes.ROWS: "fp8 per row",
    routes.FOLDED: "fp8 per tensor",
    routes.EXACT: "bf16",
    routes.DEQUANTIZED: "fp32",
}
"""The engine's routes, and what their GEMMs are called in ``hardware.yaml``."""
_ADDING = {"bf16", "fp8 per tensor", "mxfp8", "nvfp4"}
"""GEMMs that add to their output: Transformer Engine's, and of the engine's ``PRODUCTS_TO``."""
_NATIVE = {
    "Float8CurrentScaling": "fp8 per tensor",
    "DelayedScaling": "fp8 per tensor",
    "Float8BlockScaling": "mxfp8",  # Transformer Engine has MXFP8's GEMM multiply tiles there
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
"""Transformer Engine's recipes, and their GEMMs on Blackwell."""


def needs_transformer_engine(capability: tuple[int, int]) -> bool:
    """Return True if formats have tensor cores of their own that only Transformer Engine uses."""
    return capability >= (10, 0)


@cache
def gemm_name(
    precision: LinearPrecision, gemm: str, capability: tuple[int, int], transformer_engine: bool
) -> str:
    """Return the name in ``hardware.yaml`` of what multiplies one of a linear layer's GEMMs."""
    sides = precision.gemms[gemm]
    if not sides.quantized:
        return "bf16"
    if transformer_engine and needs_transformer_engine(capability):
        native = native_recipe(precision, capability)
        if native is not None:
            return _NATIVE[native.name]
    if sides.accumulation is not None or sides.dequantizes:
        return "fp32"
    formats = tuple(None if side is None else side.format for side in (sides.lhs, sides.rhs))
    # Tiles that Transformer Engine multiplies itself are not folded.
    tiles = all(isinstance(format, FP8Tile) for format in formats)
    is_native = transformer_engine and tiles and not folds_on_hopper(precision, capability)
    found = routes.route(*formats, capability, sides.folding and not is_native)
    if found is not routes.TILES:
        return _MEASURED[found]
    square = TILE in [format.block_rows for format in formats]
    return "fp8 1x128 . 128x128" if square else "fp8 1x128 . 1x128"


def takes_values(gemm: str) -> bool:
    """Return True if a GEMM takes quantized operands as exact BF16 numbers, not as codes."""
    return gemm == "bf16"


def takes_folded(gemm: str) -> bool:
    """Return True if a GEMM takes FP8 with a scale a tensor, into which other formats fold."""
    return gemm == _MEASURED[routes.FOLDED]


def adds_products(gemm: str) -> bool:
    """Return True if a GEMM adds its product to an FP32 tensor, such as the main gradient."""
    return gemm in _ADDING
