"""Parts of a model, with two linear layers each, and its parameters, from training's arguments.

A GPT layer is two parts, an attention and an MLP (or experts); a block of a hybrid is one part.
Sizes are per tensor-parallel rank, which has its share of the outputs of a first linear layer and
of the inputs of a second.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_lowbit.arguments.compatibility import check
from megatron_lowbit.errors import require
from megatron_lowbit.recipes import HIGH_PRECISION, Layer, LinearPrecision, Recipe, load_recipes
from megatron_lowbit.recipes.show import LINEAR_LAYERS

CONVOLUTION = 4
"""Tokens that a Mamba-2 mixer's convolution sees: megatron-core's only value."""
BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
"""Blocks of a hybrid that the planner models, by their symbols in ``--hybrid-layer-pattern``."""
CORE_ATTENTION = "core_attn"
"""Name of attention without its linear layers in ``--recompute-modules``."""
_PATHS = {name: LINEAR_LAYERS[symbol] for symbol, name in BLOCKS.items()}


class Amounts(dict[str, float]):
    """Seconds or bytes by what takes them, added name by name; a missing name has none."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def __add__(self, other: Mapping[str, float]) -> "Amounts":
        total = Amounts(self)
        total.add(other)
        return total

    def __mul__(self, times: float) -> "Amounts":
        return Amounts({name: times * amount for name, amount in self.items()})

    def add(self, other: Mapping[str, float], times: float = 1) -> None:
        """Add ``times`` other amounts, in place."""
        for name, amount in other.items():
            self[name] += times * amount

    def total(self) -> float:
        """Return the sum of all amounts."""
        return sum(self.values())


class Linear(NamedTuple):
    """A linear layer on one rank: its sizes and how it computes."""

    inputs: int
    outputs: int
    precision: LinearPrecision = HIGH_PRECISION

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs


class Part(NamedTuple):
    """An attention, an MLP, a layer of experts or a Mamba-2 mixer, with the norm before it.

    ``experts`` run one after another on a rank; each token chooses ``topk`` of all.
    """

    name: str
    first: Linear
    second: Linear
    experts: int = 1
    topk: int = 1

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """Both linear layers; for experts, the linear layers of each expert."""
        return self.first, self.second


class Mixer(NamedTuple):
    """Sizes of a Mamba-2 mixer on one rank: heads, their channels, the convolution's channels."""

    heads: int
    inner: int
    convolved: int


class Parameters(NamedTuple):
    """Parameters of one rank, and how many of ``all`` belong to ``experts``."""

    all: int
    experts: int


def mixer(args: Namespace) -> Mixer:
    """Return the sizes of the model's Mamba-2 mixers; x, B and C are convolved."""
    tensor = args.tensor_model_parallel_size
    # megatron-core's default: an inner size of twice the hidden size.
    heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
    inner = heads * args.mamba_head_dim
    convolved = inner + 2 * args.mamba_num_groups * args.mamba_state_dim
    return Mixer(heads // tensor, inner // tensor, convolved // tensor)


def stages(
    args: Namespace, recipe: Recipe, pipeline: int = 1, chunks: Sequence[int] = ()
) -> list[Counter[Part]]:
    """Count the parts that the ranks of each pipeline stage have.

    Equal stages are the same object. ``chunks``: layers of each model chunk (default: one chunk for
    each stage, all equal).
    """
    chunks = chunks or [args.num_layers // pipeline] * pipeline
    stage_of = [chunk % pipeline for chunk, size in enumerate(chunks) for _ in range(size)]
    counts: list[Counter[Part]] = [Counter() for _ in range(pipeline)]
    for block, name in _blocks(args):
        outputs, inputs = _widths(args, name)
        first, second = map(recipe.precision_for, _layers(args, block, name))
        part = Part(
            name,
            Linear(args.hidden_size, outputs, first),
            Linear(inputs, args.hidden_size, second),
            args.num_experts // args.expert_model_parallel_size if name == "experts" else 1,
            args.moe_router_topk if name == "experts" else 1,
        )
        counts[stage_of[block]][part] += 1
    return [counts[counts.index(parts)] for parts in counts]


def output_layer(args: Namespace, recipe: Recipe, vocabulary: int) -> Linear:
    """Return the output layer, of a vocabulary that is padded for the tensor-parallel ranks."""
    precision = recipe.precision_for(Layer.output(args.num_layers))
    columns = vocabulary // args.tensor_model_parallel_size
    return Linear(args.hidden_size, columns, precision)


def layers(args: Namespace) -> list[Layer]:
    """Return the linear layers for a recipe's rules, with the first expert of each layer."""
    return [layer for block, name in _blocks(args) for layer in _layers(args, block, name)]


def _layers(args: Namespace, block: int, name: str) -> list[Layer]:
    return [
        Layer(f"decoder.layers.{block}.{path}", block, args.num_layers) for path in _PATHS[name]
    ]


def _blocks(args: Namespace) -> Iterator[tuple[int, str]]:
    """Yield block number and name of every part, in order."""
    if args.hybrid_layer_pattern is not None:
        symbols = args.hybrid_layer_pattern.replace("|", "")
        yield from enumerate(BLOCKS[symbol] for symbol in symbols)
        return
    frequency = args.moe_layer_freq
    for block in range(args.num_layers):
        routed = frequency[block] if isinstance(frequency, list) else block % frequency == 0
        yield block, "attention"
        yield block, "experts" if args.num_experts is not None and routed else "mlp"


def _widths(args: Namespace, name: str) -> tuple[int, int]:
    """Return the outputs of a part's first linear layer and the inputs of its second."""
    if name == "mamba":
        sizes = mixer(args)
        return sizes.inner + sizes.convolved + sizes.heads, sizes.inner
    if name == "attention":
        inputs = args.num_attention_heads * args.kv_channels
        outputs = inputs + 2 * query_groups(args) * args.kv_channels
    else:
        inputs = (name == "experts" and args.moe_ffn_hidden_size) or args.ffn_hidden_size
        outputs = inputs * (2 if is_gated(args) else 1)
    tensor = args.tensor_model_parallel_size
    return outputs // tensor, inputs // tensor


def is_gated(args: Namespace) -> bool:
    """Return True if half of an MLP's first layer gates the other half."""
    return bool(args.swiglu or args.quick_geglu or args.geglu)


def query_groups(args: Namespace) -> int:
    """Return the number of key and value heads of an attention, on all ranks."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return int(groups)


def tokens_of(args: Namespace) -> int:
    """Return the tokens of a microbatch on a rank: context parallelism splits sequences."""
    return int(args.micro_batch_size * args.seq_length // args.context_parallel_size)


def local_tokens(args: Namespace) -> int:
    """Return the tokens whose residual stream a rank has: sequence parallelism splits them."""
    split = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return tokens_of(args) // split


def replicas(args: Namespace) -> int:
    """Return the ranks that hold the same parameters, except experts."""
    return int(args.data_parallel_size * args.context_parallel_size)


def loss_fusion(args: Namespace) -> str | None:
    """Return the value of ``--cross-entropy-fusion-impl``; None without a fused loss."""
    return args.cross_entropy_fusion_impl if args.cross_entropy_loss_fusion else None


def recomputed_modules(args: Namespace) -> set[str]:
    """Return the modules of ``--recompute-granularity selective``, by default core attention."""
    is_selective = args.recompute_granularity == "selective"
    return set(args.recompute_modules or [CORE_ATTENTION]) if is_selective else set()


def check_plannable(args: Namespace) -> None:
    """Raise UserError for arguments that training refuses, or that the planner does not model."""
    check(args, load_recipes(args.precision_recipe, args.recipe_set))
    tensor, heads, groups = (
        args.tensor_model_parallel_size, args.num_attention_heads, query_groups(args)
    )  # fmt: skip
    require(
        args.num_experts is not None or "E" not in (args.hybrid_layer_pattern or ""),
        f"--hybrid-layer-pattern {args.hybrid_layer_pattern}: E needs --num-experts",
    )
    require(
        heads % tensor == 0 and groups % tensor == 0,
        f"--tensor-model-parallel-size {tensor} does not divide --num-attention-heads {heads} and "
        f"--num-query-groups {groups}",
    )
    require(
        args.recompute_granularity != "full" or args.recompute_num_layers is not None,
        "--recompute-granularity full needs --recompute-num-layers",
    )
    for name, is_given in _not_modelled(args).items():
        require(not is_given, f"{name}: plans of memory and time do not cover it")


def _not_modelled(args: Namespace) -> dict[str, object]:
    """Return arguments that the planner does not model, each with a true value if it is given."""
    groups = {None, args.pipeline_model_parallel_size}
    unknown = sorted(set(args.hybrid_layer_pattern or "") - {*BLOCKS, "|"})
    tensor = args.tensor_model_parallel_size
    modules = sorted(recomputed_modules(args) - {CORE_ATTENTION})
    return {
        "--multi-latent-attention": args.multi_latent_attention,
        "--experimental-attention-variant": args.experimental_attention_variant,
        "--mtp-num-layers": args.mtp_num_layers,
        "--moe-shared-expert-intermediate-size": args.moe_shared_expert_intermediate_size,
        "--moe-latent-size": args.moe_latent_size,
        "--context-parallel-size of a hybrid": (
            args.context_parallel_size > 1 and args.hybrid_layer_pattern
        ),
        "--distill-from": args.distill_from,
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size not in (None, tensor),
        "a heterogeneous model": args.heterogeneous_layers_config_path,
        "fully sharded data parallelism": args.use_megatron_fsdp or args.use_torch_fsdp2,
        f"{', '.join(unknown)} in --hybrid-layer-pattern": unknown,
        f"--recompute-modules {' '.join(modules)}": modules,
        "--recompute-granularity selective of local layers": (
            args.recompute_granularity == "selective" and args.transformer_impl == "local"
        ),
        "--moe-layer-recompute": args.moe_layer_recompute,
        "--distribute-saved-activations": args.distribute_saved_activations,
        "--cpu-offloading-num-layers": args.cpu_offloading_num_layers,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "--moe-paged-stash": args.moe_paged_stash,
        f"--optimizer {args.optimizer}": args.optimizer != "adam",
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--num-distributed-optimizer-instances": args.num_distributed_optimizer_instances > 1,
        "--tensor-parallel-num-weight-shards": args.gtp_weight_remat_size > 1,
        "--expert-tensor-parallel-num-weight-shards": args.expert_gtp_weight_remat_size > 1,
        "--microbatch-group-size-per-virtual-pipeline-stage": (
            args.virtual_pipeline_model_parallel_size
            and args.microbatch_group_size_per_vp_stage not in groups
        ),
    }


def parameters(
    args: Namespace, parts: Counter[Part], vocabulary: int, first: bool = True, last: bool = True
) -> Parameters:
    """Return the parameters of a rank of one pipeline stage, as training counts them at its start.

    ``vocabulary`` is padded. ``first`` and ``last``: the stage has that end of the model.
    """
    norm = args.hidden_size * (2 if args.normalization == "LayerNorm" else 1)
    table = vocabulary // args.tensor_model_parallel_size * args.hidden_size
    total = experts = 0
    if first:
        total += table
        if args.position_embedding_type == "learned_absolute":
            total += args.max_position_embeddings * args.hidden_size
    if last:
        # Tied to the table of another stage, the output layer holds a copy of it.
        tied_here = first and not args.untie_embeddings_and_output_weights
        total += norm + (0 if tied_here else table)
    for part, count in parts.items():
        # A mixer's linear layers never have biases.
        biased = args.add_bias_linear and part.name != "mamba"
        biased_qkv = biased or (part.name == "attention" and args.add_qkv_bias)
        each = part.first.weights + part.first.outputs * biased_qkv
        each = part.experts * (each + part.second.weights + part.second.outputs * biased)
        if part.name == "experts":
            experts += count * each
            each += args.num_experts * (args.hidden_size + args.add_bias_linear)
        if part.name == "attention" and args.qk_layernorm:
            each += 2 * norm // args.hidden_size * args.kv_channels
        if part.name == "attention" and args.softmax_type == "learnable":
            each += args.num_attention_heads // args.tensor_model_parallel_size
        if args.sandwich_norm:
            each += norm
        if part.name == "mamba":
            # Convolution with bias; dt_bias, A_log and D of each head; the gated norm.
            sizes = mixer(args)
            each += sizes.convolved * (CONVOLUTION + 1) + 3 * sizes.heads + sizes.inner
        total += count * (norm + each)
    return Parameters(total, experts)
