"""Quantized export of the weights that the training recipe quantizes in fprop.

A weight is quantized whole, as Megatron holds it, by the recipe's own quantizer: with the blocks,
the amax and so the bits of training. Its parts of Hugging Face's are rows of it, and take along
their rows' codes and block scales and the tensor scale.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lowbit.conversion import pieces
from megatron_lowbit.conversion.checkpoints import Checkpoint
from megatron_lowbit.conversion.hugging_face_files import Made
from megatron_lowbit.conversion.layouts import LAYOUTS, Layout
from megatron_lowbit.conversion.megatron_files import Tensors
from megatron_lowbit.conversion.plan import Place, Rule
from megatron_lowbit.conversion.tensor_transforms import Join
from megatron_lowbit.errors import require
from megatron_lowbit.numerics import FORMATS, QuantizedTensor, Quantizer, Rounding
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import FP8Tile
from megatron_lowbit.recipes import Layer, Recipe, load_recipes

_LINEAR = re.compile(r"(decoder\.layers\.)(.*\b(?:linear_\w+|in_proj|out_proj))\.weight(\.\w+)?")
_HEAD = "lm_head"

Names = tuple[str, ...]


class Weight(NamedTuple):
    """A linear layer's weight (R, K) that is quantized, and Hugging Face's matrices of it."""

    layer: Layer
    quantizer: Quantizer
    places: Sequence[Place]
    shape: tuple[int, int]
    names: Names
    join: Join

    def read(self, tensors: Tensors) -> Tensor:
        """Read the whole weight."""
        shares = [tensors.read(place) for place in self.places]
        return shares[0] if len(shares) == 1 else torch.cat(shares)


class QuantizedAs(NamedTuple):
    """Request for an export: a layout's name, and a recipe and its overrides if not training's.

    ``recipes`` are two where one gives fprop and another the backward GEMMs.
    """

    layout: str
    recipes: Sequence[str] = ()
    recipe_set: Sequence[str] = ()


class Quantization(NamedTuple):
    """A checked plan of an export.

    ``formats`` are those of Hugging Face's quantized modules; ``kept`` are its other modules with
    matrices.
    """

    recipe: Recipe
    layout: Layout
    weights: Mapping[Names, Weight]
    formats: Mapping[str, BlockFormat]
    kept: Sequence[str]

    @property
    def config(self) -> dict[str, Any]:
        """The ``quantization_config`` for config.json."""
        return self.layout.config(self.formats, self.kept)

    @property
    def documents(self) -> dict[str, dict]:
        """Other JSON files, by name."""
        return self.layout.documents(self.formats, self.kept)


def plan_quantization(
    wanted: QuantizedAs, checkpoint: Checkpoint, rules: Sequence[Rule], num_layers: int
) -> Quantization:
    """Plan which weights of a checkpoint to quantize, and how.

    These are the weights that the recipe quantizes in fprop. Its switches are left out: what it
    begins with counts.

    Raises UserError where there is no recipe, or where the layout cannot hold a weight with the
    bits that it has in training.
    """
    recipe, tensors = recipe_of(wanted, checkpoint), checkpoint.tensors
    chosen = LAYOUTS[wanted.layout]
    weights, layers, kept = {}, [], []
    for names, shares in groupby(rules, key=lambda rule: rule.names):
        found = list(shares)
        layer = _layer(found[0].place, num_layers)
        if layer is not None:
            layers.append(layer)
            weight = _weight(recipe, layer, found, tensors)
            if weight is not None:
                _check(weight, chosen)
                weights[names] = weight
                continue
        if len(tensors.shape(found[0].place)) > 1:
            kept += [_module(name) for name in names]
    recipe.check_matchers(layers)
    require(len(weights) > 0, f"recipe {recipe.name} quantizes no weight in fprop")
    formats = {
        _module(name): weight.quantizer.format
        for names, weight in weights.items()
        for name in names
    }
    # A tied head has no tensor of its own, but readers build the module.
    plan = Quantization(recipe, chosen, weights, formats, list(dict.fromkeys([*kept, _HEAD])))
    chosen.config(plan.formats, plan.kept)
    return plan


def recipe_of(wanted: QuantizedAs, checkpoint: Checkpoint) -> Recipe:
    """Load the recipe that is asked for, or else the one that a checkpoint was trained with.

    Raises UserError where there is none.
    """
    names, overrides = wanted.recipes, wanted.recipe_set
    if not names:
        require(not overrides, "--recipe-set changes the recipe that --recipe names: name one")
        names, overrides = checkpoint.recipes, checkpoint.recipe_set
    require(
        len(names) > 0,
        f"{checkpoint.path}: was not trained here with a recipe; name one by --recipe",
    )
    return load_recipes(names, overrides)


def made(
    tensors: Tensors, rules: Sequence[Rule], dtype: torch.dtype | None, plan: Quantization
) -> list[Made]:
    """Plan the tensors that rules make of a checkpoint's: quantized, or else in this dtype."""

    def together(rule: Rule) -> object:
        weight = plan.weights.get(rule.names)
        return None if weight is None else plan.layout.together(rule.names)

    found: list[Made] = []
    for group, members in groupby(rules, key=together):
        if group is None:
            found += pieces.made(tensors, list(members), dtype)
        else:
            names = dict.fromkeys(rule.names for rule in members)
            found.append(_made(tensors, [plan.weights[n] for n in names], plan.layout))
    return found


def quantize_parts(weight: Tensor, quantizer: Quantizer, join: Join) -> list[QuantizedTensor]:
    """Quantize the parts of a weight (R, K), FP32 or BF16, with the bits of the quantized whole.

    Each in a format with blocks of one row: scales have a row for each row of codes.
    """
    whole = quantizer(weight.float())
    scales, rows = whole.scales, whole.codes.shape[0]
    if scales.shape[0] < rows:
        scales = scales.repeat_interleave(whole.format.block_rows, dim=0)[:rows]
    return _parts(replace(whole, scales=scales), join)


def _parts(whole: QuantizedTensor, join: Join) -> list[QuantizedTensor]:
    format = replace(whole.format, block_rows=1)
    codes, scales = _split(whole.codes, join), _split(whole.scales, join)
    return [
        QuantizedTensor(rows, scale, whole.tensor_scale, format, (len(rows), whole.shape[1]))
        for rows, scale in zip(codes, scales, strict=True)
    ]


def _split(rows: Tensor, join: Join) -> list[Tensor]:
    """Return contiguous parts, split as integers: torch does not concatenate FP8."""
    integers = torch.int32 if rows.dtype == torch.float32 else torch.uint8
    return [part.contiguous().view(rows.dtype) for part in join.split(rows.view(integers))]


def _outline(weight: Weight) -> list[QuantizedTensor]:
    """Return what :func:`quantize_parts` will make, without content."""
    rows, columns = weight.shape
    sample = weight.quantizer(torch.zeros(1, columns))
    codes, scales = (
        part[:1].to("meta").expand(rows, -1).contiguous() for part in (sample.codes, sample.scales)
    )
    whole = QuantizedTensor(
        codes, scales, sample.tensor_scale.to("meta"), sample.format, weight.shape
    )
    return _parts(whole, weight.join)


def _made(tensors: Tensors, weights: Sequence[Weight], layout: Layout) -> Made:
    def encode(parts: Iterator[list[QuantizedTensor]]) -> dict[str, Tensor]:
        named = [
            zip(weight.names, each, strict=True)
            for weight, each in zip(weights, parts, strict=True)
        ]
        return layout.encode({name: part for pairs in named for name, part in pairs})

    def make() -> list[Tensor]:
        parts = (quantize_parts(w.read(tensors), w.quantizer, w.join) for w in weights)
        return list(encode(parts).values())

    outline = encode(map(_outline, weights))
    shapes = [tuple(tensor.shape) for tensor in outline.values()]
    return Made(list(outline), shapes, [tensor.dtype for tensor in outline.values()], make)


def _layer(place: Place, num_layers: int) -> Layer | None:
    """Return the linear layer of a weight as recipes name it; None for other tensors."""
    found = _LINEAR.fullmatch(place.key)
    if found is None:
        return None
    block, rest = (str(place.index[0]), found[2]) if place.index else found[2].split(".", 1)
    if len(place.index) > 1:
        rest = rest.replace("experts.experts", f"experts.local_experts.{place.index[1]}")
    return Layer(f"{found[1]}{block}.{rest}", int(block), num_layers)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _weight(
    recipe: Recipe, layer: Layer, shares: Sequence[Rule], tensors: Tensors
) -> Weight | None:
    """Return the weight, if the recipe quantizes it in fprop."""
    fprop = recipe.precision_for(layer).fprop
    if fprop.rhs is None:
        return None
    require(fprop.hadamard is None, _refusal(layer, "goes through a Hadamard transform"))
    shapes = [tensors.shape(rule.place) for rule in shares]
    shape = (sum(rows for rows, _ in shapes), shapes[0][1])
    join = shares[0].join if len(shares) == 1 else Join((shape[0],))
    places = [rule.place for rule in shares]
    return Weight(layer, fprop.rhs, places, shape, shares[0].names, join)


def _refusal(layer: Layer, why: str) -> str:
    return f"{layer.path}: its weight {why} in fprop, which no layout holds: export it without"


def _check(weight: Weight, layout: Layout) -> None:
    """Raise UserError where the layout cannot hold this weight."""
    layer, format, (rows, columns) = weight.layer, weight.quantizer.format, weight.shape
    require(
        format.name in layout.formats,
        f"--quantized {layout.name} holds {', '.join(layout.formats)}, but the recipe has the "
        f"weight of {layer.path} in {format}",
    )
    block = FORMATS[format.name].block
    require(
        format.block == block,
        f"--quantized {layout.name} holds blocks of {block}, but the recipe has the weight of "
        f"{layer.path} in {format}: its block must be {block}",
    )
    nearest = weight.quantizer.rounding is Rounding.NEAREST_EVEN
    require(nearest, _refusal(layer, "is rounded stochastically"))
    scaled = getattr(format, "three_quarters", False)
    require(not scaled, _refusal(layer, "is scaled by three quarters"))
    tiles = isinstance(format, FP8Tile)
    require(
        tiles or columns % format.block == 0,
        f"{layer.path}: {columns} columns are not whole blocks of {format.block}, as --quantized "
        f"{layout.name} needs them",
    )
    parts = weight.join.split(torch.arange(rows).unsqueeze(1).expand(-1, 2))
    require(
        all(part.shape[1] == 2 for part in parts),
        f"{weight.names[0]} is the transpose of a weight: --quantized does not store such",
    )
    require(
        not tiles or all(_whole_tiles(part[:, 0], format.block_rows) for part in parts),
        f"{layer.path}: tiles of {format.block_rows} rows lie across the borders of "
        f"{', '.join(weight.names)}: --quantized {layout.name} cannot keep their scales",
    )


def _whole_tiles(numbers: Tensor, rows: int) -> bool:
    """Return whether each tile of a part lies in one tile of the whole, by its rows' numbers."""
    return all(bool((tile == tile[0]).all()) for tile in (numbers // rows).split(rows))
