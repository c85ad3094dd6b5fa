"""CUDA graphs of Megatron-LM under a recipe.

A graph replays kernels with the arguments of its capture. What changes from one microbatch to the
next must therefore lie in device memory: random keys do, amax histories are written in place, and
a scalar tells GEMMs whether main gradients are still zeros. Weights are quantized by a graph of
their own (``graph_weights.py``), or inside the graphs.
"""

from argparse import Namespace
from collections.abc import Sequence

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

from megatron_lowbit.megatron.layer_state import LayerState
from megatron_lowbit.numerics.randomness import key_table


class Graphs:
    """Random keys and captures of a rank's layers, from one microbatch and step to the next.

    Layers find their keys in device memory. They copy them at the beginning of a call, since other
    microbatches may come before its backward pass.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], states: Sequence[LayerState], args: Namespace
    ) -> None:
        self._chunks, self._states = chunks, states
        self._unused = key_table(0)
        shape = (len(states), len(self._unused))
        device = states[0].device if states else "cpu"
        self._keys = torch.zeros(shape, dtype=torch.int64, device=device)
        # A layer that is applied several times in a microbatch adds to what it has written.
        self._writes_first = not args.mtp_num_layers
        self._is_first = False
        self._main_grad_beta = torch.ones((), device=device)
        for state, keys in zip(states, self._keys, strict=True):
            state.graph_keys = keys
            if not state.is_expert:  # experts' layers are not captured
                state.main_grad_beta = self._main_grad_beta
        self._captured_by_layer = args.cuda_graph_impl == "local"
        self._is_pipeline = args.pipeline_model_parallel_size > 1
        self._microbatches = get_num_microbatches()

    def begin_pass(self) -> None:
        """Write what the present microbatch finds in device memory.

        Main gradients are zeros until the backward pass of the step's first microbatch. Before that
        of any other, this microbatch's own forward pass has begun.
        """
        self._main_grad_beta.fill_(float(not self._is_first))
        self._is_first = False
        self._fill_keys()

    def _fill_keys(self) -> None:
        """Write the keys of the present microbatch, in one copy that nothing waits for."""
        tables = [
            key_table(state.microbatch_key()) if state.plan.precision.stochastic else self._unused
            for state in self._states
        ]
        filled = torch.tensor(tables, dtype=torch.int64).view_as(self._keys)
        if self._keys.is_cuda:
            filled = filled.pin_memory()
        self._keys.copy_(filled, non_blocking=True)

    def begin_step(self, switched: bool) -> None:
        """Remove graphs of other precisions or, in a pipeline, of another number of microbatches.

        The step is captured anew.
        """
        self._is_first = self._writes_first
        before, self._microbatches = self._microbatches, get_num_microbatches()
        more = self._is_pipeline and self._microbatches != before
        if self._captured_by_layer and (switched or more):
            torch.cuda.synchronize()
            delete_cuda_graphs()
            for chunk in self._chunks:
                for module in chunk.modules():
                    if hasattr(module, "create_mcore_cudagraph_manager"):
                        module.create_mcore_cudagraph_manager(module.config)
                    # Megatron-LM counts the uses of a graph's input on the tensor itself, which
                    # must be another one when it counts again: rotary embeddings are cached.
                    if hasattr(module.forward, "cache_clear"):
                        module.forward.cache_clear()
