"""Hybrids of local layers: their stack, and the mixer compared with FP64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_lowbit.megatron.layers import hybrid
from megatron_lowbit.megatron.layers.hybrid import (
    GatedNorm,
    convolve_and_scan,
    torch_scan,
    triton_scan,
    use_best_scan,
)
from megatron_lowbit.megatron.recipe_hook import model_config_of
from tests.megatron.tiny_models import TINY, built, one_rank

# isort: split
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer

MODEL = f"""
    {TINY} --hybrid-layer-pattern M*-ME --hidden-size 64 --squared-relu --mamba-state-dim 8
    --mamba-head-dim 16 --mamba-num-groups 2 --position-embedding-type none --num-experts 4
    --moe-router-topk 2 --untie-embeddings-and-output-weights --seq-length 160
    --max-position-embeddings 160 --transformer-impl local --no-gradient-accumulation-fusion
"""
HEADS, WIDTH, GROUPS, STATES, INNER = 8, 16, 2, 8, 128

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="builds a model on the CPU")


@pytest.fixture(scope="module")
def model():
    with one_rank():
        yield built(MODEL)


def recurrence(mixer, hidden):
    """Compute a mixer's output (s, b, h) in FP64 by the paper's formulas."""
    weights = {name: p.detach().double() for name, p in mixer.named_parameters()}
    z, x, b, c, dt = (hidden @ weights["in_proj.weight"].t()).split(
        [INNER, INNER, GROUPS * STATES, GROUPS * STATES, HEADS], dim=-1
    )
    xbc = torch.cat([x, b, c], -1)
    taps = weights["conv1d_weight"][:, 0]
    padded = F.pad(xbc, (0, 0, 0, 0, taps.shape[1] - 1, 0))
    xbc = sum(padded[i : i + len(xbc)] * taps[:, i] for i in range(taps.shape[1]))
    x, b, c = F.silu(xbc + weights["conv1d_bias"]).split(
        [INNER, GROUPS * STATES, GROUPS * STATES], dim=-1
    )
    x = x.unflatten(-1, (HEADS, WIDTH))
    b, c = (t.unflatten(-1, (GROUPS, STATES)).repeat_interleave(HEADS // GROUPS, 2) for t in (b, c))
    dt = F.softplus(dt + weights["dt_bias"])
    rate = -weights["A_log"].exp()
    state = x.new_zeros(x.shape[1], HEADS, WIDTH, STATES)
    ys = []
    for t in range(len(x)):
        state = (dt[t] * rate).exp()[..., None, None] * state
        state = state + (dt[t, ..., None] * x[t])[..., None] * b[t, :, :, None]
        ys.append((state * c[t, :, :, None]).sum(-1) + weights["D"][:, None] * x[t])
    y = torch.stack(ys).flatten(-2) * F.silu(z)
    groups = y.unflatten(-1, (GROUPS, -1))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-5)
    return groups.flatten(-2) * weights["norm.weight"] @ weights["out_proj.weight"].t()


@on_a_cpu
def test_a_mixer_is_the_recurrence(model):
    mixer = model.decoder.layers[0].mixer
    draws = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws)
    hidden = torch.randn(160, 2, 64, generator=draws)
    y, bias = mixer(hidden)
    exact = recurrence(mixer, hidden.double())
    assert bias is None
    assert (y.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@on_a_cpu
def test_every_parameter_learns(model):
    tokens = torch.arange(320).view(2, 160) % 96
    positions = torch.arange(160).expand(2, -1)
    loss = model(tokens, positions, attention_mask=None, labels=tokens).mean()
    assert loss.isfinite()
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for name, gradient in zip(parameters, gradients, strict=True):
        assert gradient.isfinite().all() and gradient.any(), name


@on_a_cpu
def test_the_stack_is_of_local_layers_with_torchs_norms(model):
    stack = model.decoder
    assert isinstance(stack, hybrid.LocalHybridStack)
    norms = {name for name, module in stack.named_modules() if isinstance(module, torch.nn.RMSNorm)}
    assert norms == {
        "layers.0.norm", "layers.1.input_layernorm", "layers.2.pre_mlp_layernorm",
        "layers.3.norm", "layers.4.pre_mlp_layernorm", "final_norm",
    }  # fmt: skip
    used = {type(module).__module__ for module in stack.modules()}
    assert not any("transformer_engine" in name for name in used)


@on_a_cpu
def test_checkpoints_name_norms_as_transformer_engines_layers_do(model):
    groups = ProcessGroupCollection.use_mpu_process_groups()
    state = model.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
    keys = {entry.key for entry in state.values()}
    assert {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.4.pre_mlp_layernorm.weight",
        "decoder.final_norm.weight",
    } <= keys
    assert not any("input_layernorm" in key or ".norm.weight" in key for key in keys - {
        f"decoder.layers.{block}.mixer.norm.weight" for block in (0, 3)
    })  # fmt: skip


@pytest.mark.parametrize(("layers", "stack"), [("local", "own"), ("transformer_engine", None)])
def test_a_given_stack_stays(layers, stack):
    transformer = SimpleNamespace(transformer_impl=layers)
    config = SimpleNamespace(transformer=transformer, hybrid_stack_spec=stack)
    hybrid.use_local_stack(config)
    assert config.hybrid_stack_spec == stack


# -- the scan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
def test_hybrids_of_all_layers_have_the_best_scan(layers, monkeypatch, capsys):
    """Without causal-conv1d Megatron-LM's mixer would call None in either."""
    transformer = SimpleNamespace(transformer_impl=layers)
    config = SimpleNamespace(transformer=transformer, hybrid_stack_spec="own")
    place = "megatron_lowbit.megatron.recipe_hook"
    monkeypatch.setattr(f"{place}.hybrid_config_from_args", lambda args: config)
    monkeypatch.setattr(f"{place}.use_best_scan", lambda: "the best")
    monkeypatch.setattr(f"{place}.workarounds.apply_ignored_arguments", lambda config, args: [])
    monkeypatch.setattr(f"{place}.use_recipe", lambda config, args: None)
    assert (
        model_config_of(SimpleNamespace(hybrid_layer_pattern="M*", reset_attention_mask=False))
        is config
    )
    assert "Mamba scan: the best" in capsys.readouterr().out


@on_a_cpu
def test_where_nothing_is_installed_the_scan_is_torchs():
    assert use_best_scan() == "torch (no GPU here)"
    assert mamba_mixer.ExtendedRMSNorm is GatedNorm
    assert mamba_mixer.mamba_split_conv1d_scan_combined.keywords == {"scan": torch_scan}


def test_what_only_mamba_ssm_can_do_is_refused(monkeypatch):
    with pytest.raises(NotImplementedError, match="packed sequences"):
        convolve_and_scan(*[None] * 8, scan=torch_scan, seq_idx=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="before the norm"):
        GatedNorm(8, 1e-5, 4, norm_before_gate=True, device="cpu", dtype=torch.float32)
    monkeypatch.setattr("megatron_lowbit.megatron.layers.hybrid._HAVE_MAMBA_SSM", False)
    with pytest.raises(ImportError, match="mamba-ssm is not installed"):
        triton_scan(*[None] * 9)


@pytest.mark.gpu
def test_mamba_ssms_scan_agrees():
    pytest.importorskip("mamba_ssm")
    draws = torch.Generator("cuda").manual_seed(0)
    new = {"device": "cuda", "generator": draws}
    inner, channels = HEADS * 64, HEADS * 64 + 2 * GROUPS * 64
    x = torch.randn(2, 300, inner + channels + HEADS, dtype=torch.bfloat16, **new)
    weights = (
        0.3 * torch.randn(channels, 4, dtype=torch.bfloat16, **new),
        torch.zeros(channels, dtype=torch.bfloat16, device="cuda"),
        torch.rand(HEADS, **new) * 4 - 6,
        -torch.rand(HEADS, **new) * 15 - 1,
        torch.ones(HEADS, device="cuda"),
    )
    found = []
    for scan in (torch_scan, triton_scan):
        leaf = x.clone().requires_grad_()
        y = convolve_and_scan(leaf, *weights, chunk_size=128, ngroups=GROUPS, scan=scan, headdim=64)
        y.backward(torch.ones_like(y))
        found.append((y.detach().float(), leaf.grad.float()))
    for ours, theirs in zip(*found, strict=True):
        # BF16 products of sums over 128 tokens against FP32 ones.
        assert (ours - theirs).abs().max() <= 2e-2 * ours.abs().max()
