"""Recipes in Megatron-LM, through its public hooks. Import it before ``megatron``.

megatron is complete only with what these two modules supply: the second, on machines without CUDA.
"""

# isort: off
from megatron_lowbit.megatron import upstream_gaps  # noqa: F401
from megatron_lowbit.megatron import cpu_runtime  # noqa: F401
