"""Fused rotary embedding against megatron-core's own."""

import pytest
import torch

from megatron_lowbit.megatron.rope import fused_rope, use_fused_rope

# isort: split
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, BATCH, HEADS, CHANNELS = 12, 2, 3, 16
PERCENT = {"all channels": 1.0, "half of them": 0.5}


@pytest.fixture(params=PERCENT.values(), ids=PERCENT)
def freqs(request):
    embedding = RotaryEmbedding(CHANNELS, rotary_percent=request.param, use_cpu_initialization=True)
    return embedding.get_emb(SEQUENCE).cuda()  # nothing, on a CPU


def queries(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (SEQUENCE, BATCH, HEADS, CHANNELS)
    return torch.randn(shape, generator=generator).to(dtype).cuda()


def rotated(rope, x, freqs):
    """(output, gradient) for the same gradient of the output."""
    leaf = x.clone().requires_grad_()
    # A key is a strided slice of the QKV layer's output.
    output = rope(torch.cat((leaf, leaf), -1)[..., : x.size(-1)], freqs)
    output.backward(torch.linspace(-1, 1, x.numel()).view_as(x).to(x))
    return output.detach(), leaf.grad


def test_same_as_megatrons_in_fp32(freqs):
    x = queries()
    expected = rotated(rope_utils._apply_rotary_pos_emb_bshd, x, freqs)
    for result, other in zip(rotated(fused_rope, x, freqs), expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-5, atol=1e-6)


def test_bf16_is_rounded_once(freqs):
    x = queries(torch.bfloat16)
    expected = rope_utils._apply_rotary_pos_emb_bshd(x.double(), freqs)
    output, _ = rotated(fused_rope, x, freqs)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-6)


def test_keeps_no_queries_and_one_set_of_sines_for_all_layers(freqs):
    x = queries().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda packed: packed):
        one, other = fused_rope(x, freqs), fused_rope(x, freqs)
    assert not kept
    for first, second in zip(one.grad_fn.turn_back, other.grad_fn.turn_back, strict=True):
        assert first is second


def test_interleaved_channels_are_refused(freqs):
    with pytest.raises(ValueError, match="rotary_interleaved"):
        fused_rope(queries(), freqs, interleaved=True)


def config(**options):
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, **options)


@pytest.mark.usefixtures("single_process")
def test_megatron_calls_it_where_te_is_absent(freqs, monkeypatch):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    with pytest.raises(ValueError, match="apply_rope_fusion"):
        config(apply_rope_fusion=True)
    use_fused_rope()
    x = queries()
    output = rope_utils.apply_rotary_pos_emb(x, freqs, config(apply_rope_fusion=True))
    assert torch.equal(output, fused_rope(x, freqs))


def test_te_keeps_its_own(monkeypatch):
    theirs = object()
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", theirs)
    use_fused_rope()
    assert rope_utils.fused_apply_rotary_pos_emb is theirs
