"""Weights of layers in CUDA graphs, quantized once a step by a graph of their own.

A layer's graph reads codes where they lay when it was captured. The graph here writes them there
anew, before the first microbatch of each step. Where weights are not whole at that moment, as they
are still being gathered, and where random bits round them, each layer's graph quantizes its own.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from megatron_lowbit.layers import WeightCache
from megatron_lowbit.layers.operands import quantize_weight
from megatron_lowbit.megatron.layer_state import LayerState, weights_of
from megatron_lowbit.recipes import LinearPrecision

_Made = TypeVar("_Made")


class GraphWeights:
    """Quantized weights of this rank's layers, at fixed addresses."""

    def __init__(self, chunks: Sequence[torch.nn.Module], args: Namespace) -> None:
        self._layers: list[tuple[torch.nn.Parameter, LayerState]] = []
        if not (args.overlap_param_gather or args.use_megatron_fsdp or args.use_torch_fsdp2):
            # Experts' layers are not captured.
            found = (pair for chunk in chunks for pair in weights_of(chunk))
            self._layers = [pair for pair in found if not pair[1].is_expert]
        self._precisions: list[LinearPrecision] = []
        self._replay: Callable[[], None] | None = None

    @torch.no_grad()
    def begin_step(self, iteration: int, training: bool) -> None:
        """Quantize the weights of a step."""
        precisions = [state.plan.precision for _, state in self._layers]
        if precisions != self._precisions:
            self._precisions = precisions
            self._capture()
        elif self._replay is not None:
            self._replay()

    def _capture(self) -> None:
        layers, self._replay = [], None
        for weight, state in self._layers:
            state.weight_cache = WeightCache()
            if state.quantizes_weight:
                layers.append((weight, state))
        if not layers:
            return
        made, self._replay = captured(lambda: [_quantized(*layer) for layer in layers])
        for (_, state), operands in zip(layers, made, strict=True):
            state.weight_cache = WeightCache(operands, stored=True)


def _quantized(weight: torch.nn.Parameter, state: LayerState) -> tuple[Any, Any]:
    context = replace(state.context(state.shards()), weight_cache=None)
    return quantize_weight(context, lambda: weight)


def captured(function: Callable[[], _Made]) -> tuple[_Made, Callable[[], None]]:
    """Record a function in a CUDA graph; return what it makes, and what writes that anew.

    It runs once before, which compiles its kernels.
    """
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = function()
    graph.replay()
    return made, graph.replay
