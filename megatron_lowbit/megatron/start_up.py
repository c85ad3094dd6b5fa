"""Lines about a recipe that a run prints before it trains."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence

import torch
from rich.table import Table

from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.megatron import allreduce_norm
from megatron_lowbit.megatron.mxnorm import mxnorm_layers
from megatron_lowbit.recipes import Layer, Recipe, precision_table
from megatron_lowbit.recipes.precision import GemmPrecision


def describe(
    recipe: Recipe,
    engine: Engine,
    layers: Sequence[Layer],
    chunks: list[torch.nn.Module],
    args: Namespace,
    capability: tuple[int, int] | None = None,
) -> Iterator[str | Table]:
    """Yield tables and lines about layers, their precisions, and the code that computes them.

    ``capability``: compute capability of the GPU that is described; None for this machine's.
    """
    yield recipe.summary(layers)
    yield precision_table(recipe, layers)
    for switch in recipe.switches:
        yield f"switch {switch}"
    if recipe.oscillation:
        yield f"oscillation: {recipe.oscillation}"
    if recipe.switches or any(recipe.precision_for(layer).quantized for layer in layers):
        yield f"quantization engine: {engine.name} ({engine.reason})"
        yield from _products(recipe, engine, layers)
        how = {"bf16": "nothing is quantized", "recipe": "in the recipe's precision"}
        yield f"validation and test: {how[args.eval_precision]}"
    yield f"transformer layers: {args.transformer_impl}"
    if args.transformer_impl == "transformer_engine":
        yield from _kernels(recipe, layers, capability or torch.cuda.get_device_capability())
    if args.fused_allreduce_norm:
        yield allreduce_norm.describe(chunks)
    if args.mxnorm:
        active, inactive = mxnorm_layers(chunks)
        rounded = " of rounded absmaxes" if args.mxnorm_post_round else ""
        yield (
            f"MXNorm, p {args.mxnorm_p:g}{rounded}: {active} linear_qkv and linear_fc1 on rank 0; "
            f"RMSNorm in {inactive} that are not quantized"
        )


def _products(recipe: Recipe, engine: Engine, layers: Iterable[Layer]) -> Iterable[str]:
    """Describe how the engine multiplies each pair of formats of the recipe."""
    lines = {}
    for layer in layers:
        for name, gemm in recipe.precision_for(layer).gemms.items():
            if gemm.quantized or gemm.accumulation:
                pair = " x ".join(str(side.format) if side else "bf16" for side in gemm.sides)
                where = f"{name}, {pair}" if gemm.accumulation else pair
                lines[f"  {where}: {_product(gemm, engine)}"] = None
    return lines


def _product(gemm: GemmPrecision, engine: Engine) -> str:
    """Describe how the engine multiplies the operands of a GEMM, and sums the products."""
    if gemm.accumulation:  # emulated on every device
        inner, every = gemm.accumulation.inner.upper(), gemm.accumulation.promote_every
        promoted = f" of {every} products, added in FP32" if every else ""
        return f"dequantized to FP32, {inner} sums{promoted}"
    if gemm.dequantizes:  # no tensor cores take the operands
        return "dequantized to FP32, FP32 sums"
    return engine.describe(*(side and side.format for side in gemm.sides), gemm.folding)


def _kernels(recipe: Recipe, layers: Iterable[Layer], capability: tuple[int, int]) -> Iterable[str]:
    """Describe the kernels of each configuration in Transformer Engine's layers."""
    from megatron_lowbit.transformer_engine.native import kernels

    lines = {}
    for layer in layers:
        name = recipe.config_for(layer) or "high precision"
        lines[f"  {name}: {kernels(recipe.precision_for(layer), capability)} kernels"] = None
    return lines
