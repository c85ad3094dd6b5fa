"""The page's command line of verl, read by verl's own configuration."""

import re
from pathlib import Path

import pytest

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit import factories
from tests.transformer_engine.stand_in import use_stand_ins

PAGE = Path(__file__).parents[2] / "docs" / "reinforcement-learning.md"


def test_the_actor_has_the_factory(monkeypatch):
    verl, hydra = pytest.importorskip("verl"), pytest.importorskip("hydra")
    command = PAGE.read_text().partition("python -m verl.trainer.main_ppo ...")[2]
    words = re.sub(r"\\\n", " ", command.partition("```")[0]).split()
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(folder, version_base=None):
        config = hydra.compose("ppo_megatron_trainer", words)
    actor = config.actor_rollout_ref.actor
    assert actor.strategy == "megatron"
    # verl sets these fields on Megatron-Bridge's provider, a TransformerConfig.
    overrides = dict(actor.megatron.override_transformer_config)
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    model = TransformerConfig(**sizes, **overrides, bf16=True)
    assert (model.fp8, model.fp8_recipe) == ("e4m3", "custom")
    assert not model.gradient_accumulation_fusion
    use_stand_ins(monkeypatch)
    factories.__getattr__.cache_clear()
    name = model.fp8_quantizer_factory.rpartition(".")[2]
    assert model.fp8_quantizer_factory == f"{factories.__name__}.{name}"
    assert callable(getattr(factories, name))
    factories.__getattr__.cache_clear()
