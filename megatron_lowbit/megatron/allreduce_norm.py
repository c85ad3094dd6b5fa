"""The fused all-reduce in megatron-core's transformer layers, forward.

Attention's and the MLP's last linear layer leave their sums to the addition of the residual, which
runs the one operation. It hands its result to the norm that comes next, and the codes of that to
the linear layer behind the norm. wgrad quantizes the normalized rows themselves, along tokens.
"""

import weakref
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lowbit.collectives.all_reduce_norm import AllReduceNorm
from megatron_lowbit.collectives.differentiable import all_reduce_rms_norm
from megatron_lowbit.errors import require
from megatron_lowbit.kernels.norm_cases import takes
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.numerics import Request
from megatron_lowbit.numerics.rmsnorm import RMSNorm


class HandedNorm(torch.nn.Module):
    """An RMSNorm that may get its result beside its input; parameters and their names stay."""

    def __init__(self, norm: torch.nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self._handed: tuple[weakref.ref, Any, Tensor] | None = None

    def hand(self, total: Tensor, normalized: Tensor) -> None:
        """Keep what ``forward`` gives for ``total`` itself."""
        self._handed = weakref.ref(total), total.grad_fn, normalized

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., K) normalized, by itself where nothing was handed for it."""
        handed, self._handed = self._handed, None
        # Recomputation gives the sum a graph of its own, which the rows are not in.
        graph = x.grad_fn if torch.is_grad_enabled() else handed and handed[1]
        if handed is not None and handed[0]() is x and handed[1] is graph:
            return handed[2]
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _AddAndNormalize:
    """Replacement of megatron-core's function that adds bias, dropout and residual.

    ``linear`` is the layer behind the norm, None behind the last one.
    """

    def __init__(
        self, run: AllReduceNorm, norm: HandedNorm, linear: torch.nn.Module | None
    ) -> None:
        self.run, self.norm = run, norm
        self._linear = None if linear is None else weakref.ref(linear)

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self.add

    @property
    def casts(self) -> bool:
        """True if the next linear layer takes codes in training."""
        x = torch.empty(1, self.norm.weight.numel(), dtype=self.norm.weight.dtype, device="meta")
        return self.request(x) is not None

    def add(
        self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        """Return the new residual. The arguments have made sure of no bias and no dropout."""
        x, norm = output_and_bias[0], self.norm
        request = self.request(x)
        normalized, total, codes = all_reduce_rms_norm(
            self.run, x, residual, norm.weight, norm.eps, request
        )
        norm.hand(total, normalized)
        if codes is not None:
            self._linear().layer_state.hand(normalized, codes)
        return total

    def request(self, x: Tensor) -> Request | None:
        """Return how the next linear layer quantizes x (..., K), if one kernel can do it here."""
        linear = None if self._linear is None else self._linear()
        state = getattr(linear, "layer_state", None)
        if state is None or not (linear.training or state.plan.evaluates):
            return None
        precision = state.plan.precision
        if precision.fprop.delayed is not None:
            return None  # the kernel's amax would not be recorded
        rows = x.numel() // x.shape[-1]
        context = LinearContext(precision, state.plan.engine, key=0)  # rounded to nearest alone
        request = context.request("fprop", "input", rows, needs_codes=True)
        if request is None or not takes(x.view(rows, -1), RMSNorm(), request):
            return None
        format = request.quantizer.format
        return request if format.block > 1 or format.row_scaled else None


def fuse_all_reduces(chunks: list[torch.nn.Module], args: Namespace) -> None:
    """Have a GPT's chunks run the operation wherever a norm follows, once :func:`check` passed."""
    rows = args.seq_length * args.micro_batch_size
    capacity = rows * args.hidden_size * args.params_dtype.itemsize
    run = AllReduceNorm(parallel_state.get_tensor_model_parallel_group(), capacity)
    for chunk in chunks:
        _fuse(chunk, run)


def check(args: Namespace) -> None:
    """Raise UserError unless a norm alone stands between a row-parallel layer and the next one."""
    needs = {
        "--tensor-model-parallel-size above 1": args.tensor_model_parallel_size > 1,
        "--transformer-impl local": args.transformer_impl == "local",
        "--normalization RMSNorm": args.normalization == "RMSNorm" and not args.mxnorm,
        "--disable-bias-linear": not args.add_bias_linear,
        "--hidden-dropout 0": args.hidden_dropout == 0.0,
        "a model without --sequence-parallel": not args.sequence_parallel,
        "a model without --num-experts": args.num_experts is None,
        "a GPT": args.hybrid_layer_pattern is None,
    }
    missing = [name for name, holds in needs.items() if not holds]
    require(not missing, f"--fused-allreduce-norm needs {', '.join(missing)}")


def _fuse(chunk: torch.nn.Module, run: AllReduceNorm) -> None:
    decoder = chunk.decoder
    layers: list[TransformerLayer] = list(decoder.layers)
    for layer in layers:
        layer.input_layernorm = HandedNorm(layer.input_layernorm)
        layer.pre_mlp_layernorm = HandedNorm(layer.pre_mlp_layernorm)
    following = [(one.input_layernorm, one.self_attention.linear_qkv) for one in layers[1:]]
    if decoder.final_layernorm is not None:
        decoder.final_layernorm = HandedNorm(decoder.final_layernorm)
        following.append((decoder.final_layernorm, None))
    for layer in layers:
        _leave_sum(layer.self_attention.linear_proj)
        norm, linear = layer.pre_mlp_layernorm, layer.mlp.linear_fc1
        layer.self_attn_bda = _AddAndNormalize(run, norm, linear)
    # The last layer of a stage in the middle has no norm behind it, and adds up as ever.
    for layer, (norm, linear) in zip(layers, following, strict=False):
        _leave_sum(layer.mlp.linear_fc2)
        layer.mlp_bda = _AddAndNormalize(run, norm, linear)


def describe(chunks: list[torch.nn.Module]) -> str:
    """Describe how often this rank's forward pass runs the operation, and by what."""
    found = [
        function
        for chunk in chunks
        for module in chunk.modules()
        for function in (getattr(module, "self_attn_bda", 0), getattr(module, "mlp_bda", 0))
        if isinstance(function, _AddAndNormalize)
    ]
    casts = sum(function.casts for function in found)
    return (
        f"{len(found)} fused all-reduces in forward on rank 0, {casts} of them with the cast of "
        f"the next layer: {found[0].run.choice}"
    )


def _leave_sum(linear: RowParallelLinear) -> None:
    # megatron-core's own switch for linear layers whose ranks' sums another module adds up.
    linear.explicit_expert_comm = True
