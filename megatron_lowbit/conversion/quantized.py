"""Quantized export of the weights that the training recipe quantizes in fprop.

A weight is quantized as a whole, as Megatron-LM holds it, and so has the bits of training. Hugging
Face's parts of it are rows with their codes, their block scales and the tensor scale.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import LazyTensors
from megatron_lowbit.checkpoints.reader import HISTORIES, CheckpointReader, TensorSlice
from megatron_lowbit.conversion.layouts import LAYOUTS, Layout, ModuleFormats
from megatron_lowbit.conversion.lazy_tensors import lazy_tensors
from megatron_lowbit.conversion.mapping import Rule, TensorTransform
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.numerics import FORMATS, DelayedAmax, QuantizedTensor, Quantizer, Rounding
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tile
from megatron_lowbit.numerics.extra_formats import refuse_format_files
from megatron_lowbit.numerics.gemms import GEMM_ROLES
from megatron_lowbit.recipes import OPERANDS, GemmPrecision, Layer, Recipe, load_recipes
from megatron_lowbit.recipes.record import difference, digest, recipe_from, record_of

_FORMATS_ADVICE = "the checkpoint names its recipe; name it by --recipe"
_LINEAR = re.compile(r"(decoder\.layers\.)(.*\b(?:linear_\w+|in_proj|out_proj))\.weight(\.\w+)?")
_HEAD = "lm_head"

Names = tuple[str, ...]


class Weight(NamedTuple):
    """Weight (R, K) of a linear layer that is quantized, and Hugging Face's matrices of it.

    Attributes:
        amax: of training's last steps, for the tensor scale; None for the weight's own.
        input: format of the layer's input, if quantized to nearest.
        input_scale: its tensor scale of training's last steps, FP32 scalar.
        slices: Megatron-LM's tensors, concatenated by rows.
    """

    layer: Layer
    quantizer: Quantizer
    amax: DelayedAmax | None
    input: BlockFormat | None
    input_scale: Tensor | None
    slices: Sequence[TensorSlice]
    shape: tuple[int, int]
    names: Names
    transform: TensorTransform

    def read(self, tensors: CheckpointReader) -> Tensor:
        """Read the whole weight."""
        parts = [tensors.read(part) for part in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class QuantizedAs(NamedTuple):
    """Request for an export: a layout's name, and a recipe and its overrides if not training's.

    The first of two ``recipes`` gives fprop, the second the backward GEMMs.
    """

    layout: str
    recipes: Sequence[str] = ()
    recipe_set: Sequence[str] = ()


class Quantization(NamedTuple):
    """Checked plan of an export.

    ``config`` is the ``quantization_config`` for config.json; ``documents`` are other JSON files by
    name; ``unquantized`` are Hugging Face's modules with matrices that are not quantized.
    """

    recipe: Recipe
    layout: Layout
    weights: Mapping[Names, Weight]
    config: dict[str, Any]
    documents: dict[str, dict]
    unquantized: Sequence[str]


def plan_quantization(
    wanted: QuantizedAs, checkpoint: CheckpointReader, rules: Sequence[Rule], num_layers: int
) -> Quantization:
    """Plan the weights to quantize: those of fprop under the recipe before any of its switches.

    Raises UserError without a recipe, or where the layout cannot hold a weight with its bits.
    """
    recipe = recipe_of(wanted, checkpoint)
    if not wanted.recipes and (line := _changed_since(checkpoint)):
        say(line)
    layout = LAYOUTS[wanted.layout]
    weights, quantized, layers, unquantized = {}, {}, [], []
    for names, group in groupby(rules, key=lambda rule: rule.names):
        shares, modules = list(group), [name.removesuffix(".weight") for name in names]
        layer = _layer(shares[0].target, num_layers)
        if layer is not None:
            layers.append(layer)
            weight = _weight(recipe, layer, shares, checkpoint)
            if weight is not None:
                _check(weight, layout)
                weights[names] = weight
                formats = ModuleFormats(weight.quantizer.format, weight.input)
                quantized |= dict.fromkeys(modules, formats)
                continue
        if len(checkpoint.shape(shares[0].target)) > 1:
            unquantized += modules
    recipe.check_matchers(layers)
    require(len(weights) > 0, _nothing_quantized(recipe, num_layers))
    # A tied head has no tensor of its own, but readers build the module.
    kept = list(dict.fromkeys([*unquantized, _HEAD]))
    quantized = {name: quantized[own] for own in quantized for name in _names_of_module(own)}
    named = [name for own in kept for name in _names_of_module(own)]
    config, documents = layout.config(quantized, named), layout.documents(quantized, named)
    return Quantization(recipe, layout, weights, config, documents, kept)


def _names_of_module(name: str) -> list[str]:
    """Return the names of a module in files and in transformers, which renames a Nemotron-H's."""
    is_renamed = name.startswith("backbone.")
    return [name, name.replace("backbone", "model", 1)] if is_renamed else [name]


def _nothing_quantized(recipe: Recipe, num_layers: int) -> str:
    """Return the error of a recipe that quantizes no weight of a model with so many blocks."""
    if not any(precision.fprop.rhs is not None for precision in recipe.configs.values()):
        return f"recipe {recipe.name} quantizes no weight in fprop: an export has nothing to store"
    blocks = "the only block" if num_layers == 1 else f"all {num_layers} blocks"
    message = f"recipe {recipe.name} keeps {blocks} in BF16: nothing would be quantized"
    if "bf16_blocks" not in recipe.matchers:
        return f"{message}; export without --quantized"
    quantize_all = f"--recipe {recipe.name} --recipe-set bf16_blocks=none"
    return f"{message}; export without --quantized, or quantize all blocks by {quantize_all}"


def recipe_of(wanted: QuantizedAs, checkpoint: CheckpointReader) -> Recipe:
    """Load the recipe that is asked for, or else the one that a checkpoint was trained with.

    Raises UserError where there is none.
    """
    names, overrides = wanted.recipes, wanted.recipe_set
    if not names:
        require(not overrides, "--recipe-set changes the recipe that --recipe names: name one")
        names, overrides = checkpoint.recipes, checkpoint.recipe_set
    advice = "was not trained here with a recipe; name one by --recipe"
    require(len(names) > 0, f"{checkpoint.path}: {advice}")
    if wanted.recipes:
        return load_recipes(names, overrides)
    # A checkpoint may come from others: it must not choose what code runs.
    with refuse_format_files(_FORMATS_ADVICE):
        if checkpoint.recipe_record is None:
            return load_recipes(names, overrides)
        return recipe_from(checkpoint.recipe_record, f"{checkpoint.path}: recipe")


def recipe_digest(wanted: QuantizedAs, checkpoint: CheckpointReader) -> str:
    """Return the digest of the text of the recipe that :func:`recipe_of` loads."""
    if not wanted.recipes and checkpoint.recipe_record is not None:
        return digest(checkpoint.recipe_record)
    source = wanted if wanted.recipes else checkpoint
    return digest(record_of(source.recipes, source.recipe_set))


def _changed_since(checkpoint: CheckpointReader) -> str | None:
    """Return a line about a recipe that is not now what it was in training."""
    changes = [word for change in checkpoint.recipe_set for word in ("--recipe-set", change)]
    names = shlex.join([*checkpoint.recipes, *changes])
    if checkpoint.recipe_record is None:
        return f"{checkpoint.path}: records no text of its recipe; {names} is taken as it is now"
    kept = f"the export follows training; --recipe {names} takes the recipe as it is now"
    try:
        with refuse_format_files(_FORMATS_ADVICE):
            now = record_of(checkpoint.recipes, checkpoint.recipe_set)
    except UserError as error:
        return f"{error}; the export follows the text in the checkpoint"
    changed = difference(now, checkpoint.recipe_record)
    return changed and f"{names} has changed since training: now {changed}; {kept}"


def quantized_tensors(
    tensors: CheckpointReader, rules: Sequence[Rule], dtype: torch.dtype | None, plan: Quantization
) -> list[LazyTensors]:
    """Return Hugging Face's tensors of a checkpoint's: quantized, or else in this dtype."""

    def group_of(rule: Rule) -> object:
        is_quantized = rule.names in plan.weights
        return plan.layout.group_of(rule.names) if is_quantized else None

    contents: list[LazyTensors] = []
    for group, members in groupby(rules, key=group_of):
        if group is None:
            contents += lazy_tensors(tensors, list(members), dtype)
        else:
            names = dict.fromkeys(rule.names for rule in members)
            weights = [plan.weights[name] for name in names]
            contents.append(_encoded(tensors, weights, plan.layout))
    return contents


def _quantize_parts(weight: Weight, content: Tensor) -> dict[str, QuantizedTensor]:
    """Quantize the parts of a weight (R, K), FP32 or BF16, with the bits of the quantized whole.

    Each in a format with blocks of one row: scales have a row for each row of codes.
    """
    whole = weight.quantizer(content.float(), None if content.is_meta else weight.amax)
    scales, rows = whole.scales, whole.codes.shape[0]
    if scales.shape[0] < rows:
        scales = scales.repeat_interleave(whole.format.block_rows, dim=0)[:rows]
    format = replace(whole.format, block_rows=1)
    parts = (_split(tensor, weight.transform) for tensor in (whole.codes, scales))
    return {
        name: QuantizedTensor(
            codes, scale, whole.tensor_scale, format, (len(codes), whole.shape[1])
        )
        for name, codes, scale in zip(weight.names, *parts, strict=True)
    }


def _split(rows: Tensor, transform: TensorTransform) -> list[Tensor]:
    """Return contiguous parts, split as integers: torch does not concatenate FP8."""
    integers = torch.int32 if rows.dtype == torch.float32 else torch.uint8
    parts = transform.to_hugging_face(rows.view(integers))
    return [part.contiguous().view(rows.dtype) for part in parts]


def _encoded(tensors: CheckpointReader, weights: Sequence[Weight], layout: Layout) -> LazyTensors:
    def encode(read: Callable[[Weight], Tensor]) -> dict[str, Tensor]:
        parts: dict[str, QuantizedTensor] = {}
        for weight in weights:
            parts |= _quantize_parts(weight, read(weight))
        return layout.encode(parts) | _input_scales(weights, layout)

    meta = encode(lambda weight: torch.empty(weight.shape, device="meta"))
    outline = {name: tensor.to("meta") for name, tensor in meta.items()}
    return LazyTensors(outline, lambda: encode(lambda weight: weight.read(tensors)))


def _input_scales(weights: Sequence[Weight], layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of inputs' scales, the same for all parts of a layer."""
    if layout.input_scale is None:
        return {}
    key, tensor_of = layout.input_scale
    return {
        name.removesuffix("weight") + key: tensor_of(weight.input_scale).clone()
        for weight in weights
        if weight.input_scale is not None
        for name in weight.names
    }


def _layer(target: TensorSlice, num_layers: int) -> Layer | None:
    """Return the linear layer of a weight as recipes name it; None for other tensors."""
    match = _LINEAR.fullmatch(target.key)
    if match is None:
        return None
    numbers, rest = [str(index) for index in target.indices], match[2]
    if rest[0].isdigit():  # a model whose layers differ
        number, rest = rest.split(".", 1)
        numbers = [number, *numbers]
    block, *expert = numbers
    if expert:
        rest = rest.replace("experts.experts", f"experts.local_experts.{expert[0]}")
    return Layer(f"{match[1]}{block}.{rest}", int(block), num_layers)


def _weight(
    recipe: Recipe, layer: Layer, shares: Sequence[Rule], tensors: CheckpointReader
) -> Weight | None:
    """Return the weight, if the recipe quantizes it in fprop."""
    fprop = recipe.precision_for(layer).fprop
    if fprop.rhs is None:
        return None
    require(fprop.hadamard is None, _refusal(layer, "goes through a Hadamard transform"))
    slices = [rule.target for rule in shares]
    shapes = [tensors.shape(part) for part in slices]
    shape = (sum(rows for rows, _ in shapes), shapes[0][1])
    transform = replace(shares[0].transform, share=None)
    earlier = _earlier_amaxes(fprop, layer, tensors)
    input_format, input_scale = _input(fprop, earlier)
    amax = None if earlier is None else DelayedAmax(earlier[1], None)
    return Weight(layer, fprop.rhs, amax, input_format, input_scale, slices, shape,
                  shares[0].names, transform)  # fmt: skip


def _earlier_amaxes(fprop: GemmPrecision, layer: Layer, tensors: CheckpointReader) -> Tensor | None:
    """Return the amaxes of input and weight, FP32 (2,), that training's last steps give fprop.

    They are negative where too few steps are recorded; None without delayed scaling or history.
    """
    key = f"{HISTORIES}{layer.path}"
    if fprop.delayed is None or key not in tensors.histories:
        return None
    size = tuple(tensors.histories[key].size)
    if len(size) != 2 or size[0] != len(OPERANDS) or size[1] < fprop.delayed.recorded:
        return None
    amaxes = fprop.delayed.earlier(tensors.read_part(key, (0, 0), size).float())
    return amaxes[[OPERANDS.index(("fprop", role)) for role in GEMM_ROLES["fprop"]]]


def _input(
    fprop: GemmPrecision, earlier: Tensor | None
) -> tuple[BlockFormat | None, Tensor | None]:
    """Return the format of fprop's input for a reader, and its tensor scale; None for no format.

    Readers do not round at random or scale by three quarters. They take a tensor scale only with
    weights of that format, and it has to be known from training's last steps.
    """
    quantizer = fprop.lhs
    if quantizer is None or quantizer.rounding is not Rounding.NEAREST_EVEN:
        return None, None
    format = quantizer.format
    if getattr(format, "three_quarters", False):
        return None, None
    if not format.tensor_scaled:
        return format, None
    weight = fprop.rhs.format.name if fprop.rhs else ""
    if earlier is None or earlier[0] <= 0 or weight.removesuffix("-2d") != format.name:
        return None, None
    nothing = torch.zeros(format.block_rows, format.block)
    return format, quantizer(nothing, earlier[0]).tensor_scale


def _refusal(layer: Layer, why: str) -> str:
    return f"{layer.path}: its weight {why} in fprop, which no layout holds: export it without"


def _check(weight: Weight, layout: Layout) -> None:
    """Raise UserError where the layout cannot hold this weight."""
    layer, format, (rows, columns) = weight.layer, weight.quantizer.format, weight.shape
    path, option, held = layer.path, f"--quantized {layout.name}", ", ".join(layout.formats)
    actual = f"but the recipe has the weight of {path} in {format}"
    require(format.name in layout.formats, f"{option} holds {held}, {actual}")
    block = FORMATS[format.name].block
    message = f"{option} holds blocks of {block}, {actual}: its block must be {block}"
    require(format.block == block, message)
    nearest = weight.quantizer.rounding is Rounding.NEAREST_EVEN
    require(nearest, _refusal(layer, "is rounded stochastically"))
    scaled = getattr(format, "three_quarters", False)
    require(not scaled, _refusal(layer, "is scaled by three quarters"))
    tiles = isinstance(format, FP8Tile)
    message = f"{path}: {columns} columns are not whole blocks of {block}, as {option} needs them"
    require(tiles or columns % block == 0, message)
    message = f"{weight.names[0]} is the transpose of a weight: --quantized does not store such"
    require(not weight.transform.is_transposed, message)
    parts = weight.transform.to_hugging_face(torch.arange(rows))
    require(
        not tiles or all(_whole_tiles(part, format.block_rows) for part in parts),
        f"{path}: tiles of {format.block_rows} rows lie across the borders of "
        f"{', '.join(weight.names)}: {option} cannot keep their scales",
    )


def _whole_tiles(numbers: Tensor, rows: int) -> bool:
    """Return True if each tile of a part lies in one tile of the whole, by its rows' numbers."""
    return all(bool((tile == tile[0]).all()) for tile in (numbers // rows).split(rows))
