"""Arguments of hybrids of Mamba-2, attention and MLP blocks: Megatron-LM's names and meanings."""

import argparse
from argparse import Namespace

from megatron_lowbit.errors import require

# Where a model is a hybrid, what a checkpoint must agree on.
HYBRID_SHAPE = ("hybrid_override_pattern", "mamba_state_dim", "mamba_head_dim",
                "mamba_num_groups", "mamba_num_heads")  # fmt: skip
BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp"}
_EXPANSION = 2  # of megatron-core's mixer, where the number of heads is not given


def add_hybrid(parser: argparse.ArgumentParser) -> None:
    """The arguments, as a group of their own."""
    group = parser.add_argument_group("hybrids")
    group.add_argument(
        "--hybrid-override-pattern", metavar="PATTERN",
        help="a symbol for each block: M for Mamba-2, * for attention, - for an MLP",
    )  # fmt: skip
    group.add_argument("--mamba-state-dim", type=int, default=128, help="size of a head's state")
    group.add_argument("--mamba-head-dim", type=int, default=64, help="channels of a head")
    group.add_argument("--mamba-num-groups", type=int, default=8, help="heads of one share B, C")
    group.add_argument(
        "--mamba-num-heads", type=int, help="(default: 2 x hidden / --mamba-head-dim)"
    )


def mamba_heads(args: Namespace) -> int:
    """Heads of a Mamba-2 block."""
    return args.mamba_num_heads or _EXPANSION * args.hidden_size // args.mamba_head_dim


def require_hybrid(args: Namespace, wanted: bool) -> None:
    """Raise UserError where a GPT's arguments came to the hybrids' script, or the other way."""
    given = args.hybrid_override_pattern is not None
    require(given or not wanted, "pretrain_hybrid.py needs --hybrid-override-pattern")
    require(wanted or not given, "--hybrid-override-pattern: use pretrain_hybrid.py")


def check_hybrid(args: Namespace) -> None:
    """Raise UserError where the arguments do not fit together."""
    pattern = args.hybrid_override_pattern
    if pattern is None:
        return
    unknown = sorted(set(pattern) - set(BLOCKS))
    require(
        not unknown,
        f"--hybrid-override-pattern: no block is called {''.join(unknown[:1])!r}; "
        f"use {', '.join(BLOCKS)}",
    )
    require(
        len(pattern) == args.num_layers,
        f"--hybrid-override-pattern has {len(pattern)} blocks, --num-layers is {args.num_layers}",
    )
    for name in ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups"):
        value = getattr(args, name)
        require(value > 0, f"--{name.replace('_', '-')} {value}: must be positive")
    require(
        args.mamba_num_heads is not None
        or _EXPANSION * args.hidden_size % args.mamba_head_dim == 0,
        f"2 x --hidden-size {args.hidden_size} is not divisible by --mamba-head-dim "
        f"{args.mamba_head_dim}",
    )
    heads, groups, ranks = mamba_heads(args), args.mamba_num_groups, args.tensor_model_parallel_size
    require(
        heads > 0 and heads % groups == 0,
        f"{heads} Mamba heads are not divisible by --mamba-num-groups {groups}",
    )
    require(
        groups % ranks == 0,
        f"--mamba-num-groups {groups} is not divisible by --tensor-model-parallel-size {ranks}",
    )
    for name, why in (
        ("num_experts", "experts are for GPTs"),
        ("num_layers_per_virtual_pipeline_stage", "megatron-core has no virtual stages of hybrids"),
        ("recompute_granularity", "megatron-core does not recompute hybrids' blocks"),
    ):
        option = f"--{name.replace('_', '-')}"
        require(getattr(args, name) is None, f"{option} with --hybrid-override-pattern: {why}")
