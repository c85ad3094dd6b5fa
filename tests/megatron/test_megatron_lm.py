"""The plug-in for upstream Megatron-LM, against a stand-in for its ``megatron.training``."""

import argparse
import shlex
import subprocess
import sys
import types
from argparse import Namespace

import pytest
import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.integrations import megatron_lm
from megatron_lowbit.megatron.config import transformer_config
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.distributed import initialize_distributed, shutdown

USUAL = {"transformer_impl": "transformer_engine", "fp8": None, "fp4": None, "num_experts": None,
         "recipe_set": [], "seed": 1, "curr_iteration": 3}  # fmt: skip


@pytest.fixture
def training(monkeypatch):
    """A ``megatron.training`` whose pretrain parses arguments, then builds a model and returns."""
    module = types.ModuleType("megatron.training")
    module.line = []

    def pretrain(datasets, model_provider, model_type, forward_step, extra_args_provider=None):
        parser = argparse.ArgumentParser()
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        module.args = parser.parse_args(module.line)
        return model_provider(True, True, vp_stage=None)

    module.pretrain, module.get_args = pretrain, lambda: module.args
    monkeypatch.setitem(sys.modules, "megatron.training", module)
    return module


@pytest.mark.parametrize("own_arguments", [False, True])
def test_arguments_and_model_pass_through(training, monkeypatch, own_arguments):
    applied = []
    monkeypatch.setattr(megatron_lm, "apply_recipe", lambda *args: applied.append(args))

    def extra(parser):
        parser.add_argument("--theirs", type=int)
        return parser

    training.line = ["--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks=none"]
    named = {}
    if own_arguments:
        training.line += ["--theirs", "3"]
        named["extra_args_provider"] = extra
    megatron_lm.add_recipes()
    model = torch.nn.Linear(1, 1)
    built = training.pretrain(None, lambda pre, post, vp_stage: model, "gpt", None, **named)
    assert built is model
    assert applied == [(model, training.args, None)]
    assert (training.args.precision_recipe, training.args.recipe_set) == (
        "nvfp4",
        ["bf16_blocks=none"],
    )
    assert not own_arguments or training.args.theirs == 3


def test_without_a_recipe_the_model_is_left_alone(training):
    megatron_lm.add_recipes()
    model = torch.nn.Linear(1, 1)
    assert training.pretrain(None, lambda *_, **__: model, "gpt", None) is model
    assert not hasattr(model, "layer_state")


@pytest.mark.parametrize(
    ("recipe", "args", "named"),
    [
        ("nvfp4", {"transformer_impl": "local"}, "--transformer-impl transformer_engine"),
        ("nvfp4", {"fp8": "hybrid"}, "--fp8-format"),
        ("nvfp4", {"num_experts": 8}, "--num-experts"),
        ("fp8-delayed", {}, "delayed scaling"),
        ("no-such-recipe", {}, "no-such-recipe"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, args, named):
    with pytest.raises(UserError, match=named):
        megatron_lm.apply_recipe(
            torch.nn.Linear(1, 1), Namespace(**USUAL | {"precision_recipe": recipe} | args)
        )


def test_nothing_of_megatron_is_imported_before_it_is_asked_for():
    code = """
import sys
import megatron_lowbit.integrations.megatron_lm
sys.exit(any(name.startswith(("megatron.", "transformer_engine")) for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_a_model_of_megatron_core_trains_under_a_recipe():
    pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    parsed = parse_arguments(
        shlex.split("""
            --num-layers 2 --hidden-size 128 --num-attention-heads 4 --normalization RMSNorm
            --seq-length 64 --micro-batch-size 2 --train-iters 1 --lr 1 --data-path unread
            --vocab-size 96 --bf16 --transformer-impl transformer_engine
        """)
    )
    initialize_distributed(parsed)
    try:
        model = GPTModel(
            transformer_config(parsed, torch.bfloat16),
            get_gpt_layer_with_transformer_engine_spec(),
            vocab_size=96,
            max_sequence_length=64,
        ).to("cuda", torch.bfloat16)
        args = Namespace(
            **USUAL | {"precision_recipe": "nvfp4", "recipe_set": ["bf16_blocks=none"]}
        )
        megatron_lm.apply_recipe(model, args)
        tokens = torch.arange(128, device="cuda").view(2, 64) % 96
        positions = torch.arange(64, device="cuda").expand(2, -1)
        gradients, losses = [], []
        for _ in range(2):
            model.zero_grad()
            loss = model(tokens, positions, attention_mask=None, labels=tokens).float().mean()
            loss.backward()
            losses.append(loss.item())
            gradients.append(model.decoder.layers[0].mlp.linear_fc1.weight.grad.clone())
        assert losses[0] == losses[1]
        # Stochastic rounding of gradients: other random numbers in the next call.
        assert gradients[0].isfinite().all() and not torch.equal(*gradients)
        args.curr_iteration = 4
    finally:
        shutdown()
