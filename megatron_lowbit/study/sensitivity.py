"""Sensitivity of a checkpoint's linear layers to a recipe.

All linear layers in blocks are quantized as the recipe says, its rules by position ignored; layers
are ranked by the relative errors of their output and of their weight gradient, added. Weights stay
as they are.
"""

import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from rich.table import Table

from megatron_lowbit.command_line import CommandLine
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import require, say
from megatron_lowbit.folders import check_folder, replace_text
from megatron_lowbit.recipes.load import read_recipe

OUTPUT, WEIGHT_GRADIENT = "fprop/error", "wgrad/error"
UNUSED = (
    "--precision-recipe", "--recipe-set", "--fp8-recipe", "--fp8-format", "--fp4-recipe",
    "--fp4-format", "--first-last-layers-bf16", "--num-layers-at-start-in-bf16",
    "--num-layers-at-end-in-bf16", "--log-quantization-error-interval", "--save", "--async-save",
    "--save-keep-last", "--tensorboard-dir", "--wandb-project", "--train-samples",
    "--lr", "--min-lr", "--lr-decay-style", "--lr-decay-iters",
    "--lr-decay-samples", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--lr-warmup-iters",
    "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-init", "--exit-interval",
)  # fmt: skip
"""Arguments of training that measuring replaces or has no use for."""


class LayerErrors(NamedTuple):
    """Mean relative errors of a layer's output and weight gradient, and its number of weights."""

    output: float
    weight_gradient: float
    weights: int


def rank_layers(
    recipe: str, batches: int, share: float, output: Path | None, training: list[str]
) -> None:
    """Measure a checkpoint's layers, print their ranks, and write a recipe that spares the worst.

    Raises UserError for an invalid argument.

    Args:
        recipe: name or file of the recipe to measure.
        batches: number of batches to measure.
        share: largest share of the weights to keep in BF16.
        output: file of the recipe, or None for only the table.
        training: arguments of training, ``--load`` among them; its precision, schedule and
            ``--save`` are not used.
    """
    require(0 <= share <= 1, f"--keep {share:g}: a share of the weights is 0 to 1")
    require(batches > 0, f"--batches {batches}: must be positive")
    if output is not None:
        require(not os.path.lexists(output), f"--output {output} exists; give a new file")
        check_folder("--output", output.parent)
    # As slow as training to import.
    from megatron_lowbit.arguments.parser import front_parser, read_command_line

    _, words = read_command_line(front_parser(), training)
    require("--load" in words, "give training's arguments, --load among them, after --")
    with tempfile.TemporaryDirectory() as folder:
        everywhere = Path(folder) / "everywhere.yaml"
        raw = keep_in_high_precision(recipe, []) | {"output_layer": None}
        everywhere.write_text(yaml.safe_dump(raw, sort_keys=False))
        layers, is_first_rank = _measure(words, str(everywhere), batches)
    if is_first_rank:
        _report(recipe, share, output, layers)


def _measure(words: CommandLine, recipe: str, batches: int) -> tuple[dict[str, LayerErrors], bool]:
    """Run Megatron-LM's loop with a learning rate of zero; return layers, and True on rank 0."""
    from megatron_lowbit.arguments import parse_arguments
    from megatron_lowbit.megatron import pretrain
    from megatron_lowbit.megatron.features.logs import UNMEASURED, Measurement, groups_experts
    from megatron_lowbit.megatron.run.errors import gather_from_ranks, translate_assertions
    from megatron_lowbit.megatron.run.steps import run_after_backward, steps_of

    for flag in UNUSED:
        words.remove(flag)
    fixed = ["--precision-recipe", recipe, "--finetune", "--lr", "0", "--lr-decay-style",
             "constant", "--train-iters", str(batches), "--eval-iters", "0",
             "--exit-on-missing-checkpoint"]  # fmt: skip
    args = parse_arguments([*words.tokens(), *fixed])
    require(not groups_experts(args), f"{UNMEASURED}; add --transformer-impl local")
    errors: dict[str, list[tuple[float, float]]] = {}
    weights: dict[str, int] = {}

    def add(figures: dict[str, dict[str, float]]) -> None:
        for path, layer in figures.items():
            measured = layer.get(OUTPUT, 0.0), layer.get(WEIGHT_GRADIENT, 0.0)
            errors.setdefault(path, []).append(measured)

    def measure_every_step(chunks: list[Any]) -> list[Any]:
        mine = {
            module.layer_state.plan.layer.path: module.weight.numel() * module.tp_group.size()
            for chunk in chunks
            for module in chunk.modules()
            if hasattr(module, "layer_state")
        }
        for of_rank in gather_from_ranks(mine):
            weights.update(of_rank)

        def begin_step(iteration: int, training: bool) -> None:
            measurement = Measurement(chunks, iteration)
            run_after_backward(chunks, lambda: add(measurement.end()))

        steps_of(args, chunks).listeners.append(begin_step)
        return chunks

    with pretrain.teardown(), translate_assertions():
        pretrain.run(args, [measure_every_step])
    layers = {}
    for path, measured in errors.items():
        outputs, gradients = zip(*measured, strict=True)
        layers[path] = LayerErrors(fmean(outputs), fmean(gradients), weights[path])
    return layers, args.rank == 0


def keep_in_high_precision(name_or_path: str, paths: Sequence[str]) -> dict[str, Any]:
    """Return a recipe's raw YAML data with only the linear layers ``paths`` in high precision."""
    raw = read_recipe(name_or_path)
    kept = raw.get("output_layer")
    configs = {name: config for name, config in raw["configs"].items() if config or name == kept}
    matchers = {name: m for name, m in raw["matchers"].items() if m["config"] in configs}
    if paths:
        high, sensitive = _unused("high", configs), _unused("sensitive", matchers)
        pattern = f"^({'|'.join(map(re.escape, paths))})$"
        first = {"type": "regex", "pattern": pattern, "config": high, "enabled": True}
        configs, matchers = {**configs, high: {}}, {sensitive: first, **matchers}
    return {**raw, "configs": configs, "matchers": matchers}


def _unused(name: str, names: Collection[str]) -> str:
    """Return a name, made longer until it is not among the names of the recipe."""
    return name if name not in names else _unused(f"{name}-", names)


def most_sensitive(
    scores: Mapping[str, float], sizes: Mapping[str, int], share: float
) -> list[str]:
    """Return the layers with the largest scores, as far as they fit into a share of all weights."""
    left, chosen = share * sum(sizes.values()), []
    for path in sorted(scores, key=lambda path: -scores[path]):
        if sizes[path] <= left:
            chosen.append(path)
            left -= sizes[path]
    return chosen


def _report(recipe: str, share: float, output: Path | None, layers: dict[str, LayerErrors]) -> None:
    scores = {path: layer.output + layer.weight_gradient for path, layer in layers.items()}
    sizes = {path: layer.weights for path, layer in layers.items()}
    spared = most_sensitive(scores, sizes, share)
    table = Table("layer", "output", "weight gradient", "share of weights", "kept")
    for path in sorted(scores, key=lambda path: -scores[path]):
        layer, share_of_all = layers[path], layers[path].weights / sum(sizes.values())
        table.add_row(
            path, f"{layer.output:.4f}", f"{layer.weight_gradient:.4f}",
            f"{100 * share_of_all:.2f}%", "BF16" if path in spared else "",
        )  # fmt: skip
    plain_console(120).print(table)
    if output is None:
        return
    document = keep_in_high_precision(recipe, spared)
    document["name"] = output.stem
    document["description"] = f"{recipe} with its {len(spared)} most sensitive layers in BF16"
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, yaml.safe_dump(document, sort_keys=False, width=100))
    say(str(output))
