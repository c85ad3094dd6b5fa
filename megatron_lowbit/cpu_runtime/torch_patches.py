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


_Function = Callable[..., Any]


def _for_callers(prefix: str, replacement: _Function, original: _Function) -> _Function:
    """Wrap a function so that modules whose name has a prefix call another one in its place."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (replacement if caller.startswith(prefix) else original)(*args, **kwargs)

    return call


def _on_cpu(factory: _Function) -> _Function:
    """Return a tensor factory that takes device "cuda" as the CPU."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _with_cuda_names(type_of: _Function) -> _Function:
    """Return a ``Tensor.type`` that names CUDA types."""

    def type_(*args: Any, **kwargs: Any) -> Any:
        name = type_of(*args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    return type_


def _answer(value: Any) -> _Function:
    return lambda *_, **__: value


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
        factory = getattr(torch, name)
        setattr(torch, name, _for_callers("megatron.", _on_cpu(factory), factory))
    type_of = torch.Tensor.type
    # Megatron-LM's optimizers know tensors by the names of CUDA's types.
    torch.Tensor.type = _for_callers("megatron.core.optimizer", _with_cuda_names(type_of), type_of)
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
    properties = types.SimpleNamespace(major=0, minor=0, multi_processor_count=1, total_memory=0)
    for name, prefix, value in (
        ("is_available", "megatron.training.initialize", True),
        ("device_count", "megatron.training.", 1),
        ("is_initialized", "megatron.", True),
        ("get_device_capability", "megatron.", (8, 0)),  # from 8.0 on experts are grouped
        ("get_device_properties", "megatron.", properties),
    ):
        setattr(cuda, name, _for_callers(prefix, _answer(value), getattr(cuda, name)))
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
