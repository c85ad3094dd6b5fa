"""The hook of slime and miles, as their training step calls it."""

from importlib import import_module
from types import SimpleNamespace

import pytest

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.training import global_vars

from megatron_lowbit import factories
from megatron_lowbit.numerics.randomness import derive_key, layer_key, microbatch_key
from tests.transformer_engine.stand_in import use_stand_ins


@pytest.fixture
def args(monkeypatch):
    use_stand_ins(monkeypatch)
    factories.__getattr__.cache_clear()
    args = SimpleNamespace(seed=11, gradient_accumulation_fusion=False)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    for name in ("data_parallel_rank", "context_parallel_rank", "pipeline_model_parallel_rank"):
        monkeypatch.setattr(parallel_state, f"get_{name}", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 1)
    yield args
    factories.__getattr__.cache_clear()


def test_every_step_of_every_rollout_has_random_numbers_of_its_own(args):
    # By its path and with positional arguments.
    module, _, name = "megatron_lowbit.integrations.slime.before_train_step".rpartition(".")
    hook, drawn = getattr(import_module(module), name), {}
    for rollout, step in [(0, 0), (0, 1), (1, 0), (7, 3)]:
        hook(args, rollout, step, [], None, None)
        drawn[rollout, step] = [factories.nvfp4.key("Layer_1") for _ in range(2)]
        for micro_batch, key in enumerate(drawn[rollout, step]):
            number = microbatch_key(11, rollout * 65536 + step, micro_batch, 0)
            assert key == layer_key(number, derive_key("Layer_1", 0))
    assert len({key for keys in drawn.values() for key in keys}) == 8
    hook(args, 0, 1, [], None, None)  # as a run that resumes there
    assert [factories.nvfp4.key("Layer_1") for _ in range(2)] == drawn[0, 1]
