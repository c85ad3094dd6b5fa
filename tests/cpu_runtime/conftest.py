"""Fixtures of tests that run Megatron-LM in this process."""

from tests.single_process import short_runs, single_process  # noqa: F401
