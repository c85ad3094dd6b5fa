"""Plan a training run: memory, time and tokens a second of its layouts, without starting it.

Example: lowbit-plan --gpu h200 --gpus 64 @examples/llama3-8b.args --fp4-recipe nvfp4 \\
             --vocab-size 128256
         lowbit-plan --gpu h200 --gpus 64 @examples/llama3-8b.args --vocab-size 128256 \\
             --recipes bf16,fp8-tile,nvfp4 --tokens 15e12

Every other argument is one of training, as pretrain_gpt.py takes it. All figures are calculated;
--figures shows what from, measured or not.
"""

import argparse
from collections.abc import Sequence

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.planning.hardware import SCANS, kinds


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of what the command line names.

    Raises:
        UserError: an argument, of this command's or of training's, that is wrong.
    """
    own, training = read_arguments(argv)
    # After the help, which needs no torch.
    from megatron_lowbit.planning.print_plan import print_plan

    print_plan(own, training)


def read_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's arguments, and those of training."""
    return _parser().parse_known_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpu", default="h200", help=", ".join(kinds()))
    parser.add_argument("--gpus", type=int, required=True, help="all of them")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="that NVLink joins")
    parser.add_argument("--top", type=int, default=10, help="layouts to show")
    parser.add_argument(
        "--recipes", metavar="NAME_OR_FILE,...", help="recipes to compare, by their fastest layouts"
    )
    parser.add_argument(
        "--tokens", type=float, help="tokens of the whole run, for its days (default: training's)"
    )
    parser.add_argument("--scan", choices=SCANS, default=SCANS[0], help="scan of hybrids")
    parser.add_argument(
        "--as-given", action="store_true", help="only the layout that training's arguments ask for"
    )
    parser.add_argument(
        "--figures", action="store_true", help="the GPU's figures and their sources"
    )
    return parser
