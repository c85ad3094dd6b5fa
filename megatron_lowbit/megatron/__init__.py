"""What this project adds to Megatron Core. Import it before ``megatron``: it makes CPUs work."""

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401
