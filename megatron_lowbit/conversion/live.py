"""Quantized weights of a model in memory, in the layouts that serving engines load.

A trainer sends them to an engine that generates, which then multiplies training's own bits: no
checkpoint is written, and no weight is quantized twice. Exports have the same layouts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_lowbit.checkpoints.hugging_face_files import LazyTensors
from megatron_lowbit.checkpoints.model_arguments import model_of
from megatron_lowbit.checkpoints.reader import EMBEDDING, TensorSlice, other_name
from megatron_lowbit.conversion.convert import planned_tensors
from megatron_lowbit.conversion.families import family_of
from megatron_lowbit.conversion.layouts import LAYOUTS
from megatron_lowbit.conversion.layouts.layout import Layout, Weight, scales_lost_in_engines
from megatron_lowbit.conversion.mapping import Rule
from megatron_lowbit.conversion.quantized import (
    check_weight,
    config_of,
    plan_quantization,
    quantized_tensors,
    weight_of,
)
from megatron_lowbit.errors import UserError, require, require_type
from megatron_lowbit.pytorch import LowbitLinear
from megatron_lowbit.recipes import Layer, Recipe, load_recipe

_Chunk = tuple[tuple[int, ...], Tensor]
"""Part of a tensor: its offset, and its values with all axes of the whole."""


class LiveTensors:
    """Tensors of a model in memory, by Megatron-LM's keys or by the model's own names.

    ``chunks``: the parts of each tensor that this process holds, with the shape of the whole.
    """

    path = "the model"

    def __init__(self, chunks: Mapping[str, tuple[tuple[int, ...], list[_Chunk]]]) -> None:
        self._chunks = chunks

    def dtype(self, target: TensorSlice) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._whole(target.key)[1][0][1].dtype

    def shape(self, target: TensorSlice) -> tuple[int, ...]:
        """Return the shape of a slice, without the leading axes."""
        return self._whole(target.key)[0][len(target.indices) :]

    def read(self, target: TensorSlice) -> Tensor:
        """Return a slice of a tensor, a view where one part holds it; UserError if not whole."""
        axes, shape = len(target.indices), self.shape(target)
        parts = [
            (offset[axes:], values.reshape(values.shape[axes:]))
            for offset, values in self._whole(target.key)[1]
            if offset[:axes] == target.indices
        ]
        present = sum(values.numel() for _, values in parts)
        require(
            present == torch.Size(shape).numel(),
            f"quantized_weights: this process holds {present} of the "
            f"{torch.Size(shape).numel()} elements of {target.key}; give it a whole model, "
            "gathered or without tensor, pipeline and expert parallelism",
        )
        if len(parts) == 1:
            return parts[0][1]
        whole = parts[0][1].new_empty(shape)
        for offset, values in parts:
            ends = zip(offset, values.shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in ends)] = values
        return whole

    def _whole(self, key: str) -> tuple[tuple[int, ...], list[_Chunk]]:
        stored = key if key in self._chunks else other_name(key)
        require(stored in self._chunks, f"quantized_weights: the model has no tensor {key}")
        return self._chunks[stored]


class LiveExport(NamedTuple):
    """All tensors of a model, the quantized ones in a layout, and its ``quantization_config``."""

    contents: Iterator[LazyTensors]
    layout: Layout
    config: dict[str, Any]


def quantized_weights(
    model: nn.Module, recipe: Recipe | str | None = None, *, layout: str = "compressed-tensors"
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by Hugging Face's names, the weights quantized as in fprop.

    A weight that the recipe quantizes in fprop becomes its codes and scales with the bits of
    training's forward pass; other tensors are yielded as they are. One weight is quantized at a
    time, so the memory besides the model is one weight, and a copy of the experts that transformers
    stacks in memory.

    Args:
        model: a model that :func:`megatron_lowbit.convert` converted, or Megatron-LM's GPT model,
            whole in this process and in the dtype in which training multiplies.
        recipe: recipe of Megatron-LM's model, or its name. None for a converted model, whose
            layers have their precision.
        layout: one of ``conversion.LAYOUTS``.

    Raises:
        UserError: a weight that the layout cannot hold, or engines cannot load, with its bits;
            nothing to quantize; delayed scaling; a model of no known family, or of which other
            processes hold a part.
    """
    for lazy in plan_export(model, recipe, layout).contents:
        yield from lazy.make().items()


def quantization_config(
    model: nn.Module, recipe: Recipe | str | None = None, *, layout: str = "compressed-tensors"
) -> dict[str, Any]:
    """Return the ``quantization_config`` for the engine's config.json; see quantized_weights."""
    return plan_export(model, recipe, layout).config


def plan_export(model: nn.Module, recipe: Recipe | str | None, layout: str) -> LiveExport:
    """Return the export of a model; see :func:`quantized_weights`."""
    require_type("model", model, nn.Module, "an nn.Module")
    model = unwrapped(model)
    require(layout in LAYOUTS, f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if not hasattr(model, "sharded_state_dict"):
        require(recipe is None, "recipe: the layers of a converted model have their precision")
        return _converted(model, LAYOUTS[layout])
    if recipe is None:
        raise UserError("recipe: Megatron-LM's model needs training's recipe")
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    from megatron.training import get_args

    arguments, tensors = get_args(), _megatron_tensors(model)
    described = model_of(arguments, arguments.vocab_size or tensors.shape(_EMBEDDING)[0])
    rules = family_of(described).rules(described)
    plan = plan_quantization(recipe, LAYOUTS[layout], tensors, rules, described["num_layers"])
    delayed = [
        weight.layer.path
        for weight in plan.weights.values()
        if recipe.precision_for(weight.layer).fprop.delayed
    ]
    message = f"{delayed[:1]}: delayed scaling is not exported from a model in memory"
    require(not delayed, f"quantized_weights: {message}; save a checkpoint and convert it")
    _check_scales(plan.weights.values())
    return LiveExport(planned_tensors(tensors, rules, plan), plan.layout, plan.config)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` or ``DistributedDataParallel`` wraps."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        wrapped = isinstance(model, DistributedDataParallel)
        model = cast(nn.Module, model.module if wrapped else model._orig_mod)
    return model


_EMBEDDING = TensorSlice(EMBEDDING)
_WRAPPER = re.compile(r"\b(?:_orig_mod|_checkpoint_wrapped_module)\.")
"""Part of names that ``torch.compile`` or a wrapper that checkpoints activations adds."""


def _megatron_tensors(model: Any) -> LiveTensors:
    """Return the tensors of Megatron-LM's model by the keys that its checkpoints have."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.utils import unwrap_model

    sharded = unwrap_model(model).sharded_state_dict()
    apply_factories(sharded)
    chunks: dict[str, tuple[tuple[int, ...], list[_Chunk]]] = {}
    for part in nested_values(sharded):
        if isinstance(part, ShardedTensor):
            shape, offset = tuple(part.global_shape), tuple(part.global_offset)
            values = part.data.detach()
            values = values.view(*[1] * part.prepend_axis_num, *values.shape)
            chunks.setdefault(part.key, (shape, []))[1].append((offset, values))
    return LiveTensors(chunks)


def _converted(model: nn.Module, layout: Layout) -> LiveExport:
    """Plan the export of a model that ``convert`` converted, whose names are Hugging Face's."""
    state = {_WRAPPER.sub("", name): value for name, value in model.state_dict().items()}
    others = [name for name, value in state.items() if type(value) is not Tensor or value.is_meta]
    message = "is no plain tensor with values; gather it or load it first"
    require(not others, f"quantized_weights: {others[:1]} {message}")
    saved = _as_saved(model, state)
    names = {id(value): name for name, value in saved.items()}
    tensors = LiveTensors(
        {name: (tuple(value.shape), [((0,) * value.dim(), value)]) for name, value in saved.items()}
    )
    weights: dict[str, Weight] = {}
    modules = set(model.modules())
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LowbitLinear) and module.precision.fprop.rhs is not None:
            stored = _WRAPPER.sub("", f"{path}.weight").removeprefix(".")
            name = names.get(id(state.get(stored)))
            require(not path.endswith(".base_layer"), f"{path} has an adapter; merge it first")
            if name is None:
                raise UserError(f"{path}: its weight is saved as another tensor, or part of one")
            weights[name] = _weight(module, name, tensors)
            check_weight(weights[name], layout, module.in_features)
            require(
                modules.issuperset(module.scaled_with) or not weights[name].format.tensor_scaled,
                f"{path}: a layer with its tensor scale was replaced; convert the model again",
            )
    require(len(weights) > 0, "quantized_weights: no converted layer quantizes a weight in fprop")
    _check_scales(weights.values())
    contents = (
        quantized_tensors(tensors, weights[name], layout)
        if name in weights
        else LazyTensors({name: value.to("meta")}, partial(dict, {name: value}))
        for name, value in saved.items()
    )
    unquantized = [name for name, value in saved.items() if value.dim() > 1 and name not in weights]
    return LiveExport(contents, layout, config_of(layout, weights, unquantized))


def _as_saved(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names that transformers saves, experts that it has stacked apart."""
    if not hasattr(model, "save_pretrained"):
        return state
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 saves what it has in memory
        return state
    return cast(dict[str, Tensor], revert_weight_conversion(model, state))


def _check_scales(weights: Iterable[Weight]) -> None:
    if advice := scales_lost_in_engines((weight.rule.names, weight) for weight in weights):
        raise UserError(f"quantized_weights: {advice}")


def _weight(module: LowbitLinear, name: str, tensors: LiveTensors) -> Weight:
    """Return the weight of a converted layer, with the amax of all that share its scale."""
    rows = (module.out_features,)
    rule = Rule((TensorSlice(name),), (name,), rows, rows)
    layer = Layer(name.removesuffix(".weight"), 0, 1)
    weight = cast(Weight, weight_of(module.precision.fprop, layer, rule, tensors))
    sharing = (module, *module.scaled_with)
    amaxes = [other.weight.detach().float().abs().max() for other in sharing]
    return weight._replace(amax=torch.stack(amaxes).max() if len(amaxes) > 1 else None)
