"""The presets in examples/: their numbers against the papers', and the models they make."""

from argparse import Namespace
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_lowbit.arguments import front_parser, parse_arguments
from megatron_lowbit.arguments.parser import read_command_line
from megatron_lowbit.arguments.precision import Machine, translate_precision
from megatron_lowbit.megatron.run.dry_run import model_stages
from megatron_lowbit.planning.model import parameters, stages
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.recipes.command import main as show_recipe
from megatron_lowbit.recipes.show import model_layers

# isort: split
from megatron.training.training import destroy_global_state

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY_VOCABULARY = 4096


@dataclass(frozen=True)
class Published:
    """Statement of a paper about a model.

    Attributes:
        vocabulary: Padded. The papers do not give it: GPT-2's, Nemotron-H's and Llama's.
        parameters: As in the model's name.
        tolerance: Of ``parameters``, relative: names are rounded.
        tokens: In the whole training run.
        rounding: By how much ``tokens`` may be rounded.
        final_decay: Share of the iterations at the end in which WSD decays.
    """

    vocabulary: int
    parameters: float
    tolerance: float
    tokens: float
    rounding: float = 0.0
    final_decay: float | None = None


PRESETS = {
    # The name dates from shorter sequences and counts part of the tables; it is 356M here.
    "gpt-345m": Published(50304, 345e6, 0.04, 33e9),
    "gpt-1.3b": Published(50304, 1.3e9, 0.02, 40e9),
    "gpt-6.7b": Published(50304, 6.7e9, 0.01, 20e9),
    # 1.29B here; 0.54B of them are the two tables, whose size the paper does not give.
    "transformer-1.2b": Published(131072, 1.2e9, 0.08, 1e12, final_decay=0.15),
    "hybrid-8b": Published(131072, 8e9, 0.02, 1e12, final_decay=0.15),
    "hybrid-12b": Published(131072, 12e9, 0.03, 10e12, final_decay=0.20),
    # Llama 3's vocabulary would give its two tables alone 263M: the name fits with Llama 2's.
    "llama3-125m": Published(32000, 125e6, 0.01, 2.62e9, rounding=5e6),
    "llama3-1b": Published(128256, 1e9, 0.01, 20.97e9, rounding=5e6),
    "llama3-8b": Published(128256, 8e9, 0.01, 314.57e9, rounding=5e6),
    "llama3-70b": Published(128256, 70e9, 0.01, 15e12, rounding=1e7),
    "llama3-405b": Published(128256, 405e9, 0.01, 15.6e12, rounding=1e7),
    # 30.5B in total, of which 3.3B are active (its model card).
    "qwen3-30b-a3b": Published(151936, 30.5e9, 0.002, 36e12, rounding=1e7),
}
TWINS = {
    "gpt-tiny": ("gpt-345m", "gpt-1.3b", "gpt-6.7b"),
    "transformer-tiny": ("transformer-1.2b",),
    "hybrid-tiny": ("hybrid-8b", "hybrid-12b"),
    "llama3-tiny": ("llama3-125m", "llama3-1b", "llama3-8b"),
}
VOCABULARIES = {name: published.vocabulary for name, published in PRESETS.items()}
VOCABULARIES |= dict.fromkeys(TWINS, TINY_VOCABULARY)
KIND = (
    "swiglu", "squared_relu", "normalization", "layernorm_epsilon", "add_bias_linear",
    "position_embedding_type", "rotary_base", "rotary_percent", "group_query_attention",
    "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout",
    "lr_decay_style", "lr_wsd_decay_style", "adam_beta1", "adam_beta2", "weight_decay",
    "clip_grad",
)  # fmt: skip


@cache
def parse(name: str, *more: str) -> Namespace:
    # Megatron-LM's null tokenizer adds one token.
    vocabulary = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARIES[name] - 1)]
    try:
        # Runs of trillions of tokens need more memory for the index of samples than most machines.
        with patch("megatron_lowbit.arguments.values._check_index"):
            return parse_arguments(
                [f"@{EXAMPLES / name}.args", "--data-path", "unread", *vocabulary, *more]
            )
    finally:
        destroy_global_state()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_as_large_as_the_paper_says(name):
    published = PRESETS[name]
    count = parameter_count(parse(name), published.vocabulary)
    assert count == pytest.approx(published.parameters, rel=published.tolerance)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_on_as_many_tokens_as_the_paper_says(name):
    args, published = parse(name), PRESETS[name]
    iteration = args.global_batch_size * args.seq_length
    missed = abs(args.train_iters * iteration - published.tokens)
    assert missed <= max(iteration / 2, published.rounding)
    if published.final_decay is not None:
        assert args.lr_wsd_decay_iters == round(published.final_decay * args.train_iters)
    if name.startswith("gpt"):
        assert args.lr_warmup_iters == round(375e6 / iteration)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_preset_leaves_recipe_data_and_machine_open(name):
    args, text = parse(name), (EXAMPLES / f"{name}.args").read_text()
    assert (args.precision_recipe, args.recipe_set, args.fp4, args.fp8) == (None, [], None, None)
    given = " ".join(line for line in text.splitlines() if not line.startswith("#"))
    for option in ("recipe", "data-path", "tokenizer-model", "vocab", "parallel"):
        assert option not in given
    assert not args.bf16 and not args.fp16
    assert args.micro_batch_size <= 4
    assert args.global_batch_size % args.micro_batch_size == 0


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("hybrid-12b", {0, 1, *range(54, 62)}),
        ("hybrid-8b", set(range(44, 52))),
        ("transformer-1.2b", set(range(16, 20))),
    ],
)
@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_a_preset_keeps_the_blocks_in_bf16_that_the_paper_keeps(name, blocks, recipe):
    """Appendix A, and the captions of figures 8 to 11 for the 1.2B model."""
    args = parse(name, "--fp4-recipe", recipe)
    chosen = load_recipe(*args.precision_recipe, args.recipe_set)
    (model,) = model_stages(args)
    kept = [layer for layer in model.layers if not chosen.precision_for(layer).quantized]
    assert {layer.block for layer in kept} == blocks
    each = 4 if name == "transformer-1.2b" else 2
    assert len(kept) == each * len(blocks)


parser = cache(front_parser)
RECIPES = {
    # The paper's NVFP4 (104, 88 and 64 layers) and what keeps a share of the blocks as it does.
    **dict.fromkeys(["nvfp4", "mxfp4", "nvfp4-fold", "nvfp4-late-bf16"], (104, 88, 64)),
    # The paper's FP8 reference (appendix A.1): the first block and the last two in BF16.
    "fp8-tile-e4m3": (118, 98, 68),
    # Recipes that quantize every block.
    **dict.fromkeys(["fp8-tile", "mxfp8", "fp8-delayed", "mxfp4-backward"], (124, 104, 80)),
    "bf16": (0, 0, 0),
}
"""Quantized layers of hybrid-12b, hybrid-8b and transformer-1.2b, of 124, 104 and 80."""


def translated(words: str) -> tuple[Namespace, list[str], list[str]]:
    """Return the arguments of a command line on a CPU, overrides of the recipe, and lines."""
    args, line = read_command_line(parser(), words.split())
    lines = translate_precision(args, line, Machine(None, transformer_engine=False))
    return args, parser().parse_args(line.tokens()).recipe_set, lines


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("number", "name"), [(0, "hybrid-12b"), (1, "hybrid-8b"), (2, "transformer-1.2b")]
)
def test_a_presets_blocks_are_for_recipes_that_keep_a_share_of_blocks(number, name, recipe):
    args, overrides, lines = translated(f"@{EXAMPLES / name}.args --precision-recipe {recipe}")
    layers = model_layers(args.hybrid_layer_pattern, args.num_layers)
    chosen = load_recipe(recipe, overrides)
    assert sum(chosen.precision_for(layer).quantized for layer in layers) == RECIPES[recipe][number]
    kept = recipe in ("fp8-tile-e4m3", "fp8-tile", "mxfp8", "fp8-delayed", "mxfp4-backward")
    assert any("of the preset" in line for line in lines) == kept


@pytest.mark.parametrize("more", ["", " --num-layers-at-end-in-bf16 8"])
def test_blocks_that_a_user_asks_for_are_for_every_recipe(tmp_path, more):
    """On the command line, or in a file of the user's own, which may take in a preset."""
    preset = f"@{EXAMPLES / 'hybrid-12b'}.args"
    own = tmp_path / "own.args"
    own.write_text(f"{preset} {'' if more else '--first-last-layers-bf16'}")
    _, overrides, _ = translated(f"@{own} --precision-recipe fp8-tile-e4m3{more}")
    assert overrides == ["bf16_blocks.first=2", "bf16_blocks.last=8"]


def test_a_copy_of_a_preset_is_shown_as_the_preset(tmp_path, capsys):
    text = (EXAMPLES / "hybrid-12b.args").read_text()
    own = tmp_path / "mine.args"
    for content, quantized in ((text, 118), (text.replace("--lr 4.5e-4", "--lr 1e-4"), 104)):
        own.write_text(content)
        show_recipe(["show", "fp8-tile-e4m3", "--model", str(own)])
        assert f"{quantized} of 124 linear layers quantized" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "blocks"),
    {"hybrid-8b": (24, 4, 24), "hybrid-12b": (28, 6, 28), "hybrid-tiny": (6, 1, 6)}.items(),
)
def test_hybrids_have_the_papers_blocks_and_attention_in_the_middle(name, blocks):
    pattern = parse(name).hybrid_layer_pattern
    assert tuple(map(pattern.count, "M*-")) == blocks
    # The papers' first two and last eight blocks are MLPs or Mamba-2.
    assert "*" not in pattern[:2] + pattern[-8:]


@pytest.mark.parametrize(
    ("tiny", "large"), [(tiny, large) for tiny, models in TWINS.items() for large in models]
)
def test_a_tiny_twin_is_of_the_same_kind(tiny, large):
    twin, model = parse(tiny), parse(large)
    assert {name: getattr(twin, name) for name in KIND} == {
        name: getattr(model, name) for name in KIND
    }
    assert twin.min_lr / twin.lr == pytest.approx(model.min_lr / model.lr)
    assert twin.seq_length <= 128 and 4 <= twin.global_batch_size <= 8 and twin.train_iters == 50
    assert parameter_count(twin, TINY_VOCABULARY) < 3e6


def parameter_count(args: Namespace, vocabulary: int) -> int:
    """Count the parameters of a model; tests/planning compares this with models that are built."""
    (parts,) = stages(args, load_recipe("bf16"))
    return parameters(args, parts, vocabulary).all


def test_a_token_of_qwen3_takes_3_3_billion_parameters():
    args = parse("qwen3-30b-a3b")
    active = Namespace(**vars(args) | {"num_experts": args.moe_router_topk})
    assert parameter_count(active, 151936) == pytest.approx(3.3e9, rel=0.02)
