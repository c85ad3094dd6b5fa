"""The key ``output_layer``: which config it names, where it decides, and what is printed."""

import pytest
import yaml

from megatron_lowbit.numerics.precision import HIGH_PRECISION
from megatron_lowbit.recipes import Layer, Progress, load_recipe, load_recipes
from megatron_lowbit.recipes.command import main
from megatron_lowbit.recipes.record import difference, recipe_from, record_of
from tests.recipes.conftest import refused

HEAD = Layer.output(12)
BLOCK = Layer("decoder.layers.5.mlp.linear_fc1", 5, 12)
MINE = """
name: mine
output_layer: wide
configs:
  low: {input: {format: nvfp4}, weight: {format: nvfp4}, grad: {format: nvfp4}}
  wide: {input: {format: mxfp8-e4m3}, weight: {format: fp8-tensor-e4m3}}
matchers:
  all: {type: glob, pattern: "*", config: low, enabled: true}
"""


@pytest.fixture
def mine(tmp_path):
    """File of a recipe whose output layer has a config of its own."""
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return str(path)


def test_no_rule_decides_about_the_output_layer(mine):
    """Rules for every path, or for the last blocks, do not quantize it."""
    for name in ("nvfp4", "fp8-tile"):
        recipe = load_recipe(name)
        assert recipe.precision_for(HEAD) == HIGH_PRECISION and not recipe.takes_output_layer
    recipe = load_recipe(mine)
    assert recipe.precision_for(HEAD) == recipe.configs["wide"]
    assert recipe.precision_for(BLOCK) == recipe.configs["low"]
    assert (recipe.matcher_names(HEAD), recipe.config_for(HEAD)) == ("output_layer", "wide")


@pytest.mark.parametrize("name", ["fp8-tile", "fp8-tensorwise", "fp8-row", "nvfp4", "bf16"])
def test_a_shipped_recipe_gives_its_precision(name):
    recipe = load_recipe("mxfp4", f"output_layer={name}")
    quantizing = [p for p in load_recipe(name).configs.values() if p.quantized]
    assert recipe.precision_for(HEAD) == (quantizing or [HIGH_PRECISION])[0]
    assert recipe.precision_for(BLOCK) == load_recipe("mxfp4").precision_for(BLOCK)


def test_a_change_of_all_configs_does_not_reach_a_shipped_recipe(mine):
    changes = ["grad.rounding=stochastic", "output_layer=mxfp8"]
    recipe = load_recipe(mine, changes)
    assert recipe.precision_for(HEAD) == load_recipe("mxfp8").configs["mxfp8"]
    assert recipe.precision_for(BLOCK).stochastic


@pytest.mark.parametrize("field", ["grad.rounding", "configs.mxfp8.grad.rounding"])
@pytest.mark.parametrize("of_file", [False, True])
def test_later_changes_reach_the_copy_of_a_shipped_config(mine, tmp_path, field, of_file):
    """Named by a change or by the recipe's file; the shipped recipe stays as it is."""
    name, changes = mine, ["output_layer=mxfp8"]
    if of_file:
        path, changes = tmp_path / "file.yaml", []
        path.write_text(MINE.replace("output_layer: wide", "output_layer: mxfp8"))
        name = str(path)
    recipe = load_recipe(name, [*changes, f"{field}=stochastic"])
    mxfp8 = load_recipe("mxfp8", "grad.rounding=stochastic").configs["mxfp8"]
    assert recipe.precision_for(HEAD) == mxfp8 != load_recipe("mxfp8").configs["mxfp8"]
    assert recipe.precision_for(BLOCK).stochastic == (field == "grad.rounding")


def test_none_removes_it(mine):
    for value in ("none", "null"):
        assert not load_recipe(mine, f"output_layer={value}").takes_output_layer
    assert load_recipe("nvfp4", "output_layer=none") == load_recipe("nvfp4")


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("fp8-til", ["output_layer", "'fp8-til'", "use one of fp8-tile"]),
        ("zzz", ["output_layer", "'zzz'", "use one of low, wide, ", "fp8-row", "nvfp4,"]),
        ("nemotron3-super", ["output_layer", "'nemotron3-super'", "use one of"]),  # two precisions
        ("nvfp4-late-bf16", ["output_layer", "'nvfp4-late-bf16'", "use one of"]),  # a switch
        ("mine.yaml", ["output_layer", "'mine.yaml'", "use one of"]),
        ("[fp8-tile]", ["output_layer"]),
        ("3", ["output_layer"]),
    ],
)
def test_wrong_names_name_the_key_and_the_choices(mine, value, parts):
    refused(load_recipe, mine, f"output_layer={value}", parts=["mine.yaml", *parts])


def test_switches_take_it_along():
    """The recipe that a switch names has no config for it."""
    recipe = load_recipe("nvfp4-late-bf16", "output_layer=fp8-tile")
    tile = load_recipe("fp8-tile").precision_for(BLOCK)
    early, late = (recipe.at(Progress(fraction=share)) for share in (0.0, 0.9))
    assert early.precision_for(HEAD) == tile
    assert late.precision_for(HEAD).fprop == HIGH_PRECISION.fprop
    assert late.precision_for(HEAD).wgrad == tile.wgrad


def test_each_of_two_recipes_gives_its_gemms():
    recipe = load_recipes(["fp8-tile", "mxfp4-backward"], ["backward.output_layer=mxfp8"])
    found, mxfp8 = recipe.precision_for(HEAD), load_recipe("mxfp8").configs["mxfp8"]
    assert found.fprop == HIGH_PRECISION.fprop
    assert (found.dgrad, found.wgrad) == (mxfp8.dgrad, mxfp8.wgrad)


def test_records_hold_the_precision_itself():
    with_it, without = record_of(["nvfp4"], ["output_layer=fp8-tile"]), record_of(["nvfp4"])
    assert "fp8-128x128-e4m3" in with_it["recipes"][0]
    assert recipe_from(with_it, "x") == load_recipe("nvfp4", "output_layer=fp8-tile")
    assert difference(with_it, without) is not None
    assert difference(with_it, record_of(["nvfp4"], ["output_layer=fp8-row"])) is not None
    raw = yaml.safe_load(with_it["recipes"][0])
    del raw["configs"]["fp8-tile"]
    broken = with_it | {"recipes": [yaml.safe_dump(raw)]}
    refused(recipe_from, broken, "x", parts=["x: output_layer: no config 'fp8-tile'", "nvfp4"])


def test_it_is_shown_as_a_layer_without_a_block(capsys):
    main(["show", "nvfp4", "--num-layers", "4", "--recipe-set", "output_layer=fp8-tile"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recipe nvfp4: 9 of 17 linear layers quantized"
    rows = [line.split() for line in lines if line.startswith("-")]
    assert [row[:3] for row in rows] == [["-", "output_layer", "output_layer"]] * 6
    assert rows[1][3:] == ["fprop", "weight", "fp8-128x128-e4m3", "pow2", "8.002"]
    main(["show", "nvfp4", "--num-layers", "4"])
    plain = capsys.readouterr().out.splitlines()
    assert plain[0] == "recipe nvfp4: 8 of 16 linear layers quantized"
    assert not any("output_layer" in line for line in plain)
