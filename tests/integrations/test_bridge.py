"""Recipes in Megatron-Bridge, by the functions of its configuration and callbacks.

Megatron-Bridge needs Python 3.12 and Transformer Engine. Its two modules that are tested do not:
they are imported without the package's other modules.
"""

import importlib
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.quant_config import MatchContext
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics.randomness import derive_key, layer_key, microbatch_key
from tests.transformer_engine.stand_in import use_stand_ins

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
           "mlp.linear_fc2")  # fmt: skip


@pytest.fixture
def bridge(monkeypatch):
    """The integration, on Megatron-Bridge's own modules."""
    try:
        files = importlib.metadata.files("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs megatron-bridge")
    [root] = [file.locate().parent for file in files if str(file) == "megatron/bridge/__init__.py"]
    for name in ("megatron.bridge", "megatron.bridge.training"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[2:]))]
        monkeypatch.setitem(sys.modules, name, package)
    models = ModuleType("megatron.bridge.models")
    models.GPTModelProvider = models.T5ModelProvider = TransformerConfig
    monkeypatch.setitem(sys.modules, models.__name__, models)
    names = ("training.mixed_precision", "training.callbacks")
    for name in (*(f"megatron.bridge.{name}" for name in names),
                 "megatron_lowbit.integrations.bridge"):  # fmt: skip
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("megatron_lowbit.integrations.bridge")
    for name in names:
        sys.modules.pop(f"megatron.bridge.{name}", None)


def model_config(**changes) -> TransformerConfig:
    sizes = {"num_layers": 12, "hidden_size": 64, "num_attention_heads": 4}
    return TransformerConfig(**sizes | {"gradient_accumulation_fusion": False} | changes)


def precision_of(config: TransformerConfig, layer: str) -> TEQuantizationParams:
    """Return Transformer Engine's parameters of a layer, as megatron-core finds them."""
    key = config.quant_recipe.match_to_config_key(MatchContext(layer, 0))
    return TEQuantizationParams.parse_from_config(
        SimpleNamespace(config=config.quant_recipe.configs[key], config_key=key)
    )


def test_a_name_gives_every_layer_its_precision(bridge):
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    for name in ("lowbit_nvfp4", "lowbit-nvfp4"):
        config, precision = model_config(), get_mixed_precision_config(name)
        precision.finalize()
        precision.setup(config)
        assert config.bf16 and config.params_dtype == torch.bfloat16 and config.fp4 is None
        for block in range(12):
            for linear in LINEARS:
                training = precision_of(config, f"decoder.layers.{block}.{linear}").training_recipe
                # The first 2/62 and the last 8/62 of twelve blocks stay in BF16.
                quantized = 1 <= block < 10
                factory = "megatron_lowbit.factories.nvfp4" if quantized else None
                assert training.custom_recipe_factory == factory


def test_names_are_those_of_recipes_that_factories_compute(bridge):
    registry = bridge.MIXED_PRECISION_RECIPES
    assert {"lowbit_nvfp4", "lowbit_fp8_tile", "lowbit_mxfp8"} < registry.keys()
    assert not {"lowbit_fp8_delayed", "lowbit_nvfp4_late_bf16", "lowbit_bf16"} & registry.keys()
    with pytest.raises(UserError, match="nvfp4-late-bf16 has switches"):
        bridge.lowbit_precision("nvfp4-late-bf16")
    with pytest.raises(UserError, match="is not a shipped recipe"):
        bridge.lowbit_precision("mine.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_fusion": True}, "model.gradient_accumulation_fusion"),
        ({"num_moe_experts": 4}, "model.num_moe_experts"),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}, "by number"),
    ],
)
def test_models_without_factories_are_refused(changes, message, bridge):
    with pytest.raises(UserError, match=message):
        bridge.lowbit_precision("nvfp4").setup(model_config(**changes))


def test_the_callback_makes_keys_a_function_of_the_step(bridge, monkeypatch):
    use_stand_ins(monkeypatch)
    from megatron.bridge.training.callbacks import CallbackContext, CallbackManager
    from megatron.core import parallel_state

    from megatron_lowbit import factories

    named = importlib.import_module("megatron_lowbit.transformer_engine.named")
    monkeypatch.setattr(named, "_announced", None)
    for function in ("data_parallel_rank", "context_parallel_rank", "pipeline_model_parallel_rank"):
        monkeypatch.setattr(parallel_state, f"get_{function}", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 1)
    factories.__getattr__.cache_clear()
    manager = CallbackManager()
    manager.add(bridge.LowbitCallback())
    for step in (3, 4, 3):
        state = SimpleNamespace(
            cfg=SimpleNamespace(rng=SimpleNamespace(seed=11)),
            train_state=SimpleNamespace(step=step),
        )
        manager.fire("on_train_step_start", CallbackContext(state=state, model=[]))
        expected = layer_key(microbatch_key(11, step, 0, 0), derive_key("Layer_1", 0))
        assert factories.nvfp4.key("Layer_1") == expected
    factories.__getattr__.cache_clear()
