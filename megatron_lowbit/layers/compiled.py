"""A linear layer as operators that torch.compile takes into its graph: the bits of eager mode.

A compiler sees shapes and dtypes of an operator, not its arithmetic, so that it cannot change the
bits. The layer saves its input and weight in high precision, and quantizes them again in backward:
codes would have shapes that depend on formats and kernels.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.errors import require
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers.autograd_state import autocast_off
from megatron_lowbit.layers.context import LinearContext, draw_key
from megatron_lowbit.layers.linear import backward_linear, check_dtypes, forward_linear
from megatron_lowbit.numerics.precision import LinearPrecision
from megatron_lowbit.version import __version__

_LINEAR = f"megatron_lowbit::linear_{__version__.replace('.', '_')}"
"""The operator's name; torch's caches on disk know graphs by it, without what its backward does."""
_PRECISIONS: list[LinearPrecision] = []


def number_of(precision: LinearPrecision) -> int:
    """Return the number by which operators of this process know a precision."""
    if precision not in _PRECISIONS:
        _PRECISIONS.append(precision)
    return _PRECISIONS.index(precision)


def call_key(precision: LinearPrecision) -> int:
    """Return a call's random key; UserError in a CUDA graph, which would repeat it each step."""
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    require(
        not (precision.stochastic and captured),
        "LowbitLinear: the precision has random numbers, and a CUDA graph would repeat them in "
        "each step; train without CUDA graphs",
    )
    key = draw_key(precision)
    if dist.is_available() and dist.is_initialized():
        # Launchers seed all ranks alike: they would round different tokens by the same bits.
        key ^= dist.get_rank()
    return key


def compiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, others: list[Tensor], number: int, random: bool
) -> Tensor:
    """Compute ``x @ weight.T + bias``, to be traced.

    Args:
        x: (..., K), FP32 or BF16.
        weight: (N, K).
        bias: (N,), or None.
        others: weights (N', K) that share the weight's tensor scale.
        number: precision's, by :func:`number_of`.
        random: True if the precision takes a key.

    Returns:
        (..., N) in x's dtype.
    """
    check_dtypes(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    key = None
    if random:
        # On the input depends that layers draw their keys one after another, and on the device
        # which generator is restored where activations are computed again. Compilers make one
        # of calls that have equal arguments, but never of empty tensors: by the operator, since
        # ``cpu_runtime`` replaces the function.
        cpu = torch.device("cpu")
        call = torch.ops.aten.empty.memory_format([0], device=cpu)
        key = _draw_key(rows, call, number, device=cpu)
    y: Tensor = _linear(rows, weight, bias, others, key, number, torch.is_grad_enabled())
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op(
    "megatron_lowbit::draw_key", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _draw_key(x: Tensor, call: Tensor, number: int, *, device: torch.device) -> Tensor:
    return torch.tensor(call_key(_PRECISIONS[number]), device=device)


@_draw_key.register_fake
def _(x: Tensor, call: Tensor, number: int, *, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.custom_op(_LINEAR, mutates_args=())
def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    others: list[Tensor],
    key: Tensor | None,
    number: int,
    training: bool,
) -> Tensor:
    context = _context(x, others, key, number, training)
    with autocast_off(x.device):
        return forward_linear(context, x, weight, bias, None, (False, False))[0]


@_linear.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("megatron_lowbit::linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    others: list[Tensor],
    key: Tensor | None,
    number: int,
    needs: list[bool],
) -> list[Tensor]:
    """Return the gradients that are needed of x, weight and bias."""
    dgrad, wgrad, bias = needs
    context = _context(x, others, key, number, training=True)
    with autocast_off(x.device):
        grads = backward_linear(context, weight, (x, None), grad, (dgrad, wgrad))
    return [part for part in (*grads, grad.sum(dim=0) if bias else None) if part is not None]


@_linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, others: Any, key: Any, number: int, needs: list[bool]
) -> list[Tensor]:
    shapes = x.shape, weight.shape, weight.shape[:1]
    return [x.new_empty(shape) for shape, wanted in zip(shapes, needs, strict=True) if wanted]


def _context(
    x: Tensor, others: list[Tensor], key: Tensor | None, number: int, training: bool
) -> LinearContext:
    return LinearContext(
        _PRECISIONS[number], select_engine(x.device), 0 if key is None else int(key), training,
        saves_input=True, scaled_with=others,
    )  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, others, key, ctx.number, _ = inputs
    ctx.others = len(others)
    ctx.save_for_backward(x, weight, key, *others)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, key, *others = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grads = iter(_linear_backward(grad, x, weight, others, key, ctx.number, needs))
    of_operands = (next(grads) if wanted else None for wanted in needs)
    return *of_operands, [None] * ctx.others, None, None, None


_linear.register_autograd(_differentiate, setup_context=_keep)
