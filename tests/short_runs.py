"""Parts that runs of a few iterations leave out, because they would take longer than those."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_lowbit.megatron import pretrain

# isort: split
from megatron.core.dist_checkpointing.strategies import filesystem_async


@contextmanager
def without_pictures() -> Iterator[None]:
    """Skip the picture at the end of a run, inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "_draw_loss", lambda args, metrics: None)
        yield


def fork_results_queue() -> None:
    """Start the process that has the queue of a checkpoint's writers as a fork of this one.

    Megatron-LM would start another one, which imports torch at the first save.
    """
    filesystem_async.get_write_results_queue("fork")
