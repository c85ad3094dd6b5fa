"""Plan a training run: memory, time and tokens/s of its layouts, without starting it.

Example: lowbit-plan --gpu h200 --gpus 64 @examples/llama3-8b.args --fp4-recipe nvfp4 \\
             --vocab-size 128256
         lowbit-plan --gpu h200 --gpus 64 @examples/llama3-8b.args --vocab-size 128256 \\
             --recipes bf16 fp8-tile nvfp4 --tokens 15e12

Every other argument is a training argument, as for pretrain_gpt.py. All results are calculated;
--figures prints the figures of the GPU that they come from, with their sources.
"""

import argparse
from collections.abc import Sequence
from math import inf

from megatron_lowbit.command_line import command_parser
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import require
from megatron_lowbit.planning.hardware import SCANS, gpu_names


def main(argv: Sequence[str] | None = None) -> None:
    """Print the layouts of a run, fastest first, or the fastest under each of several recipes.

    Raises UserError for a wrong argument of this command or of training, and where no layout fits.
    """
    args, training = _parser().parse_known_args(argv)
    for name in ("gpus", "gpus_per_node", "top", "tokens"):
        value = getattr(args, name)
        message = f"--{name.replace('_', '-')} {value}: must be positive"
        require(value is None or 0 < value < inf, message)
    # After the help, which needs no torch.
    from megatron_lowbit.arguments.parser import front_parser, read_command_line
    from megatron_lowbit.planning.report import advice, report
    from megatron_lowbit.planning.search import plan_run

    choices: list[list[str]] = [[]]
    if args.recipes is not None:
        given, _ = read_command_line(front_parser(), training)
        require(
            given.precision_recipe is None,
            "--recipes excludes --precision-recipe: omit one of them",
        )
        choices = [["--precision-recipe", name] for name in args.recipes]
    runs = [
        plan_run([*training, *choice], args.gpu, args.gpus, args.gpus_per_node, args.as_given,
                 args.scan or SCANS[0], args.tokens)
        for choice in choices
    ]  # fmt: skip
    has_scan = runs[0].args.hybrid_layer_pattern is not None
    require(has_scan or args.scan is None, f"--scan {args.scan}: only hybrids have a scan; omit it")
    console = plain_console(130)
    for part in report(runs, args.top, args.figures):
        console.print(part, highlight=False)
    for line in advice(runs):
        console.print(line, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpu", default="h200", help=f"kind of GPU: {', '.join(gpu_names())}")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs joined by NVLink")
    parser.add_argument("--top", type=int, default=10, help="number of layouts to show")
    parser.add_argument(
        "--recipes", nargs="+", metavar="NAME_OR_FILE",
        help="recipes to compare, each by its fastest layout",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=float, help="tokens of the run (default: from its arguments)"
    )
    parser.add_argument("--scan", choices=SCANS, help=f"scan of hybrids (default: {SCANS[0]})")
    parser.add_argument(
        "--as-given", action="store_true", help="only the layout of the training arguments"
    )
    parser.add_argument(
        "--figures", action="store_true", help="print the figures of the GPU and their sources"
    )
    return parser
