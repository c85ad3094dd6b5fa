"""Quantized export of the weights that the training recipe quantizes in fprop.

A weight is quantized as a whole, as Megatron-LM holds it, and so has the bits of training. Hugging
Face's parts of it are rows with their codes, their block scales and the tensor scale.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import LazyTensors
from megatron_lowbit.checkpoints.reader import (
    HISTORIES,
    CheckpointReader,
    TensorSlice,
    TensorSource,
)
from megatron_lowbit.conversion.layouts.layout import Layout, Weight, rows_of_piece
from megatron_lowbit.conversion.mapping import Rule
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.numerics import FORMATS, DelayedAmax, QuantizedTensor, Quantizer, Rounding
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tile
from megatron_lowbit.numerics.extra_formats import refuse_format_files
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.recipes import OPERANDS, GemmPrecision, Layer, Recipe, load_recipes
from megatron_lowbit.recipes.record import difference, digest, recipe_from, record_of

_FORMATS_ADVICE = "the checkpoint names its recipe; name it by --recipe"
_LINEAR = re.compile(r"(decoder\.layers\.)(.*\b(?:linear_\w+|in_proj|out_proj))\.weight(\.\w+)?")


class QuantizedAs(NamedTuple):
    """Request for an export: a layout's name, and a recipe and its overrides if not training's.

    The first of two ``recipes`` gives fprop, the second the backward GEMMs. ``calibration`` is text
    from which the tensor scales of inputs are computed.
    """

    layout: str
    recipes: Sequence[str] = ()
    recipe_set: Sequence[str] = ()
    calibration: Path | None = None


class Quantization(NamedTuple):
    """Checked plan of an export.

    ``weights`` are by Hugging Face's names of their matrices; ``config`` is config.json's
    ``quantization_config``; ``unquantized`` are Hugging Face's modules with matrices that are not
    quantized.
    """

    recipe: Recipe
    layout: Layout
    weights: Mapping[tuple[str, ...], Weight]
    config: dict[str, Any]
    unquantized: Sequence[str]


def plan_quantization(
    recipe: Recipe,
    layout: Layout,
    tensors: TensorSource,
    rules: Sequence[Rule],
    num_layers: int,
    input_amaxes: Mapping[str, Tensor] = MappingProxyType({}),
) -> Quantization:
    """Plan the weights to quantize: fprop's under the recipe before any of its switches.

    ``input_amaxes``, by the paths of layers, replace the amaxes of the last steps.

    Raises UserError where the layout cannot hold a weight with its bits.
    """
    weights: dict[tuple[str, ...], Weight] = {}
    modules: dict[str, Weight] = {}
    layers, unquantized = [], []
    for rule in rules:
        layer, weight = _layer(rule.targets[0], num_layers), None
        if layer is not None:
            layers.append(layer)
            amax = input_amaxes.get(layer.path)
            weight = weight_of(recipe.precision_for(layer).fprop, layer, rule, tensors, amax)
        if weight is not None:
            check_weight(weight, layout, tensors.shape(rule.targets[0])[-1])
            weights[rule.names] = weight
            modules |= dict.fromkeys(rule.names, weight)
        elif len(tensors.shape(rule.targets[0])) > 1:
            unquantized += [name.removesuffix(".weight") for name in rule.names]
    recipe.check_matchers(layers)
    require(len(weights) > 0, _nothing_quantized(recipe, num_layers))
    return Quantization(
        recipe, layout, weights, config_of(layout, modules, unquantized), unquantized
    )


def config_of(
    layout: Layout, weights: Mapping[str, Weight], unquantized: Sequence[str]
) -> dict[str, Any]:
    """Return config.json's ``quantization_config``, by the names of all matrices."""
    modules = {name: weights[key] for key in weights for name in _names_of_module(key)}
    # A tied head has no tensor of its own, but readers build the module.
    others = [name for key in (*unquantized, "lm_head") for name in _names_of_module(key)]
    return layout.config(modules, list(dict.fromkeys(others)))


def _names_of_module(name: str) -> list[str]:
    """Return the names of a module in files and in transformers, which renames a Nemotron-H's."""
    name = name.removesuffix(".weight")
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

    A line says where that one has changed since. Raises UserError where there is none.
    """
    if wanted.recipes:
        return load_recipes(wanted.recipes, wanted.recipe_set)
    message = "--recipe-set changes the recipe that --recipe names: name one"
    require(not wanted.recipe_set, message)
    advice = "was not trained here with a recipe; name one by --recipe"
    require(len(checkpoint.recipes) > 0, f"{checkpoint.path}: {advice}")
    if line := _changed_since(checkpoint):
        say(line)
    # A checkpoint may come from others: it must not choose what code runs.
    with refuse_format_files(_FORMATS_ADVICE):
        if checkpoint.recipe_record is None:
            return load_recipes(checkpoint.recipes, checkpoint.recipe_set)
        return recipe_from(checkpoint.recipe_record, f"{checkpoint.path}: recipe")


def recipe_digest(wanted: QuantizedAs, checkpoint: CheckpointReader) -> str:
    """Return the digest of the text of the recipe that :func:`recipe_of` loads."""
    source = wanted if wanted.recipes else checkpoint
    record = None if wanted.recipes else checkpoint.recipe_record
    return digest(record or record_of(source.recipes, source.recipe_set))


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


def quantized_tensors(tensors: TensorSource, weight: Weight, layout: Layout) -> LazyTensors:
    """Return a quantized weight's tensors in a layout, with the bits of the quantized whole.

    Making them raises UserError for a weight that is not finite.
    """
    rule = weight.rule

    def read() -> Tensor:
        content = rule.read(tensors)
        require(
            bool(content.isfinite().all()),
            f"{weight.layer.path}: its weight has infinities or NaN, which would spread over "
            "quantized blocks; export it without --quantized",
        )
        return content

    def encode(content: Tensor) -> dict[str, Tensor]:
        quantized = quantize_in_pieces(content, weight)
        scales, rows = quantized.scales, quantized.codes.shape[0]
        if scales.shape[0] < rows:
            scales = scales.repeat_interleave(quantized.format.block_rows, dim=0)[:rows]
        # The parts have blocks of one row, and scales for each of their rows.
        format, columns = replace(quantized.format, block_rows=1), quantized.shape[1]
        encoded: dict[str, Tensor] = {}
        for name, codes, scale in zip(
            rule.names, _split(quantized.codes, rule), _split(scales, rule), strict=True
        ):
            shape = (len(codes), columns)
            part = QuantizedTensor(codes, scale, quantized.tensor_scale, format, shape)
            module = name.removesuffix("weight")
            encoded |= {module + key: tensor for key, tensor in layout.encode(part).items()}
            if layout.input_scale and weight.input_scale is not None:
                key, tensor_of = layout.input_scale
                encoded[module + key] = tensor_of(weight.input_scale).clone()
        return encoded

    meta = encode(rule.outline(tensors))
    outline = {name: tensor.to("meta") for name, tensor in meta.items()}
    return LazyTensors(outline, lambda: encode(read()))


def quantize_in_pieces(content: Tensor, weight: Weight) -> QuantizedTensor:
    """Quantize a weight some rows at a time, with the bits of the whole.

    ``content`` is (R, K), BF16 or FP32, or without content on the ``meta`` device.
    """
    quantizer, format, amax = weight.quantizer, weight.format, weight.amax
    if content.is_meta:
        return _outline(quantizer, tuple(content.shape))
    pieces = content.split(rows_of_piece(content.shape[1], format.block_rows))
    if format.tensor_scaled and not isinstance(amax, Tensor):
        current = torch.stack([piece.float().abs().amax() for piece in pieces]).amax()
        amax = current if amax is None else amax.resolve(current)
    parts = [quantizer(piece.float(), amax) for piece in pieces]
    codes, scales = (
        torch.cat([_as_integers(tensor) for tensor in tensors]).view(tensors[0].dtype)
        for tensors in ([part.codes for part in parts], [part.scales for part in parts])
    )
    return replace(parts[0], codes=codes, scales=scales, shape=tuple(content.shape))


@cache
def _outline(quantizer: Quantizer, shape: tuple[int, ...]) -> QuantizedTensor:
    """Quantize a weight without content, once per shape: on ``meta`` it takes some milliseconds."""
    return quantizer(torch.empty(shape, device="meta"))


def _as_integers(x: Tensor) -> Tensor:
    """View a tensor as integers: torch does not concatenate FP8."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.uint8)


def _split(rows: Tensor, rule: Rule) -> list[Tensor]:
    """Return the contiguous parts of a weight's codes or scales."""
    parts = rule.to_hugging_face(_as_integers(rows))
    return [part.contiguous().view(rows.dtype) for part in parts]


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


def weight_of(
    fprop: GemmPrecision,
    layer: Layer,
    rule: Rule,
    tensors: TensorSource,
    input_amax: Tensor | None = None,
) -> Weight | None:
    """Return the weight of a layer, if fprop quantizes it.

    ``input_amax`` is an FP32 scalar; None for the amax of training's last steps.
    """
    if fprop.rhs is None:
        return None
    require(fprop.hadamard is None, _refusal(layer, "goes through a Hadamard transform"))
    earlier = _earlier_amaxes(fprop, layer, tensors)
    if input_amax is None and earlier is not None:
        input_amax = earlier[0]
    input_format, input_scale = _input(fprop, input_amax)
    amax = None if earlier is None else DelayedAmax(earlier[1], None)
    return Weight(layer, fprop.rhs, rule, amax, input_format, input_scale)


def _earlier_amaxes(fprop: GemmPrecision, layer: Layer, tensors: TensorSource) -> Tensor | None:
    """Return the amaxes of input and weight, FP32 (2,), that training's last steps give fprop.

    They are negative where too few steps are recorded; None without delayed scaling or history.
    A model in memory is exported without its histories.
    """
    key = f"{HISTORIES}{layer.path}"
    if fprop.delayed is None or not isinstance(tensors, CheckpointReader):
        return None
    if key not in tensors.histories:
        return None
    size = tuple(tensors.histories[key].size)
    if len(size) != 2 or size[0] != len(OPERANDS) or size[1] < fprop.delayed.recorded:
        return None
    amaxes = fprop.delayed.earlier(tensors.read_part(key, (0, 0), size).float())
    return amaxes[[OPERANDS.index((Gemm.FPROP, role)) for role in GEMM_ROLES[Gemm.FPROP]]]


def _input(fprop: GemmPrecision, amax: Tensor | None) -> tuple[BlockFormat | None, Tensor | None]:
    """Return the format of fprop's input for a reader, and its tensor scale; None for no format.

    Readers do not round at random, scale by three quarters or scale rows of blocks. They take a
    tensor scale only with weights of that format, and it has to be known, from an amax.
    """
    quantizer, weight = fprop.lhs, fprop.rhs
    if quantizer is None or quantizer.rounding is not Rounding.NEAREST_EVEN:
        return None, None
    format = quantizer.format
    if getattr(format, "three_quarters", False) or format.scales_tensor_rows:
        return None, None
    if not format.tensor_scaled:
        return format, None
    alike = weight is not None and weight.format.name.removesuffix("-2d") == format.name
    if amax is None or amax <= 0 or not alike:
        return None, None
    nothing = torch.zeros(format.block_rows, format.block)
    return format, quantizer(nothing, amax).tensor_scale


def _refusal(layer: Layer, why: str) -> str:
    return f"{layer.path}: its weight {why} in fprop, which no layout holds: export it without"


def check_weight(weight: Weight, layout: Layout, columns: int) -> None:
    """Raise UserError where the layout cannot hold this weight."""
    layer, format, rule = weight.layer, weight.format, weight.rule
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
    message = f"{rule.names[0]} is the transpose of a weight: --quantized does not store such"
    require(not rule.is_transposed, message)
    parts = rule.to_hugging_face(torch.arange(sum(rule.target_rows)))
    require(
        not tiles or all(_whole_tiles(part, format.block_rows) for part in parts),
        f"{path}: tiles of {format.block_rows} rows lie across the borders of "
        f"{', '.join(rule.names)}: {option} cannot keep their scales",
    )


def _whole_tiles(numbers: Tensor, rows: int) -> bool:
    """Return True if each tile of a part lies in one tile of the whole, by its rows' numbers."""
    return all(bool((tile == tile[0]).all()) for tile in (numbers // rows).split(rows))
