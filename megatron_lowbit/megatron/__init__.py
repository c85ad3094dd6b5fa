"""Recipes in Megatron-LM, through its public hooks.

Import this package before ``megatron``: it supplies names that megatron needs during its import.
"""

# isort: off
from megatron_lowbit.megatron import workarounds  # noqa: F401
from megatron_lowbit.megatron import cpu  # noqa: F401
