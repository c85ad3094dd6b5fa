"""Recipes of examples/recipes do what their descriptions say."""

from pathlib import Path

import pytest

from megatron_lowbit.recipes import Layer, load_recipe

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"


@pytest.mark.parametrize(
    ("layer", "formats"),
    [
        ("mlp.experts.local_experts.3.linear_fc1", ("nvfp4", "nvfp4-2d")),
        ("mlp.shared_experts.linear_fc2", ("fp8-1x128-e4m3", "fp8-128x128-e4m3")),
        ("self_attention.linear_qkv", None),
    ],
)
def test_routed_experts(layer, formats):
    recipe = load_recipe(str(FOLDER / "routed-experts.yaml"))
    fprop = recipe.precision_for(Layer(f"decoder.layers.2.{layer}", 2, 8)).fprop
    found = [quantizer.format.name for quantizer in fprop.sides if quantizer]
    assert found == list(formats or ())


def test_every_file_is_tested():
    assert [file.name for file in FOLDER.iterdir()] == ["routed-experts.yaml"]
