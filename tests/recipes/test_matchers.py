"""Layers that a matcher matches, and the matcher that wins."""

from fractions import Fraction

import pytest
import yaml

from megatron_lowbit.numerics.precision import LinearPrecision
from megatron_lowbit.recipes import HIGH_PRECISION, Layer, Recipe, load, load_recipe
from megatron_lowbit.recipes.load import read_recipe
from megatron_lowbit.recipes.matchers import BlocksMatcher, GlobMatcher, RegexMatcher, count_blocks
from tests.recipes.conftest import refused

NAMES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def model(blocks: int) -> list[Layer]:
    return [
        Layer(f"decoder.layers.{block}.{name}", block, blocks)
        for block in range(blocks)
        for name in NAMES
    ]


def in_blocks(first=None, last=None, config="c", **more) -> BlocksMatcher:
    return BlocksMatcher(config=config, enabled=True, first=first, last=last, **more)


def glob(pattern, config="c") -> GlobMatcher:
    return GlobMatcher(config=config, enabled=True, pattern=pattern)


def regex(pattern, config="c") -> RegexMatcher:
    return RegexMatcher(config=config, enabled=True, pattern=pattern)


def bf16_blocks(recipe: Recipe, blocks: int) -> list[int]:
    layers = model(blocks)
    high = {x.block for x in layers if not recipe.precision_for(x).quantized}
    quantized = {x.block for x in layers if recipe.precision_for(x).quantized}
    assert not high & quantized  # a block is in one precision as a whole
    return sorted(high)


@pytest.mark.parametrize(
    "blocks, first, last",
    [
        (1, 1, 1), (2, 1, 1), *((blocks, 1, 1) for blocks in range(3, 12)), (12, 1, 2), (20, 1, 3),
        (32, 1, 4), (52, 2, 7), (62, 2, 8), (126, 4, 16),
    ],
)  # fmt: skip
def test_shipped_blocks(blocks, first, last):
    """62 blocks give the published 12B run's 2 + 8, and each end keeps one at least."""
    expected = sorted({*range(first), *range(blocks - last, blocks)})
    assert bf16_blocks(load_recipe("nvfp4"), blocks) == expected


def test_mxfp4_keeps_the_blocks_of_nvfp4():
    ends = {key: load_recipe(key).matchers["bf16_blocks"] for key in ("mxfp4", "nvfp4")}
    assert ends["mxfp4"] == ends["nvfp4"]


def test_blocks_of_the_command_line_switch_on_a_matcher_that_is_off(tmp_path):
    file = tmp_path / "mine.yaml"
    raw = read_recipe("nvfp4", ["bf16_blocks.enabled=false"])
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    assert bf16_blocks(load_recipe(str(file)), 10) == []
    changes = load.bf16_blocks(str(file), 2, 3)
    assert bf16_blocks(load_recipe(str(file), changes), 10) == [0, 1, 7, 8, 9]


def test_bf16_recipe_quantizes_nothing():
    assert bf16_blocks(load_recipe("bf16"), 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "extent, blocks, count",
    [
        (None, 10, 0), (0, 10, 0), (4, 10, 4), (12, 10, 12),
        (Fraction(1, 1000), 10, 1), (Fraction(1, 4), 10, 2), (Fraction(7, 20), 10, 4),
        (Fraction(26, 100), 10, 3), (Fraction(1), 10, 10),
    ],
)  # fmt: skip
def test_count_blocks(extent, blocks, count):
    assert count_blocks(extent, blocks) == count


def matched(matcher, layers) -> set[str]:
    return {layer.path for layer in layers if matcher.matches(layer)}


@pytest.mark.parametrize(
    "position, blocks",
    [
        ({"first": 2}, {0, 1}), ({"last": 1}, {5}), ({"first": 1, "last": 2}, {0, 4, 5}),
        ({"first": 0, "last": 0}, set()),
        # by number, negative from the end
        ({"numbers": (0,)}, {0}), ({"numbers": (3, 1)}, {1, 3}), ({"numbers": (-1,)}, {5}),
        ({"numbers": (-6, -2)}, {0, 4}), ({"numbers": (2, -1)}, {2, 5}),
        ({"numbers": (0, -6)}, {0}), ({"numbers": (6, -7)}, set()),
        ({"first": Fraction(1, 6), "last": 2, "numbers": (2, -4, -1)}, {0, 2, 4, 5}),
    ],
)  # fmt: skip
def test_blocks(position, blocks):
    matcher = in_blocks(**position)
    assert matched(matcher, model(6)) == {x.path for x in model(6) if x.block in blocks}
    matcher = in_blocks(kinds=("attention",), **position)
    expected = {x.path for x in model(6) if x.block in blocks and "attention" in x.path}
    assert len(expected) == 2 * len(blocks) and matched(matcher, model(6)) == expected


@pytest.mark.parametrize(
    ("position", "matches"),
    [
        ({"first": 1}, False), ({"last": 0}, False), ({"numbers": (0, 1, -1, -4)}, False),
        ({"first": 1, "numbers": (0,)}, False), ({"last": 1}, True),
    ],
)  # fmt: skip
def test_blocks_of_multi_token_prediction_come_after_the_last(position, matches):
    for depth in range(2):
        layer = Layer(f"mtp.layers.{depth}.eh_proj", 4 + depth, 4)
        assert in_blocks(**position).matches(layer) is matches


KINDS_OF_PATHS = {
    "decoder.layers.0.self_attention.linear_qkv": "attention",
    "decoder.layers.0.self_attention.linear_proj": "attention",
    "decoder.layers.0.cross_attention.linear_kv": "attention",
    "decoder.layers.0.mlp.linear_fc1": "mlp",
    "decoder.layers.11.mlp.linear_fc2": "mlp",
    "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1": "moe",
    "decoder.layers.0.mlp.experts.local_experts.15.linear_fc2": "moe",
    "decoder.layers.0.mlp.shared_experts.linear_fc1": "moe",
    "decoder.layers.3.mixer.in_proj": "mamba",
    "decoder.layers.3.mixer.out_proj": "mamba",
    "output_layer": "other",
}


@pytest.mark.parametrize("path, kind", KINDS_OF_PATHS.items())
def test_kinds(path, kind):
    """An expert's linears are the MoE's, not an MLP's, though their path says mlp too."""
    layer = Layer(path, 0, 12)
    assert layer.kind == kind
    for other in ("attention", "mlp", "moe", "mamba"):
        assert in_blocks(kinds=(other,)).matches(layer) is (other == kind)
    assert in_blocks(kinds=("attention", "mlp", "moe", "mamba")).matches(layer) is (kind != "other")


def test_kinds_and_numbers_by_recipe_set():
    """mxfp8 everywhere but in attention; nvfp4 with other blocks in high precision."""
    attention = "{type: blocks, kinds: [attention], config: high, enabled: true}"
    linears = '{type: glob, pattern: "*", config: mxfp8, enabled: true}'
    order = f"matchers={{attention: {attention}, linears: {linears}}}"
    recipe = load_recipe("mxfp8", ["configs.high={}", order])
    high = {x.path for x in model(12) if not recipe.precision_for(x).quantized}
    assert high == {x.path for x in model(12) if "attention" in x.path}
    recipe = load_recipe("nvfp4", ["bf16_blocks.kinds=[attention]", "bf16_blocks.numbers=[5]"])
    high = {x.path for x in model(12) if not recipe.precision_for(x).quantized}
    assert high == {
        x.path for x in model(12) if "attention" in x.path and x.block in (0, 5, 10, 11)
    }


@pytest.mark.parametrize("numbers", [(7, 0), (0, -9), (99,), (-100,)])
def test_numbers_outside_the_model(numbers):
    """In every model it is used with; the message has the number and the blocks there are."""
    recipe = Recipe("mine", "", CONFIGS, {"some": in_blocks(config="high", numbers=numbers)})
    recipe.check_matchers(model(200))
    outside = next(n for n in numbers if not -7 <= n < 7)
    parts = ["mine", "some", f"block {outside},", "0 to 6"]
    refused(recipe.check_matchers, model(7), parts=parts)


def test_glob_fits_the_whole_path():
    layers = model(12)
    assert matched(glob("*"), layers) == {x.path for x in layers}
    assert len(matched(glob("*.linear_fc?"), layers)) == 24
    assert len(matched(glob("decoder.layers.1.*"), layers)) == 4  # not 10, 11
    assert len(matched(glob("decoder.layers.1[01].*"), layers)) == 8
    for pattern in ("linear_fc1", "*FC1", "mlp.*"):
        assert not matched(glob(pattern), layers)


def test_regex_searches_the_path():
    layers = model(12)
    assert len(matched(regex("linear_fc1"), layers)) == 12
    assert len(matched(regex(r"layers\.1\."), layers)) == 4
    assert len(matched(regex(r"^decoder.*_(qkv|proj)$"), layers)) == 24
    assert not matched(regex("^mlp"), layers)


QUANTIZED = load_recipe("nvfp4").configs["nvfp4"]
CONFIGS = {"low": QUANTIZED, "high": LinearPrecision()}


def test_first_match_wins():
    matchers = {
        "fc1": glob("*linear_fc1", "high"),
        "edge": in_blocks(first=1, config="low"),
        "mlp": regex("mlp", "high"),
    }
    recipe = Recipe("r", "", CONFIGS, matchers)
    layers = {x.path.removeprefix("decoder.layers."): x for x in model(2)}
    expected = {
        "0.mlp.linear_fc1": ("fc1", False),
        "0.mlp.linear_fc2": ("edge", True),
        "0.self_attention.linear_qkv": ("edge", True),
        "1.mlp.linear_fc1": ("fc1", False),
        "1.mlp.linear_fc2": ("mlp", False),
    }
    for path, (name, quantized) in expected.items():
        assert recipe.matcher_for(layers[path]) == name
        assert recipe.precision_for(layers[path]).quantized is quantized
    unmatched = layers["1.self_attention.linear_qkv"]
    assert recipe.matcher_for(unmatched) is None
    assert recipe.precision_for(unmatched) == HIGH_PRECISION
    turned = Recipe("r", "", CONFIGS, dict(reversed(matchers.items())))
    assert turned.precision_for(layers["0.mlp.linear_fc1"]).quantized is False
    assert turned.matcher_for(layers["0.mlp.linear_fc1"]) == "mlp"


def test_a_matcher_that_matches_nothing_is_an_error():
    matchers = {"all": glob("*", "low"), "typo": glob("*.liner_fc1", "high")}
    recipe = Recipe("mine", "", CONFIGS, matchers)
    parts = ["mine", "typo", "12 linear layers", "decoder.layers.0.self_attention.linear_qkv"]
    refused(recipe.check_matchers, model(3), parts=parts)


def test_a_matcher_shadowed_by_earlier_ones_is_in_order():
    matchers = {"all": glob("*", "low"), "fc1": glob("*linear_fc1", "high")}
    Recipe("r", "", CONFIGS, matchers).check_matchers(model(3))
    load_recipe("nvfp4").check_matchers(model(1))
