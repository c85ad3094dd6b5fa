"""The one table of engines: where the formats' arithmetic runs, by device, with the reason."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.kernels import compiled
from megatron_lowbit.kernels.routes import MIN_CAPABILITY
from megatron_lowbit.numerics import Request, quantize_both
from megatron_lowbit.numerics import gemm as reference_gemm
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.mxnorm import MXNorm, norm_grad


@dataclass(frozen=True)
class Engine:
    """The functions a linear layer calls.

    ``quantize(x, row, col)`` is :func:`megatron_lowbit.numerics.quantize_both`, but an operand that
    is not kept may come in whatever form ``gemm`` takes; ``gemm(lhs, rhs, bias, accumulation,
    out_dtype)`` is :func:`megatron_lowbit.numerics.gemm`. ``describe(lhs, rhs)`` says in words how
    formats (None: high precision) are multiplied. ``folds()`` gives how many operand values were
    rounded when they were folded, of how many, since it was last called, ``fold_losses(lhs, rhs)``
    that of one product's. ``fused_norm(x, norm, request)`` is :meth:`normalize` in one kernel, or
    None for a case that it does not take. ``norm_grad(grad, x, rho)`` is its backward pass, the
    reference's bits. ``reason`` says why this engine.
    """

    name: str
    quantize: Callable[..., tuple]
    gemm: Callable[..., Tensor]
    reason: str
    describe: Callable[[BlockFormat | None, BlockFormat | None], str] = lambda lhs, rhs: (
        "dequantized to FP32, FP32 sums"
    )
    folds: Callable[[], tuple[int, int]] = lambda: (0, 0)
    fold_losses: Callable[[Any, Any], tuple[int, int]] = lambda lhs, rhs: (0, 0)
    fused_norm: Callable[..., tuple | None] = lambda x, norm, request: None
    norm_grad: Callable[[Tensor, Tensor, Tensor], Tensor] = norm_grad

    def normalize(self, x: Tensor, norm: MXNorm, request: Request) -> tuple[Any, Tensor]:
        """x (R, C) normalized and quantized along its rows; what it was times, FP32 (R, 1)."""
        fused = self.fused_norm(x, norm, request)
        if fused is not None:
            return fused
        rho = norm.inverse_rms(x, request.quantizer.format.block)
        return self.quantize(x.float() * rho, request, None)[0], rho

    def __deepcopy__(self, _: dict) -> "Engine":
        """Itself: megatron-core copies what it hands to layers, but their counts go together."""
        return self


def reference(reason: str) -> Engine:
    """The reference arithmetic in eager torch, on any device."""
    return Engine("reference", quantize_both, reference_gemm, reason)


def select_engine(device: torch.device, request: str = "auto") -> Engine:
    """The engine for a device.

    Args:
        device: where the tensors are.
        request: ``auto``, or ``reference`` for the eager arithmetic everywhere.
    """
    if request == "reference":
        return reference("asked for")
    if device.type == "cpu":
        missing = compiled.missing_compiler()
        if missing is None:
            return Engine("compiled", compiled.quantize, compiled.gemm, "CPU with a C++ compiler")
        return reference(missing)
    if device.type == "cuda":
        return _for_gpu(torch.cuda.get_device_capability(device))
    return reference(f"no fused kernels for {device.type}")


def _for_gpu(capability: tuple[int, int]) -> Engine:
    # Triton is there wherever torch has CUDA, and on few other machines.
    from megatron_lowbit.kernels.fused import FusedEngine
    from megatron_lowbit.kernels.norm_grad import norm_grad as norm_grad_kernel

    shown = ".".join(map(str, capability))
    if capability < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return reference(f"compute capability {shown}; fused kernels need {needed}")
    engine = FusedEngine(capability)

    def describe(lhs: BlockFormat | None, rhs: BlockFormat | None) -> str:
        route = engine.route(lhs, rhs)
        return f"{route.name}, {route.accumulation}"

    reason = f"GPU of compute capability {shown}"
    return Engine(
        "fused",
        engine.quantize,
        engine.gemm,
        reason,
        describe,
        engine.folded.take,
        engine.fold_losses,
        engine.normalize,
        norm_grad_kernel,
    )
