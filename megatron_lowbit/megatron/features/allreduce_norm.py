"""Fused all-reduce, residual addition, norm and quantization in megatron-core's transformer layers.

The row-parallel linear layers of attention and MLP skip their all-reduce in the forward pass. The
residual addition after them runs the fused operation. It passes the normalized rows to the next
norm, and their quantized codes to the linear layer after it. The codes serve only fprop; wgrad
quantizes the normalized rows along tokens.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_lowbit.collectives.all_reduce_norm import AllReduceNorm, all_reduce_rms_norm
from megatron_lowbit.kernels.routes import takes_norm
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.numerics import Request
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.rmsnorm import RMSNorm


class PrecomputedNorm(torch.nn.Module):
    """RMSNorm whose result the fused operation may have computed, with torch's parameter names."""

    def __init__(self, norm: torch.nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self._result: tuple[weakref.ref, Any, Tensor] | None = None

    def set_result(self, x: Tensor, normalized: Tensor) -> None:
        """Set the result of the next ``forward``, if its input is this x."""
        self._result = weakref.ref(x), x.grad_fn, normalized

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., K) normalized: the result that was set for x, or else computed here."""
        result, self._result = self._result, None
        if result is not None:
            source, grad_fn, normalized = result
            # Recomputation gives x another graph, of which the result is no part.
            same_graph = grad_fn is x.grad_fn or not torch.is_grad_enabled()
            if source() is x and same_graph:
                return normalized
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _AddAndNormalize:
    """Replacement of megatron-core's addition of a residual, without bias and dropout.

    ``run`` is the fused operation, ``norm`` comes after the addition, and ``linear`` after the
    norm; None after the final norm.
    """

    def __init__(
        self, run: AllReduceNorm, norm: PrecomputedNorm, linear: torch.nn.Module | None
    ) -> None:
        self.run, self.norm = run, norm
        self._linear = None if linear is None else weakref.ref(linear)

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self.add

    def add(
        self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        """Return the new residual."""
        x, norm = output_and_bias[0], self.norm
        request = self.request(x)
        normalized, total, codes = all_reduce_rms_norm(
            self.run, x, residual, norm.weight, norm.eps, request
        )
        norm.set_result(total, normalized)
        if codes is not None:
            self._linear().layer_state.set_input_codes(normalized, codes)
        return total

    def request(self, x: Tensor) -> Request | None:
        """Return the next linear layer's request for x (..., K), if the kernel supports it."""
        linear = None if self._linear is None else self._linear()
        state = getattr(linear, "layer_state", None)
        if state is None or not (linear.training or state.plan.evaluates):
            return None
        precision = state.plan.precision
        if precision.fprop.delayed is not None:
            return None  # The kernel does not record the amax.
        rows = x.numel() // x.shape[-1]
        # The kernel only rounds to nearest, which needs no key.
        context = LinearContext(precision, state.plan.engine, key=0)
        request = context.request(Gemm.FPROP, Role.INPUT, rows, needs_codes=True)
        if request is None or not takes_norm(x.view(rows, -1), RMSNorm(), request):
            return None
        format = request.quantizer.format
        return request if format.block > 1 or format.row_scaled else None


class FusedAllReduceNorm(Feature):
    """The fused operation in a GPT's chunks."""

    argument = "fused_allreduce_norm"

    def install(self) -> None:
        args = self.run.args
        rows = args.seq_length * args.micro_batch_size
        capacity = rows * args.hidden_size * args.params_dtype.itemsize
        self._run = AllReduceNorm(parallel_state.get_tensor_model_parallel_group(), capacity)
        self._additions: list[_AddAndNormalize] = []
        for chunk in self.run.chunks:
            self._fuse(chunk.decoder)

    def _fuse(self, decoder: torch.nn.Module) -> None:
        layers: list[TransformerLayer] = list(decoder.layers)
        for layer in layers:
            layer.input_layernorm = PrecomputedNorm(layer.input_layernorm)
            layer.pre_mlp_layernorm = PrecomputedNorm(layer.pre_mlp_layernorm)
        following = [(each.input_layernorm, each.self_attention.linear_qkv) for each in layers[1:]]
        if decoder.final_layernorm is not None:
            decoder.final_layernorm = PrecomputedNorm(decoder.final_layernorm)
            following.append((decoder.final_layernorm, None))
        for layer in layers:
            # megatron-core's own switch, by which the linear layer skips its all-reduce.
            layer.self_attention.linear_proj.explicit_expert_comm = True
            layer.self_attn_bda = self._addition(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)
        # The last layer of a stage in the middle has no norm after it, and keeps its all-reduce.
        for layer, (norm, linear) in zip(layers, following, strict=False):
            layer.mlp.linear_fc2.explicit_expert_comm = True
            layer.mlp_bda = self._addition(norm, linear)

    def _addition(self, norm: PrecomputedNorm, linear: torch.nn.Module | None) -> _AddAndNormalize:
        self._additions.append(_AddAndNormalize(self._run, norm, linear))
        return self._additions[-1]

    def describe(self) -> Iterator[str]:
        """Yield the number and the path of the fused operations in this rank's forward pass."""
        casts = 0  # additions after which the next linear layer uses the codes in training
        for addition in self._additions:
            gain = addition.norm.weight
            x = torch.empty(1, gain.numel(), dtype=gain.dtype, device="meta")
            casts += addition.request(x) is not None
        yield (
            f"{len(self._additions)} fused all-reduces in forward on rank 0, {casts} of them with "
            f"the cast of the next layer: {self._run.choice}"
        )
