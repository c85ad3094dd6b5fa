"""Records of recipes: they give the same recipe again, and say what differs."""

from pathlib import Path

import pytest
import yaml

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import load_recipe, load_recipes, shipped_recipes
from megatron_lowbit.recipes.load import read_recipe
from megatron_lowbit.recipes.record import checked, difference, digest, recipe_from, record_of

RECIPES = Path(__file__).parents[2] / "recipes"
FORMAT = """
from dataclasses import replace
from megatron_lowbit.numerics import format_by_name
FORMATS = (replace(format_by_name("mxfp4"), name="of-a-record"),)
"""


@pytest.fixture
def mine(tmp_path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text((RECIPES / "nvfp4.yaml").read_text())
    return file


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_record_gives_its_recipe(name):
    record = checked(record_of([name]), "a checkpoint")
    found, expected = recipe_from(record, "a checkpoint"), load_recipe(name)
    assert found == expected
    assert list(found.matchers) == list(expected.matchers)
    assert difference(record, record_of([name])) is None


def test_a_record_holds_the_changes_of_fields_and_both_recipes():
    names, changes = ["nvfp4", "mxfp8"], ["forward.bf16_blocks=none", "backward.wgrad=null"]
    found = recipe_from(record_of(names, changes), "a checkpoint")
    assert found == load_recipes(names, changes) != load_recipes(names)
    assert difference(record_of(names, changes[1:]), record_of(names, changes)) == (
        "recipe nvfp4+mxfp8 with forward.matchers.bf16_blocks.type blocks instead of nothing "
        "(4 more fields differ)"
    )


@pytest.mark.parametrize("off", [False, "off", 0])
def test_a_switch_that_is_off_needs_no_target(tmp_path, off):
    """Older records have it."""
    file = tmp_path / "mine.yaml"
    switch = {"late": {"fraction": 0.8, "to": "gone.yaml", "part": "all", "enabled": off}}
    file.write_text(yaml.safe_dump(read_recipe("nvfp4") | {"switches": switch}, sort_keys=False))
    record = record_of([str(file)])
    found = recipe_from(record, "a checkpoint")
    assert found == load_recipe(str(file)) and not found.switches
    older = record | {"targets": {"gone.yaml": record_of(["mxfp8"])["recipes"][0]}}
    assert difference(record, older) is difference(older, record) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("name: nvfp4\n", "name: mine\n"),
        ("description: NVFP4", "description: My"),
        ("configs:\n", "# a comment\nconfigs:\n"),
        ("rounding: nearest", "rounding: nearest, axis: own"),
        ("{format: nvfp4, rounding: nearest}", "{rounding: nearest, format: nvfp4}"),
    ],
)
def test_what_changes_no_number_does_not_count(mine, before, after):
    edit(mine, before, after)
    assert difference(record_of([str(mine)]), record_of(["nvfp4"])) is None


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("stochastic", "nearest", "configs.nvfp4.grad.rounding nearest instead of stochastic"),
        ("size: 16", "size: 32", "configs.nvfp4.wgrad.hadamard.size 32 instead of 16"),
        ("last: 8/62", "last: 9/62", "matchers.bf16_blocks.last 9/62 instead of 8/62"),
        ("weight: {format: nvfp4-2d, rounding: nearest}", "", "configs.nvfp4.weight.format "
         "nothing instead of nvfp4-2d (1 more fields differ)"),
    ],
)  # fmt: skip
def test_the_field_that_differs_is_named(mine, before, after, text):
    edit(mine, before, after)
    assert difference(record_of([str(mine)]), record_of(["nvfp4"])) == f"recipe nvfp4 with {text}"


def test_the_order_of_matchers_counts(mine):
    lines = mine.read_text().splitlines(keepends=True)
    mine.write_text("".join([*lines[:-2], lines[-1], lines[-2]]))
    found = difference(record_of([str(mine)]), record_of(["nvfp4"]))
    assert found == "recipe nvfp4 with another order of matchers"


def test_other_recipes_are_named():
    assert difference(record_of(["nvfp4"]), record_of(["mxfp8"])) == (
        "recipe nvfp4 instead of recipe mxfp8"
    )
    assert difference(record_of([]), record_of(["mxfp8"])) == "no recipe instead of recipe mxfp8"
    own = record_of([], (), "Megatron-LM's own e4m3 blockwise")
    assert difference(own, record_of([])) == "Megatron-LM's own e4m3 blockwise instead of no recipe"
    assert difference(record_of(["bf16"]), record_of([])) is None


def test_the_recipe_of_a_switch_counts(tmp_path, mine):
    first = tmp_path / "first.yaml"
    first.write_text((RECIPES / "nvfp4-late-bf16.yaml").read_text())
    edit(first, "to: bf16", f"to: {mine}")
    before = record_of([str(first)])
    edit(mine, "stochastic", "nearest")
    assert difference(record_of([str(first)]), before) == (
        f"recipe nvfp4-late-bf16 with {mine}: configs.nvfp4.grad.rounding nearest instead of "
        "stochastic"
    )
    assert recipe_from(before, "a checkpoint") != load_recipe(str(first))


def test_the_content_of_a_format_file_counts(tmp_path, mine):
    edit(mine, "configs:\n", "formats: [counted.py]\nconfigs:\n")
    (tmp_path / "counted.py").write_text(FORMAT)
    before = record_of([str(mine)])
    moved = before | {"recipes": [before["recipes"][0].replace(str(tmp_path), "/elsewhere")]}
    assert difference(before, moved) is None
    changed = before | {"format_files": {"counted.py": "0" * 64}}
    assert difference(before, changed).startswith("recipe nvfp4 with counted.py ")


def test_digests_are_those_of_content(mine):
    assert digest(record_of([str(mine)])) == digest(record_of(["nvfp4"]))
    edit(mine, "stochastic", "nearest")
    assert digest(record_of([str(mine)])) != digest(record_of(["nvfp4"]))


@pytest.mark.parametrize(
    "record",
    [
        "x",
        {"recipes": "nvfp4"},
        {"recipes": [5]},
        {"recipes": ["[unclosed"]},
        {"recipes": ["just text"]},
        {"recipes": ["name: x\nname: y"]},
        {"recipes": [], "targets": {"bf16": 5}},
        {"recipes": [], "format_files": []},
        {"recipes": [], "megatron_lm": 5},
    ],
)
def test_a_damaged_record_is_refused_in_one_line(record):
    with pytest.raises(UserError, match=r"^a checkpoint\b[^\n]*$"):
        checked(record, "a checkpoint")
