"""Weights as codes in place of BF16 parameters: ``--quantized-param-gather``.

Megatron-LM's distributed optimizer keeps FP32 parameters, of which each rank has a share, and
writes them to a BF16 buffer, of which the model's parameters are views. Here that buffer has memory
only from the end of a backward pass to the next forward pass. Then weights are quantized and
gathered as codes (``stored_bucket.py``), and the buffer is freed. Layers take the codes from their
cache. A checkpoint, and an evaluation in BF16, gather the BF16 parameters once more.

Buffers, gradients and optimizer are Megatron-LM's own. The codes are those of a run without the
argument, to the bit: both quantize the FP32 parameters rounded to BF16.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from megatron_lowbit.errors import require
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.megatron.layer_state import LayerState, weights_of
from megatron_lowbit.megatron.rank_errors import say_on_rank_0
from megatron_lowbit.megatron.steps import run_after_backward, steps_of
from megatron_lowbit.megatron.stored_bucket import StoredBucket
from megatron_lowbit.recipes import Layer, Recipe

FLAG = "--quantized-param-gather"


def check_recipe(recipe: Recipe, layers: Iterable[Layer]) -> None:
    """Raise UserError if a quantized layer's weight is needed in another form than codes."""
    require(
        not recipe.switches,
        f"{FLAG}: recipe {recipe.name} has switches, after which weights would be stored otherwise",
    )
    for layer in layers:
        precision = recipe.precision_for(layer)
        obstacle = precision.storage_obstacle if precision.quantized else None
        require(obstacle is None, f"{FLAG}: recipe {recipe.name}, {layer.path}: {obstacle}")


def check_states(states: Iterable[LayerState]) -> None:
    """Raise UserError for a layer whose kernels take no codes of this project."""
    for state in states:
        native = getattr(state, "native", None)
        require(
            native is None,
            f"{FLAG}: {state.plan.layer.path} computes with Transformer Engine's "
            f"{native and native.name}, which quantizes the weight itself: use "
            "--transformer-impl local",
        )


@dataclass
class _Group:
    """Megatron-LM's group of buckets, its own gather, and what replaces its buckets.

    ``is_whole`` tells whether its buffers have the BF16 parameters of all ranks.
    """

    gather: Callable[..., None]
    upstream: Any
    buckets: list[StoredBucket] = field(default_factory=list)
    is_whole: bool = True

    def gather_whole(self) -> None:
        """Gather the BF16 parameters, unless they are there."""
        if not self.is_whole:
            self.gather(force_sync=True)
        self.is_whole = True


class QuantizedParameters:
    """Stored weights of this rank's chunks, and the moments at which they are written and freed.

    Args:
        args: the run's arguments.
        chunks: the model's chunks, taken over by the recipe.
    """

    def __init__(self, args: Namespace, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._evaluates = args.eval_precision == "recipe"
        self._buffers: list[Any] = []
        self._groups: list[_Group] = []
        self._is_built = False
        self._is_new = True  # the optimizer's parameters are not synchronized yet
        steps_of(args, chunks).listeners.append(self.begin_step)
        chunks[0].quantized_parameters = _BeforeSave(self.restore)

    def wrap(self, wrapped: list[Any]) -> list[Any]:
        """Find the buffers with weights to store; a ``post_wrap_hook``."""
        weights = self._contexts().keys()
        for chunk in wrapped:
            for buffers, groups in (
                (chunk.buffers, chunk.bucket_groups),
                (chunk.expert_parallel_buffers, chunk.expert_parallel_bucket_groups),
            ):
                if all(weights.isdisjoint(buffer.params) for buffer in buffers):
                    continue
                self._buffers += buffers
                for group in groups:
                    self._groups.append(_Group(group.start_param_sync, group))
                    group.start_param_sync = partial(_leave_to_first_pass, group)
        return wrapped

    def begin_step(self, iteration: int, training: bool) -> None:
        """Store the new weights before the first forward pass of a step."""
        with torch.no_grad():
            self._sync()
            if training or self._evaluates:
                self._free()
            else:
                self.restore()
        if training:
            run_after_backward(self._chunks, self._prepare_update)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers all BF16 parameters, rounded from the optimizer's; on all ranks."""
        if not self._is_built:
            return  # Before the first step they have them, or a checkpoint is about to be loaded.
        self._sync()
        self._allocate()
        for group in self._groups:
            group.gather_whole()

    def _buckets(self) -> Iterator[StoredBucket]:
        for group in self._groups:
            yield from group.buckets

    def _contexts(self) -> dict[Parameter, LinearContext]:
        """Return a context of each quantized weight that is trained."""
        found = {}
        for chunk in self._chunks:
            for weight, state in weights_of(chunk):
                if weight.requires_grad and state.plan.precision.quantized:
                    found[weight] = state.weight_context()
        return found

    def _sync(self) -> None:
        """Quantize and gather what the optimizer has written, once."""
        if not self._is_new:
            return
        if not self._is_built:
            self._build()
        for group in self._groups:
            if not all(bucket.gathers_codes for bucket in group.buckets):
                group.gather_whole()
            for bucket in group.buckets:
                bucket.sync()
        if not self._is_built:
            self._is_built = True
            say_on_rank_0(self._describe())
        self._is_new = False

    def _build(self) -> None:
        """Move parameters out of the buffers, once optimizer and checkpoint are there."""
        contexts = self._contexts()
        for group in self._groups:
            ranks = group.upstream.intra_distributed_optimizer_instance_group
            for bucket in group.upstream.buckets:
                own = {p: contexts[p] for p in bucket.params_list if p in contexts}
                group.buckets.append(StoredBucket(bucket, ranks, own))

    def _describe(self) -> str:
        buckets = list(self._buckets())
        codes = sum(bucket.code_bytes for bucket in buckets)
        replaced = sum(bucket.replaced_bytes for bucket in buckets)
        received = sum(bucket.gathered_bytes for bucket in buckets)
        before = sum(bucket.whole_bytes for bucket in buckets)
        return (
            f"weights as codes: rank 0 keeps {codes / 2**20:,.1f} MiB of them in place of "
            f"{replaced / 2**20:,.1f} MiB in BF16, and receives {received / 2**20:,.1f} MiB of "
            f"parameters a step in place of {before / 2**20:,.1f} MiB"
        )

    def _prepare_update(self) -> None:
        """Give the optimizer the memory that it writes to; activations are free by now."""
        with torch.no_grad():
            self._allocate()
        self._is_new = True

    def _allocate(self) -> None:
        for buffer in self._buffers:
            storage = buffer.param_data.untyped_storage()
            if storage.size() == 0:
                storage.resize_(buffer.param_data.nbytes)
        # A skipped update leaves them as they are.
        for bucket in self._buckets():
            bucket.write_own_shard()

    def _free(self) -> None:
        for buffer in self._buffers:
            buffer.param_data.untyped_storage().resize_(0)
        for group in self._groups:
            group.is_whole = False


def _leave_to_first_pass(group: Any, force_sync: bool = False) -> None:
    """Take the place of ``start_param_sync`` of a bucket group."""
    group.param_gather_dispatched = True


class _BeforeSave(torch.nn.Module):
    """Submodule that is told when the model's parameters are collected for a checkpoint."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self._function = function

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Call the function; nothing of its own is saved."""
        self._function()
        return {}
