r"""Find the linear layers that a recipe hurts most, and write a recipe that keeps them in BF16.

Example: python tools/sensitivity.py --recipe nvfp4 --keep 0.15 --output mine.yaml -- \
             @examples/gpt-30m.args --load runs/bf16 --data-path data/text \
             --tokenizer-model data/tokenizer

What follows -- is as in training. All linear layers are quantized as the recipe says, its rules by
position left out; layers are ranked by the relative errors of their output and of their weight
gradient, added.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from megatron_lowbit.command_line import CommandParser, split_at_dashes
from megatron_lowbit.errors import exit_on_user_error, require
from megatron_lowbit.recipes.sensitive import keeping, most_sensitive


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, and write what the command line names."""
    own, training = split_at_dashes(argv)
    parser = CommandParser(description=__doc__)
    parser.add_argument("--recipe", required=True, metavar="NAME_OR_FILE", help="the one measured")
    parser.add_argument("--batches", type=int, default=4, help="batches measured")
    parser.add_argument(
        "--keep", type=float, default=0.15, help="largest share of the weights to keep"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.yaml", help="the new recipe")
    args = parser.parse_args(own)
    require(0 <= args.keep <= 1, f"--keep {args.keep:g}: a share of the weights is 0 to 1")
    require("--load" in training, "give training's arguments, --load among them, after --")
    with tempfile.TemporaryDirectory() as folder:
        everywhere = Path(folder) / "everywhere.yaml"
        everywhere.write_text(yaml.safe_dump(keeping(args.recipe, []), sort_keys=False))
        more = ["--precision-recipe", str(everywhere), "--finetune", "--lr", "1",
                "--lr-decay-style", "constant", "--lr-warmup-iters", "0",
                "--train-iters", str(args.batches), "--eval-iters", "0",
                "--exit-on-missing-checkpoint"]  # fmt: skip
        _measure([*training, *more], partial(_report, args))


def _measure(arguments: list[str], report) -> None:
    # As slow as training to import.
    from megatron_lowbit.training.arguments import parse_arguments
    from megatron_lowbit.training.distributed import rank
    from megatron_lowbit.training.pretrain import pretrain
    from megatron_lowbit.training.sensitivity import measure

    def work(run) -> None:
        found = measure(run)
        if rank() == 0:
            report(found)

    pretrain(parse_arguments(arguments), work=work)


def _report(args: argparse.Namespace, found: dict) -> None:
    scores = {path: layer.score for path, layer in found.items()}
    sizes = {path: layer.weights for path, layer in found.items()}
    kept = most_sensitive(scores, sizes, args.keep)
    shown = Table("layer", "output", "weight gradient", "share of weights", "kept")
    whole = sum(sizes.values())
    for path in sorted(scores, key=lambda path: -scores[path]):
        layer = found[path]
        cells = (f"{layer.output:.4f}", f"{layer.weight_gradient:.4f}",
                 f"{100 * layer.weights / whole:.2f}%")  # fmt: skip
        shown.add_row(path, *cells, "BF16" if path in kept else "")
    Console(width=120).print(shown)
    if args.output is None:
        return
    recipe = keeping(args.recipe, kept)
    recipe["name"] = args.output.stem
    recipe["description"] = f"{args.recipe} with its {len(kept)} most sensitive layers in BF16"
    args.output.write_text(yaml.safe_dump(recipe, sort_keys=False, width=100))
    print(args.output)


if __name__ == "__main__":
    exit_on_user_error(main)
