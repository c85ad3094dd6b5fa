"""Quantized weights of a model in memory, in the layouts that serving engines load.

A trainer sends them to an engine that generates, which then multiplies training's own bits: no
checkpoint is written, and no weight is quantized twice. Exports have the same layouts.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lowbit.checkpoints.hugging_face_files import LazyTensors
from megatron_lowbit.checkpoints.model_arguments import model_of
from megatron_lowbit.checkpoints.reader import EMBEDDING, TensorSlice, other_name
from megatron_lowbit.conversion.convert import lazy_tensors
from megatron_lowbit.conversion.families import family_of
from megatron_lowbit.conversion.layouts import LAYOUTS
from megatron_lowbit.conversion.layouts.layout import Layout, Weight
from megatron_lowbit.conversion.mapping import Rule
from megatron_lowbit.conversion.quantized import (
    check_weight,
    plan_quantization,
    quantized_tensors,
    scales_lost_in_engines,
    weight_of,
)
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.pytorch import LowbitLinear
from megatron_lowbit.recipes import Layer, Recipe, load_recipe

_Chunk = tuple[tuple[int, ...], Tensor]
"""Part of a tensor: its offset, and its values with all axes of the whole."""


class LiveTensors:
    """Tensors of a model in memory, by Megatron-LM's keys or by the model's own names.

    Args:
        chunks: the parts of each tensor that this process holds, with the shape of the whole.
    """

    path = "the model"
    histories: Mapping[str, Any] = {}

    def __init__(self, chunks: Mapping[str, tuple[tuple[int, ...], list[_Chunk]]]) -> None:
        self._chunks = chunks

    def dtype(self, target: TensorSlice) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._whole(target.key)[1][0][1].dtype

    def shape(self, target: TensorSlice) -> tuple[int, ...]:
        """Return the shape of a slice, without the leading axes."""
        return self._whole(target.key)[0][len(target.indices) :]

    def read(self, target: TensorSlice) -> Tensor:
        """Return a slice of a tensor, as a view where one part holds it.

        Raises:
            UserError: other processes hold a part of it.
        """
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

    def read_part(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Refuse: a model in memory is exported without amax histories."""
        raise UserError(f"quantized_weights: no part of {key} is read from a model in memory")

    def _whole(self, key: str) -> tuple[tuple[int, ...], list[_Chunk]]:
        stored = key if key in self._chunks else other_name(key)
        require(stored in self._chunks, f"quantized_weights: the model has no tensor {key}")
        return self._chunks[stored]


class LiveExport(NamedTuple):
    """Tensors, the rules of all of them, and the quantized ones in a layout."""

    tensors: LiveTensors
    rules: Sequence[Rule]
    layout: Layout
    weights: Mapping[tuple[str, ...], Weight]
    config: dict[str, Any]

    def contents(self) -> Iterator[LazyTensors]:
        """Yield the tensors of each rule."""
        for rule in self.rules:
            if weight := self.weights.get(rule.names):
                yield quantized_tensors(self.tensors, weight, self.layout)
            else:
                yield lazy_tensors(self.tensors, rule, None)


def quantized_weights(
    model: nn.Module,
    recipe: Recipe | str | None = None,
    *,
    layout: str = "compressed-tensors",
    arguments: Namespace | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by Hugging Face's names, the weights quantized as in fprop.

    A weight that the recipe quantizes in fprop becomes its codes and scales with the bits of
    training's forward pass; other tensors are yielded as they are. One weight is quantized at a
    time, so the memory besides the model is one weight.

    Args:
        model: a model that :func:`megatron_lowbit.convert` converted, or Megatron-LM's GPT model,
            whole in this process and in the dtype in which training multiplies.
        recipe: recipe of Megatron-LM's model, or its name. None for a converted model, whose
            layers have their precision.
        layout: one of ``conversion.LAYOUTS``.
        arguments: Megatron-LM's arguments; by default ``megatron.training.get_args()``.

    Raises:
        UserError: a weight that the layout cannot hold, or engines cannot load, with its bits;
            nothing to quantize; delayed scaling; a model of no known family, or of which other
            processes hold a part.
    """
    for lazy in plan_export(model, recipe, layout, arguments).contents():
        with torch.no_grad():
            yield from lazy.make().items()


def quantization_config(
    model: nn.Module,
    recipe: Recipe | str | None = None,
    *,
    layout: str = "compressed-tensors",
    arguments: Namespace | None = None,
) -> dict[str, Any]:
    """Return the ``quantization_config`` for the engine's config.json; see quantized_weights."""
    return plan_export(model, recipe, layout, arguments).config


def plan_export(
    model: nn.Module, recipe: Recipe | str | None, layout: str, arguments: Namespace | None
) -> LiveExport:
    """Return the export of a model; see :func:`quantized_weights`."""
    require(layout in LAYOUTS, f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if not hasattr(model, "sharded_state_dict"):
        require(recipe is None, "recipe: the layers of a converted model have their precision")
        return _converted(model, LAYOUTS[layout])
    if recipe is None:
        raise UserError("recipe: Megatron-LM's model needs training's recipe")
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if arguments is None:
        from megatron.training import get_args

        arguments = get_args()
    tensors = _megatron_tensors(model)
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
    _check_scales(plan.weights)
    return LiveExport(tensors, rules, plan.layout, plan.weights, plan.config)


_EMBEDDING = TensorSlice(EMBEDDING)


def _megatron_tensors(model: Any) -> LiveTensors:
    """Return the tensors of Megatron-LM's model by the keys that its checkpoints have."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    sharded = model.sharded_state_dict()
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
    state = {name: value for name, value in model.state_dict().items() if value.dim() > 0}
    chunks = {
        name: (tuple(value.shape), [((0,) * value.dim(), value)]) for name, value in state.items()
    }
    sharded = [name for name, value in state.items() if type(value) is not Tensor]
    require(not sharded, f"quantized_weights: {sharded[:1]} is no plain tensor; gather it first")
    rules = {
        name: Rule((TensorSlice(name),), (name,), value.shape[:1], value.shape[:1])
        for name, value in state.items()
    }
    tensors = LiveTensors(chunks)
    modules: dict[str, Weight] = {}
    unquantized = []
    for path, module in model.named_modules():
        weight = None
        if isinstance(module, LowbitLinear):
            weight = _weight(module, path, rules[f"{path}.weight"], tensors)
        if weight is not None:
            check_weight(weight, layout, module.in_features)
            modules[path] = weight
        elif isinstance(module, nn.Linear | nn.Embedding):
            unquantized.append(path)
    require(len(modules) > 0, "quantized_weights: no converted layer quantizes a weight in fprop")
    weights = {weight.rule.names: weight for weight in modules.values()}
    _check_scales(weights)
    config = layout.config(modules, unquantized)
    return LiveExport(tensors, list(rules.values()), layout, weights, config)


def _check_scales(weights: Mapping[tuple[str, ...], Weight]) -> None:
    if advice := scales_lost_in_engines(weights.items()):
        raise UserError(f"quantized_weights: {advice}")


def _weight(module: LowbitLinear, path: str, rule: Rule, tensors: LiveTensors) -> Weight | None:
    """Return the weight of a converted layer, with the amax of all that share its scale."""
    weight = weight_of(module.precision.fprop, Layer(path, 0, 1), rule, tensors)
    if weight is None:
        return None
    sharing = (module, *module.scaled_with)
    amaxes = [other.weight.detach().float().abs().max() for other in sharing]
    return weight._replace(amax=torch.stack(amaxes).max() if len(amaxes) > 1 else None)
