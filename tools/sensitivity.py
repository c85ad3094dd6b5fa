r"""Find the linear layers that a recipe hurts most, and write a recipe that keeps them in BF16.

Example: python tools/sensitivity.py --recipe nvfp4 --keep 0.15 --output mine.yaml -- \
             @examples/gpt-30m.args --load runs/bf16 --data-path data/text \
             --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer

What follows -- is as in training; its precision, schedule and --save are not used. All linear
layers are quantized as the recipe says, its rules by position left out; layers are ranked by the
relative errors of their output and of their weight gradient, added. Weights stay as they are.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.table import Table

from megatron_lowbit.command_line import (
    CommandParser,
    GivenArguments,
    expand_files,
    split_at_dashes,
)
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import exit_on_user_error, require
from megatron_lowbit.recipes.sensitive import keeping, most_sensitive

OUTPUT, WEIGHT_GRADIENT = "fprop/error", "wgrad/error"
UNUSED = (
    "--precision-recipe", "--recipe-set", "--fp8-recipe", "--fp8-format", "--fp4-recipe",
    "--fp4-format", "--first-last-layers-bf16", "--num-layers-at-start-in-bf16",
    "--num-layers-at-end-in-bf16", "--log-quantization-error-interval", "--save", "--async-save",
    "--save-keep-last", "--tensorboard-dir", "--wandb-project", "--train-samples",
    "--rampup-batch-size", "--lr", "--min-lr", "--lr-decay-style", "--lr-decay-iters",
    "--lr-decay-samples", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--lr-warmup-iters",
    "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-init", "--exit-interval",
)  # fmt: skip
"""Arguments of training that measuring replaces or has no use for."""


class Layer(NamedTuple):
    """Mean relative errors of a layer's output and weight gradient, and its number of weights."""

    output: float
    weight_gradient: float
    weights: int

    @property
    def score(self) -> float:
        """Figure by which layers are ranked."""
        return self.output + self.weight_gradient


class Sensitivity:
    """A hook of the model that measures its layers in every iteration."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._errors: dict[str, list[tuple[float, float]]] = {}
        self._weights: dict[str, int] = {}

    def __call__(self, chunks: list) -> list:
        """Measure these chunks from now on; return them."""
        import torch.distributed as dist

        from megatron_lowbit.megatron.quantization_log import Measurement
        from megatron_lowbit.megatron.steps import steps_of

        mine = {
            module.layer_state.plan.layer.path: module.weight.numel() * module.tp_group.size()
            for chunk in chunks
            for module in chunk.modules()
            if hasattr(module, "layer_state")
        }
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        for weights in gathered:
            self._weights |= weights

        def begin_step(iteration: int, training: bool) -> None:
            Measurement(chunks, iteration, self._add)

        steps_of(self._args, chunks).listeners.append(begin_step)
        return chunks

    def _add(self, iteration: int, errors: dict[str, dict[str, float]]) -> None:
        for path, figures in errors.items():
            found = figures.get(OUTPUT, 0.0), figures.get(WEIGHT_GRADIENT, 0.0)
            self._errors.setdefault(path, []).append(found)

    def layers(self) -> dict[str, Layer]:
        """Return what was measured, by the layers' paths."""
        return {
            path: Layer(*(sum(of) / len(found) for of in zip(*found, strict=True)), weights)
            for path, found in self._errors.items()
            for weights in [self._weights[path]]
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, and write what the command line names."""
    own, training = split_at_dashes(argv)
    parser = CommandParser(description=__doc__)
    parser.add_argument("--recipe", required=True, metavar="NAME_OR_FILE", help="recipe to measure")
    parser.add_argument("--batches", type=int, default=4, help="number of batches to measure")
    parser.add_argument(
        "--keep", type=float, default=0.15, help="largest share of the weights to keep"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.yaml", help="recipe to write")
    args = parser.parse_args(own)
    require(0 <= args.keep <= 1, f"--keep {args.keep:g}: a share of the weights is 0 to 1")
    require(args.batches > 0, f"--batches {args.batches}: must be positive")
    require("--load" in training, "give training's arguments, --load among them, after --")
    with _everywhere(args.recipe) as recipe:
        found, is_first_rank = _measure(training, recipe, args.batches)
    if is_first_rank:
        _report(args, found)


@contextmanager
def _everywhere(recipe: str) -> Iterator[str]:
    """Write the recipe without its rules by position to a temporary file; yield its name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "everywhere.yaml"
        file.write_text(yaml.safe_dump(keeping(recipe, []), sort_keys=False))
        yield str(file)


def _measure(training: list[str], recipe: str, batches: int) -> tuple[dict[str, Layer], bool]:
    """Run Megatron-LM's loop with a learning rate of zero; return layers, and True on rank 0."""
    # As slow as training to import.
    from megatron_lowbit.megatron import pretrain
    from megatron_lowbit.megatron.arguments import front_parser, parse_arguments

    given = GivenArguments(front_parser(), expand_files(training))
    for flag in UNUSED:
        given.remove(flag)
    fixed = ["--precision-recipe", recipe, "--finetune", "--lr", "0", "--lr-decay-style",
             "constant", "--train-iters", str(batches), "--eval-iters", "0",
             "--exit-on-missing-checkpoint"]  # fmt: skip
    args = parse_arguments([*given.tokens(), *fixed])
    sensitivity = Sensitivity(args)
    with pretrain.teardown(), pretrain.translate_assertions():
        pretrain.run(args, [sensitivity])
    return sensitivity.layers(), args.rank == 0


def _report(args: argparse.Namespace, found: dict[str, Layer]) -> None:
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
    plain_console(120).print(shown)
    if args.output is None:
        return
    recipe = keeping(args.recipe, kept)
    recipe["name"] = args.output.stem
    recipe["description"] = f"{args.recipe} with its {len(kept)} most sensitive layers in BF16"
    args.output.write_text(yaml.safe_dump(recipe, sort_keys=False, width=100))
    print(args.output)


if __name__ == "__main__":
    exit_on_user_error(main)
