"""List the recipes, show their effect on a model, and write files for Megatron-LM's scripts."""

import argparse
from collections.abc import Sequence

from megatron_lowbit.command_line import (
    CommandParser,
    add_command,
    command_parser,
    expand_with_origin,
)
from megatron_lowbit.errors import UserError, require

_NAME = "name of a recipe, as in lowbit-recipes list"


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``list``, ``show NAME``, or ``te-config NAME`` for a GPT or hybrid model of some size."""
    args = _parser().parse_args(argv)
    # After the help, which needs no torch.
    from megatron_lowbit.recipes.show import list_recipes, show, write_te_config

    if args.command == "list":
        list_recipes()
    elif args.command == "te-config":
        write_te_config(args.recipe, _read_model(args.model))
    else:
        _check_shape(args)
        recipes = (args.forward, args.recipe) if args.forward else (args.recipe,)
        show(recipes, args.recipe_set, args if args.model is None else _read_model(args.model))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(prog="lowbit-recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_command(commands, "list", "list the recipes that come with the package")
    show = add_command(commands, "show", "show a recipe layer by layer and GEMM by GEMM")
    show.add_argument("recipe", metavar="NAME_OR_FILE", help=f"{_NAME}, or a YAML file")
    show.add_argument("--forward", metavar="NAME_OR_FILE", help="another recipe for fprop")
    show.add_argument(
        "--recipe-set", metavar="FIELD=VALUE", action="append", default=[],
        help="change a field of the recipe, as in training (repeatable)",
    )  # fmt: skip
    show.add_argument("--model", metavar="FILE", help="a model's arguments: a file or a preset")
    _add_shape(show)
    show.set_defaults(blocks_of_preset=False)
    config = add_command(
        commands,
        "te-config",
        "print a recipe as a file for Megatron-LM's --te-precision-config-file",
    )
    config.add_argument("recipe", metavar="NAME", help=_NAME)
    config.add_argument(
        "--model", metavar="FILE", required=True, help="a model's arguments: a file or a preset"
    )
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-layers", type=int, default=12, help="number of layers of a GPT")
    parser.add_argument(
        "--hybrid-layer-pattern",
        "--hybrid-override-pattern",  # Megatron-LM's deprecated name
        metavar="PATTERN",
        help="blocks of a hybrid: M for Mamba, * for attention, + for latent attention, - for an "
        "MLP, E for experts; blocks after / are for multi-token prediction",
    )
    parser.add_argument(
        "--q-lora-rank", type=int, metavar="N", help="rank of the queries of latent attention"
    )
    parser.add_argument(
        "--normalization", choices=("LayerNorm", "RMSNorm", "MXNorm"),
        help="norm of the model; layers with MXNorm are listed",
    )  # fmt: skip
    parser.add_argument(
        "--first-last-layers-bf16", action="store_true", help="replace the recipe's BF16 blocks"
    )
    for name, end in (("start", "first"), ("end", "last")):
        parser.add_argument(
            f"--num-layers-at-{name}-in-bf16", type=int, default=1, metavar="BLOCKS",
            help=f"{end} blocks that --first-last-layers-bf16 keeps in BF16",
        )  # fmt: skip


def _check_shape(args: argparse.Namespace) -> None:
    """Raise UserError for arguments about the model that would have no effect."""
    shape = CommandParser(add_help=False)
    _add_shape(shape)
    given = [a.option_strings[0] for a in shape._actions if getattr(args, a.dest) != a.default]
    ends = [flag for flag in given if flag.startswith("--num-layers-at-")]
    pattern = args.hybrid_layer_pattern or ""
    for idle, why in (
        (args.model and given, "--model gives the model"),
        (pattern and "--num-layers" in given and ["--num-layers"], "the pattern gives the layers"),
        ("+" not in pattern and args.q_lora_rank and ["--q-lora-rank"], "it needs + in a pattern"),
        (not args.first_last_layers_bf16 and ends, "it needs --first-last-layers-bf16"),
    ):
        require(not idle, f"{' '.join(idle or [])} has no effect: {why}")


def _read_model(file: str) -> argparse.Namespace:
    """Read layers, pattern and norm from a file of arguments, most of which say other things.

    ``file`` may begin with an at sign, as in training commands.
    """
    try:
        expanded = expand_with_origin([f"@{file.removeprefix('@')}"])
    except UserError as error:
        raise UserError(f"--model {str(error).removeprefix('@')}") from None
    parser = CommandParser(prog=file, allow_abbrev=False)
    _add_shape(parser)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--multi-latent-attention", action="store_true")
    args = parser.parse_known_args([word for word, _ in expanded])[0]
    blocks = ("--first-last-layers-bf16", "--num-layers-at-")
    args.blocks_of_preset = not any(
        word.startswith(blocks) for word, of_preset in expanded if not of_preset
    )
    return args
