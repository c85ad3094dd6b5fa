"""Run megatron.core and megatron.training where there is no CUDA device.

This is the one module that acts at import, because megatron reads some of these names while it is
imported itself. With a CUDA device it does nothing. Without one it

- lets megatron, and no other caller, ask torch for device "cuda" (it gets the CPU), find one
  device, and read "torch.cuda.FloatTensor" and the like from ``Tensor.type()``;
- turns ``Tensor.cuda``, ``Module.cuda``, streams, events and ``torch.cuda.synchronize`` into
  no-ops, and ``torch.cuda.current_device`` into the CPU, for every caller;
- gathers and reduce-scatters unequal parts, which experts exchange and gloo refuses;
- keeps the random states that megatron calls CUDA's in torch's default CPU generator, and data
  loaders away from it;
- replaces megatron's ``torch.compile`` decorators by nothing: they would need a C++ compiler;
- gives megatron's optimizers an Adam with the interface of Transformer Engine's (cpu_adam.py);
- leaves out the warm-up of compiled functions, whose random inputs would come between the seed and
  the initial weights, and differ from layout to layout;
- lets torch's norms do what Transformer Engine's do (cpu_norm.py);
- stands in for Triton kernels that megatron imports, where Triton is absent.
"""

import contextlib
import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_lowbit.megatron import cpu_norm
from megatron_lowbit.megatron.cpu_adam import GroupStepAdam
from megatron_lowbit.megatron.generator import with_seed

_FACTORIES = [
    "arange",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
]


def _calling_module(depth: int) -> str:
    """Return the name of the module whose code runs ``depth`` calls above the caller's frame."""
    return sys._getframe(depth + 1).f_globals.get("__name__", "")


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


# -- names of torch --------------------------------------------------------------------------------


def _with_megatron_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that device "cuda" means the CPU when megatron calls it."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")) and _calling_module(1).startswith("megatron."):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _with_cuda_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` to name CUDA types for megatron's optimizers, which accept no others."""

    @functools.wraps(type_of)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        if isinstance(answer, str) and _calling_module(1).startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


def _for_callers(prefix: str, answer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch.cuda to return ``answer`` to modules whose name has this prefix."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _calling_module(1).startswith(prefix):
            return answer
        return original(*args, **kwargs)

    return call


class _Stream:
    """Stands for ``torch.cuda.Stream`` and ``Event``: work on a CPU is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    synchronize = wait = record = wait_stream = wait_event = _do_nothing

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


class _NoMemoryStatistics(dict):
    """Statistics of a CUDA allocator that has allocated nothing."""

    def __missing__(self, key: str) -> int:
        return 0


def _identity() -> Callable[..., Any]:
    return lambda self, *_, **__: self


def _no_op() -> Callable[..., None]:
    """Return a new function each time: torch._dynamo refuses one under two names of torch."""
    return lambda *_, **__: None


def _replace_in_torch() -> None:
    # ``with torch.device("meta")`` knows factories by identity, from a list made at its first use.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _with_megatron_on_cpu(getattr(torch, name)))
    torch.Tensor.type = _with_cuda_names(torch.Tensor.type)
    torch.Tensor.cuda = _identity()
    torch.Tensor.record_stream = _no_op()
    torch.nn.Module.cuda = _identity()
    _replace_in_torch_cuda()


def _replace_in_torch_cuda() -> None:
    cuda, stream = torch.cuda, _Stream()
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, _no_op())
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_: stream
    cuda.default_stream = lambda *_: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.memory_stats = lambda *_, **__: _NoMemoryStatistics()
    # megatron.training starts only with a device; torch's compiler, which asks too, must see none.
    cuda.is_available = _for_callers("megatron.training.initialize", True, cuda.is_available)
    cuda.device_count = _for_callers("megatron.training.", 1, cuda.device_count)
    cuda.is_initialized = _for_callers("megatron.", True, cuda.is_initialized)
    # No feature of any generation of GPUs.
    cuda.get_device_capability = _for_callers("megatron.", (0, 0), cuda.get_device_capability)
    properties = types.SimpleNamespace(major=0, minor=0, multi_processor_count=1, total_memory=0)
    cuda.get_device_properties = _for_callers("megatron.", properties, cuda.get_device_properties)

    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state


# -- names of megatron -----------------------------------------------------------------------------


def _import_megatron_without_compiler() -> None:
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function if function else lambda wrapped: wrapped
    try:
        import megatron.core
    finally:
        torch.compile = compile_
    megatron.core.jit.disable_jit_fuser()


_TRITON_KERNELS = {
    "megatron.core.transformer.moe.ops.paged_stash": (
        "GLOBAL_BLOCK_SIZE",
        "paged_stash_copy_kernel",
        "paged_stash_pop_kernel",
    ),
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
        "tensor_get_slice_after",
        "tensor_masked_update",
        "tensor_merge",
    ),
}
"""Modules that megatron imports, but that nothing calls in training on a CPU."""


def _stand_in_for_triton_kernels() -> None:
    """Where Triton is absent, let megatron's modules import that ask for kernels on a GPU."""
    if importlib.util.find_spec("triton") is not None:
        return
    for name, kernels in _TRITON_KERNELS.items():
        module = types.ModuleType(name)
        for kernel in kernels:
            setattr(module, kernel, None)
        sys.modules[name] = module


def _splits_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return split sizes as NumPy, as all-to-all wants; megatron converts CUDA tensors alone."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _with_uneven_parts(exchange: Callable[..., Any], uneven: Callable[..., Any]) -> Callable:
    """Wrap megatron's collective along the first axis; gloo's own refuses unequal parts."""

    def call(x: torch.Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> Any:
        if sizes is None or group.size() == 1:
            return exchange(x, group, sizes, *rest)
        return uneven(x.contiguous(), group, [int(size) for size in sizes])

    return call


def _gather_parts(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Gather every rank's part (its size, ...) into the whole (sum of sizes, ...)."""
    ranks = group.size()
    whole = x.new_empty((sum(sizes), *x.shape[1:]))
    copies = x.expand(ranks, *x.shape).flatten(0, 1)
    torch.distributed.all_to_all_single(whole, copies, sizes, [len(x)] * ranks, group=group)
    return whole


def _reduce_scatter_parts(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Sum the ranks' wholes (sum of sizes, ...) and return this rank's part of the sum."""
    ranks, own = group.size(), sizes[group.rank()]
    parts = x.new_empty((ranks * own, *x.shape[1:]))
    torch.distributed.all_to_all_single(parts, x, [own] * ranks, sizes, group=group)
    return parts.unflatten(0, (ranks, own)).sum(dim=0)


def _set_draws(state: torch.Tensor) -> None:
    """Set what torch's CPU generator draws next, but leave ``torch.initial_seed()`` as it is.

    On a GPU megatron's states are the CUDA generator's, and the CPU generator's seed names the
    microbatch (random_key.py). Here both live in one generator: only draws may switch.
    """
    torch.set_rng_state(with_seed(state, torch.initial_seed()))


def _with_own_generator(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap megatron's function that builds data loaders so that they draw from no shared generator.

    A loader draws once whenever it is iterated over anew, and so when a run is resumed. On a GPU
    dropout draws from another generator; here its numbers would be others from there on.
    """

    @functools.wraps(build)
    def build_loader(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        if loader is not None:
            loader.generator = torch.Generator()
        return loader

    return build_loader


def _replace_in_megatron() -> None:
    from megatron.core import optimizer
    from megatron.core.fusions import fused_layer_norm
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.training import initialize, training

    initialize._warmup_jit_function = _no_op()
    loaders = training.build_pretraining_data_loader
    training.build_pretraining_data_loader = _with_own_generator(loaders)
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    # In FP32, as here, it copies into parameters that require gradients; see upstream-notes.md.
    name, kind = "load_parameter_state_from_dp_reshardable", distrib_optimizer.DistributedOptimizer
    setattr(kind, name, torch.no_grad()(getattr(kind, name)))

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """megatron's tracker over torch's default CPU generator."""

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Draw from the state ``name`` inside, from the state outside again after it.

            Raises KeyError for a name that was not added.
            """
            outside_name = self._current_state_name
            outside = torch.get_rng_state()
            # Forks may nest: the outer named state is entered again below, also by its name.
            if outside_name in self.states_:
                self.states_[outside_name] = outside
            _set_draws(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                _set_draws(self.states_.get(outside_name, outside))
                self._current_state_name = outside_name

    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    random._set_cuda_rng_state = lambda state, *_, **__: _set_draws(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_on_cpu
    for norm in (
        torch_norm.WrappedTorchNorm,
        fused_layer_norm.FusedLayerNorm,
    ):  # the second: Apex's
        norm.__new__ = staticmethod(cpu_norm.build)
    for name, uneven in (
        ("_gather_along_first_dim", _gather_parts),
        ("_reduce_scatter_along_first_dim", _reduce_scatter_parts),
    ):
        setattr(mappings, name, _with_uneven_parts(getattr(mappings, name), uneven))


def _install() -> None:
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported too early: on a machine without CUDA, import "
            "megatron_lowbit.megatron first"
        )
    _replace_in_torch()
    with warnings.catch_warnings():
        # megatron announces at import that Transformer Engine and Apex, both for GPUs, are absent.
        for absent in ("Transformer Engine and Apex", "Apex is not", "Only transformer-engine"):
            warnings.filterwarnings("ignore", message=absent)
        _stand_in_for_triton_kernels()
        _import_megatron_without_compiler()
        _replace_in_megatron()


if not torch.cuda.is_available():
    _install()
