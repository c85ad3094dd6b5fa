"""A recipe's reset of oscillating weights: its keys, and what it does not go with."""

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics.oscillation import OscillationReset
from megatron_lowbit.recipes import load_combined, load_recipe
from megatron_lowbit.recipes.command import main

RESET = "oscillation={start: 0.64, period: 200}"


def test_its_keys():
    recipe = load_recipe("tetrajet2", [RESET, "oscillation.ratio=4"])
    assert recipe.oscillation == OscillationReset(0.64, 200, over=50, ratio=4)
    assert load_recipe("tetrajet2", [RESET, "oscillation=none"]).oscillation is None


def test_it_is_shown(capsys):
    main(["show", "tetrajet2", "--recipe-set", RESET])
    assert "oscillation: weights with R >= 8 over 50 iterations are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "override", "named"),
    [
        ("tetrajet2", "oscillation.over=200", "over 200 is not from 1 to 199"),
        ("tetrajet2", "oscillation.start=.inf", "start inf is neither an iteration nor a share"),
        ("tetrajet2", "oscillation.start=1e400", "start inf is neither an iteration nor a share"),
        ("tetrajet2", "oscillation.ratio=.inf", "ratio inf is not positive and finite"),
        ("tetrajet2", "oscillation.share=5", "oscillation.share: no such key; use one of start"),
        ("tetrajet2", "weight.rounding=stochastic", "configs.fp4: fprop's weight must be rounded"),
        ("nvfp4", "fprop.hadamard={size: 16}", "fprop's weight must be rounded to nearest"),
        ("fp8-delayed", "input.rounding=nearest", "it does not go with amax_history"),
    ],
)
def test_what_is_refused(name, override, named):
    with pytest.raises(UserError, match=named):
        load_recipe(name, [RESET, override])


def test_it_needs_weights_that_fprop_quantizes(tmp_path):
    """Before or after a switch."""
    message = r"\.yaml: oscillation: without effect, fprop quantizes no weight; remove it"
    for name, overrides in (("bf16", []), ("nvfp4", ["fprop=null"])):
        with pytest.raises(UserError, match=message):
            load_recipe(name, [*overrides, RESET])
    file = tmp_path / "mine.yaml"
    file.write_text("name: x\nconfigs: {bf16: {}}\nmatchers: {}\n" + RESET.replace("=", ": "))
    with pytest.raises(UserError, match=message):
        load_recipe(str(file))
    late = "switches.late={fraction: 0.5, to: tetrajet2, part: PART}"
    load_recipe("bf16", [RESET, late.replace("PART", "all")])
    with pytest.raises(UserError, match=message):
        load_recipe("bf16", [RESET, late.replace("PART", "backward")])


def test_other_recipes_of_a_run_have_none(tmp_path):
    """It belongs to the recipe of fprop, for the whole run."""
    file = tmp_path / "resets.yaml"
    configs = "configs: {mxfp4: {weight: {format: mxfp4}}}\nmatchers: {}\n"
    file.write_text(f"name: resets\n{configs}{RESET.replace('=', ': ')}")
    assert load_combined(str(file), "nvfp4").oscillation is not None
    with pytest.raises(UserError, match="recipe resets has an oscillation: that is of weights"):
        load_combined("nvfp4", str(file))
    with pytest.raises(UserError, match="recipe resets has an oscillation; name one without"):
        load_recipe("nvfp4", [f"switches.s={{iteration: 5, to: {file}}}"])
