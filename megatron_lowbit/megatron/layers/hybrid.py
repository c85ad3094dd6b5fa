"""Hybrid models of Mamba-2, attention, MLP and expert blocks with local layers.

Megatron-LM only has a hybrid stack of Transformer Engine layers, and its Mamba-2 mixer needs
mamba-ssm's functions, which torch's replace here where they are not installed.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.training.models import HybridModelConfig
from torch import Tensor

from megatron_lowbit.layers.ssd import causal_convolution, grouped_rms_norm, ssd

_HAVE_MAMBA_SSM: bool = mamba_mixer.HAVE_MAMBA_SSM  # before use_best_scan changes it


class LocalHybridStack(HybridStack):
    """Megatron-LM's hybrid stack with torch's final norm instead of Transformer Engine's."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        post_layer_norm = kwargs.pop("post_layer_norm", True)
        super().__init__(config, *args, **kwargs, post_layer_norm=False)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = WrappedTorchNorm(
                config, config.hidden_size, eps=config.layernorm_epsilon
            )


def use_local_stack(model_config: HybridModelConfig) -> None:
    """Set the stack's spec of a hybrid with local layers, which Megatron-LM does not have."""
    is_local = model_config.transformer.transformer_impl == "local"
    if is_local and model_config.hybrid_stack_spec is None:
        model_config.hybrid_stack_spec = local_stack_spec(model_config.transformer)


def local_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a hybrid stack with a separate norm before each block's linear layers.

    Checkpoints use the same names for the norms as Transformer Engine's fused layers.
    """
    norms = {"qk_layernorm": config.qk_layernorm, "normalization": config.normalization}
    gpt = get_gpt_layer_local_submodules(**norms, qk_l2_norm=config.qk_l2_norm)
    latent = get_gpt_layer_local_submodules(**norms, multi_latent_attention=True)
    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(MambaMixer, submodules=projections),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    attention, latent_attention = (
        TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=layer.self_attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=layer.sharded_state_dict_keys_map,
        )
        for layer in (gpt, latent)
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=gpt.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=gpt.sharded_state_dict_keys_map,
    )
    experts = get_moe_module_spec(
        use_te=False,
        num_experts=config.num_moe_experts or 1,  # not built for patterns without experts
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    moe = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm, mlp=experts, mlp_bda=get_bias_dropout_add
    )
    # The inner layers of multi-token prediction follow the pattern.
    prediction = MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        layer_norm=WrappedTorchNorm,
    )
    predictions = MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(MultiTokenPredictionLayer, submodules=prediction)]
    )
    return ModuleSpec(
        LocalHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
            mla_layer=ModuleSpec(TransformerLayer, submodules=latent_attention),
            moe_layer=ModuleSpec(MoETransformerLayer, submodules=moe),
            mtp_block_spec=ModuleSpec(MultiTokenPredictionBlock, submodules=predictions),
        ),
    )


class GatedNorm(torch.nn.Module):
    """Group-wise RMSNorm of this rank's channels, after an optional gate.

    Arguments are as for mamba-ssm's norm; ``factory``: device and dtype of the weight.
    """

    def __init__(
        self, channels: int, eps: float, group_size: int, norm_before_gate: bool, **factory: Any
    ) -> None:
        super().__init__()
        if norm_before_gate:
            raise NotImplementedError("norm_before_gate: only a gate before the norm is supported")
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(channels, **factory))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize x (..., channels), multiplied by silu(gate), in x's dtype."""
        return grouped_rms_norm(x, self.weight, gate, self.group_size, self.eps)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the weight, sharded over the tensor-parallel group along its only axis."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def use_best_scan() -> str:
    """Install the fastest available scan in megatron-core's mixer; return its description."""
    if torch.cuda.is_available() and _HAVE_MAMBA_SSM:
        if mamba_mixer.causal_conv1d_fn is not None:
            return "mamba-ssm, convolution and scan fused"
        mamba_mixer.mamba_split_conv1d_scan_combined = partial(convolve_and_scan, scan=triton_scan)
        return "mamba-ssm's scan (causal-conv1d is not installed: torch's convolution)"
    mamba_mixer.HAVE_MAMBA_SSM = True  # The mixer needs only the functions replaced here.
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = partial(convolve_and_scan, scan=torch_scan)
    missing = "mamba-ssm is not installed" if torch.cuda.is_available() else "no GPU here"
    return f"torch ({missing})"


def convolve_and_scan(
    zxbcdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    a: Tensor,
    D: Tensor,
    chunk_size: int,
    ngroups: int,
    *,
    scan: Any,
    headdim: int | None = None,
    **others: Any,
) -> Tensor:
    """Compute mamba-ssm's ``mamba_split_conv1d_scan_combined`` by torch's convolution and ``scan``.

    Arguments are as of that function, without ``seq_idx``; ``scan`` is :func:`torch_scan` or
    :func:`triton_scan`. ``zxbcdt`` is (batch, length, 2 * heads * head dim + 2 * groups * state dim
    + heads), ``conv_weight`` (channels of x, B and C, width), ``conv_bias`` (channels,),
    ``dt_bias`` and ``a`` (heads,), ``D`` (heads, head dim), or (heads,) with ``headdim``. Returns
    (batch, length, heads * head dim) in zxbcdt's dtype, gated but not normalized.
    """
    if others.get("seq_idx") is not None:
        raise NotImplementedError("packed sequences need mamba-ssm and causal-conv1d")
    heads, inner = len(dt_bias), D.numel() if headdim is None else len(dt_bias) * headdim
    states = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * states, heads], dim=-1)
    xbc = causal_convolution(xbc, conv_weight, conv_bias)
    x, b, c = xbc.split([inner, ngroups * states, ngroups * states], dim=-1)
    x, z = (t.unflatten(-1, (heads, -1)) for t in (x, z))
    b, c = (t.unflatten(-1, (ngroups, -1)) for t in (b, c))
    return scan(x, dt, a, b, c, D, z, dt_bias, chunk_size).flatten(-2)


def torch_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, dt_bias: Tensor,
    chunk_size: int,
) -> Tensor:  # fmt: skip
    """Run the scan in torch for x, z (batch, length, heads, head dim), and dt without its bias."""
    y = ssd(x, F.softplus(dt.float() + dt_bias), a, b, c, d, chunk_size)
    return (y * F.silu(z.float())).to(x.dtype)


def triton_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, dt_bias: Tensor,
    chunk_size: int,
) -> Tensor:  # fmt: skip
    """Run the same scan by mamba-ssm; raise ImportError if it is not installed."""
    if not _HAVE_MAMBA_SSM:
        raise ImportError("mamba-ssm is not installed")
    return mamba_mixer.mamba_chunk_scan_combined(
        x.contiguous(), dt.contiguous(), a, b.contiguous(), c.contiguous(), chunk_size,
        D=d, z=z.contiguous(), dt_bias=dt_bias, dt_softplus=True,
    )  # fmt: skip
