"""What this project adds to Megatron Core. Import it before ``megatron``: it makes CPUs work."""

from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401
