"""Arguments that Megatron-LM parses and ignores are applied."""

import shlex
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
)

# isort: split
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.utils import openai_gelu


def arguments(**changes: object) -> Namespace:
    values = {
        "rope_scaling_factor": 8.0, "use_rope_scaling": False, "openai_gelu": False,
        "bias_gelu_fusion": False,
    }  # fmt: skip
    return Namespace(**{**values, **changes})


@pytest.fixture
def config() -> SimpleNamespace:
    """Model configuration, as Megatron-LM builds it for any arguments."""
    transformer = SimpleNamespace(activation_func=torch.nn.functional.gelu)
    return SimpleNamespace(rope_scaling_factor=8.0, transformer=transformer)


def test_nothing_is_changed_unasked(config):
    assert list(apply_ignored_arguments(config, arguments())) == []
    # The factor alone means nothing.
    assert list(apply_ignored_arguments(config, arguments(rope_scaling_factor=32.0))) == []
    assert config.rope_scaling_factor == 8.0
    assert config.transformer.activation_func is torch.nn.functional.gelu


def test_the_scaling_factor(config):
    args = arguments(use_rope_scaling=True, rope_scaling_factor=32.0)
    (line,) = apply_ignored_arguments(config, args)
    assert line == "--rope-scaling-factor 32 applied: Megatron-LM ignores it"
    assert config.rope_scaling_factor == 32.0
    # Where Megatron-LM does not ignore it, nothing is left to say.
    assert list(apply_ignored_arguments(config, args)) == []


def test_a_model_without_rotary_embedding(config):
    del config.rope_scaling_factor
    args = arguments(use_rope_scaling=True, rope_scaling_factor=32.0)
    assert list(apply_ignored_arguments(config, args)) == []
    assert not hasattr(config, "rope_scaling_factor")


def test_the_approximate_gelu(config):
    (line,) = apply_ignored_arguments(config, arguments(openai_gelu=True))
    assert line == "--openai-gelu applied: Megatron-LM ignores it"
    x = torch.linspace(-4, 4, 101)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(config.transformer.activation_func(x), expected)
    assert config.transformer.activation_func is openai_gelu


def test_the_fused_gelu_is_approximate_already(config):
    args = arguments(openai_gelu=True, bias_gelu_fusion=True)
    assert list(apply_ignored_arguments(config, args)) == []
    assert config.transformer.activation_func is torch.nn.functional.gelu


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
