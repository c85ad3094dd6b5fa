"""Arguments of mixture-of-experts layers: Megatron-LM's names and meanings."""

import argparse
import ast
from argparse import Namespace

from megatron_lowbit.errors import require

# Where a model has experts, what a checkpoint must agree on.
EXPERT_SHAPE = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq",
                "moe_router_pre_softmax")  # fmt: skip
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


def add_experts(parser: argparse.ArgumentParser) -> None:
    """The arguments, as a group of their own."""
    group = parser.add_argument_group("experts")
    group.add_argument("--num-experts", type=int, help="experts of each mixture-of-experts layer")
    group.add_argument("--moe-router-topk", type=int, default=2, help="experts of each token")
    group.add_argument(
        "--moe-router-pre-softmax", action="store_true",
        help="softmax over all experts, before the top k are chosen",
    )  # fmt: skip
    group.add_argument(
        "--moe-ffn-hidden-size", type=int, help="of an expert (default: --ffn-hidden-size)"
    )
    group.add_argument(
        "--moe-layer-freq", type=layer_frequency, default=1, metavar="N_OR_LIST",
        help="experts in every N-th layer, or 1 (experts) and 0 by layer: ([0]+[1]*3)",
    )  # fmt: skip
    group.add_argument(
        "--moe-router-load-balancing-type", choices=_BALANCING, default="aux_loss",
        help="what keeps experts evenly used",
    )  # fmt: skip
    group.add_argument(
        "--moe-aux-loss-coeff", type=float, default=0.0, help="weight of a balancing loss"
    )


def layer_frequency(text: str) -> int | list[int]:
    """N, or the list that an expression of lists, ``+`` and ``*`` gives.

    Raises ArgumentTypeError where the text is neither.
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        value = None
    if isinstance(value, int) and value > 0:
        return value
    if isinstance(value, list) and value and all(entry in (0, 1) for entry in value):
        return value
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a positive number nor a list of 0 and 1 such as ([0]+[1]*3)"
    )


def fill_experts(args: Namespace) -> None:
    """Defaults that follow from other arguments."""
    if args.num_experts is not None and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size


def check_experts(args: Namespace) -> None:
    """Raise UserError where the arguments do not fit together."""
    experts, parallel = args.num_experts, args.expert_model_parallel_size
    require(parallel > 0, f"--expert-model-parallel-size {parallel}: must be positive")
    if experts is None:
        require(parallel == 1, f"--expert-model-parallel-size {parallel} needs --num-experts")
        require(args.moe_ffn_hidden_size is None, "--moe-ffn-hidden-size needs --num-experts")
        return
    for name in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk"):
        value = getattr(args, name)
        require(value > 0, f"--{name.replace('_', '-')} {value}: must be positive")
    require(
        experts % parallel == 0,
        f"--num-experts {experts} is not divisible by --expert-model-parallel-size {parallel}",
    )
    _check_router(args)
    _check_layers(args)
    if args.tensor_model_parallel_size > 1:
        _check_tensor_parallel(args)


def _check_router(args: Namespace) -> None:
    topk, experts = args.moe_router_topk, args.num_experts
    require(topk <= experts, f"--moe-router-topk {topk} exceeds --num-experts {experts}")
    require(
        topk > 1
        or args.moe_router_pre_softmax
        or args.moe_router_load_balancing_type == "sinkhorn",
        "--moe-router-topk 1 needs --moe-router-pre-softmax: after the choice one weight is 1",
    )


def _check_layers(args: Namespace) -> None:
    frequency = args.moe_layer_freq
    require(
        isinstance(frequency, int) or len(frequency) == args.num_layers,
        f"--moe-layer-freq {frequency}: --num-layers is {args.num_layers}",
    )


def _check_tensor_parallel(args: Namespace) -> None:
    ranks, wide = args.tensor_model_parallel_size, args.moe_ffn_hidden_size
    require(
        wide % ranks == 0,
        f"--moe-ffn-hidden-size {wide} is not divisible by --tensor-model-parallel-size {ranks}",
    )
    require(
        args.sequence_parallel,
        "--num-experts with --tensor-model-parallel-size above 1 needs --sequence-parallel",
    )
    require(
        args.disable_bias_linear,
        "--num-experts with --tensor-model-parallel-size above 1 needs --disable-bias-linear",
    )


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(entry) for entry in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluate(node.left) + _evaluate(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if max((side for side in (left, right) if isinstance(side, int)), default=0) > 10_000:
            raise ValueError("too long a list")
        return left * right
    raise ValueError("not a list expression")
