"""Parts of a model, with two linear layers each, and its parameters, from training's arguments.

A GPT's layer is an attention and an MLP (or experts), a hybrid's block one part. Sizes are of the
whole layer; ``tensor`` ranks divide a first layer's outputs and a second layer's inputs.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lowbit.errors import require
from megatron_lowbit.recipes import HIGH_PRECISION, Layer, LinearPrecision, Recipe

CONVOLUTION = 4
"""Tokens that a Mamba-2 mixer's convolution sees: megatron-core's only value."""
_EXPANSION = 2
"""Inner over hidden size of megatron-core's mixer, where the number of heads is not given."""
BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
"""Blocks of a hybrid that plans know, by their symbols in ``--hybrid-layer-pattern``."""
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
        """Return inputs and outputs on one rank."""
        if self.column:
            return self.inputs, self.outputs // tensor
        return self.inputs // tensor, self.outputs

    def elements(self, tensor: int) -> int:
        """Return the number of weights on one rank."""
        return self.inputs * self.outputs // tensor


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
    """Return the sizes of the model's Mamba-2 mixers."""
    heads = args.mamba_num_heads or _EXPANSION * args.hidden_size // args.mamba_head_dim
    states = 2 * args.mamba_num_groups * args.mamba_state_dim
    return Mixer(heads, heads * args.mamba_head_dim, states)


def stages(
    args: Namespace, recipe: Recipe, pipeline: int = 1, chunks: Sequence[int] = ()
) -> list[Counter[Part]]:
    """Count the parts of each kind that the ranks of each pipeline stage have.

    Equal stages are the same object.

    Args:
        args: training's arguments.
        recipe: precision of the linear layers.
        pipeline: number of stages.
        chunks: layers of each model chunk (default: one chunk for each stage, all equal).
    """
    chunks = chunks or [args.num_layers // pipeline] * pipeline
    stage = [chunk % pipeline for chunk, size in enumerate(chunks) for _ in range(size)]
    found: list[Counter[Part]] = [Counter() for _ in range(pipeline)]
    for block, kind in _kinds(args):
        found[stage[block]][_part(args, recipe, kind, block)] += 1
    return [found[found.index(parts)] for parts in found]


def layers(args: Namespace) -> list[Layer]:
    """Return the linear layers as a recipe's rules see them; of each layer's experts the first."""
    return [
        Layer(f"decoder.layers.{block}.{name}", block, args.num_layers)
        for block, kind in _kinds(args)
        for name in _PATHS[kind]
    ]


def is_gated(args: Namespace) -> bool:
    """Return True if half of an MLP's first layer gates the other half."""
    return bool(args.swiglu or args.quick_geglu or args.geglu)


def query_groups(args: Namespace) -> int:
    """Return the number of key and value heads of an attention."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def check_plannable(args: Namespace) -> None:
    """Raise UserError for a model or a layout that plans do not describe."""
    unknown = sorted(set(args.hybrid_layer_pattern or "") - {*BLOCKS, "|"})
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    require(
        args.num_experts is not None or "E" not in (args.hybrid_layer_pattern or ""),
        f"--hybrid-layer-pattern {args.hybrid_layer_pattern}: E needs --num-experts",
    )
    tensor, heads, groups = (
        args.tensor_model_parallel_size, args.num_attention_heads, query_groups(args)
    )  # fmt: skip
    require(
        heads % tensor == 0 and groups % tensor == 0,
        f"--tensor-model-parallel-size {tensor} does not divide --num-attention-heads {heads} and "
        f"--num-query-groups {groups}",
    )
    for what, found in (
        ("--multi-latent-attention", args.multi_latent_attention),
        ("--experimental-attention-variant", args.experimental_attention_variant),
        ("--mtp-num-layers", args.mtp_num_layers),
        ("--moe-shared-expert-intermediate-size", args.moe_shared_expert_intermediate_size),
        ("--moe-latent-size", args.moe_latent_size),
        ("--context-parallel-size", args.context_parallel_size > 1),
        ("--expert-tensor-parallel-size", expert_tensor != args.tensor_model_parallel_size),
        ("a heterogeneous model", args.heterogeneous_layers_config_path),
        ("fully sharded data parallelism", args.use_megatron_fsdp or args.use_torch_fsdp2),
        (f"{', '.join(unknown)} in --hybrid-layer-pattern", unknown),
    ):
        require(not found, f"{what}: plans of memory and time do not cover it")


def _kinds(args: Namespace) -> Iterator[tuple[int, str]]:
    """Return block number and kind of every part, in order."""
    if args.hybrid_layer_pattern is not None:
        symbols = args.hybrid_layer_pattern.replace("|", "")
        yield from enumerate(BLOCKS[symbol] for symbol in symbols)
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
    """Return outputs of a part's first linear layer and inputs of its second."""
    if kind == "attention":
        queries = args.num_attention_heads * args.kv_channels
        return queries + 2 * query_groups(args) * args.kv_channels, queries
    if kind == "mamba":
        sizes = mixer(args)
        return 2 * sizes.inner + sizes.states + sizes.heads, sizes.inner
    width = args.ffn_hidden_size
    if kind == "experts":
        width = args.moe_ffn_hidden_size or width
    return width * (2 if is_gated(args) else 1), width


class Parameters(NamedTuple):
    """Parameters of one rank, and how many of ``all`` are the ``experts``'."""

    all: int
    experts: int


def parameters(
    args: Namespace, parts: Counter[Part], vocabulary: int, tensor: int, expert: int, ends: str
) -> Parameters:
    """Return parameters of a rank of one pipeline stage, as training counts them at its start.

    ``vocabulary`` is padded. ``ends``: which ends of the model the stage has, of "first" and "last"
    none, one or both in a text.
    """
    norm = args.hidden_size * (2 if args.normalization == "LayerNorm" else 1)
    table = vocabulary // tensor * args.hidden_size
    total = experts = 0
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
            weights += args.num_experts * (args.hidden_size + args.add_bias_linear)
        if part.kind == "attention" and args.qk_layernorm:
            weights += 2 * norm // args.hidden_size * args.kv_channels
        if part.kind == "attention" and args.softmax_type == "learnable":
            weights += args.num_attention_heads // tensor
        if args.sandwich_norm:
            weights += norm
        if part.kind == "mamba":
            weights += _mixer_parameters(mixer(args), tensor)
        total += count * (norm + weights)
    return Parameters(total, experts)


def _linear_parameters(args: Namespace, part: Part, linear: Linear, tensor: int) -> int:
    inputs, outputs = linear.split(tensor)
    biased = args.add_bias_linear
    if part.kind == "attention" and linear.column:
        biased = biased or args.add_qkv_bias
    # A mixer's linear layers never have biases.
    return (inputs + (biased and part.kind != "mamba")) * outputs


def _mixer_parameters(sizes: Mixer, tensor: int) -> int:
    """Count convolution with bias; dt_bias, A_log and D of each head; the gated norm."""
    convolution = sizes.convolved * (CONVOLUTION + 1)
    return (convolution + 3 * sizes.heads + sizes.inner) // tensor
