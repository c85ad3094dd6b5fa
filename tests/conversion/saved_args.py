"""Change what a checkpoint says of its run."""

from pathlib import Path
from typing import Any

import torch

from megatron_lowbit.megatron.run.common_state import read_common_state
from megatron_lowbit.storage import files


def change_args(path: Path, **changes: Any) -> None:
    """Give a checkpoint's folder other arguments, in the file where older ones keep them.

    Megatron-LM reads that file first, too.
    """
    common = read_common_state(path)
    vars(common["args"]).update(changes)
    torch.save(common, path / "common.pt")
    files.write_document(path, {"files": files.checksums(path)})
