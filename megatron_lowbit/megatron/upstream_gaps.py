"""Supply what the PyPI package of Megatron-LM 0.19.2 expects and does not find.

``typing.override`` is missing from Python 3.11. The Makefile of the dataset helpers is missing from
the package, which holds the compiled helpers themselves; see docs/upstream-notes.md.
"""

import sys
import typing

if sys.version_info < (3, 12):
    from typing_extensions import override

    typing.override = override  # type: ignore[attr-defined]


def use_prebuilt_dataset_helpers() -> None:
    """Let ``initialize_megatron`` take the compiled dataset helpers that the package holds."""
    from megatron.core.datasets import helpers_cpp, utils  # noqa: F401  their presence is the point

    utils.compile_helpers = lambda: None
