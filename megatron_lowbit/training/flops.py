"""How many floating-point operations a model's training takes, from its arguments."""

from argparse import Namespace


def sample_flops(args: Namespace, padded_vocab_size: int) -> int:
    """Floating-point operations of training on one sequence, forward and backward, by all ranks.

    With L layers, sequence length s, hidden size h, a heads of d channels and g query groups, per
    token::

        6 * (L * (h * (a + 2 * g) * d  +  a * d * h)  +  MLPs  +  h * vocabulary)
        + 6 * L * s * a * d

    The first line is the GEMMs with weights: query, key and value, attention output, MLPs and the
    projection to the padded vocabulary. Each weight takes a multiplication and an addition in the
    forward pass and twice that in the backward pass. An MLP of width f has m * h * f weights, m
    being 3 if it is gated and 2 if not; a layer with experts has the router's h * experts and the
    MLPs of those experts that one token goes to.

    The second line is the two GEMMs of causal attention: half of 12 * L * s * a * d, because half
    of the scores are masked, whether or not the kernel skips them. Recomputation, quantization,
    embedding look-up, norms, softmax and the optimizer are not counted.
    """
    queries = args.num_attention_heads * args.kv_channels
    keys_and_values = 2 * args.num_query_groups * args.kv_channels
    attention = args.hidden_size * (queries + keys_and_values) + queries * args.hidden_size
    mlps = sum(_mlp_weights(args, layer) for layer in range(args.num_layers))
    weights = args.num_layers * attention + mlps + args.hidden_size * padded_vocab_size
    scores = args.num_layers * args.seq_length * queries
    return 6 * (weights + scores) * args.seq_length


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
