"""What a model is made of, from its arguments: parts with two linear layers each, and parameters.

A GPT's layer is an attention and an MLP (or experts), a hybrid's block one part. Sizes are of the
whole layer; ``tensor`` ranks divide a first layer's outputs and a second layer's inputs.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lowbit.recipes import HIGH_PRECISION, Layer, LinearPrecision, Recipe
from megatron_lowbit.training.hybrid_arguments import BLOCKS, mamba_heads

CONVOLUTION = 4
"""Tokens that a Mamba-2 mixer's convolution sees: megatron-core's only value."""
_PATHS = {
    "attention": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "mlp": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "experts": (
        "mlp.experts.local_experts.0.linear_fc1",
        "mlp.experts.local_experts.0.linear_fc2",
    ),
    "mamba": ("mixer.in_proj", "mixer.out_proj"),
}


class Linear(NamedTuple):
    """A linear layer: its sizes, its place in tensor parallelism, how it computes.

    ``column``: its outputs are split over the ranks, else its inputs.
    """

    inputs: int
    outputs: int
    column: bool
    precision: LinearPrecision = HIGH_PRECISION

    def split(self, tensor: int) -> tuple[int, int]:
        """Inputs and outputs on one rank."""
        if self.column:
            return self.inputs, self.outputs // tensor
        return self.inputs // tensor, self.outputs


class Part(NamedTuple):
    """An attention, an MLP, a layer of experts or a Mamba-2 mixer, with the norm before it."""

    kind: str
    first: Linear
    second: Linear


class Mixer(NamedTuple):
    """Sizes of a Mamba-2 mixer: heads, their channels together, and the width of B and C."""

    heads: int
    inner: int
    states: int

    @property
    def convolved(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + self.states


def mixer(args: Namespace) -> Mixer:
    """The sizes of the model's Mamba-2 mixers."""
    heads = mamba_heads(args)
    states = 2 * args.mamba_num_groups * args.mamba_state_dim
    return Mixer(heads, heads * args.mamba_head_dim, states)


def stages(
    args: Namespace, recipe: Recipe, pipeline: int = 1, virtual: int = 1
) -> list[Counter[Part]]:
    """How many of which parts the ranks of each pipeline stage have.

    Interleaved, a rank has ``virtual`` pieces, every ``pipeline``-th.
    """
    piece = args.num_layers // (pipeline * virtual)
    found: list[Counter[Part]] = [Counter() for _ in range(pipeline)]
    for block, kind in _kinds(args):
        found[block // piece % pipeline][_part(args, recipe, kind, block)] += 1
    return found


def layers(args: Namespace) -> list[Layer]:
    """The linear layers as a recipe's rules see them; of each layer's experts the first."""
    return [
        Layer(f"decoder.layers.{block}.{name}", block, args.num_layers)
        for block, kind in _kinds(args)
        for name in _PATHS[kind]
    ]


def _kinds(args: Namespace) -> Iterator[tuple[int, str]]:
    """Number of its block and kind of every part, in order."""
    if args.hybrid_override_pattern is not None:
        yield from enumerate(BLOCKS[symbol] for symbol in args.hybrid_override_pattern)
        return
    for block in range(args.num_layers):
        yield block, "attention"
        yield block, "experts" if _has_experts(args, block) else "mlp"


def _has_experts(args: Namespace, block: int) -> bool:
    if args.num_experts is None:
        return False
    frequency = args.moe_layer_freq
    return bool(frequency[block] if isinstance(frequency, list) else block % frequency == 0)


def _part(args: Namespace, recipe: Recipe, kind: str, block: int) -> Part:
    wide, inner = _widths(args, kind)
    paths = [f"decoder.layers.{block}.{name}" for name in _PATHS[kind]]
    precisions = [recipe.precision_for(Layer(path, block, args.num_layers)) for path in paths]
    return Part(
        kind,
        Linear(args.hidden_size, wide, True, precisions[0]),
        Linear(inner, args.hidden_size, False, precisions[1]),
    )


def _widths(args: Namespace, kind: str) -> tuple[int, int]:
    """Outputs of a part's first linear layer and inputs of its second."""
    if kind == "attention":
        queries = args.num_attention_heads * args.kv_channels
        return queries + 2 * args.num_query_groups * args.kv_channels, queries
    if kind == "mamba":
        sizes = mixer(args)
        return 2 * sizes.inner + sizes.states + sizes.heads, sizes.inner
    width = args.moe_ffn_hidden_size if kind == "experts" else args.ffn_hidden_size
    return width * (2 if args.swiglu else 1), width


class Parameters(NamedTuple):
    """Parameters of one rank: of ``all``, the ``experts``' and those that stay FP32."""

    all: int
    experts: int
    fp32: int


def parameters(
    args: Namespace, parts: Counter[Part], vocabulary: int, tensor: int, expert: int, ends: str
) -> Parameters:
    """Parameters of a rank of one pipeline stage, as training counts them at its start.

    ``vocabulary`` is padded. ``ends``: which ends of the model the stage has, of "first" and "last"
    none, one or both in a text.
    """
    norm = args.hidden_size * (2 if args.normalization == "LayerNorm" else 1)
    table = vocabulary // tensor * args.hidden_size
    total = experts = fp32 = 0
    if "first" in ends:
        total += table
        if args.position_embedding_type == "learned_absolute":
            total += args.max_position_embeddings * args.hidden_size
    if "last" in ends:
        # Tied to the table of another stage, the output layer holds a copy of it.
        tied_here = "first" in ends and not args.untie_embeddings_and_output_weights
        total += norm + (0 if tied_here else table)
    for part, count in parts.items():
        weights = sum(_linear_parameters(args, part, linear, tensor) for linear in part[1:])
        if part.kind == "experts":
            weights *= args.num_experts // expert
            experts += count * weights
            weights += args.num_experts * args.hidden_size
        if part.kind == "mamba":
            weights += _mixer_parameters(mixer(args), tensor)
            fp32 += count * 2 * mixer(args).heads // tensor  # A_log and D
        total += count * (norm + weights)
    return Parameters(total, experts, fp32)


def _linear_parameters(args: Namespace, part: Part, linear: Linear, tensor: int) -> int:
    inputs, outputs = linear.split(tensor)
    # A mixer's linear layers never have biases.
    return (inputs + (part.kind != "mamba" and not args.disable_bias_linear)) * outputs


def _mixer_parameters(sizes: Mixer, tensor: int) -> int:
    """Convolution with bias; dt_bias, A_log and D of each head; the gated norm."""
    convolution = sizes.convolved * (CONVOLUTION + 1)
    return (convolution + 3 * sizes.heads + sizes.inner) // tensor
