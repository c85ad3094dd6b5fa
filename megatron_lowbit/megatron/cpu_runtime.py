"""Makes megatron.core usable where there is no CUDA device; does nothing where there is one.

The one module that acts at import, because megatron.core reads some of these names while it is
imported itself. On a CPU it

- lets megatron.core, and no other caller, ask torch for device "cuda" (it gets the CPU) and read
  "torch.cuda.FloatTensor" and the like from ``Tensor.type()``;
- turns ``Tensor.cuda``, ``Module.cuda``, ``torch.cuda.synchronize`` and streams into no-ops, and
  ``torch.cuda.current_device`` into the CPU, for every caller;
- gathers and reduce-scatters unequal parts, which experts exchange and gloo refuses;
- keeps the random states that megatron calls CUDA's in torch's default CPU generator, so
  ``torch.cuda.manual_seed`` seeds that one and ``model_parallel_cuda_manual_seed`` works;
- replaces megatron's ``torch.compile`` decorators by nothing: they would need a C++ compiler;
- stands in for Triton kernels of inference that its Mamba mixer imports, where Triton is absent.
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
    """Name of the module whose code runs ``depth`` calls above the caller's own frame."""
    return sys._getframe(depth + 1).f_globals.get("__name__", "")


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _with_megatron_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The tensor factory, with device "cuda" meaning the CPU when megatron.core calls it."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")) and _calling_module(1).startswith("megatron.core"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _with_cuda_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``, naming CUDA types when megatron's optimizers ask: they accept no others."""

    @functools.wraps(type_of)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        if isinstance(answer, str) and _calling_module(1).startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


class _Stream:
    """Stands for ``torch.cuda.Stream`` and ``Event``: work on a CPU is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _do_nothing(self, *_: Any) -> None:
        pass

    synchronize = wait = record = wait_stream = wait_event = _do_nothing

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


def _identity() -> Callable[..., Any]:
    return lambda self, *_, **__: self


def _no_op() -> Callable[..., None]:
    """A new function each time: torch._dynamo refuses one function under two names of torch."""
    return lambda *_, **__: None


def _replace_in_torch() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _with_megatron_on_cpu(getattr(torch, name)))
    torch.Tensor.type = _with_cuda_names(torch.Tensor.type)
    torch.Tensor.cuda = _identity()
    torch.Tensor.record_stream = _no_op()
    torch.nn.Module.cuda = _identity()

    stream = _Stream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, _no_op())
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.default_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()

    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state


def _import_megatron_without_compiler() -> None:
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function if function else lambda wrapped: wrapped
    try:
        with warnings.catch_warnings():
            # megatron announces here that Transformer Engine and Apex, both for GPUs, are absent.
            warnings.filterwarnings("ignore", message="Transformer Engine and Apex")
            import megatron.core
    finally:
        torch.compile = compile_
    megatron.core.jit.disable_jit_fuser()


def _stand_in_for_triton_kernels() -> None:
    """Where Triton is absent, let megatron's Mamba mixer import: inference alone uses these."""
    if importlib.util.find_spec("triton") is not None:
        return
    name = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    module = types.ModuleType(name)
    for function in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
        setattr(module, function, None)
    sys.modules[name] = module


def _splits_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Split sizes as NumPy, as all-to-all wants them: megatron converts only CUDA tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _with_uneven_parts(exchange: Callable[..., Any], uneven: Callable[..., Any]) -> Callable:
    """megatron's collective along the first axis; gloo's own refuses parts of unequal sizes."""

    def call(x: torch.Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> Any:
        if sizes is None or group.size() == 1:
            return exchange(x, group, sizes, *rest)
        return uneven(x.contiguous(), group, [int(size) for size in sizes])

    return call


def _gather_parts(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Every rank's part (its size, ...) to the whole (sum of sizes, ...)."""
    ranks = group.size()
    whole = x.new_empty((sum(sizes), *x.shape[1:]))
    copies = x.expand(ranks, *x.shape).flatten(0, 1)
    torch.distributed.all_to_all_single(whole, copies, sizes, [len(x)] * ranks, group=group)
    return whole


def _reduce_scatter_parts(x: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """The whole (sum of sizes, ...) of each rank to this rank's part of their sum."""
    ranks, own = group.size(), sizes[group.rank()]
    parts = x.new_empty((ranks * own, *x.shape[1:]))
    torch.distributed.all_to_all_single(parts, x, [own] * ranks, sizes, group=group)
    return parts.unflatten(0, (ranks, own)).sum(dim=0)


def _set_draws(state: torch.Tensor) -> None:
    """Set what torch's CPU generator draws next, but leave ``torch.initial_seed()`` as it is.

    On a GPU megatron's states are the CUDA generator's, and the CPU generator's seed names the
    microbatch (training/distributed.py). Here both live in one generator: only draws may switch.
    """
    seed = torch.initial_seed()
    state = state.clone()
    state[:8] = torch.tensor([seed], dtype=torch.uint64).view(torch.uint8)  # where torch keeps it
    torch.set_rng_state(state)
    if torch.initial_seed() != seed:
        raise RuntimeError("torch's CPU generator state no longer starts with its seed")


def _replace_in_megatron() -> None:
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

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
    _import_megatron_without_compiler()
    _stand_in_for_triton_kernels()
    _replace_in_megatron()


if not torch.cuda.is_available():
    _install()
