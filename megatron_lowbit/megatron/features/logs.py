"""Logs of what quantization does while a model trains: errors, norms, and fallbacks to BF16.

A measurement covers the first microbatch of an iteration, forward and backward. Training computes
the same bits with it and without: the random numbers of a measurement are its own. The first
operand with values that are not finite is printed at once: they may end the run before the figures
are written.

Source of the norms' statistics: "MXNorm" (arXiv 2603.13180), figures 6 to 8, which follow the RMS
of outputs, outlier features and histograms over a training.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp
from megatron.training import global_vars
from torch import Tensor, nn

from megatron_lowbit.analysis.quantization_error import NONFINITE, Sums, add, figures, gemm_sums
from megatron_lowbit.errors import say
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.layers.mxnorm import MXNormColumnParallelLinear
from megatron_lowbit.megatron.layers.state import first_local_expert, layer_of
from megatron_lowbit.megatron.run.errors import gather_from_ranks
from megatron_lowbit.numerics import Operand, derive_key
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.recipes import Recipe

METRIC = "quantization"
"""Start of the figures' names; the layer's path and the figure's name follow."""
NORMS = "norms"
"""Start of the names of norms' figures; the norm's path and the figure's name follow."""
FALLBACKS = "bf16_fallbacks"
"""Start of the names of counts; the GEMM's name follows."""
_OUTLIER = "outlier_amax"
"""A sum that is a maximum over ranks, by its ending."""
UNMEASURED = "experts that Transformer Engine groups are not measured"
_NORM_NAMES = (
    "input_layernorm", "pre_mlp_layernorm", "final_layernorm", "final_norm", "norm",
    "q_layernorm", "k_layernorm",
)  # fmt: skip


class QuantizationLog(Feature):
    """Measurements of a model every ``--log-quantization-error-interval`` iterations.

    Figures go where Megatron-LM writes its scalars, under ``quantization/PATH/FIGURE`` and
    ``norms/PATH/FIGURE``.
    """

    argument = "log_quantization_error_interval"

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._iteration = 0
        self._measured: dict[str, Measurement | NormStatistics] = {}

    def describe(self) -> Iterator[str]:
        """Yield a line if some layers are not measured."""
        if groups_experts(self.run.args):
            yield f"--{self.argument.replace('_', '-')}: {UNMEASURED}"

    def begin_step(self, iteration: int, training: bool) -> None:
        """Begin to measure an iteration at the interval."""
        if training and iteration % self.run.args.log_quantization_error_interval == 0:
            self._iteration, chunks = iteration, self.run.chunks
            self._measured = {
                METRIC: Measurement(chunks, iteration), NORMS: NormStatistics(chunks, iteration)
            }  # fmt: skip

    def after_backward(self) -> None:
        """Write the figures that were measured."""
        measured, self._measured = self._measured, {}
        for metric, measurement in measured.items():
            scalars = {
                f"{metric}/{path}/{name}": value
                for path, layer_figures in measurement.end().items()
                for name, value in layer_figures.items()
            }
            write_scalars(scalars, self._iteration + 1)


def groups_experts(args: Namespace) -> bool:
    """Return True if Transformer Engine groups a model's experts, as it does in all hybrids."""
    is_grouped = args.moe_grouped_gemm or args.hybrid_layer_pattern is not None
    return bool(args.num_experts and is_grouped and args.transformer_impl == "transformer_engine")


class Measurement:
    """Measurement of every quantized layer over the first microbatch of the present iteration.

    Layers that normalize their own input are not measured. ``iteration``: finished iterations.
    """

    def __init__(self, chunks: Sequence[nn.Module], iteration: int) -> None:
        self.iteration = iteration
        self._sums: dict[str, Sums] = {}
        self._is_finite = True
        self._handles = [
            module.register_forward_hook(self._watch, with_kwargs=True)
            for chunk in chunks
            for module in chunk.modules()
            if hasattr(module, "layer_state") and not hasattr(module, "layer_norm_weight")
        ]

    def end(self) -> dict[str, dict[str, float]]:
        """Stop, and return the figures of each layer by its path; all ranks together."""
        for handle in self._handles:
            handle.remove()
        return _gather(self._sums, figures)

    def _watch(self, module: nn.Module, inputs: tuple, named: dict, outputs: Any) -> None:
        """Measure the forward pass of a layer, and its backward pass when the gradient is there."""
        state = module.layer_state
        path, y = state.plan.layer.path, outputs[0] if isinstance(outputs, tuple) else outputs
        # With recomputation a layer runs twice, the first time without gradients.
        if path in self._sums or not y.requires_grad or not state.plan.precision.quantized:
            return
        x = inputs[0].source if isinstance(inputs[0], Operand) else inputs[0]
        x = x.detach().flatten(0, -2)
        # An expert may have no tokens in the first microbatch.
        self._sums[path] = {}
        if not x.numel():
            return
        # An output layer that shares the embedding's weight has none of its own.
        weight = (named["weight"] if module.weight is None else module.weight).detach()
        context = LinearContext(
            state.plan.precision,
            state.plan.engine,
            key=derive_key(METRIC, path, self.iteration),
            training=False,
            amax_history=state.amax_history,
        )
        with torch.no_grad():
            self._add(path, gemm_sums(context, Gemm.FPROP, x, weight))
        # Transformer Engine's layers that every rank has whole are in no group.
        rank = 0 if module.tp_group is None else module.tp_group.rank()
        y.register_hook(partial(self._watch_grad, path, context, x, weight, rank))

    @torch.no_grad()
    def _watch_grad(
        self, path: str, context: LinearContext, x: Tensor, weight: Tensor, rank: int, grad: Tensor
    ) -> None:
        grad = grad.detach().flatten(0, -2)
        # Under sequence parallelism one of them has all tokens, the other this rank's.
        tokens = min(len(x), len(grad))
        x, grad = (t if len(t) == tokens else t[rank * tokens :][:tokens] for t in (x, grad))
        self._add(path, gemm_sums(context, Gemm.DGRAD, grad, weight.t()))
        self._add(path, gemm_sums(context, Gemm.WGRAD, grad.t(), x.t()))

    def _add(self, path: str, sums: Sums) -> None:
        """Keep a GEMM's sums; print the first operand whose values are not all finite."""
        self._sums[path] |= sums
        for name, value in sums.items():
            if self._is_finite and name.endswith(NONFINITE) and value:
                self._is_finite = False
                say(
                    f"rank {dist.get_rank()}, iteration {self.iteration + 1}: {path} "
                    f"{name.removesuffix(NONFINITE)}{NONFINITE}: {int(value)}, the first of them"
                )


class NormStatistics:
    """Sums of each norm's output over the first forward pass that trains, by its path.

    Histograms are written at once, by the rank that has Megatron-LM's TensorBoard writer, of its
    own norms. Norms inside of Transformer Engine's linear layers are not measured.
    """

    def __init__(self, chunks: Sequence[nn.Module], iteration: int) -> None:
        self._sums: dict[str, Sums] = {}
        self._iteration = iteration
        self._handles = [
            module.register_forward_hook(partial(self._watch, path))
            for chunk in chunks
            for path, module in _norms(chunk)
        ]

    def end(self) -> dict[str, dict[str, float]]:
        """Stop, and return the figures of each norm by its path; all ranks together."""
        for handle in self._handles:
            handle.remove()
        return _gather(
            self._sums,
            lambda sums: {
                "rms": math.sqrt(sums["squares"] / sums["values"]),
                "outlier": sums[_OUTLIER],
            },
        )

    @torch.no_grad()
    def _watch(self, path: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        # With recomputation a norm runs twice.
        if path in self._sums:
            return
        x, y = inputs[0].detach(), output
        if isinstance(module, MXNormColumnParallelLinear):
            y = _normalized(module, x)
        outlier, feature = largest_feature(x)
        self._sums[path] = {
            "squares": y.double().square().sum(),
            "values": torch.tensor(y.numel(), dtype=torch.float64, device=y.device),
            _OUTLIER: outlier,
        }
        if writer := global_vars.get_tensorboard_writer():
            tag, step = f"{NORMS}/{path}", self._iteration + 1
            for name, values in (("input", x), ("output", y), ("outlier", x[..., feature])):
                writer.add_histogram(f"{tag}/{name}", values.detach().float().flatten(), step)
            writer.add_scalar(f"{tag}/outlier_feature", feature, step)


def largest_feature(x: Tensor) -> tuple[Tensor, int]:
    """Return the size and the number of the feature of x (..., K) that is largest over all tokens.

    The size is its RMS over the tokens as a multiple of x's own, an FP64 scalar from 1 to sqrt(K),
    0 where x is zero.
    """
    squares = x.double().flatten(0, -2).square().mean(0)
    largest, feature = squares.max(0)
    ratio = torch.where(largest == 0, 0.0, (largest / squares.mean()).sqrt())
    return ratio, int(feature)


def _norms(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a chunk's norms by their paths, with the numbers of the whole model's blocks."""
    first_expert = first_local_expert(chunk.config)
    for name, module in chunk.named_modules():
        parent, _, last = name.rpartition(".")
        # A Mamba mixer's own norm multiplies with a gate.
        is_norm = last in _NORM_NAMES and not parent.endswith("mixer")
        is_norm = is_norm and not isinstance(module, IdentityOp)
        if is_norm or isinstance(module, MXNormColumnParallelLinear):
            layer = layer_of(chunk, name, first_expert)
            yield name if layer is None else layer.path, module


def _normalized(module: MXNormColumnParallelLinear, x: Tensor) -> Tensor:
    """Return the normalized input of a layer, (..., K) in FP32."""
    plan = module.layer_state.plan
    gain = module.layer_norm_weight.float()
    if not plan.precision.quantized or plan.norm is None:
        return nn.functional.rms_norm(x.float(), gain.shape, gain, module.config.layernorm_epsilon)
    block = plan.precision.fprop.lhs.format.block
    return plan.norm.normalize(x.flatten(0, -2), block) * gain


def _gather(sums: dict[str, Sums], figures: Any) -> dict[str, dict[str, float]]:
    """Return the figures of every layer or norm, from the sums of all ranks."""
    mine = {path: {k: float(v) for k, v in values.items()} for path, values in sums.items()}
    total: dict[str, dict[str, float]] = {}
    for sums_of_rank in gather_from_ranks(mine):
        for path, values in sums_of_rank.items():
            add(total.setdefault(path, {}), values)
    return {path: figures(values) for path, values in sorted(total.items())}


def write_scalars(metrics: dict[str, float], iteration: int) -> None:
    """Write figures as Megatron-LM writes its scalars: on the rank that has the writers."""
    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if writer:
        for name, value in metrics.items():
            writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(metrics, iteration)


class Fallbacks(Feature):
    """Counts of products that were not finite and were computed again in high precision.

    They are written every ``--log-interval`` iterations and at the last one, of the iterations
    since the last report; what is recomputed in backward counts twice. Each rank prints which of
    its layers they were in. All ranks count together, also where this one's layers have no
    fallback, or none yet.
    """

    _iteration: int | None = None

    @classmethod
    def is_on(cls, args: Namespace, recipe: Recipe) -> bool:
        return any(precision.falls_back for precision in recipe.precisions())

    def begin_step(self, iteration: int, training: bool) -> None:
        """Remember an iteration at whose end counts are reported."""
        number, args = iteration + 1, self.run.args
        if training and (number % args.log_interval == 0 or number == args.train_iters):
            self._iteration = number

    def after_backward(self) -> None:
        """Write the counts of all ranks, and print the counts of this one."""
        iteration, self._iteration = self._iteration, None
        if iteration is None:
            return
        states = [state for state in self.run.states if state.fallbacks is not None]
        device = next(self.run.chunks[0].parameters()).device
        none = torch.zeros(len(GEMM_ROLES), dtype=torch.int64, device=device)
        total = sum((state.fallbacks for state in states), none)
        for state in states if total.any() else ():
            for gemm, count in zip(GEMM_ROLES, state.fallbacks.tolist(), strict=True):
                if count:
                    say(
                        f"rank {dist.get_rank()}, iteration {iteration}: {state.plan.layer.path} "
                        f"{gemm}: {count} products were not finite, and were computed again in BF16"
                    )
            state.fallbacks.zero_()
        dist.all_reduce(total)
        counts = zip(GEMM_ROLES, total.tolist(), strict=True)
        write_scalars({f"{FALLBACKS}/{gemm}": count for gemm, count in counts}, iteration)
