"""Run torchtitan's trainer on a CPU, with the arguments of ``torchtitan.train``.

Its device type, its attention's backward pass, memory statistics and a barrier need a GPU; this
script replaces them, and nothing else.
"""

import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # Before torchtitan asks for it.

from torch.nn.attention import flex_attention  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.train import main  # noqa: E402


class NoMemory:
    """Memory statistics of a device that has none."""

    device_name, device_capacity = "CPU", 1

    def reset_peak_stats(self) -> None:
        """Reset nothing."""

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        """Return zeros."""
        return metrics.DeviceMemStats(*[0] * 6)


metrics.build_device_memory_monitor = lambda *args, **kwargs: NoMemory()
utils.set_pg_timeouts = lambda **kwargs: None
flex_attention._validate_device = lambda *tensors: None
FlexAttention._compiled_flex_attn = staticmethod(flex_attention.flex_attention)
main()
