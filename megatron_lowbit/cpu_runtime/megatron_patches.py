"""Replacements of functions of megatron that need CUDA, NCCL, Transformer Engine or Triton."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_lowbit.cpu_runtime.random_state import patch_random_states, with_own_generator
from megatron_lowbit.cpu_runtime.te_interfaces import GroupStepAdam, build_norm

_TRITON_KERNELS = {
    "megatron.core.transformer.moe.ops.paged_stash":
        "GLOBAL_BLOCK_SIZE paged_stash_copy_kernel paged_stash_pop_kernel",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops":
        "tensor_get_slice_after tensor_masked_update tensor_merge",
}  # fmt: skip
"""Modules with kernels that megatron imports, but does not call in training on a CPU."""


def add_missing_triton_modules() -> None:
    """Add empty modules for megatron's Triton kernels if Triton is not installed."""
    if importlib.util.find_spec("triton") is not None:
        return
    for name, kernels in _TRITON_KERNELS.items():
        module = types.ModuleType(name)
        for kernel in kernels.split():
            setattr(module, kernel, None)
        sys.modules[name] = module


def import_without_compiler() -> None:
    """Import megatron.core without its ``torch.compile`` decorators, which need a C++ compiler."""
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function if function else lambda wrapped: wrapped
    try:
        import megatron.core
    finally:
        torch.compile = compile_
    megatron.core.jit.disable_jit_fuser()


def patch_megatron() -> None:
    """Replace functions of megatron.core and megatron.training."""
    from megatron.core import optimizer
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.training import initialize, training

    # The warm-up of compiled functions draws random inputs before the initial weights are drawn.
    # Their number depends on the parallel layout.
    initialize._warmup_jit_function = lambda *_, **__: None
    loaders = training.build_pretraining_data_loader
    training.build_pretraining_data_loader = with_own_generator(loaders)
    patch_random_states(random)
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    # With FP32 parameters it copies into tensors that require gradients; see upstream-notes.md.
    name, kind = "load_parameter_state_from_dp_reshardable", distrib_optimizer.DistributedOptimizer
    setattr(kind, name, torch.no_grad()(getattr(kind, name)))
    for norm in (torch_norm.WrappedTorchNorm, fused_layer_norm.FusedLayerNorm):  # torch's, Apex's
        norm.__new__ = staticmethod(build_norm)
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_on_cpu
    for name, uneven in (
        ("_gather_along_first_dim", _gather_uneven),
        ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
    ):
        setattr(mappings, name, _with_uneven_parts(getattr(mappings, name), uneven))


def _splits_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return split sizes as NumPy for all-to-all; megatron only converts CUDA tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _with_uneven_parts(collective: Callable[..., Any], uneven: Callable[..., Any]) -> Any:
    """Wrap megatron's collective along the first axis, since gloo supports only equal parts."""

    def call(x: torch.Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> Any:
        if sizes is None or group.size() == 1:
            return collective(x, group, sizes, *rest)
        return uneven(x.contiguous(), group, [int(size) for size in sizes])

    return call


def _gather_uneven(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Gather every rank's part (its size, ...) into one tensor (sum of sizes, ...)."""
    ranks = group.size()
    gathered = x.new_empty((sum(sizes), *x.shape[1:]))
    copies = x.expand(ranks, *x.shape).flatten(0, 1)
    torch.distributed.all_to_all_single(gathered, copies, sizes, [len(x)] * ranks, group=group)
    return gathered


def _reduce_scatter_uneven(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Sum the ranks' tensors (sum of sizes, ...) and return this rank's part of the sum."""
    ranks, own = group.size(), sizes[group.rank()]
    parts = x.new_empty((ranks * own, *x.shape[1:]))
    torch.distributed.all_to_all_single(parts, x, [own] * ranks, sizes, group=group)
    return parts.unflatten(0, (ranks, own)).sum(dim=0)
