"""Replacements of functions of torch that need CUDA."""

import contextlib
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_FACTORIES = (
    "arange", "empty", "empty_like", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip


def _calling_module(depth: int) -> str:
    """Return the name of the module whose code runs ``depth`` calls above the caller's frame."""
    return sys._getframe(depth + 1).f_globals.get("__name__", "")


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _with_megatron_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory to take device "cuda" as the CPU if megatron calls it."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")) and _calling_module(1).startswith("megatron."):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _with_cuda_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` to return CUDA types to megatron's optimizers, which need them."""

    @functools.wraps(type_of)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(self, *args, **kwargs)
        if isinstance(answer, str) and _calling_module(1).startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


def _for_callers(prefix: str, answer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch.cuda to return ``answer`` to modules whose name has a prefix."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _calling_module(1).startswith(prefix):
            return answer
        return original(*args, **kwargs)

    return call


class _Stream:
    """Replacement of ``torch.cuda.Stream`` and ``Event``, with no work to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    synchronize = wait = record = wait_stream = wait_event = _do_nothing

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


def patch_torch() -> None:
    """Replace functions of torch and torch.cuda."""
    # ``with torch.device("meta")`` identifies factories by a list of functions, which is built at
    # its first use.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _with_megatron_on_cpu(getattr(torch, name)))
    torch.Tensor.type = _with_cuda_names(torch.Tensor.type)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda *_, **__: None
    torch.nn.Module.cuda = lambda self, *_, **__: self
    cuda, stream = torch.cuda, _Stream()
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache"):
        # torch._dynamo needs a function of its own for each name of torch.
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_: stream
    cuda.default_stream = lambda *_: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.memory_stats = lambda *_, **__: Counter()  # zeros
    # megatron.training demands a device; torch's compiler, which also calls these, must see none.
    cuda.is_available = _for_callers("megatron.training.initialize", True, cuda.is_available)
    cuda.device_count = _for_callers("megatron.training.", 1, cuda.device_count)
    cuda.is_initialized = _for_callers("megatron.", True, cuda.is_initialized)
    # Megatron-LM groups experts from capability 8.0 on.
    cuda.get_device_capability = _for_callers("megatron.", (8, 0), cuda.get_device_capability)
    properties = types.SimpleNamespace(major=0, minor=0, multi_processor_count=1, total_memory=0)
    cuda.get_device_properties = _for_callers("megatron.", properties, cuda.get_device_properties)

    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
