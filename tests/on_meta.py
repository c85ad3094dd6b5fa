"""Models that take no memory, for tests that count."""

import torch
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """Tensors that name a device are made on torch's meta device and stay: they take no memory.

    ``torch.device("meta")`` as a context moves only those that name none; megatron-core's do.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.to:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)
