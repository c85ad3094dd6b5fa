"""Weight gradients added to the main gradients by Apex's kernel, in the layers left to it."""

from types import SimpleNamespace

import pytest
from tiny_run import done, losses

# isort: split
from megatron.core.tensor_parallel import layers

RECIPE = ("--fp4-recipe", "nvfp4", "--train-iters", 3)


@pytest.fixture
def apex(monkeypatch):
    """Stands for Apex's extension, which needs CUDA; notes the shapes of what it added."""
    added = []

    def accumulate(x, grad, main_grad):
        added.append(tuple(main_grad.shape))
        main_grad += grad.T @ x

    extension = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", extension, raising=False)
    return added


@pytest.fixture
def unfused(pretrain_here, tmp_path) -> dict[int, float]:
    result = pretrain_here(*RECIPE, "--save", tmp_path / "unfused")
    done(result)
    assert "optimizer: torch AdamW, weight gradients by torch" in result.stdout
    return losses(tmp_path / "unfused")


def test_same_losses(unfused, pretrain_here, tmp_path, apex):
    result = pretrain_here(*RECIPE, "--save", tmp_path)
    done(result)
    assert "weight gradients by Apex, fused" in result.stdout
    assert losses(tmp_path) == pytest.approx(unfused, rel=1e-6)
    # In 3 iterations of 2 microbatches: the first and the last block, which stay in high precision,
    # with 4 linears each, and the output layer. The other blocks add by themselves.
    assert set(apex) == {(128, 64), (64, 64), (256, 64), (64, 128), (512, 64)}
    assert len(apex) == 3 * 2 * (2 * 4 + 1)


def test_switched_off(unfused, pretrain_here, tmp_path, apex):
    done(pretrain_here(*RECIPE, "--no-gradient-accumulation-fusion", "--save", tmp_path))
    assert not apex
    assert losses(tmp_path) == pytest.approx(unfused, rel=1e-6)
