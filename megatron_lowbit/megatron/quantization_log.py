"""Log of what quantization does to each linear layer while a model trains.

A measurement covers the first microbatch of an iteration, forward and backward. Training computes
the same bits with it and without: the random numbers of a measurement are its own. The first
operand with values that are not finite is printed at once: they may end the run before the figures
are written.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import global_vars
from torch import Tensor, nn

from megatron_lowbit.analysis.quantization_error import NONFINITE, Sums, add, figures, gemm_sums
from megatron_lowbit.errors import say
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.megatron import norm_statistics as norms
from megatron_lowbit.megatron.rank_errors import gather_from_ranks
from megatron_lowbit.megatron.steps import run_after_backward, steps_of
from megatron_lowbit.numerics import Operand, derive_key
from megatron_lowbit.numerics.gemms import Gemm

METRIC = "quantization"
"""Start of the figures' names; the layer's path and the figure's name follow."""


def log_quantization_errors(args: Namespace, chunks: list[nn.Module]) -> None:
    """Measure a model's layers every ``--log-quantization-error-interval`` iterations.

    Figures go where Megatron-LM writes its scalars, under ``quantization/PATH/FIGURE``.
    """
    interval = args.log_quantization_error_interval
    if interval == 0:
        return

    def begin_step(iteration: int, training: bool) -> None:
        if training and iteration % interval == 0:
            Measurement(chunks, iteration, partial(_write, METRIC))
            _log_norms(chunks, iteration)

    steps_of(args, chunks).listeners.append(begin_step)


class Measurement:
    """Measurement of every quantized layer over the first microbatch of the present iteration.

    It ends when Megatron-LM has finalized the iteration's gradients. Layers that normalize their
    own input are left out.

    Args:
        chunks: this rank's part of the model.
        iteration: finished iterations.
        report: called on all ranks at the end with the number of the iteration, counted from 1, and
            the figures of each layer by its path.
    """

    def __init__(self, chunks: Sequence[nn.Module], iteration: int, report: Any) -> None:
        self._iteration, self._report = iteration, report
        self._found: dict[str, Sums] = {}
        self._is_finite = True
        self._handles = [
            module.register_forward_hook(self._watch)
            for chunk in chunks
            for module in chunk.modules()
            if hasattr(module, "layer_state") and not hasattr(module, "layer_norm_weight")
        ]
        run_after_backward(chunks, self._end)

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._report(self._iteration + 1, _gather(self._found, figures))

    def _watch(self, module: nn.Module, inputs: tuple, outputs: Any) -> None:
        """Measure the forward pass of a layer, and its backward pass when the gradient is there."""
        state = module.layer_state
        path, y = state.plan.layer.path, outputs[0] if isinstance(outputs, tuple) else outputs
        # With recomputation a layer runs twice, the first time without gradients.
        if path in self._found or not y.requires_grad or not state.plan.precision.quantized:
            return
        x = inputs[0].source if isinstance(inputs[0], Operand) else inputs[0]
        x = x.detach().flatten(0, -2)
        # An expert may have no tokens in the first microbatch.
        self._found[path] = {}
        if not x.numel():
            return
        weight = module.weight.detach()
        context = LinearContext(
            state.plan.precision,
            state.plan.engine,
            key=derive_key(METRIC, path, self._iteration),
            training=False,
            amax_history=state.amax_history,
        )
        with torch.no_grad():
            self._add(path, gemm_sums(context, Gemm.FPROP, x, weight))
        rank = module.tp_group.rank()
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
        self._found[path] |= sums
        for name, value in sums.items():
            if self._is_finite and name.endswith(NONFINITE) and value:
                self._is_finite = False
                say(
                    f"rank {dist.get_rank()}, iteration {self._iteration + 1}: {path} "
                    f"{name.removesuffix(NONFINITE)}{NONFINITE}: {int(value)}, the first of them"
                )


def _log_norms(chunks: Sequence[nn.Module], iteration: int) -> None:
    """Log the statistics of norms over the same microbatch."""
    statistics = norms.NormStatistics(chunks, iteration)

    def end() -> None:
        statistics.remove()
        _write(norms.METRIC, iteration + 1, _gather(statistics.sums, norms.figures))

    run_after_backward(chunks, end)


def _gather(found: dict[str, Sums], figures: Any) -> dict[str, dict[str, float]]:
    """Return the figures of every layer or norm, from the sums of all ranks."""
    mine = {path: {k: float(v) for k, v in sums.items()} for path, sums in found.items()}
    total: dict[str, dict[str, float]] = {}
    for sums_of_rank in gather_from_ranks(mine):
        for path, sums in sums_of_rank.items():
            add(total.setdefault(path, {}), sums)
    return {path: figures(sums) for path, sums in sorted(total.items())}


def _write(metric: str, iteration: int, found: dict[str, dict[str, float]]) -> None:
    metrics = {
        f"{metric}/{path}/{name}": value
        for path, layer in found.items()
        for name, value in layer.items()
    }
    write_scalars(metrics, iteration)


def write_scalars(metrics: dict[str, float], iteration: int) -> None:
    """Write figures as Megatron-LM writes its scalars: on the rank that has the writers."""
    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if writer:
        for name, value in metrics.items():
            writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(metrics, iteration)
