"""How many floating-point operations a model's training takes, from its arguments."""

from argparse import Namespace

from megatron_lowbit.training.hybrid_arguments import BLOCKS, mamba_heads


def sample_flops(args: Namespace, padded_vocab_size: int) -> int:
    """Floating-point operations of training on one sequence, forward and backward, by all ranks.

    With sequence length s, hidden size h, a heads of d channels and g query groups, per token::

        6 * (weights of all blocks  +  h * vocabulary)  +  6 * attention blocks * s * a * d
        + 21 * Mamba blocks * i * n

    The first term is the GEMMs with weights, those of a GPT's layer being an attention and an MLP.
    Each weight takes a multiplication and an addition in the forward pass and twice that in the
    backward pass. Attention has h * (a + 2 * g) * d + a * d * h weights. An MLP of width f has
    m * h * f, m being 3 if it is gated and 2 if not; with experts it is the router's h * experts
    and the MLPs of those experts that one token goes to. A Mamba-2 block of inner size i, state
    size n, k heads and b groups has h * (2 * i + 2 * b * n + k) + i * h.

    The second term is the two GEMMs of causal attention: half of 12 * s * a * d, because half of
    the scores are masked, whether or not the kernel skips them. The third is the scan as
    Megatron-LM counts it: 7 operations for each entry of the state, three times. Recomputation,
    quantization, embedding look-up, convolutions, norms, softmax and the optimizer are not counted.
    """
    blocks = _blocks(args)
    attentions, mambas = blocks.count("attention"), blocks.count("mamba")
    queries = args.num_attention_heads * args.kv_channels
    keys_and_values = 2 * args.num_query_groups * args.kv_channels
    weights = attentions * args.hidden_size * (2 * queries + keys_and_values)
    weights += sum(_mlp_weights(args, layer) for layer in range(blocks.count("mlp")))
    scan = 0
    if mambas:
        inner = mamba_heads(args) * args.mamba_head_dim
        states = 2 * args.mamba_num_groups * args.mamba_state_dim
        weights += mambas * args.hidden_size * (3 * inner + states + mamba_heads(args))
        scan = 21 * mambas * inner * args.mamba_state_dim
    weights += args.hidden_size * padded_vocab_size
    scores = attentions * args.seq_length * queries
    return (6 * (weights + scores) + scan) * args.seq_length


def _blocks(args: Namespace) -> list[str]:
    """What the model is made of, in no order."""
    if args.hybrid_override_pattern is None:
        return ["attention", "mlp"] * args.num_layers
    return [BLOCKS[symbol] for symbol in args.hybrid_override_pattern]


def _mlp_weights(args: Namespace, layer: int) -> int:
    """Weights in the GEMMs of one token in one layer's MLP, or in its router and experts."""
    matrices = 3 if args.swiglu else 2
    if args.num_experts is None or not _has_experts(args.moe_layer_freq, layer):
        return matrices * args.hidden_size * args.ffn_hidden_size
    experts = matrices * args.moe_ffn_hidden_size * args.moe_router_topk
    return args.hidden_size * (experts + args.num_experts)


def _has_experts(frequency: int | list[int], layer: int) -> bool:
    """Whether the layer, counted from 0, has experts: every N-th from the first, or as listed."""
    return bool(frequency[layer] if isinstance(frequency, list) else layer % frequency == 0)
