"""CUDA graphs of Megatron-LM under a recipe.

A graph replays kernels with the arguments of its capture. What changes from one microbatch to the
next must therefore lie in device memory: random keys do, and amax histories are written in place. A
layer's graph reads quantized weights where they lay when it was captured; a graph of their own
writes them there before the first microbatch of each step. Where weights are not whole at that
moment, as they are still being gathered, and where random bits round them, each layer's graph
quantizes its own.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.cuda_graphs import _layer_is_graphable, delete_cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule

from megatron_lowbit.layers import WeightCache
from megatron_lowbit.layers.operands import quantize_weight
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.layers.state import LayerState, layer_states, weights_of
from megatron_lowbit.numerics.randomness import key_table
from megatron_lowbit.recipes import LinearPrecision, Recipe

_T = TypeVar("_T")
_OF_PARTS = {
    "cudagraph_manager_router": "_forward_mlp_router",
    "cudagraph_manager_postprocess": "_forward_mlp_postprocess",
}
"""Managers of the parts of a hybrid's layer with experts, and the methods that they replace."""


class CudaGraphs(Feature):
    """Random keys, quantized weights and captures of a rank's layers.

    Layers copy their keys at the beginning of a call, since other microbatches may come before its
    backward pass.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._precisions: list[LinearPrecision] = []
        self._replay: Callable[[], None] | None = None
        self._replays = True

    @classmethod
    def is_on(cls, args: Namespace, recipe: Recipe) -> bool:
        return args.cuda_graph_impl != "none"

    def install(self) -> None:
        """Give the layers places in device memory for what changes between replays."""
        args = self.run.args
        self._states = states = self._captured_states()
        self._unused = key_table(0)
        device = states[0].device if states else "cpu"
        self._keys = torch.zeros((len(states), len(self._unused)), dtype=torch.int64, device=device)
        for state, keys in zip(states, self._keys, strict=True):
            state.graph_keys = keys
        self._captured_for = self._note_microbatches()
        self._weights: list[tuple[torch.nn.Parameter, LayerState]] = []
        # Weights that are gathered later are not whole when a step begins.
        if not (args.overlap_param_gather or args.use_megatron_fsdp or args.use_torch_fsdp2):
            dense = {state for state in states if not state.is_expert}
            weights = (pair for chunk in self.run.chunks for pair in weights_of(chunk))
            self._weights = [pair for pair in weights if pair[1] in dense]

    def _captured_states(self) -> list[LayerState]:
        """Return the states of layers that graphs capture: of whole blocks, or of their parts.

        Layers outside of graphs keep random keys on the CPU, without which experts are not
        computed together, and their own caches of weights. The output layer is outside of blocks.
        """
        args, states = self.run.args, self.run.states
        # Local graphs of a GPT's parts are of its whole blocks.
        is_local = args.cuda_graph_impl == "local"
        if args.cuda_graph_modules and not (is_local and args.hybrid_layer_pattern is None):
            parts = [
                part
                for chunk in self.run.chunks
                for block in chunk.modules()
                if _layer_is_graphable(block, chunk.config)
                for part in _captured_parts(block, is_local)
            ]
            captured = set(layer_states(parts))
            states = [state for state in states if state in captured]
        return [state for state in states if not state.plan.layer.is_output]

    def _note_microbatches(self) -> tuple[Any, int | bool]:
        """Let layers write gradients that are the only ones of a step; return what captures fix."""
        args, microbatches = self.run.args, get_num_microbatches()
        # Such layers may run several times in a microbatch.
        repeats = args.mtp_num_layers or args.mlp_chunks_for_training > 1
        writes = microbatches == 1 and not repeats
        for state in self._states:
            if not state.is_expert:  # experts' layers are not captured
                state.main_grad_beta = not writes
        is_pipeline = args.pipeline_model_parallel_size > 1
        return self.run.current, microbatches if is_pipeline else writes

    def begin_pass(self) -> None:
        """Write the keys of the microbatch."""
        tables = [
            key_table(state.microbatch_key()) if state.plan.precision.stochastic else self._unused
            for state in self._states
        ]
        keys = torch.tensor(tables, dtype=torch.int64).view_as(self._keys)
        if self._keys.is_cuda:  # one copy that nothing waits for
            keys = keys.pin_memory()
        self._keys.copy_(keys, non_blocking=True)

    def begin_step(self, iteration: int, training: bool) -> None:
        """Remove graphs of another precision or number of microbatches, and write weights.

        Evaluation in high precision runs without the graphs of quantized layers.
        """
        args = self.run.args
        replays = (
            training
            or args.eval_precision == "recipe"
            or not any(state.plan.precision.quantized for state in self.run.states)
        )
        if args.cuda_graph_impl == "local" and replays != self._replays:
            self._replay_graphs(replays)
        if training:
            before, self._captured_for = self._captured_for, self._note_microbatches()
            if before != self._captured_for:
                self._delete_graphs()
        if replays:
            self._quantize_weights()

    def _replay_graphs(self, replays: bool) -> None:
        """Let the layers that Megatron-LM captures run by their graphs, or without them."""
        self._replays = replays
        for chunk in self.run.chunks:
            for module in chunk.modules():
                if not hasattr(module, "cudagraph_manager"):
                    continue
                if replays:
                    vars(module).pop("_should_call_local_cudagraph", None)
                else:
                    module._should_call_local_cudagraph = lambda *_, **__: False

    def _delete_graphs(self) -> None:
        """Let Megatron-LM capture its graphs by layer again in this step."""
        if self.run.args.cuda_graph_impl != "local":
            return
        torch.cuda.synchronize()
        delete_cuda_graphs()
        for chunk in self.run.chunks:
            for module in chunk.modules():
                if hasattr(module, "create_mcore_cudagraph_manager"):
                    for manager, method in _OF_PARTS.items():
                        if hasattr(module, manager):  # which the layer would keep
                            delattr(module, manager)
                            delattr(module, method)
                    module.create_mcore_cudagraph_manager(module.config)
                # Megatron-LM counts the uses of a graph's input on the tensor itself, which
                # must be another one when it counts again: rotary embeddings are cached.
                if hasattr(module.forward, "cache_clear"):
                    module.forward.cache_clear()

    @torch.no_grad()
    def _quantize_weights(self) -> None:
        """Quantize the weights of a step, at fixed addresses."""
        precisions = [state.plan.precision for _, state in self._weights]
        if precisions == self._precisions:
            if self._replay is not None:
                self._replay()
            return
        self._precisions, self._replay = precisions, None
        for _, state in self._weights:
            state.weight_cache = WeightCache()
        layers = [pair for pair in self._weights if pair[1].quantizes_weight]
        if layers:
            operands, self._replay = captured(lambda: [_quantized(*layer) for layer in layers])
            for (_, state), pair in zip(layers, operands, strict=True):
                state.weight_cache = WeightCache(pair, stored=True)


def _captured_parts(block: Any, is_local: bool) -> list[torch.nn.Module]:
    """Return the parts of a block that graphs capture: Megatron-LM's, and latent projections."""
    parts, mlp = list(block._get_submodules_under_cudagraphs()), getattr(block, "mlp", None)
    if CudaGraphModule.moe_preprocess in block.config.cuda_graph_modules:
        names = ["fc1_latent_proj", *(["fc2_latent_proj"] if is_local else [])]
        parts += [getattr(mlp, name) for name in names if hasattr(mlp, name)]
    return parts


def _quantized(weight: torch.nn.Parameter, state: LayerState) -> tuple[Any, Any]:
    context = replace(state.context(state.shards()), weight_cache=None)
    return quantize_weight(context, lambda: weight)


def captured(function: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
    """Record a function in a CUDA graph; return its result, and a function that rewrites it.

    It runs once before, which compiles its kernels.
    """
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()
    graph.replay()
    return result, graph.replay
