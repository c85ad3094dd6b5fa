"""Common state of a checkpoint of Megatron-LM: what is not a tensor, as a dictionary.

Its keys are ``args`` (the run's arguments), ``iteration``, ``checkpoint_version``,
``content_metadata``, and states of scheduler and optimizer.
"""

import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
import megatron.core  # noqa: F401  it tells torch which of its classes are safe to load

from megatron_lowbit.errors import require
from megatron_lowbit.storage.checkpoint_content import check_common_state
from megatron_lowbit.storage.pickles import (
    COMMON,
    WITH_COMMON,
    Reader,
    load_restricted,
    read_objects,
    the_only,
)

KEY = COMMON
LEGACY = "common.pt"


def saved_args(path: Path) -> Namespace | None:
    """Return the arguments of the run that saved a checkpoint of any format; None without them."""
    found: Namespace | None = None
    for file, key, content in read_objects(path, (KEY, "args")):
        if key == "args":  # in the format fsdp_dtensor
            found = content
        elif key == KEY:
            found = the_only(content, path).get("args")
        elif file.name in WITH_COMMON:  # In the format torch, all ranks' files have the same.
            found = content.get("args")
        if found is not None:
            break
    return found


def read_common_state(path: Path) -> dict[str, Any]:
    """Read the common state of a checkpoint without running what it holds, or raise UserError."""
    legacy = path / LEGACY
    old = legacy.is_file()
    state = load_restricted(legacy, legacy) if old else the_only(read_object(path, KEY), path)
    check_common_state(state, str(path))
    return state


def read_object(path: Path, key: str) -> Any:
    """Read one object of a checkpoint's files, a list of one entry."""
    reader = Reader(path)
    location = reader.read_metadata().storage_data.get(MetadataIndex(key))
    require(location is not None, f"{path}: no object {key}")
    return reader.read_object(location)


def as_object(value: Any) -> bytes:
    """Return a value as Megatron-LM keeps it among a checkpoint's objects."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()
