"""Recipes by sensitivity: which layers are taken, and that they alone stay in high precision."""

import yaml

from megatron_lowbit.recipes import HIGH_PRECISION, Layer, load_recipe
from megatron_lowbit.recipes.sensitive import keeping, most_sensitive


def test_the_most_sensitive_within_the_budget():
    scores = {"a": 3.0, "b": 5.0, "c": 4.0, "d": 1.0}
    sizes = {"a": 10, "b": 20, "c": 50, "d": 20}
    assert most_sensitive(scores, sizes, 0.30) == ["b", "a"]  # c does not fit beside b
    assert most_sensitive(scores, sizes, 0.19) == ["a"]
    assert most_sensitive(scores, sizes, 0.0) == []
    assert most_sensitive(scores, sizes, 1.0) == ["b", "c", "a", "d"]


def test_layers_that_are_kept(tmp_path):
    """Those alone; what the recipe kept by position is quantized like all others."""
    paths = ["decoder.layers.1.mlp.linear_fc1", "decoder.layers.11.self_attention.linear_qkv"]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(keeping("nvfp4", paths), sort_keys=False))
    recipe, usual = load_recipe(str(file)), load_recipe("nvfp4", ["bf16_blocks=none"])
    for number in range(24):
        for name in ("mlp.linear_fc1", "self_attention.linear_qkv"):
            layer = Layer(f"decoder.layers.{number}.{name}", number, 24)
            wanted = HIGH_PRECISION if layer.path in paths else usual.precision_for(layer)
            assert recipe.precision_for(layer) == wanted
    file.write_text(yaml.safe_dump(keeping("nvfp4", []), sort_keys=False))
    everywhere = load_recipe(str(file))
    first = Layer("decoder.layers.0.mlp.linear_fc1", 0, 24)
    assert everywhere.precision_for(first) == usual.precision_for(first)
