"""Weights as codes in place of BF16 parameters: ``--quantized-param-gather``.

Megatron-LM's distributed optimizer keeps FP32 parameters, of which each rank has a share, and
writes them to a BF16 buffer, of which the model's parameters are views. Here that buffer has memory
only from the end of a backward pass to the next forward pass. Then weights are quantized and
gathered as codes (``stored_bucket.py``), and the buffer is freed. Layers take the codes from their
cache. A checkpoint, and an evaluation in BF16, gather the BF16 parameters once more.

Buffers, gradients and optimizer are Megatron-LM's. The codes equal a run's without the argument to
the bit: both quantize the FP32 parameters rounded to BF16.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from megatron_lowbit.errors import require
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.features.stored_bucket import StoredBucket
from megatron_lowbit.megatron.layers.state import weights_of
from megatron_lowbit.megatron.run.errors import say_on_rank_0
from megatron_lowbit.recipes import Layer

FLAG = "--quantized-param-gather"


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


class QuantizedParameters(Feature):
    """Stored weights of this rank's chunks, and the moments at which they are written and freed."""

    argument, submodule = "quantized_param_gather", "quantized_parameters"

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._buffers: list[Any] = []
        self._groups: list[_Group] = []
        self._is_built = False
        self._is_new = True  # the optimizer's parameters are not synchronized yet

    def check_rank(self) -> None:
        """Raise UserError for a layer whose kernels take no codes of this project."""
        for state in self.run.states:
            native = getattr(state, "native", None)
            require(
                native is None,
                f"{FLAG}: {state.plan.layer.path} computes with Transformer Engine's "
                f"{native and native.name}, which quantizes the weight itself: use "
                "--transformer-impl local",
            )

    def check(self, layers: Sequence[Layer]) -> None:
        """Raise UserError if a quantized layer's weight is needed in another form than codes."""
        recipe = self.run.recipe
        require(not recipe.switches, f"{FLAG}: recipe {recipe.name} has switches, after which "
                "weights would be stored otherwise")  # fmt: skip
        for layer in layers:
            if layer.is_output:
                continue  # Its weight stays in BF16.
            precision = recipe.precision_for(layer)
            obstacle = precision.storage_obstacle if precision.quantized else None
            require(obstacle is None, f"{FLAG}: recipe {recipe.name}, {layer.path}: {obstacle}")

    def wrap(self, wrapped: list[Any]) -> None:
        """Find the buffers with weights to store."""
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

    @torch.no_grad()
    def begin_step(self, iteration: int, training: bool) -> None:
        self._sync()
        if training or self.run.args.eval_precision == "recipe":
            self._free()
        else:
            self._restore()

    def _free(self) -> None:
        for buffer in self._buffers:
            buffer.param_data.untyped_storage().resize_(0)
        for group in self._groups:
            group.is_whole = False

    @torch.no_grad()
    def after_backward(self) -> None:
        """Give the optimizer the memory that it writes to; activations are free by now."""
        self._allocate()
        self._is_new = True

    def extra_tensors(
        self, chunk: torch.nn.Module, saved: Container[str] | None
    ) -> dict[str, torch.Tensor]:
        """Give the model its parameters; nothing more is saved."""
        self._restore()
        return {}

    @torch.no_grad()
    def _restore(self) -> None:
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
        return {
            weight: state.weight_context()
            for chunk in self.run.chunks
            for weight, state in weights_of(chunk)
            if weight.requires_grad and state.plan.precision.quantized
        }

    def _sync(self) -> None:
        """Quantize and gather what the optimizer has written, once."""
        if not self._is_new:
            return
        self._is_new, was_built = False, self._is_built
        if not was_built:
            self._build()
        for group in self._groups:
            if not all(bucket.gathers_codes for bucket in group.buckets):
                group.gather_whole()
            for bucket in group.buckets:
                bucket.sync()
        if not was_built:
            say_on_rank_0(self._sizes())

    def _build(self) -> None:
        """Move parameters out of the buffers, once optimizer and checkpoint are there."""
        contexts = self._contexts()
        for group in self._groups:
            ranks = group.upstream.intra_distributed_optimizer_instance_group
            for bucket in group.upstream.buckets:
                stored = {p: contexts[p] for p in bucket.params_list if p in contexts}
                group.buckets.append(StoredBucket(bucket, ranks, stored))
        self._is_built = True

    def _sizes(self) -> str:
        codes, replaced, received, before = (
            sum(getattr(bucket, name) for bucket in self._buckets()) / 2**20
            for name in ("code_bytes", "replaced_bytes", "gathered_bytes", "whole_bytes")
        )
        return (
            f"weights as codes: rank 0 keeps {codes:,.1f} MiB of them in place of "
            f"{replaced:,.1f} MiB in BF16, and receives {received:,.1f} MiB of "
            f"parameters per step in place of {before:,.1f} MiB"
        )

    def _allocate(self) -> None:
        for buffer in self._buffers:
            storage = buffer.param_data.untyped_storage()
            if storage.size() == 0:
                storage.resize_(buffer.param_data.nbytes)
        # A skipped update leaves them as they are.
        for bucket in self._buckets():
            bucket.write_own_shard()


def _leave_to_first_pass(group: Any, force_sync: bool = False) -> None:
    """Take the place of ``start_param_sync`` of a bucket group."""
    group.param_gather_dispatched = True
