"""Give the linear layers of a plain PyTorch model the precision of a recipe."""

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from types import MethodType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from megatron_lowbit.errors import error_prefix, require, require_type
from megatron_lowbit.pytorch.blocks import WRAPPED, block_paths, modules_in_blocks
from megatron_lowbit.pytorch.linear import (
    EvalPrecision,
    LowbitLinear,
    check_eval_precision,
    check_precision,
)
from megatron_lowbit.recipes import Layer, LinearPrecision, Recipe, load_recipe
from megatron_lowbit.recipes.matchers import BlocksMatcher

_Model = TypeVar("_Model", bound=nn.Module)
_NOT_LINEAR = nn.Embedding | nn.EmbeddingBag | nn.modules.conv._ConvNd
_SHOWN = 8
_FORWARDS = ("forward", "_old_forward")
"""Attributes of a module that hold the forward of its class: the second where a hook of accelerate
took the place of the first."""
ONE_MATRIX = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of a module's linear layers whose weights are one matrix in Megatron-LM."""


def convert(
    model: _Model,
    recipe: Recipe | str | PathLike[str],
    *,
    blocks: str | Sequence[str] | None = None,
    eval_precision: EvalPrecision = "bf16",
) -> _Model:
    """Turn the ``nn.Linear`` modules that a recipe quantizes into ``LowbitLinear``, in place.

    The module objects stay, with their parameters and hooks, accelerate's included. Only modules in
    the model's blocks are considered, as a recipe in Megatron-LM has no effect on embeddings and
    the output layer. Low-rank adapters are not converted.
    Weights that are one matrix in Megatron-LM (``ONE_MATRIX``) share a tensor scale, as there and
    in an export.
    Converting again applies another recipe; ``bf16`` restores ``nn.Linear``. On an error the
    model is unchanged.

    Args:
        model: the whole model, of which no layers are split off yet.
        recipe: a recipe, or its name or file as for ``load_recipe``. Its rules see module paths
            such as ``model.layers.5.mlp.down_proj``.
        blocks: path of the module whose children are the model's blocks, or several paths in
            order; see :func:`megatron_lowbit.pytorch.blocks.block_paths`.
        eval_precision: precision of the converted modules in evaluation mode.

    Returns:
        The model.

    Warns:
        UserWarning: modules that are no ``nn.Linear`` with its own ``forward`` and whose precision
            is not the recipe's, by name.

    Raises:
        UserError: a recipe with switches, an output layer, delayed scaling or kinds of blocks;
            ``eval_precision="recipe"`` where a fused kernel of torch would ignore it; a
            rule that matches no linear layer; a recipe that would leave all layers in high
            precision; a module at two paths for which the recipe has two precisions; no blocks, or
            ambiguous ones.
        TypeError: an argument of another type.
    """
    require_type("model", model, nn.Module, "an nn.Module")
    if isinstance(recipe, str | PathLike):
        recipe = load_recipe(recipe)
    require_type("recipe", recipe, Recipe, "a recipe or a recipe's name")
    check_recipe(recipe)
    check_eval_precision(eval_precision)
    require(
        eval_precision == "bf16" or not any(map(_may_be_fused, model.modules())),
        f"eval_precision={eval_precision!r}: in evaluation without gradients, the fused kernel of "
        "nn.TransformerEncoderLayer would ignore it; call "
        "torch.backends.mha.set_fastpath_enabled(False) before",
    )
    linears: list[tuple[Layer, nn.Linear]] = []
    others = []
    for layer, module in modules_in_blocks(model, block_paths(model, blocks)):
        if _is_plain_linear(module):
            linears.append((layer, module))
        elif _has_matrix(module):
            others.append((layer, module))
    layers = [layer for layer, _ in linears]
    require(bool(layers), _not_converted(recipe, others))
    recipe.check_matchers(layers)
    check_effect(recipe, layers)
    precisions = _precision_of_each(linears, recipe)
    for module, precision in precisions.items():
        _set_precision(module, precision, eval_precision)
    others = [(layer, module) for layer, module in others if _differs(module, layer, recipe)]
    _share_scales(linears, precisions)
    if others:
        warnings.warn(_not_converted(recipe, others), stacklevel=2)
    return model


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError for a recipe that layers without state or a schedule cannot follow."""
    require(
        not recipe.switches,
        f"recipe {recipe.name} has switches, but convert sees no progress of a run: call "
        "convert(model, recipe.at(Progress(...))) at the start and whenever a switch is reached",
    )
    require(
        not recipe.takes_output_layer,
        f"recipe {recipe.name} has an output_layer, but convert changes only layers in blocks: "
        "disable it by output_layer=none",
    )
    for part in filter(None, [recipe, recipe.backward]):
        for name, matcher in part.matchers.items():
            require(
                not (isinstance(matcher, BlocksMatcher) and matcher.kinds),
                f"recipe {part.name}: matcher {name} names kinds of blocks of "
                "Megatron-LM; select the model's layers by a glob or regex of their paths",
            )
        for config, precision in part.configs.items():
            with error_prefix(f"recipe {part.name}: config {config}: "):
                check_precision(precision)


def _may_be_fused(module: nn.Module) -> bool:
    """Return True if torch may evaluate a module in one kernel, without its linear layers."""
    is_encoder = isinstance(module, nn.TransformerEncoderLayer)
    has_kernel = is_encoder and getattr(module.self_attn, "batch_first", False)
    return bool(has_kernel and torch.backends.mha.get_fastpath_enabled())


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Check that a module computes by the ``forward`` that conversion replaces."""
    # A subclass may compute otherwise: nn.MultiheadAttention never calls its out_proj.
    return type(module) in (nn.Linear, LowbitLinear) and not _replaces_forward(module)


def _replaces_forward(module: nn.Module) -> bool:
    """Check whether a call of a module does not reach the ``forward`` of its class."""
    name = _FORWARDS[hasattr(module, "_hf_hook")]
    forward = vars(module).get(name)
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _has_matrix(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear | _NOT_LINEAR):
        return isinstance(module, nn.Linear)
    return any(weight.ndim > 1 for weight in module.parameters(recurse=False))


def _differs(module: nn.Module, layer: Layer, recipe: Recipe) -> bool:
    """Check whether a module that is not converted has another precision than the recipe's."""
    precision = recipe.precision_for(layer)
    if isinstance(module, LowbitLinear):
        return module.precision != precision
    return precision.quantized


def _precision_of_each(
    linears: Sequence[tuple[Layer, nn.Linear]], recipe: Recipe
) -> dict[nn.Linear, LinearPrecision]:
    """Return the precision of each module. UserError if one module would need two."""
    first: dict[nn.Linear, Layer] = {}
    for layer, module in linears:
        before = first.setdefault(module, layer)
        require(
            recipe.precision_for(before) == recipe.precision_for(layer),
            f"{before.path} and {layer.path} are one module, to which recipe {recipe.name} gives "
            "two precisions",
        )
    return {module: recipe.precision_for(layer) for module, layer in first.items()}


def check_effect(recipe: Recipe, layers: Sequence[Layer]) -> None:
    """Raise UserError for a recipe that quantizes, but none of these layers."""
    intended = any(precision.quantized for precision in recipe.precisions())
    quantized = any(recipe.precision_for(layer).quantized for layer in layers)
    deciding = ", ".join(sorted({recipe.matcher_names(layer) for layer in layers}))
    require(
        quantized or not intended,
        f"recipe {recipe.name} quantizes none of the model's {len(layers)} linear layers in "
        f"{layers[0].num_blocks} blocks: the matchers {deciding} leave all in high precision",
    )


def _set_precision(module: Any, precision: LinearPrecision, eval_precision: EvalPrecision) -> None:
    if precision.quantized:
        module.__class__ = LowbitLinear
        module.set_precision(precision, eval_precision)
    elif isinstance(module, LowbitLinear):
        for name in LowbitLinear.__annotations__:
            vars(module).pop(name, None)
        module.__class__ = nn.Linear  # type: ignore[assignment]
    for name in _FORWARDS:
        forward = getattr(vars(module).get(name), "__func__", None)
        if forward in (nn.Linear.forward, LowbitLinear.forward):
            setattr(module, name, MethodType(type(module).forward, module))


def _share_scales(
    linears: Sequence[tuple[Layer, nn.Linear]], precisions: Mapping[nn.Linear, LinearPrecision]
) -> None:
    """Let modules of one precision whose weights Megatron-LM holds as one share a tensor scale."""
    groups: dict[tuple[str, Sequence[str], LinearPrecision], list[LowbitLinear]] = {}
    for layer, module in linears:
        parent, _, name = layer.path.removesuffix(f".{WRAPPED}").rpartition(".")
        for names in ONE_MATRIX:
            if name in names and isinstance(module, LowbitLinear):
                groups.setdefault((parent, names, precisions[module]), []).append(module)
    for members in groups.values():
        for module in members:
            module.scaled_with = tuple(other for other in members if other is not module)


def _not_converted(recipe: Recipe, others: Sequence[tuple[Layer, nn.Module]]) -> str:
    replaced = any(_replaces_forward(module) for _, module in others)
    shown = [
        f"{layer.path} ({type(module).__name__}"
        f"{', whose forward is replaced' if _replaces_forward(module) else ''})"
        for layer, module in others[:_SHOWN]
    ]
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    help = "; convert before what replaces forward, or undo that" if replaced else ""
    return (
        f"recipe {recipe.name}: {len(others)} modules in the blocks are no nn.Linear with its own "
        f"forward and keep their precision: {', '.join(shown)}{more}{help}"
    )
