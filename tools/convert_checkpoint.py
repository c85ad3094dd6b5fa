"""Checkpoints from Hugging Face's format to Megatron's and back.

    python tools/convert_checkpoint.py to-megatron FOLDER OUTPUT
    python tools/convert_checkpoint.py to-hugging-face CHECKPOINTS OUTPUT --norm-epsilon 1e-5

To go on training: pretrain_gpt.py @OUTPUT/model.args --load OUTPUT --finetune
--tokenizer-model OUTPUT/hugging_face ...
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lowbit.conversion.convert import DTYPES, SHARD_BYTES, to_hugging_face, to_megatron
from megatron_lowbit.conversion.layouts import LAYOUTS
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.conversion.verify import TOKENS, print_difference
from megatron_lowbit.errors import exit_on_user_error, require


def main(argv: Sequence[str] | None = None) -> None:
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("to-megatron", help="safetensors to torch_dist")
    back = commands.add_parser("to-hugging-face", help="torch_dist to safetensors")
    for command in (there, back):
        command.add_argument("source", type=Path)
        command.add_argument("output", type=Path)
        command.add_argument("--force", action="store_true", help="replace OUTPUT")
        command.add_argument(
            "--shard-bytes", type=int, default=SHARD_BYTES, help="the most in a file (%(default)s)"
        )
        command.add_argument(
            "--verify", action="store_true", help="compare logits of both sides, on the CPU"
        )
        command.add_argument(
            "--verify-tokens", type=int, nargs="+", default=TOKENS, metavar="ID",
            help="token ids for --verify",
        )  # fmt: skip
    back.add_argument("--norm-epsilon", type=float, default=1e-5, help="of training")
    back.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    back.add_argument("--carry", type=Path, metavar="FOLDER", help="its tokenizer comes along")
    back.add_argument(
        "--quantized", choices=LAYOUTS, help="store the weights that training quantized so"
    )
    back.add_argument(
        "--recipe", nargs="+", default=[], metavar="NAME_OR_FILE",
        help="for --quantized (default: training's); of two the first gives fprop",
    )  # fmt: skip
    back.add_argument("--recipe-set", metavar="FIELD=VALUE", action="append", default=[])
    args = parser.parse_args(argv)
    if args.command == "to-megatron":
        to_megatron(args.source, args.output, args.force, args.shard_bytes)
        if args.verify:
            print_difference(args.source, args.output, args.verify_tokens)
        return
    quantized = None
    if args.quantized:
        quantized = QuantizedAs(args.quantized, args.recipe, args.recipe_set)
    else:
        require(
            not (args.recipe or args.recipe_set), "--recipe and --recipe-set go with --quantized"
        )
    to_hugging_face(
        args.source, args.output, args.norm_epsilon, args.dtype, args.carry, args.shard_bytes,
        args.force, quantized,
    )  # fmt: skip
    if args.verify:
        print_difference(args.output, args.source, args.verify_tokens, quantized)


if __name__ == "__main__":
    exit_on_user_error(main)
