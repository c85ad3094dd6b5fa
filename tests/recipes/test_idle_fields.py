"""Every field of a recipe has an effect or is refused, in a file and on the command line."""

import pytest
import torch
import yaml

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import FORMATS, Quantizer, Rounding, format_by_name
from megatron_lowbit.numerics.randomness import Draw
from megatron_lowbit.recipes import load_recipe, load_recipes
from megatron_lowbit.recipes.load import apply_override, read_recipe

TENSOR, FOLDS, READ = "tensor scale", "scales that fold", "no GEMM"
IDLE = [
    ("fp8-tile", "amax_history.length=16", TENSOR),
    ("fp8-tile", "amax_history={length: 16, algorithm: average, just_in_time: 1000}", TENSOR),
    ("mxfp4", "amax_history={}", TENSOR),
    ("fp8-tile", "tensor_scale=group", TENSOR),
    ("fp8-row", "tensor_scale=group", TENSOR),
    ("mxfp8", "tensor_scale=group", TENSOR),
    ("nvfp4", "folding=false", FOLDS),
    ("fp8-tile-e4m3", "wgrad.folding=false", FOLDS),
    ("qat-nvfp4", "grad.rounding=stochastic", READ),
    ("bf16", "configs.bf16.input.split_mean=true", READ),
    ("bf16", "configs.bf16.fallback=bf16", READ),
    ("nvfp4", "fprop.weight.axis=fprop", READ),
    ("nvfp4", "fprop.input.requantize=true", READ),
]


@pytest.mark.parametrize(("name", "override", "why"), IDLE)
def test_an_override_without_effect_is_refused(name, override, why):
    with pytest.raises(UserError, match=f"--recipe-set .*: without effect, .*{why}") as error:
        load_recipe(name, [override])
    assert override in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "override", "why"), IDLE)
def test_the_same_field_of_a_file_is_refused(tmp_path, name, override, why):
    raw = read_recipe(name)
    apply_override(raw, override)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match=rf"mine.yaml: configs\..*: without effect, .*{why}"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    "override",
    [
        "configs.nvpf4.grad.rounding=nearest",
        "configs.nvpf4={grad: {format: nvfp4}}",
        "configs.nvpf4={}",
    ],
)
def test_a_config_that_no_matcher_has_is_refused(override):
    """A typo in the name of a config makes another one; of a file it may be for later."""
    message = "--recipe-set .*: without effect, no matcher has config 'nvpf4', but nvfp4, bf16"
    with pytest.raises(UserError, match=message):
        load_recipe("nvfp4", [override])
    load_recipe("nvfp4", [override, "bf16_blocks.config=nvpf4"])
    load_recipe("nvfp4", [override, "output_layer=nvpf4"])


@pytest.mark.parametrize("section", ["matchers", "switches"])
def test_what_is_not_there_is_not_removed(section):
    """A typo in the name of a switch would leave it in force."""
    name = {"matchers": "linears", "switches": "late"}[section]
    message = rf"--recipe-set .*=none: no '{name}x' to remove; {section} are .*{name}"
    with pytest.raises(UserError, match=message):
        load_recipe("nvfp4-late-bf16", [f"{section}.{name}x=none"])
    left = load_recipe("nvfp4-late-bf16", [f"{section}.{name}=none"])
    assert name not in [*left.matchers, *(switch.name for switch in left.switches)]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("nvfp4", ["grad.rounding=stochastic"]),  # as it is
        ("nvfp4", ["wgrad.grad.rounding=stochastic"]),
        ("fp8-tile", ["tensor_scale=shard"]),  # the defaults
        ("fp8-tile", ["amax_history=null", "folding=true"]),
        ("nvfp4", ["grad.four_over_six=none"]),
        ("nvfp4", ["dgrad=null", "wgrad=null"]),  # leaves the role of gradients to no GEMM
        ("fp8-delayed", ["input.format=mxfp8-e4m3"]),  # others keep tensor scales
        ("fp8-delayed", [f"{role}.format=mxfp8-e4m3" for role in ("input", "weight", "grad")]),
    ],
)
def test_values_that_hold_already_are_accepted(name, overrides):
    load_recipe(name, overrides)


def test_a_field_that_one_of_two_configs_reads_is_accepted():
    second = "configs.tiles={input: {format: fp8-1x128-e4m3}, weight: {format: fp8-128x128-e4m3}}"
    found = load_recipe("nvfp4", [second, "output_layer=tiles", "tensor_scale=group"])
    assert found.configs["nvfp4"].fprop.tensor_scale == "group"


@pytest.mark.parametrize(
    ("override", "gemms"),
    [
        ("forward.grad.rounding=stochastic", "fprop"),
        ("forward.wgrad=null", "fprop"),
        ("backward.fprop={}", "dgrad and wgrad"),
        ("backward.fprop={weight: {rounding: nearest}}", "dgrad and wgrad"),
    ],
)
def test_a_field_of_the_pass_that_the_other_recipe_gives_is_refused(override, gemms):
    with pytest.raises(UserError, match=f"without effect, the .* recipe gives {gemms} only"):
        load_recipes(["fp8-tile", "mxfp4-backward"], [override])


def test_fields_of_its_own_pass_are_accepted():
    overrides = ["forward.input.scale_format=fp32", "backward.grad.rounding=nearest"]
    combined = load_recipes(["fp8-tile", "mxfp4-backward"], overrides)
    assert combined.configs["fp8"].fprop.lhs.format.scale_format == "fp32"
    assert combined.backward.configs["mxfp4"].dgrad.lhs.rounding is Rounding.NEAREST_EVEN


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (name, option, value)
        for name, format in FORMATS.items()
        for option, values in format.OPTIONS.items()
        for value in values[1:]
        if (name, option) != ("nvfp4-2d", "row_scaled")  # rows have no scale of square blocks
    ],
)
def test_every_option_of_a_format_changes_bits(name, option, value):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(128, 256, generator=generator) * torch.randn(128, 1, generator=generator).exp()
    # Scaled to 4, 3 and 2 these are exact, and scaled to 6 they are not: see four_over_six.
    x[:16] = torch.tensor([1.0, 0.75, 0.5]).repeat(86)[:256]
    plain, changed = (
        Quantizer(format, Rounding.NEAREST_EVEN)(x, draw=Draw(3)).dequantize()
        for format in (FORMATS[name], format_by_name(name, **{option: value}))
    )
    assert not torch.equal(plain, changed)
