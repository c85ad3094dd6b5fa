"""Arguments that Megatron-LM parses and ignores are applied."""

import shlex
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.megatron.pretrain import teardown
from megatron_lowbit.megatron.recipe_hook import model_config_of
from megatron_lowbit.megatron.run.workarounds import (
    apply_ignored_arguments,
    fuse_gradient_accumulation,
    hide_loss_from_second_parse,
)

# isort: split
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.utils import openai_gelu
from megatron.training import ft_integration

SCALED = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}
GELU, OWN = torch.nn.functional.gelu, {"rope_scaling_factor": 8.0}


@pytest.mark.parametrize(
    ("fields", "changes", "factor", "activation"),
    [
        (OWN, {}, 8.0, GELU),
        (OWN, {"rope_scaling_factor": 32.0}, 8.0, GELU),  # without effect
        (OWN, SCALED, 32.0, GELU),
        ({"rope_scaling_factor": 32.0}, SCALED, 32.0, GELU),
        ({}, SCALED, None, GELU),  # a model without rotary embedding
        (OWN, {"openai_gelu": True}, 8.0, openai_gelu),
        # The fused function is approximate already.
        (OWN, {"openai_gelu": True, "bias_gelu_fusion": True}, 8.0, GELU),
    ],
)
def test_ignored_arguments_are_applied(fields, changes, factor, activation):
    """A line names each change."""
    config = SimpleNamespace(**fields, transformer=SimpleNamespace(activation_func=GELU))
    given = dict.fromkeys(
        ("use_rope_scaling", "openai_gelu", "bias_gelu_fusion", "multi_latent_attention"), False
    ) | {"hybrid_layer_pattern": None}
    args = Namespace(**OWN | given | changes)
    lines = list(apply_ignored_arguments(config, args))
    assert getattr(config, "rope_scaling_factor", None) == factor
    assert config.transformer.activation_func is activation
    expected = ["--rope-scaling-factor 32"] * (factor != fields.get("rope_scaling_factor"))
    expected += ["--openai-gelu"] * (activation is not GELU)
    assert lines == [f"{flag} applied: Megatron-LM ignores it" for flag in expected]


def test_an_activation_that_is_no_gelu_stays():
    silu = torch.nn.functional.silu
    config = SimpleNamespace(transformer=SimpleNamespace(activation_func=silu))
    args = Namespace(
        rope_scaling_factor=8.0, use_rope_scaling=False, openai_gelu=True, bias_gelu_fusion=False,
        hybrid_layer_pattern=None,
    )  # fmt: skip
    assert list(apply_ignored_arguments(config, args)) == []
    assert config.transformer.activation_func is silu


def test_the_approximate_gelu_is_torchs():
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(openai_gelu(x), GELU(x, approximate="tanh"))


def test_a_runs_configuration_has_both(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    line = """
        --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
        --max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data
        --tokenizer-type NullTokenizer --vocab-size 100 --position-embedding-type rope
        --use-rope-scaling --rope-scaling-factor 32 --openai-gelu --no-bias-gelu-fusion
    """
    with teardown():
        config = model_config_of(parse_arguments(shlex.split(line)))
    assert config.rope_scaling_factor == 32.0
    assert config.transformer.activation_func is openai_gelu
    assert capsys.readouterr().out.count(" applied: Megatron-LM ignores it") == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_accumulated_without_apex(monkeypatch, device, main_dtype):
    """Sums in FP32, which an FP32 main gradient takes unrounded on a GPU."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)
    fuse_gradient_accumulation()
    assert layers._grad_accum_fusion_available
    extension = layers.fused_weight_gradient_mlp_cuda
    function = extension.wgrad_gemm_accum_fp16
    if main_dtype is torch.float32:
        function = extension.wgrad_gemm_accum_fp32
    torch.manual_seed(0)
    x, grad = (torch.randn(64, size).to(device, torch.bfloat16) for size in (32, 48))
    main_grad = torch.randn(48, 32).to(device, main_dtype)
    added = grad.double().t() @ x.double()
    exact, largest = main_grad.double() + added, added.abs().max()
    function(x, grad, main_grad)
    rounds = device == "cpu" or main_dtype is torch.bfloat16
    bound = 2**-8 * (largest + exact.abs().max()) if rounds else 2**-20 * largest
    assert (main_grad.double() - exact).abs().max() <= bound


def test_apexs_extension_stays(monkeypatch):
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", "its own", raising=False)
    fuse_gradient_accumulation()
    assert layers.fused_weight_gradient_mlp_cuda == "its own"


LOSS = "--cross-entropy-fusion-impl"


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        (f"{LOSS} lowbit", f"{LOSS} native"),
        (f"{LOSS}=liger", f"{LOSS}=native"),
        (f"{LOSS} te {LOSS}=te", f"{LOSS} te {LOSS}=te"),  # Megatron-LM's own
        (f"{LOSS}=te --save lowbit {LOSS} liger", f"{LOSS}=te --save lowbit {LOSS} native"),
        (f"--save=lowbit --seed 5 {LOSS}=lowbit", f"--save=lowbit --seed 5 {LOSS}=native"),
    ],
)
def test_megatron_lms_second_parse_sees_losses_that_it_knows(given, hidden, monkeypatch):
    """All other words stay as they are, and the parse itself succeeds."""
    monkeypatch.setattr(sys, "argv", ["script", *given.split()])
    hide_loss_from_second_parse()
    assert sys.argv == ["script", *hidden.split()]
    ft_integration.setup()


@pytest.mark.parametrize("given", [f"{LOSS} lowbit", f"{LOSS}=liger"])
def test_the_second_parse_refuses_a_loss_that_is_not_hidden(given, monkeypatch):
    """Else the workaround is not needed any more."""
    monkeypatch.setattr(sys, "argv", ["script", *given.split()])
    with pytest.raises(SystemExit):
        ft_integration.setup()
