"""The recipe of a quantized export: the user's, or the one that a checkpoint names."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lowbit.conversion.quantized import QuantizedAs, _changed_since, recipe_of
from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.recipes.record import record_of

RECIPE = """
name: mine
formats: [mine.py]
configs: {}
matchers: {}
"""


def test_a_checkpoint_runs_no_format_file(tmp_path):
    """It may come from others, and its recipe and the recipe's file with it."""
    trace = tmp_path / "trace"
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(f"open({str(trace)!r}, 'w')")
    path = str(tmp_path / "mine.yaml")
    checkpoint = SimpleNamespace(path=Path("runs"), recipes=[path], recipe_set=[],
                                 recipe_record=None)  # fmt: skip
    with pytest.raises(UserError, match=r"mine\.py: not run; .* name it by --recipe"):
        recipe_of(QuantizedAs("modelopt"), checkpoint)
    assert not trace.exists()
    with pytest.raises(UserError, match="FORMATS must be"):
        recipe_of(QuantizedAs("modelopt", [path]), checkpoint)
    assert trace.exists()


def test_a_shipped_recipe_of_a_checkpoint():
    checkpoint = SimpleNamespace(path=Path("runs"), recipes=["nvfp4"], recipe_set=["wgrad=null"],
                                 recipe_record=None)  # fmt: skip
    assert recipe_of(QuantizedAs("modelopt"), checkpoint).name == "nvfp4"


def test_the_recipe_of_training_is_that_of_its_text(tmp_path):
    """The file may have been edited or deleted since; the export keeps training's formats."""
    file = tmp_path / "mine.yaml"
    text = (Path(__file__).parents[2] / "recipes" / "nvfp4.yaml").read_text()
    file.write_text(text)
    checkpoint = SimpleNamespace(path=Path("runs"), recipes=[str(file)], recipe_set=[])
    checkpoint.recipe_record = record_of(checkpoint.recipes)
    assert _changed_since(checkpoint) is None
    edited = text.replace("nvfp4-2d", "mxfp4-2d").replace("format: nvfp4,", "format: mxfp4,")
    file.write_text(edited)
    assert recipe_of(QuantizedAs("modelopt"), checkpoint) == load_recipe("nvfp4")
    assert _changed_since(checkpoint) == (
        f"{file} has changed since training: now recipe nvfp4 with configs.nvfp4.input.format "
        "mxfp4 instead of nvfp4 (2 more fields differ); the export follows training; --recipe "
        f"{file} takes the recipe as it is now"
    )
    file.unlink()
    assert recipe_of(QuantizedAs("modelopt"), checkpoint) == load_recipe("nvfp4")
    assert _changed_since(checkpoint) == (
        f"recipe file {file} does not exist; the export follows the text in the checkpoint"
    )


def test_a_checkpoint_without_the_text_of_its_recipe():
    checkpoint = SimpleNamespace(path=Path("runs"), recipes=["nvfp4"], recipe_set=[])
    checkpoint.recipe_record = None
    expected = "runs: records no text of its recipe; nvfp4 is taken as it is now"
    assert _changed_since(checkpoint) == expected
