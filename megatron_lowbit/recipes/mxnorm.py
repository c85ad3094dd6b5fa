"""Requirements of ``--normalization MXNorm`` on a recipe."""

from collections.abc import Sequence

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes.matchers import Layer
from megatron_lowbit.recipes.precision import HIGH_PRECISION, LinearPrecision
from megatron_lowbit.recipes.recipe import Recipe

NORMALIZED = ("self_attention.linear_qkv", "mlp.linear_fc1")
"""Ends of the paths of layers that MXNorm comes before."""


def norm_block(precision: LinearPrecision) -> int:
    """Return the block size of fprop's input, whose absmaxes the norm uses.

    Raises:
        ValueError: that input is not quantized in blocks.
    """
    quantizer = precision.fprop.lhs
    if quantizer is None or quantizer.format.block == 1:
        found = "is not quantized" if quantizer is None else f"is {quantizer.format.name}"
        raise ValueError(
            f"fprop's input {found}: MXNorm needs one quantized in blocks, such as mxfp8-e4m3"
        )
    if precision.wgrad.uses_fprop:
        kind = "axis fprop" if precision.wgrad.rhs_of_fprop else "requantize"
        raise ValueError(f"wgrad's input has {kind}: MXNorm's is quantized anew, along tokens")
    if precision.fprop.hadamard is not None:
        raise ValueError("fprop has a hadamard: MXNorm needs the absmaxes of the input itself")
    return quantizer.format.block


def check_mxnorm(recipe: Recipe, layers: Sequence[Layer], hidden_size: int | None = None) -> None:
    """Check every precision that a run gives the layers after MXNorm.

    A layer has RMSNorm for as long as it is in high precision.

    Raises:
        UserError: one is quantized with no blocks that fit, or none is ever quantized.
    """
    normalized = [layer for layer in layers if layer.path.endswith(NORMALIZED)]
    active = False
    for switches, current in recipe.phases():
        when = "".join(f" (switch {switch})" for switch in switches)
        for layer in normalized:
            precision = current.precision_for(layer)
            if precision == HIGH_PRECISION:
                continue
            active = True
            try:
                block = norm_block(precision)
            except ValueError as error:
                raise UserError(
                    f"--normalization MXNorm: {layer.path}{when}: {error}, or a layer whose GEMMs "
                    "are all in high precision"
                ) from None
            if hidden_size is not None and hidden_size % block:
                raise UserError(
                    f"--normalization MXNorm: --hidden-size {hidden_size} is not a multiple of "
                    f"{layer.path}'s block of {block}{when}"
                )
    if normalized and not active:
        raise UserError(
            f"--normalization MXNorm: recipe {recipe.name} quantizes none of its layers"
        )
