"""Without a GPU, Triton's kernels run in its interpreter: it reads that when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
