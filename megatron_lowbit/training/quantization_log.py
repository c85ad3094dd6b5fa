"""Measures what quantization does to each linear layer while a model trains."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lowbit.analysis.quantization_error import Sums, add, figures, gemm_sums
from megatron_lowbit.layers.call import LinearCall
from megatron_lowbit.numerics import Operand, derive_key

METRIC = "quantization"


@contextmanager
def quantization_errors(
    model: Sequence[nn.Module], iteration: int, result: dict[str, dict[str, float]]
) -> Iterator[None]:
    """While it is open, each quantized layer's first microbatch is measured, forward and backward.

    On leaving, ``result`` gets every layer's figures by its path, of all ranks together: all of
    them leave it. Training computes the same bits as without: the random numbers are others.
    Layers whose input is normalized inside (MXNorm) are left out.
    """
    found: dict[str, Sums] = {}
    handles = [
        module.register_forward_hook(partial(_watch, found, iteration))
        for chunk in model
        for module in chunk.modules()
        if getattr(module, "layer_state", None) is not None
        and not hasattr(module, "layer_norm_weight")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    result.update(_gathered(found))


def metrics_of(errors: dict[str, dict[str, float]]) -> dict[str, float]:
    """One level of names, as loggers want them."""
    return {
        f"{METRIC}/{path}/{name}": value
        for path, layer in errors.items()
        for name, value in layer.items()
    }


def _watch(
    found: dict[str, Sums], iteration: int, module: nn.Module, inputs: tuple, outputs: Any
) -> None:
    state = module.layer_state
    path, y = state.plan.layer.path, outputs[0] if isinstance(outputs, tuple) else outputs
    # With recomputation a layer runs twice, the first time without gradients.
    if path in found or not y.requires_grad or not state.plan.precision.quantized:
        return
    x = inputs[0].source if isinstance(inputs[0], Operand) else inputs[0]
    x = x.detach().flatten(0, -2)
    if not x.numel():
        return
    weight = module.weight.detach()
    call = LinearCall(
        precision=state.plan.precision,
        engine=state.plan.engine,
        key=derive_key(METRIC, path, iteration),
        training=False,
        keep_input=False,
        amax_history=state.amax_history,
    )
    with torch.no_grad():
        found[path] = gemm_sums(call, "fprop", x, weight)
    rank = module.tp_group.rank()
    y.register_hook(partial(_watch_grad, found[path], call, x, weight, rank))


@torch.no_grad()
def _watch_grad(
    sums: Sums, call: LinearCall, x: Tensor, weight: Tensor, rank: int, grad: Tensor
) -> None:
    grad = grad.detach().flatten(0, -2)
    # Under sequence parallelism one of them has all tokens, the other this rank's.
    tokens = min(len(x), len(grad))
    x, grad = (t if len(t) == tokens else t[rank * tokens :][:tokens] for t in (x, grad))
    sums |= gemm_sums(call, "dgrad", grad, weight.t())
    sums |= gemm_sums(call, "wgrad", grad.t(), x.t())


def _gathered(found: dict[str, Sums]) -> dict[str, dict[str, float]]:
    """Figures of every layer from all ranks' sums."""
    mine = {path: {k: float(v) for k, v in sums.items()} for path, sums in found.items()}
    of_ranks: list[Any] = [mine]
    if dist.is_initialized():
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
    total: dict[str, dict[str, float]] = {}
    for ranks in of_ranks:
        for path, sums in ranks.items():
            add(total.setdefault(path, {}), sums)
    return {path: figures(sums) for path, sums in sorted(total.items())}
