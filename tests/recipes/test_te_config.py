"""Recipes as Megatron-LM's own scripts take them, read by its own readers."""

from importlib import import_module

import pytest

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.extensions.transformer_engine import TEQuantizationParams, TEQuantizationRecipe
from megatron.core.quantization.utils import get_quant_config_or_none, load_quantization_recipe

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import HIGH_PRECISION, Layer, load_recipe, shipped_recipes
from megatron_lowbit.recipes.command import main
from megatron_lowbit.recipes.show import model_layers
from megatron_lowbit.recipes.te_config import factory_names, factory_precision, te_config
from tests.recipes.conftest import refused

REFUSED = {"bf16", "fp8-delayed", "qat-nvfp4-activations", "nvfp4-late-bf16",
           "torchao-v2-late-bf16"}  # fmt: skip
HYBRID = "M-M*-ME*-M+E/*-"
PREFIX = "megatron_lowbit.factories."


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_of_constant_precisions_has_factories(name):
    recipe = load_recipe(name)
    if name in REFUSED:
        with pytest.raises(UserError, match=f"recipe {name} "):
            factory_names(recipe)
        return
    names = factory_names(recipe)
    assert {config: factory_precision(factory) for config, factory in names.items()} == {
        config: precision for config, precision in recipe.configs.items() if precision.quantized
    }
    assert all(factory.isidentifier() for factory in names.values())
    if len(names) == 1:
        assert [*names.values()] == [name.replace("-", "_")]


@pytest.mark.parametrize("name", ["nvfp5", "nvfp4__nvfp4", "nemotron3_super", "__path__"])
def test_other_names_are_no_factories(name):
    assert not hasattr(import_module("megatron_lowbit.factories"), name)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("input.rounding=stochastic", "random numbers in fprop"),
        ("weight.rounding=stochastic", "random numbers in fprop"),
        ("fallback=bf16", "fallback or hot_channels"),
        ("fprop.hot_channels=0.1", "fallback or hot_channels"),
        ("output_layer=nvfp4", "output_layer"),
    ],
)
def test_recipes_that_need_more_than_a_factory_are_refused(setting, named):
    with pytest.raises(UserError, match=f"recipe mxfp4 has {named}"):
        factory_names(load_recipe("mxfp4", setting))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8-tile", "torchao-v2", "nemotron3-super"])
@pytest.mark.parametrize(("pattern", "count"), [(None, 7), (HYBRID, 0)])
def test_megatron_reads_the_precision_of_each_layer(tmp_path, name, pattern, count):
    recipe, layers = load_recipe(name), model_layers(pattern, count)
    file = tmp_path / "precision.yaml"
    file.write_text(te_config(recipe, layers, stages=1))
    read = load_quantization_recipe(str(file))
    for layer in layers:
        for expert in ("0", "3"):
            path = layer.path.replace("local_experts.0", f"local_experts.{expert}")
            params = TEQuantizationParams.parse_from_config(get_quant_config_or_none(path, read))
            training, evaluation = params.training_recipe, params.evaluation_recipe
            assert evaluation == TEQuantizationRecipe()  # BF16
            factory, found = training.custom_recipe_factory, HIGH_PRECISION
            assert training.fp8_quantization_recipe == (None if factory is None else "custom")
            if factory is not None:
                assert training.override_nonquantized_autocast
                found = factory_precision(factory.removeprefix(PREFIX))
            assert found == recipe.precision_for(layer)


def test_pipeline_stages_number_their_own_layers():
    layers = model_layers(None, 8)
    assert te_config(load_recipe("mxfp8"), layers, 2) == te_config(load_recipe("mxfp8"), layers, 1)
    with pytest.raises(UserError, match=r"\(bf16_blocks\).*each pipeline stage"):
        te_config(load_recipe("nvfp4"), layers, 2)
    glob = load_recipe("mxfp8", "matchers.one={type: glob, pattern: '*layers.1.*', config: mxfp8, "
                       "enabled: true}")  # fmt: skip
    with pytest.raises(UserError, match=r"\(one\)"):
        te_config(glob, layers, 2)


def test_one_kind_of_layer_in_a_block_is_named_by_itself():
    blocks = "matchers.mlps={type: blocks, kinds: [mlp], last: 1, config: mxfp8, enabled: true}"
    text = te_config(load_recipe("mxfp8", blocks), model_layers(None, 2), 1)
    assert "decoder.layers.1.mlp.linear_fc1" in text and "decoder.layers.1.*" not in text


def test_the_command_takes_a_model_of_a_file(tmp_path, capsys):
    model = tmp_path / "model.args"
    model.write_text("--num-layers 12 --hidden-size 64\n")
    main(["te-config", "nvfp4", "--model", str(model)])
    layers = [Layer(f"decoder.layers.{n}.mlp.linear_fc1", n, 12) for n in range(12)]
    text = capsys.readouterr().out
    for layer in layers:
        high = not load_recipe("nvfp4").precision_for(layer).quantized
        assert (f"decoder.layers.{layer.block}.*" in text) == high


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        ("mine.yaml", "", "mine.yaml: only recipes that come with the package"),
        ("nvfp4", "--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 1"),
        ("mxfp8", "--num-experts 8", "experts"),
        ("mxfp8", "--multi-latent-attention", "latent attention"),
        ("fp8-delayed", "", "amax_history"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path, name, words, named):
    model = tmp_path / "model.args"
    model.write_text(f"--num-layers 12 {words}\n")
    assert named in refused(lambda: main(["te-config", name, "--model", str(model)]))
