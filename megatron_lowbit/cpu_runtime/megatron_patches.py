"""Replacements of what needs CUDA, NCCL, Transformer Engine or Triton in Megatron-LM.

On a GPU, megatron's random states are states of the CUDA generator, and the seed of the CPU
generator is the key of the microbatch (random_key.py). Without CUDA, one generator holds both:
megatron may then change the numbers that it draws next, but not ``torch.initial_seed()``.
"""

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(kernels.split()))


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
    from megatron.core.transformer import torch_norm, transformer_config
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.training import initialize, training

    # The warm-up of compiled functions draws random inputs before the initial weights are drawn.
    # Their number depends on the parallel layout.
    initialize._warmup_jit_function = lambda *_, **__: None
    loaders = training.build_pretraining_data_loader
    training.build_pretraining_data_loader = with_own_generator(loaders)
    _patch_random_states(random)
    # Megatron-LM compiles a C++ extension for recomputed outputs, which needs ninja.
    random._get_share_storage = lambda: _copy_storage
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    # With FP32 parameters it copies into tensors that require gradients; see upstream-notes.md.
    optimizer_class = distrib_optimizer.DistributedOptimizer
    optimizer_class.load_parameter_state_from_dp_reshardable = torch.no_grad()(
        optimizer_class.load_parameter_state_from_dp_reshardable
    )
    for norm in (torch_norm.WrappedTorchNorm, fused_layer_norm.FusedLayerNorm):  # torch's, Apex's
        norm.__new__ = staticmethod(build_norm)
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_on_cpu
    config_class = transformer_config.TransformerConfig
    config_class.__post_init__ = _checked_as_on_gpus(config_class.__post_init__)
    for name, uneven in (
        ("_gather_along_first_dim", _gather_uneven),
        ("_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
    ):
        setattr(mappings, name, _with_uneven_parts(getattr(mappings, name), uneven))


def _checked_as_on_gpus(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the checks of a configuration, which refuse to overlap all-to-all in FP32 models."""

    def check_in_bf16(config: Any) -> None:
        in_bf16, config.bf16 = config.bf16, config.bf16 or config.overlap_moe_expert_parallel_comm
        check(config)
        config.bf16 = in_bf16

    return check_in_bf16


def _splits_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return split sizes as NumPy for all-to-all; megatron only converts CUDA tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _with_uneven_parts(collective: Callable[..., Any], uneven: Callable[..., Any]) -> Any:
    """Wrap megatron's collective along the first axis, since gloo supports only equal parts."""

    def call(x: Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> Any:
        if sizes is None or group.size() == 1:
            return collective(x, group, sizes, *rest)
        return uneven(x.contiguous(), group, [int(size) for size in sizes])

    return call


def _gather_uneven(x: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """Gather every rank's part (its size, ...) into one tensor (sum of sizes, ...)."""
    ranks = group.size()
    gathered = x.new_empty((sum(sizes), *x.shape[1:]))
    copies = x.expand(ranks, *x.shape).flatten(0, 1)
    torch.distributed.all_to_all_single(gathered, copies, sizes, [len(x)] * ranks, group=group)
    return gathered


def _reduce_scatter_uneven(x: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """Sum the ranks' tensors (sum of sizes, ...) and return this rank's part of the sum."""
    ranks, rows = group.size(), sizes[group.rank()]
    parts = x.new_empty((ranks * rows, *x.shape[1:]))
    torch.distributed.all_to_all_single(parts, x, [rows] * ranks, sizes, group=group)
    return parts.unflatten(0, (ranks, rows)).sum(dim=0)


def with_seed(state: Tensor, seed: int) -> Tensor:
    """Return a state that draws the same numbers, but has another ``torch.initial_seed()``.

    ``state`` is as ``torch.get_rng_state()`` returns it, ``seed`` from 0 to 2**64 - 1.
    """
    state = state.clone()
    # torch stores the seed before the state of the Mersenne twister.
    state[:8] = torch.tensor([seed], dtype=torch.uint64).view(torch.uint8)
    return state


def _set_draws(state: Tensor) -> None:
    """Set the numbers that the CPU generator draws next, without its ``torch.initial_seed()``."""
    torch.set_rng_state(with_seed(state, torch.initial_seed()))


def _patch_random_states(random: types.ModuleType) -> None:
    """Make ``megatron.core.tensor_parallel.random`` use torch's default CPU generator."""

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):  # type: ignore[name-defined, misc]
        """megatron's tracker of named random states, with the CPU generator."""

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Draw from the named state inside the context; restore the outer state on exit."""
            outer_name, outer_state = self._current_state_name, torch.get_rng_state()
            # Forks may be nested, and an inner fork may use the outer one's name.
            if outer_name in self.states_:
                self.states_[outer_name] = outer_state
            _set_draws(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                _set_draws(self.states_.get(outer_name, outer_state))
                self._current_state_name = outer_name

    random.CudaRNGStatesTracker = CpuRNGStatesTracker  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_, **__: _set_draws(state)  # type: ignore[attr-defined]


def _copy_storage(to: Tensor, source: Tensor) -> None:
    """Give a tensor and all of its views the values of another, though they were discarded."""
    storage = to.untyped_storage()
    storage.resize_(source.untyped_storage().nbytes())
    storage.copy_(source.untyped_storage())


def with_own_generator(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap megatron's function that builds data loaders to give each loader its own generator.

    A loader draws a number whenever an iteration over it begins, as after a resumption. From the
    default generator, this would change the numbers of dropout.
    """

    @functools.wraps(build)
    def build_loader(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        if loader is not None:
            loader.generator = torch.Generator()
        return loader

    return build_loader


class GroupStepAdam(torch.optim.Adam):
    """Adam that counts steps in its parameter groups, like Transformer Engine's.

    Megatron-LM trains with torch's own Adam, but cannot load checkpoints of a distributed optimizer
    with it, because a new torch Adam has no ``step``. Arguments are as of torch's Adam,
    ``adam_w_mode`` as of AdamW; ``capturable`` is ignored, since only CUDA graphs need it.
    """

    def __init__(
        self, params: Any, adam_w_mode: bool = True, capturable: bool = False, **settings: Any
    ) -> None:
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set a loaded state; torch's Adam would look for each parameter's ``step``."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters by torch's Adam."""
        if closure is not None:
            raise ValueError("closure: not supported, as in Transformer Engine's Adam")
        stepping = []
        for group in self.param_groups:
            # A checkpoint may hold it as a tensor.
            steps = int(group.get("step", 0))
            group["step"] = steps + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] = torch.tensor(float(steps))
                stepping.append(state)
        super().step()
        for state in stepping:
            del state["step"]


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm with gain 1 + weight (``--apply-layernorm-1p``)."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with gain 1 + weight (``--apply-layernorm-1p``)."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


_NORMS = {
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("LayerNorm", True): ZeroCenteredLayerNorm,
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("RMSNorm", True): ZeroCenteredRMSNorm,
}


def build_norm(
    _: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any
) -> torch.nn.Module:
    """Build a norm, as the constructor of Megatron-LM's norms.

    The attribute ``sequence_parallel`` of the parameters makes Megatron-LM sum their gradients over
    the tensor-parallel group.
    """
    norm = _NORMS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
