"""Command that starts a planned run, in one line."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_lowbit.command_line import shell_line
from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.hardware import GPU
from megatron_lowbit.planning.routing import needs_transformer_engine
from megatron_lowbit.planning.training_arguments import TrainingArguments

_DATA = (
    "data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "mock_data",
)  # fmt: skip
"""Attributes of which training needs one."""


def run_command(
    training: Sequence[str], words: TrainingArguments, layout: Sequence[str], gpus: int,
    per_node: int, gpu: GPU,
) -> tuple[str, list[str]]:  # fmt: skip
    """Return the command that starts a run, and the arguments in it that nobody gave.

    Args:
        training: arguments of the run as they were given, with ``@FILE``.
        words: the same without those that the layout replaces.
        layout: arguments that ask for the layout.
        gpus: number of GPUs.
        per_node: most GPUs of a host.
        gpu: kind of the GPUs.
    """
    added = [*words.added, *_data(words.flags)]
    written = [*words.given.tokens(), *layout, *added]
    kept = [*training, *layout, *added]
    args = _parsed(written, gpus)
    # A later argument replaces one in a file, but cannot switch off a flag.
    chosen = kept if _parsed(kept, gpus) == args else written
    processes = next(n for n in range(min(per_node, gpus), 0, -1) if gpus % n == 0)
    start = []
    if args["tensor_model_parallel_size"] > 1 and not needs_transformer_engine(gpu.capability):
        start.append("CUDA_DEVICE_MAX_CONNECTIONS=1")
    if gpus > 1:
        start.append("torchrun")
        if gpus > processes:
            rendezvous = "--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500"
            start.append(f"--nnodes {gpus // processes} {rendezvous}")
        start.append(f"--nproc-per-node {processes} --no-python")
    return " ".join([*start, "lowbit-pretrain", shell_line(chosen)]), added


def _data(flags: Namespace) -> list[str]:
    """Return arguments that let a run without data start: mock data and its tokenizer."""
    found = [] if any(getattr(flags, name) for name in _DATA) else ["--mock-data"]
    if flags.tokenizer_model is None:
        found += ["--tokenizer-type", "NullTokenizer"]
    return found


def _parsed(words: Sequence[str], gpus: int) -> dict[str, Any]:
    """Return the validated arguments; none where training refuses them."""
    try:
        return vars(TrainingArguments(words).parse(gpus))
    except UserError:
        return {}
