"""Recipes in Megatron-LM, through its hooks.

Import this package before ``megatron``: it supplies names that megatron needs during its import.
"""

from megatron_lowbit import cpu_runtime  # noqa: F401
