"""Precision of each linear module of a model, by its path and the global number of its block."""

import re
from dataclasses import dataclass

import torch

from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.recipes import Layer, LinearPrecision

_BLOCK = re.compile(r"(?P<where>.*?\blayers)\.\d+")
_GROUPED = re.compile(r"(?<=\.experts\.)(linear_fc\d)\.(\d+)$")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+")
_MTP = "mtp."


@dataclass(frozen=True)
class LayerPlan:
    """Identity, precision and engine of one linear layer.

    ``norm`` is how the layer normalizes its input, where MXNorm is part of it. ``evaluates`` tells
    whether the precision holds in evaluations, too, which else are in high precision.
    """

    layer: Layer
    precision: LinearPrecision
    engine: Engine
    accumulate_main_grad: bool
    norm: MXNorm | None = None
    evaluates: bool = True


def layer_of(chunk: torch.nn.Module, name: str, first_expert: int) -> Layer | None:
    """Return the layer that a recipe's rules see for a module; None for one outside the blocks.

    megatron names modules by the chunk's own block numbers and the rank's own expert numbers; rules
    see global ones, and grouped experts as if they were not. Blocks of multi-token prediction come
    after the decoder's last.

    Args:
        chunk: one virtual pipeline stage of the model.
        name: the module's path in the chunk.
        first_expert: the global number of the rank's first expert.
    """
    found = _BLOCK.match(name)
    if found is None:
        return None
    num_blocks = chunk.config.num_layers
    number = chunk.get_submodule(found[0]).layer_number - 1
    path = f"{found['where']}.{number}{name[found.end() :]}"
    path = _GROUPED.sub(r"local_experts.\2.\1", path)
    path = _EXPERT.sub(lambda expert: str(int(expert[0]) + first_expert), path)
    return Layer(path, number + (num_blocks if name.startswith(_MTP) else 0), num_blocks)
