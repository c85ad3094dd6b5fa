"""Shipped recipes, operand by operand, against a table written from their sources."""

import pytest

from megatron_lowbit.numerics import DelayedScaling, Hadamard
from megatron_lowbit.recipes import (
    HIGH_PRECISION,
    Layer,
    LinearPrecision,
    Progress,
    Recipe,
    load_combined,
    load_recipe,
    shipped_recipes,
)
from megatron_lowbit.recipes.show import model_layers

HIGH = ("high", "high")
FRESH_64 = Hadamard(64, "fresh", "fp32")
HISTORIES = {
    "fp8-delayed": DelayedScaling(length=16, algorithm="max", just_in_time=None),
    # dgrad and wgrad make no scale.
    ("qat-nvfp4-activations", "fprop"): DelayedScaling(16, "max", just_in_time=1),
}


UNUSED = {"block_scales": "e4m3", "four_over_six": "none", "max_scale": 448,
          "sixteen_seventeenths": False, "tensor_scaled": True, "row_scaled": False}  # fmt: skip


def says(quantizer) -> str:
    """Return everything a quantizer does: element, block, scaling options, rounding."""
    if quantizer is None:
        return "high"
    form = quantizer.format
    block = f"{form.block_rows}x{form.block}" if form.block > 1 else ""
    shared = "tensor" if form.tensor_scaled else "row" if form.row_scaled else ""
    words = ["mean +" if quantizer.splits_mean else "", form.element.name, block, shared]
    for name in form.OPTIONS:
        value = getattr(form, name)
        shown = {"three_quarters": "3/4" if value else "", "block": ""}
        off = name in UNUSED and value == UNUSED[name]
        words.append(shown.get(name, "" if off else str(value)))
    return " ".join(filter(None, [*words, quantizer.rounding.value]))


def operands(precision: LinearPrecision) -> dict[str, tuple[str, str]]:
    return {name: (says(g.lhs), says(g.rhs)) for name, g in precision.gemms.items()}


MXFP4_SR = "e2m1 1x32 floor 3/4 stochastic"
MXFP8 = "e4m3 1x32 rceil nearest"

GEMMS = ("fprop", "dgrad", "wgrad")
ROWS, SQUARES = "e2m1 1x16 tensor", "e2m1 16x16 tensor"
FOUR_OVER_SIX = "e2m1 1x16 tensor mse 256"


def gemms(fprop, dgrad, wgrad) -> dict[str, tuple[str, str]]:
    return dict(zip(GEMMS, (fprop, dgrad, wgrad), strict=True))


OPERANDS = {
    "bf16": gemms(HIGH, HIGH, HIGH),
    "fp8-tile": gemms(
        ("e4m3 1x128 pow2 nearest", "e4m3 128x128 pow2 nearest"),
        ("e5m2 1x128 pow2 nearest", "e4m3 128x128 pow2 nearest"),
        ("e5m2 1x128 pow2 nearest", "e4m3 1x128 pow2 nearest"),
    ),
    "fp8-tile-e4m3": gemms(
        ("e4m3 1x128 fp32 nearest", "e4m3 128x128 fp32 nearest"),
        ("e4m3 1x128 fp32 nearest", "e4m3 128x128 fp32 nearest"),
        ("e4m3 1x128 fp32 nearest", "e4m3 1x128 fp32 nearest"),
    ),
    "fp8-tensorwise": gemms(
        ("e4m3 tensor fp32 nearest", "e4m3 tensor fp32 nearest"),
        ("e5m2 tensor fp32 nearest", "e4m3 tensor fp32 nearest"),
        ("e5m2 tensor fp32 nearest", "e4m3 tensor fp32 nearest"),
    ),
    "fp8-row": dict.fromkeys(GEMMS, ("e4m3 row nearest",) * 2),
    "mxfp8": dict.fromkeys(GEMMS, (MXFP8, MXFP8)),
    "mxfp4-backward": gemms(HIGH, (MXFP4_SR, MXFP4_SR), (MXFP4_SR, MXFP4_SR)),
    "mxfp4": gemms(
        ("e2m1 1x32 rceil nearest", "e2m1 32x32 rceil nearest"),
        ("e2m1 1x32 rceil stochastic", "e2m1 32x32 rceil nearest"),
        ("e2m1 1x32 rceil stochastic", "e2m1 1x32 rceil nearest"),
    ),
    "nvfp4": gemms(
        (f"{ROWS} nearest", f"{SQUARES} nearest"),
        (f"{ROWS} stochastic", f"{SQUARES} nearest"),
        (f"{ROWS} stochastic", f"{ROWS} nearest"),
    ),
    "nvfp4-fold": gemms(
        (f"{ROWS} foldable nearest", f"{SQUARES} foldable nearest"),
        (f"{ROWS} foldable-up stochastic", f"{SQUARES} foldable nearest"),
        (f"{ROWS} foldable-up stochastic", f"{ROWS} foldable nearest"),
    ),
    "nvfp4-4over6": gemms(
        (f"{FOUR_OVER_SIX} nearest",) * 2,
        (f"{FOUR_OVER_SIX} stochastic", f"{FOUR_OVER_SIX} nearest"),
        (f"{FOUR_OVER_SIX} stochastic", f"{FOUR_OVER_SIX} nearest"),
    ),
    "nvfp4-4over6-te": gemms(
        (f"{ROWS} mae 256 nearest", f"{SQUARES} mae 256 nearest"),
        (f"{ROWS} stochastic", f"{SQUARES} mae 256 nearest"),
        (f"{ROWS} stochastic", f"{ROWS} mae 256 nearest"),
    ),
    "if4": gemms(
        (f"{ROWS} mse nearest",) * 2,
        (f"{ROWS} mse True stochastic", f"{ROWS} mse nearest"),
        (f"{ROWS} mse True stochastic", f"{ROWS} mse nearest"),
    ),
    "averis": gemms(
        (f"mean + {ROWS} nearest", f"{ROWS} nearest"),
        (f"mean + {ROWS} stochastic", f"{ROWS} nearest"),
        (f"mean + {ROWS} stochastic", f"mean + {ROWS} nearest"),
    ),
    "nvfp4-ue5m3": gemms(
        (f"{ROWS} nearest", f"{ROWS} nearest"),
        (f"{ROWS} stochastic", f"{ROWS} nearest"),
        (f"{ROWS} stochastic", f"{ROWS} nearest"),
    ),
    "quartet2": gemms(
        (f"{ROWS} nearest",) * 2,
        (f"{ROWS} quartet2 stochastic",) * 2,
        (f"{ROWS} quartet2 stochastic",) * 2,
    ),
    "torchao-v2": gemms(
        (f"{ROWS} nearest",) * 2,
        (f"{ROWS} torchao stochastic", f"{ROWS} nearest"),
        (f"{ROWS} torchao stochastic", f"{ROWS} nearest"),
    ),
    "nvfp4-backward": gemms(
        (MXFP8, MXFP8),
        (f"{ROWS} torchao stochastic", f"{ROWS} nearest"),
        (f"{ROWS} torchao stochastic", f"{ROWS} nearest"),
    ),
    "tetrajet2": gemms(
        ("e2m1 1x128 nearest",) * 2, ("e2m1 1x128 stochastic",) * 2, ("e2m1 1x128 stochastic",) * 2
    ),
}
OPERANDS["fp8-delayed"] = OPERANDS["fp8-tensorwise"]
OPERANDS["nemotron3-super"] = OPERANDS["nvfp4"]
NAMES = {  # formats whose blocks look like NVFP4's
    "if4": dict.fromkeys(GEMMS, ("if4", "if4")),
    "nvfp4-ue5m3": dict.fromkeys(GEMMS, ("nvfp4-ue5m3", "nvfp4-ue5m3")),
    "quartet2": gemms(("quartet2",) * 2, ("ms-eden",) * 2, ("ms-eden",) * 2),
    "torchao-v2": gemms(("nvfp4",) * 2, ("ms-eden", "nvfp4"), ("ms-eden", "nvfp4")),
    "nvfp4-backward": gemms(("mxfp8-e4m3",) * 2, ("ms-eden", "nvfp4"), ("ms-eden", "nvfp4")),
}
REUSED = {  # what GEMMs have of others: everything that is not named is False
    "averis": {"dgrad": {"rhs_of_fprop"}, "wgrad": {"rhs_of_fprop", "lhs_of_dgrad"}},
    "quartet2": {"dgrad": {"requantizes_rhs"}, "wgrad": {"requantizes_rhs"}},
    "torchao-v2": {"dgrad": {"requantizes_rhs"}},
}
REUSED["tetrajet2"], REUSED["nvfp4-backward"] = REUSED["quartet2"], REUSED["torchao-v2"]
LATE = {"nvfp4-late-bf16": "nvfp4", "torchao-v2-late-bf16": "torchao-v2"}
"""Recipes with a forward pass in BF16 at the end, and those that they are until then."""

FRESH_128 = Hadamard(128, "fresh", "bf16")
QAT = {  # weight, input
    "nvfp4": ("e2m1 1x16 tensor nearest", "e2m1 1x16 tensor nearest"),
    "mxfp4": ("e2m1 1x32 even nearest", "e2m1 1x32 even nearest"),
    "mxfp8": (MXFP8, MXFP8),
    "fp8-blocks": ("e4m3 128x128 pow2 nearest", "e4m3 1x128 pow2 nearest"),
    "int4-g32": ("int4 1x32 nearest", "e4m3 row nearest"),
    "int4-g128": ("int4 1x128 nearest", "e4m3 row nearest"),
}
for _name, (_weight, _input) in QAT.items():
    OPERANDS[f"qat-{_name}"] = gemms(("high", _weight), ("high", _weight), HIGH)
    OPERANDS[f"qat-{_name}-activations"] = gemms(
        (_input, _weight), ("high", _weight), ("high", _input)
    )

FIXED_16 = Hadamard(16, "fixed", "bf16")
HADAMARDS = {
    "mxfp4-backward": {"dgrad": FRESH_64, "wgrad": FRESH_64},
    "mxfp4": {"wgrad": Hadamard(32, "fixed", "bf16")},
    **{name: {"wgrad": FIXED_16} for name in ("nvfp4", "nvfp4-fold", "nvfp4-4over6", "if4")},
    **{
        name: {"dgrad": FRESH_128, "wgrad": FRESH_128}
        for name in ("quartet2", "torchao-v2", "nvfp4-backward")
    },
    "tetrajet2": {"dgrad": FIXED_16, "wgrad": FIXED_16},
}

KEPT = {  # blocks of the published model -> what stays in high precision, from the ends
    "fp8-tile-e4m3": (10, {0, 8, 9}),
    "mxfp4": (62, {0, 1, *range(54, 62)}),
    "nvfp4": (62, {0, 1, *range(54, 62)}),
    "nvfp4-fold": (62, {0, 1, *range(54, 62)}),
    "nvfp4-4over6": (24, {20, 21, 22, 23}),
    "if4": (24, {20, 21, 22, 23}),
    "nvfp4-4over6-te": (62, {0, 1, *range(54, 62)}),
}
for _table in (OPERANDS, NAMES, REUSED, HADAMARDS, KEPT):
    _table |= {late: _table[plain] for late, plain in LATE.items() if plain in _table}
HYBRID = "nemotron3-super"
"""A recipe that chooses layers by their names, and is tested on a model that has them."""
GPT = [name for name in OPERANDS if name != HYBRID]


def quantized(recipe: Recipe, blocks: int) -> tuple[set[int], set[LinearPrecision]]:
    """Return blocks in high precision, and the precisions that the others have, in a GPT."""
    layers = model_layers(None, blocks)
    recipe.check_matchers(layers)
    by_block = {}
    for layer in layers:
        by_block.setdefault(layer.block, set()).add(recipe.precision_for(layer))
    high = {block for block, found in by_block.items() if found == {HIGH_PRECISION}}
    low = [found for block, found in by_block.items() if block not in high]
    return high, set().union(*low)


def test_the_table_has_every_recipe():
    assert set(OPERANDS) == set(shipped_recipes())


@pytest.mark.parametrize("name", GPT)
def test_operands(name):
    """All linear layers that are quantized say the same, and it is the table's."""
    high, low = quantized(load_recipe(name), KEPT.get(name, (12, set()))[0])
    if name == "bf16":
        assert high == set(range(12)) and not low
    for precision in low or {HIGH_PRECISION}:
        assert operands(precision) == OPERANDS[name]
        for gemm, format in NAMES.get(name, {}).items():
            assert tuple(side.format.name for side in precision.gemms[gemm].sides) == format


@pytest.mark.parametrize("name", GPT)
def test_what_both_operands_share(name):
    """Transforms, tensor scales of the shard, amax histories, usual sums."""
    for config in load_recipe(name).configs.values():
        if not config.quantized:
            assert config == HIGH_PRECISION
            continue
        for gemm, precision in config.gemms.items():
            assert precision.hadamard == HADAMARDS.get(name, {}).get(gemm)
            assert precision.tensor_scale == "shard"
            assert precision.delayed == HISTORIES.get((name, gemm), HISTORIES.get(name))
            assert precision.accumulation is None
            uses = ("rhs_of_fprop", "requantizes_rhs", "lhs_of_dgrad")
            found = {use for use in uses if getattr(precision, use)}
            # QAT, straight through: dgrad and wgrad multiply by whatever fprop quantizes.
            qat = name.startswith("qat-") and gemm != "fprop" and precision.rhs is not None
            assert found == ({"rhs_of_fprop"} if qat else REUSED.get(name, {}).get(gemm, set()))


@pytest.mark.parametrize("name", GPT)
def test_blocks_in_high_precision(name):
    blocks, kept = KEPT.get(name, (12, set()))
    expected = set(range(12)) if name == "bf16" else kept
    assert quantized(load_recipe(name), blocks)[0] == expected


@pytest.mark.parametrize("name, blocks, kept", [("nvfp4", 62, 20), ("mxfp4", 62, 20)])
def test_published_counts_of_linears(name, blocks, kept):
    """The 12B hybrid keeps 20 of 124 linear layers: two a block of any kind."""
    recipe = load_recipe(name)
    for pattern in ("M*-", "-", "M-M*"):
        layers = model_layers((pattern * blocks)[:blocks], 1)
        high = [x for x in layers if not recipe.precision_for(x).quantized]
        assert (len(high), len(layers)) == (kept, 2 * blocks)


def test_layers_of_nemotron3_super():
    """Its published table, on paths of a hybrid with experts and multi-token prediction."""
    recipe, last = load_recipe(HYBRID), 87
    bf16 = {
        "decoder.layers.9.self_attention.linear_qkv", "decoder.layers.9.self_attention.linear_proj",
        "decoder.layers.3.mlp.fc1_latent_proj", "decoder.layers.3.mlp.fc2_latent_proj",
        "mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.local_experts.0.linear_fc1",
        f"decoder.layers.{last}.mlp.experts.local_experts.0.linear_fc1",
        f"decoder.layers.{last - 12}.mixer.out_proj",
    }  # fmt: skip
    nvfp4 = {
        "decoder.layers.0.mixer.in_proj", "decoder.layers.3.mlp.experts.local_experts.0.linear_fc1",
        "decoder.layers.3.mlp.experts.local_experts.511.linear_fc2",
        "decoder.layers.3.mlp.shared_experts.linear_fc1",
        f"decoder.layers.{last - 13}.mixer.in_proj",
    }  # fmt: skip
    configs = {"bf16": bf16, "nvfp4": nvfp4, "mxfp8": {"decoder.layers.0.mixer.out_proj"}}
    for config, paths in configs.items():
        for path in paths:
            number = int(path.partition("layers.")[2].partition(".")[0])
            assert recipe.config_for(Layer(path, number, last + 1)) == config, path
    assert operands(recipe.configs["nvfp4"]) == OPERANDS["nvfp4"]
    assert operands(recipe.configs["mxfp8"]) == OPERANDS["mxfp8"]
    assert recipe.configs["nvfp4"] == load_recipe("nvfp4").configs["nvfp4"]
    recipe.check_matchers(model_layers("M-M*-", 1))


@pytest.mark.parametrize("name", LATE)
def test_bf16_at_the_end(name):
    """Another recipe until four fifths of a run; fprop in high precision after that."""
    recipe, plain = load_recipe(name), load_recipe(LATE[name])
    assert recipe.configs["nvfp4"] == plain.configs["nvfp4"] and recipe.matchers == plain.matchers
    before, after = Progress(999, 0, 0.7999), Progress(1000, 0, 0.8)
    (low,) = quantized(recipe.at(before), 62)[1]
    assert low == plain.configs["nvfp4"]
    (low,) = quantized(recipe.at(after), 62)[1]
    assert operands(low) == OPERANDS[LATE[name]] | {"fprop": HIGH}


def test_mxfp4_backward_under_an_fp8_forward():
    """fprop is fp8-tile's, dgrad and wgrad are mxfp4-backward's, transforms with them."""
    recipe = load_combined("fp8-tile", "mxfp4-backward")
    high, low = quantized(recipe, 5)
    assert not high and len(low) == 1
    (precision,) = low
    assert operands(precision) == OPERANDS["mxfp4-backward"] | {
        "fprop": OPERANDS["fp8-tile"]["fprop"]
    }
    transforms = {gemm: p.hadamard for gemm, p in precision.gemms.items()}
    assert transforms == {"fprop": None} | HADAMARDS["mxfp4-backward"]


@pytest.mark.parametrize(
    "theirs, ours",
    [("blockwise", "fp8-tile"), ("delayed", "fp8-delayed"), ("tensorwise", "fp8-tensorwise")],
)
def test_megatrons_names(theirs, ours):
    assert load_recipe(theirs) == load_recipe(ours)
    assert load_recipe(theirs).name == ours
