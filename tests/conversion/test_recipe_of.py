"""The recipe of a quantized export: the user's, or the one that a checkpoint names."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lowbit.conversion.quantized import QuantizedAs, recipe_of
from megatron_lowbit.errors import UserError

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
    checkpoint = SimpleNamespace(path=Path("runs"), recipes=[path], recipe_set=[])
    with pytest.raises(UserError, match=r"mine\.py: not run; .* name it by --recipe"):
        recipe_of(QuantizedAs("modelopt"), checkpoint)
    assert not trace.exists()
    with pytest.raises(UserError, match="FORMATS must be"):
        recipe_of(QuantizedAs("modelopt", [path]), checkpoint)
    assert trace.exists()


def test_a_shipped_recipe_of_a_checkpoint():
    checkpoint = SimpleNamespace(path=Path("runs"), recipes=["nvfp4"], recipe_set=["wgrad=null"])
    assert recipe_of(QuantizedAs("modelopt"), checkpoint).name == "nvfp4"
