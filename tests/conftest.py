"""Without a GPU, Triton's kernels run in its interpreter, and tests marked ``gpu`` are skipped."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))
