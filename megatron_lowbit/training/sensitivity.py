"""What quantization does to each layer of a trained model, over a few batches."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from megatron_lowbit.analysis.quantization_error import add
from megatron_lowbit.training.quantization_log import quantization_errors
from megatron_lowbit.training.run import Run, batches
from megatron_lowbit.training.step import forward_backward

OUTPUT, WEIGHT_GRADIENT = "fprop/error", "wgrad/error"


class Sensitivity(NamedTuple):
    """Mean relative errors of a layer's output and weight gradient, and its number of weights."""

    output: float
    weight_gradient: float
    weights: int

    @property
    def score(self) -> float:
        """By which layers are ranked."""
        return self.output + self.weight_gradient


def measure(run: Run) -> dict[str, Sensitivity]:
    """Of every quantized layer, over ``train_iters`` batches; weights stay as they are."""
    stream, count = batches(run, run.train_data, 0), run.args.train_iters
    totals: dict[str, dict[str, float]] = {}
    run.set_precision()
    for iteration in range(count):
        run.beat(f"batch {iteration + 1}")
        errors: dict[str, dict[str, float]] = {}
        with quantization_errors(run.model, iteration, errors):
            forward_backward(run.args, iteration, stream, run.model)
        for path, layer in errors.items():
            named = {name: layer.get(name, 0.0) for name in (OUTPUT, WEIGHT_GRADIENT)}
            add(totals.setdefault(path, {}), named)
    sizes = _weights(run.model, run.args.tensor_model_parallel_size)
    return {
        path: Sensitivity(total[OUTPUT] / count, total[WEIGHT_GRADIENT] / count, sizes[path])
        for path, total in totals.items()
    }


def _weights(model: list[nn.Module], tensor_parallel: int) -> Mapping[str, int]:
    """Every rank's layers' numbers of weights, by path."""
    mine = {
        module.layer_state.plan.layer.path: module.weight.numel() * tensor_parallel
        for chunk in model
        for module in chunk.modules()
        if getattr(module, "layer_state", None) is not None
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return {path: size for sizes in of_ranks for path, size in sizes.items()}
