"""Fixtures of tests that run Megatron-LM in this process."""

from tests.single_process import no_pictures, single_process  # noqa: F401
