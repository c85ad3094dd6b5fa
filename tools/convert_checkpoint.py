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
from megatron_lowbit.errors import exit_on_user_error


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
    back.add_argument("--norm-epsilon", type=float, default=1e-5, help="of training")
    back.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    back.add_argument("--carry", type=Path, metavar="FOLDER", help="its tokenizer comes along")
    back.add_argument(
        "--shard-bytes", type=int, default=SHARD_BYTES, help="the most in a file (%(default)s)"
    )
    args = parser.parse_args(argv)
    if args.command == "to-megatron":
        to_megatron(args.source, args.output, args.force)
        return
    to_hugging_face(
        args.source, args.output, args.norm_epsilon, args.dtype, args.carry, args.shard_bytes,
        args.force,
    )  # fmt: skip


if __name__ == "__main__":
    exit_on_user_error(main)
