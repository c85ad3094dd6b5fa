"""Arguments of the model: Megatron-LM's names and meanings."""

import argparse

from megatron_lowbit.training.expert_arguments import add_experts
from megatron_lowbit.training.hybrid_arguments import add_hybrid


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments, those of experts and hybrids in groups of their own."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"),
        help="whose layers (default: Transformer Engine's where it is installed)",
    )  # fmt: skip
    group.add_argument("--num-layers", type=int, required=True, help="layers; of a hybrid, blocks")
    group.add_argument("--hidden-size", type=int, required=True, help="width of the model")
    group.add_argument(
        "--ffn-hidden-size", type=int, help="of the MLP (default: 4 x hidden, 8/3 if gated)"
    )
    group.add_argument("--num-attention-heads", type=int, required=True, help="query heads")
    group.add_argument("--kv-channels", type=int, help="width of a head (default: hidden / heads)")
    group.add_argument(
        "--group-query-attention", action="store_true", help="query heads share keys and values"
    )
    group.add_argument(
        "--num-query-groups", type=int, default=1, help="groups of --group-query-attention"
    )
    group.add_argument("--swiglu", action="store_true", help="gated SiLU instead of GELU")
    group.add_argument("--squared-relu", action="store_true", help="squared ReLU instead of GELU")
    group.add_argument(
        "--openai-gelu", action="store_true",
        help="GELU by tanh, as GPT-2's; without it GELU is exact on a CPU, by tanh where fused",
    )  # fmt: skip
    group.add_argument(
        "--normalization", choices=("LayerNorm", "RMSNorm", "MXNorm"), default="LayerNorm",
        help="MXNorm: RMSNorm by the block scales of what is quantized",
    )  # fmt: skip
    group.add_argument("--mxnorm-p", type=float, default=2.0, help="exponent of MXNorm's mean")
    group.add_argument("--norm-epsilon", type=float, default=1e-5, help="added to the variance")
    group.add_argument("--disable-bias-linear", action="store_true", help="no biases")
    group.add_argument(
        "--position-embedding-type", choices=("learned_absolute", "rope", "none"),
        default="learned_absolute", help="none is for hybrids",
    )  # fmt: skip
    group.add_argument("--rotary-base", type=int, default=10000, help="base of rope's wavelengths")
    group.add_argument(
        "--rotary-percent", type=float, default=1.0, help="share of a head that turns, 0 to 1"
    )
    group.add_argument(
        "--use-rope-scaling", action="store_true",
        help="lower the low frequencies as Llama 3.1 does, from 8192 positions on",
    )  # fmt: skip
    group.add_argument(
        "--rope-scaling-factor", type=float, default=8.0, help="what they are divided by"
    )
    group.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true",
        help="an output layer of its own, instead of the embedding's weights",
    )  # fmt: skip
    group.add_argument("--max-position-embeddings", type=int, help="(default: --seq-length)")
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="the vocabulary is padded to a multiple",
    )
    group.add_argument(
        "--init-method-std", type=float, default=0.02, help="standard deviation of first weights"
    )
    group.add_argument("--hidden-dropout", type=float, default=0.0, help="probability, 0 to 1")
    group.add_argument("--attention-dropout", type=float, default=0.0, help="probability, 0 to 1")
    add_experts(parser)
    add_hybrid(parser)
