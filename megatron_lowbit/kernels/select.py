"""Choice of the engine for a device."""

import torch

from megatron_lowbit.kernels import compiled
from megatron_lowbit.kernels.engine import Engine, ReferenceEngine
from megatron_lowbit.kernels.routes import MIN_CAPABILITY


def select_engine(device: torch.device, request: str = "auto") -> Engine:
    """Return the fastest engine that computes on a device, with the reason for it.

    Args:
        device: where the tensors are.
        request: ``auto``, or ``reference`` for the eager arithmetic everywhere.
    """
    if request == "reference":
        return ReferenceEngine("requested")
    if device.type == "cpu":
        missing = compiled.missing_compiler()
        if missing is None:
            return compiled.CompiledEngine("CPU with a C++ compiler")
        return ReferenceEngine(missing)
    if device.type != "cuda":
        return ReferenceEngine(f"no fused kernels for {device.type}")
    capability = torch.cuda.get_device_capability(device)
    shown, needed = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
    if capability < MIN_CAPABILITY:
        return ReferenceEngine(f"compute capability {shown}; fused kernels need {needed}")
    # Triton is there wherever torch has CUDA, and on few other machines.
    from megatron_lowbit.kernels.fused import FusedEngine

    return FusedEngine(capability)
