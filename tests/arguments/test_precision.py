"""Choice between recipes of this project and Megatron-LM's own FP8 and FP4."""

from typing import NamedTuple

import pytest

from megatron_lowbit.arguments import front_parser
from megatron_lowbit.arguments.precision import (
    INSTALL_TRANSFORMER_ENGINE,
    Machine,
    check_layers,
    translate_precision,
)
from megatron_lowbit.command_line import CommandLine
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import format_by_name
from megatron_lowbit.recipes import HIGH_PRECISION, Layer, Recipe, load_recipes

CPU = Machine(None, transformer_engine=False)
AMPERE = Machine((8, 0), transformer_engine=True)
HOPPER = Machine((9, 0), transformer_engine=True)
HOPPER_WITHOUT_TE = Machine((9, 0), transformer_engine=False)
BLACKWELL = Machine((10, 0), transformer_engine=True)


class Choice(NamedTuple):
    """Recipes, words and lines that a command line became."""

    recipes: list[str]
    overrides: list[str]
    words: CommandLine
    lines: list[str]


@pytest.fixture(scope="module")
def parser():
    return front_parser()


@pytest.fixture
def choose(parser):
    def choose(line: str, machine: Machine) -> Choice:
        argv = line.split()
        words = CommandLine(parser, argv)
        lines = translate_precision(parser.parse_args(argv), words, machine)
        args = parser.parse_args(words.tokens())
        return Choice(args.precision_recipe or [], args.recipe_set, words, lines)

    return choose


def load(choice: Choice) -> Recipe:
    return load_recipes(choice.recipes, choice.overrides)


def precision_of_block(recipe: Recipe, block: int, num_blocks: int = 4):
    return recipe.precision_for(Layer(f"decoder.layers.{block}.mlp.linear_fc1", block, num_blocks))


@pytest.mark.parametrize("machine", [CPU, HOPPER])
def test_fp16_is_refused_where_a_recipe_quantizes(choose, machine):
    for line in ("--precision-recipe nvfp4", "--fp8-recipe mxfp8", "--fp8-format hybrid"):
        if machine is CPU or "format" not in line:
            with pytest.raises(UserError, match=r"--fp16 with a recipe: .* give --bf16"):
                choose(f"--fp16 {line}", machine)
    assert choose("--fp16 --precision-recipe bf16", machine).recipes == ["bf16"]
    assert choose("--fp16", machine).recipes == []


def test_combined_with_fp4_the_fp8_format_is_only_for_fprop(choose):
    """Fields of dgrad and wgrad would be without effect."""
    line = "--fp8-format e4m3 --fp8-recipe tensorwise --fp4-recipe nvfp4 --no-fp8-wgrad"
    found = choose(line, CPU)
    assert found.recipes == ["fp8-tensorwise", "nvfp4"] and found.overrides == []
    load(found)


def test_without_an_argument_nothing_is_quantized(choose):
    found = choose("--bf16", HOPPER)
    assert found.recipes == [] and found.words.tokens() == ["--bf16"]
    assert "nothing is quantized" in found.lines[0]


@pytest.mark.parametrize(
    ("line", "recipes"),
    [
        ("--fp4-recipe nvfp4", ("nvfp4",)),
        ("--fp4-recipe mxfp4-backward", ("mxfp4-backward",)),
        ("--fp8-recipe fp8-tile", ("fp8-tile",)),
        ("--fp8-recipe blockwise", ("fp8-tile",)),
        ("--fp8-recipe delayed", ("fp8-delayed",)),
        ("--fp8-recipe tensorwise", ("fp8-tensorwise",)),
        ("--fp8-recipe mxfp8", ("mxfp8",)),
        ("--fp4-recipe mxfp4-backward --fp8-recipe blockwise", ("fp8-tile", "mxfp4-backward")),
        ("--precision-recipe nvfp4", ("nvfp4",)),
        ("--precision-recipe fp8-tile nvfp4", ("fp8-tile", "nvfp4")),
    ],
)
@pytest.mark.parametrize("machine", [CPU, HOPPER, BLACKWELL])
def test_names_without_a_format_are_recipes(choose, line, recipes, machine):
    found = choose(line, machine)
    assert found.recipes == [*recipes] and found.overrides == []
    assert all(name in found.lines[0] for name in recipes)


@pytest.mark.parametrize(
    ("line", "machine"),
    [
        ("--fp8-format hybrid", HOPPER),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", HOPPER),
        ("--fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather", HOPPER),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", BLACKWELL),
        ("--fp4-format e2m1", BLACKWELL),
        ("--fp4-format e2m1 --fp4-recipe custom --fp4-quantizer-factory a.b", BLACKWELL),
        ("--fp8-format e4m3 --te-precision-config-file some.yaml", HOPPER),
    ],
)
def test_megatron_runs_its_own_formats_where_it_can(choose, line, machine):
    found = choose(line, machine)
    assert found.recipes == [] and found.words.tokens() == line.split()
    assert "Megatron-LM's own" in found.lines[0]


@pytest.mark.parametrize(
    ("line", "machine", "recipe", "reason"),
    [
        ("--fp8-format hybrid --fp8-recipe blockwise", CPU, "fp8-tile", "no CUDA device"),
        ("--fp8-format hybrid --fp8-recipe blockwise", AMPERE, "fp8-tile", "9.0, this GPU has 8.0"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", CPU, "fp8-tile-e4m3", "no CUDA device"),
        ("--fp8-format hybrid", HOPPER_WITHOUT_TE, "fp8-delayed", "not installed"),
        ("--fp8-format hybrid --transformer-impl local", HOPPER, "fp8-delayed", "local"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", HOPPER, "mxfp8", "10.0, this GPU has 9.0"),
        ("--fp4-format e2m1", HOPPER, "nvfp4", "10.0, this GPU has 9.0"),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", CPU, "fp8-tensorwise", "no CUDA device"),
    ],
)
def test_elsewhere_a_recipe_takes_their_place(choose, line, machine, recipe, reason):
    found = choose(line, machine)
    assert found.recipes == [recipe]
    assert reason in found.lines[0]
    assert not [word for word in found.words.tokens() if word.startswith(("--fp8", "--fp4"))]


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize(("format_", "grad"), [("hybrid", "e5m2"), ("e4m3", "e4m3")])
def test_the_recipe_has_the_elements_of_the_format(choose, name, format_, grad):
    recipe = load(choose(f"--fp8-format {format_} --fp8-recipe {name}", CPU))
    for block in range(4):
        precision = precision_of_block(recipe, block)
        assert precision.fprop.lhs.format.name.endswith("e4m3")
        assert precision.fprop.rhs.format.name.endswith("e4m3")
        assert precision.dgrad.lhs.format.name.endswith(grad)


def test_tiles_have_scales_of_transformer_engine(choose):
    for format_ in ("hybrid", "e4m3"):
        recipe = load(choose(f"--fp8-format {format_} --fp8-recipe blockwise", CPU))
        expected = format_by_name("fp8-1x128-e4m3", scale_format="pow2")
        assert precision_of_block(recipe, 0).fprop.lhs.format == expected


@pytest.mark.parametrize(
    ("line", "length"),
    [
        ("", 1),
        ("--fp8-amax-history-len 1024", 1),
        ("--fp8-amax-history-len 1024 --fp8-amax-compute-algo max", 1024),
    ],
)
def test_delayed_scaling_keeps_its_history(choose, line, length):
    found = choose(f"--fp8-format hybrid --no-fp8-wgrad {line}", CPU)
    precision = precision_of_block(load(found), 0)
    assert precision.fprop.delayed.length == length
    assert precision.wgrad == HIGH_PRECISION.wgrad


FIRST, START, END = (
    "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16",
)  # fmt: skip


def high_blocks(choice: Choice) -> list[int]:
    recipe = load(choice)
    return [block for block in range(4) if precision_of_block(recipe, block) == HIGH_PRECISION]


@pytest.mark.parametrize(
    ("line", "high"),
    [
        ("", []), (f"{START} 2", []), (FIRST, [0, 3]), (f"{FIRST} {START} 0", [3]),
        (f"{FIRST} {START} 0 {END} 0", []), (f"{FIRST} {START} 2 {END} 1", [0, 1, 3]),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "formats",
    [
        "--fp4-format e2m1",
        "--fp8-format e4m3 --fp8-recipe blockwise",
        "--fp8-format hybrid --fp8-recipe mxfp8",
    ],
)
def test_first_and_last_blocks_stay_in_bf16_as_asked(choose, formats, line, high):
    assert high_blocks(choose(f"{formats} {line}", CPU)) == high


@pytest.mark.parametrize(
    ("line", "high"),
    [
        (f"--fp8-recipe fp8-tile --fp4-recipe nvfp4 {FIRST}", [0, 3]),
        *((f"{named} {name} {FIRST} {START} 0 {END} 2", [2, 3])
          for named in ("--fp4-recipe", "--precision-recipe") for name in ("nvfp4", "fp8-tile")),
        # Two arguments remove them.
        (f"--precision-recipe nvfp4 {FIRST} {START} 0 {END} 0 --recipe-set bf16_blocks=none", []),
        ("--fp4-format e2m1 --recipe-set bf16_blocks=none", []),
    ],
)  # fmt: skip
def test_first_and_last_blocks_of_a_recipe(choose, line, high):
    assert high_blocks(choose(line, CPU)) == high


def test_recipes_whose_blocks_are_not_changed(choose):
    assert choose("--fp4-recipe nvfp4", CPU).overrides == []
    assert choose(f"--precision-recipe bf16 {FIRST}", CPU).overrides == []


@pytest.mark.parametrize(
    ("line", "machine", "recipes"),
    [
        ("--fp8-format hybrid --fp8-recipe blockwise --fp4-recipe mxfp4-backward", HOPPER,
         ("fp8-tile", "mxfp4-backward")),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp4-recipe nvfp4", BLACKWELL,
         ("mxfp8", "nvfp4")),
        ("--fp4-format e2m1 --fp8-recipe tensorwise", BLACKWELL, ("fp8-tensorwise", "nvfp4")),
    ],
)  # fmt: skip
def test_fp8_forward_and_fp4_backward_is_a_combination_of_recipes(choose, line, machine, recipes):
    found = choose(line, machine)
    assert found.recipes == [*recipes]
    precision = precision_of_block(load(found), 1)
    assert "8" in precision.fprop.lhs.format.name and "fp4" in precision.dgrad.lhs.format.name


def test_arguments_that_a_recipe_replaces_are_named(choose):
    line = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --fp8-margin 2 " \
        "--reuse-grad-buf-for-mxfp8-param-ag --moe-router-padding-for-fp8"  # fmt: skip
    found = choose(line, HOPPER)
    assert not [word for word in found.words.tokens() if "fp8-" in word]
    assert any("ignored --fp8-margin 2: " in line for line in found.lines)


@pytest.mark.parametrize(
    ("line", "stores"),
    [
        ("--precision-recipe fp8-tile --fp8-param-gather", True),
        ("--fp4-recipe nvfp4 --fp4-param-gather", True),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather", False),
        ("--fp8-recipe blockwise", False),
    ],
)
def test_weights_as_codes_are_asked_for_with_the_name_of_a_recipe(choose, line, stores):
    found = choose(line, HOPPER)
    assert ("--quantized-param-gather" in found.words) == stores
    taken = [line for line in found.lines if "taken as --quantized-param-gather" in line]
    assert len(taken) == stores


def test_own_settings_come_after_translated_ones(choose):
    line = "--fp8-format hybrid --fp8-recipe mxfp8 --recipe-set grad.format=mxfp8-e4m3"
    precision = precision_of_block(load(choose(line, CPU)), 0)
    assert precision.dgrad.lhs.format.name == "mxfp8-e4m3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--precision-recipe nvfp4 --fp4-recipe nvfp4", "--precision-recipe excludes --fp4-recipe"),
        ("--precision-recipe nvfp4 --fp8-format e4m3", "--precision-recipe excludes --fp8-format"),
        ("--precision-recipe a b c", "at most two"),
        ("--precision-recipe", "a YAML file or one of averis, bf16, fp8-delayed, "),
        ("--precision-recipe nvfp5", "did you mean nvfp4"),
        ("--fp4-recipe nvfp5", "did you mean nvfp4"),
        ("--fp8-format e4m3 --fp4-format e2m1", "excludes"),
        ("--fp8-format e4m3 --fp8-recipe fp8-tile", "named without --fp8-format"),
        ("--fp8-format e4m3 --fp8-recipe custom --fp8-quantizer-factory a.b", "cannot run here"),
        ("--fp8-format e4m3 --te-precision-config-file a.yaml", "cannot run here"),
        ("--fp4-recipe nvfp4 --te-precision-config-file a.yaml", "omit it"),
        ("--fp8-recipe custom", "needs --fp8-format"),
        ("--recipe-set grad.rounding=nearest", "--recipe-set needs a recipe"),
        ("--fp4-recipe nvfp4 --recipe-set grad.round=nearest", "grad.round"),
        ("--fp8-format e4m3 --recipe-set grad.rounding=nearest", "Megatron-LM's own code"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(choose, line, message):
    with pytest.raises(UserError, match=message) as refusal:
        choose(line, HOPPER if "own code" in message else CPU)
    assert "\n" not in str(refusal.value)


def test_layers_that_are_not_installed(parser):
    def check(line: str, machine: Machine) -> None:
        check_layers(parser.parse_args(line.split()), machine)

    for machine in (CPU, HOPPER):
        check("--bf16", machine)
    with pytest.raises(UserError, match="is not installed; give --transformer-impl local") as error:
        check("--bf16", HOPPER_WITHOUT_TE)
    assert str(error.value).endswith(INSTALL_TRANSFORMER_ENGINE)
    for allowed in ("--transformer-impl local", "--dry-run", "--spec module specification"):
        check(allowed, HOPPER_WITHOUT_TE)
