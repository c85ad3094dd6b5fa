"""Statistics of a model's norms: RMS of outputs, outlier features and histograms of inputs.

Source: "MXNorm" (arXiv 2603.13180), figures 6 to 8, which follow these over a training.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.training import global_vars
from torch import Tensor, nn

from megatron_lowbit.megatron.experts import first_local
from megatron_lowbit.megatron.layer_plan import layer_of
from megatron_lowbit.megatron.mxnorm import MXNormColumnParallelLinear

METRIC = "norms"
"""Start of the names; the norm's path and ``rms``, ``outlier``, ``input`` or ``output`` follow."""
_OUTLIER = "outlier_amax"
"""A sum that is a maximum over ranks, by its ending."""
_NORMS = (
    "input_layernorm", "pre_mlp_layernorm", "final_layernorm", "final_norm", "norm",
    "q_layernorm", "k_layernorm",
)  # fmt: skip


class NormStatistics:
    """Sums of each norm's output over the first forward pass that trains, by its path.

    Histograms are written at once, by the rank that has Megatron-LM's TensorBoard writer, of its
    own norms. Norms inside of Transformer Engine's linear layers are left out.
    """

    def __init__(self, chunks: Sequence[nn.Module], iteration: int) -> None:
        self.sums: dict[str, dict[str, Tensor]] = {}
        self._iteration = iteration
        self._handles = [
            module.register_forward_hook(partial(self._watch, path))
            for chunk in chunks
            for path, module in _norms(chunk)
        ]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _watch(self, path: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        # With recomputation a norm runs twice.
        if path in self.sums:
            return
        x, y = inputs[0].detach(), output
        if isinstance(module, MXNormColumnParallelLinear):
            y = _normalized(module, x)
        outlier, feature = largest_feature(x)
        self.sums[path] = {
            "squares": y.double().square().sum(),
            "values": torch.tensor(y.numel(), dtype=torch.float64, device=y.device),
            _OUTLIER: outlier,
        }
        writer = global_vars.get_tensorboard_writer()
        if writer:
            for name, values in (("input", x), ("output", y), ("outlier", x[..., feature])):
                tag = f"{METRIC}/{path}/{name}"
                writer.add_histogram(tag, values.detach().float().flatten(), self._iteration + 1)
            writer.add_scalar(f"{METRIC}/{path}/outlier_feature", feature, self._iteration + 1)


def largest_feature(x: Tensor) -> tuple[Tensor, int]:
    """Find the feature of x (..., K) that is largest over all tokens.

    Returns:
        Its RMS over the tokens as a multiple of x's own, an FP64 scalar from 1 to sqrt(K), 0 where
        x is zero; its number.
    """
    squares = x.double().flatten(0, -2).square().mean(0)
    largest, feature = squares.max(0)
    ratio = torch.where(largest == 0, 0.0, (largest / squares.mean()).sqrt())
    return ratio, int(feature)


def figures(sums: dict[str, float]) -> dict[str, float]:
    """Return a norm's output's RMS, and its input's largest feature on any rank, from sums."""
    return {"rms": math.sqrt(sums["squares"] / sums["values"]), "outlier": sums[_OUTLIER]}


def _norms(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a chunk's norms by their paths, with the numbers of the whole model's blocks."""
    for name, module in chunk.named_modules():
        parent, _, last = name.rpartition(".")
        # A Mamba mixer's own norm multiplies with a gate.
        is_norm = last in _NORMS and not parent.endswith("mixer")
        is_norm = is_norm and not isinstance(module, IdentityOp)
        if is_norm or isinstance(module, MXNormColumnParallelLinear):
            layer = layer_of(chunk, name, first_local(chunk.config))
            yield name if layer is None else layer.path, module


def _normalized(module: MXNormColumnParallelLinear, x: Tensor) -> Tensor:
    """Return what a layer's own norm makes of its input, (..., K) in FP32."""
    plan = module.layer_state.plan
    gain = module.layer_norm_weight.float()
    if not plan.precision.quantized or plan.norm is None:
        return nn.functional.rms_norm(x.float(), gain.shape, gain, module.config.layernorm_epsilon)
    block = plan.precision.fprop.lhs.format.block
    return plan.norm.normalize(x.flatten(0, -2), block) * gain
