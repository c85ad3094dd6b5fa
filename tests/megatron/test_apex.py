"""Local layers with Apex, by a substitute: Apex itself needs a GPU."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.fusions import fused_layer_norm
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.run.workarounds import use_torch_rms_norm
from tests.megatron.tiny_models import TINY
from tests.short_runs import steps

ROOT = Path(__file__).parents[2]
APEX = {
    "apex/__init__.py": "",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
class FusedLayerNormAffineFunction:
    def forward(ctx, input, weight, bias, normalized_shape, eps): ...

    def apply(*args):
        raise RuntimeError("expected a CUDA tensor")
""",
    "apex/optimizers/__init__.py": """
class FusedAdam:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("expected a CUDA tensor")

class FusedSGD(FusedAdam): ...
""",
    "fused_weight_gradient_mlp_cuda.py": """
shapes = []

def wgrad_gemm_accum_fp32(input, grad, main_grad):
    shapes.append(tuple(main_grad.shape))
    main_grad.add_(grad.t() @ input)
""",
}
"""Modules that Megatron-LM imports from Apex, with the signatures that it calls."""
RUN = """
import json
import sys

import fused_weight_gradient_mlp_cuda
import megatron_lowbit.megatron
from megatron_lowbit.megatron import pretrain

pretrain.main(sys.argv[1:])
print("SHAPES", json.dumps(fused_weight_gradient_mlp_cuda.shapes))
"""
ARGUMENTS = f"""
    {TINY} --num-layers 2 --swiglu --position-embedding-type rope
    --untie-embeddings-and-output-weights --precision-recipe nvfp4 --first-last-layers-bf16
    --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0
"""


@pytest.mark.slow
def test_apex_changes_no_bits_and_no_quantized_wgrad(tmp_path, monkeypatch):
    """Apex's kernel accumulates weight gradients of layers in high precision only."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pretrain.main([*ARGUMENTS.split(), "--save", str(tmp_path / "without")])
    for name, source in APEX.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path / "site")]))
    command = [sys.executable, "-W", "ignore", "-c", RUN, *ARGUMENTS.split(), "--save"]
    result = subprocess.run([*command, str(tmp_path / "with")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(steps(tmp_path / "without")) == 2
    assert steps(tmp_path / "with") == steps(tmp_path / "without")
    shapes = json.loads(result.stdout.rpartition("SHAPES ")[2])
    output = [128, 32]  # the padded vocabulary
    first_block = [[32, 64], [128, 32], [32, 32], [96, 32]]
    # Two microbatches of two iterations; block 1 is quantized.
    assert shapes == [output, *first_block] * 4


@pytest.fixture
def apex_norm(monkeypatch):
    """Megatron-LM's norm of Apex after the beginning of a run on a GPU."""
    monkeypatch.delattr(FusedLayerNorm, "__new__")  # the CPU's
    monkeypatch.setattr(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True)
    use_torch_rms_norm()
    return FusedLayerNorm


def test_a_cpu_takes_torchs_norms():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    assert type(FusedLayerNorm(config, 8)) is torch.nn.LayerNorm


@pytest.mark.parametrize(
    ("normalization", "kind"), [("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", FusedLayerNorm)]
)
def test_only_layer_norm_is_apexs(apex_norm, normalization, kind):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, normalization=normalization
    )
    for norm in (apex_norm(config, 8, eps=1e-3), apex_norm(config=config, hidden_size=8, eps=1e-3)):
        assert type(norm) is type(copy.deepcopy(norm)) is kind
        assert norm.eps == 1e-3 and norm.weight.shape == (8,)
