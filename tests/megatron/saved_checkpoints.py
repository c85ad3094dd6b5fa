"""Folders of checkpoints that the tests of saving and loading share."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run.load_source import choose_checkpoint
from megatron_lowbit.storage import files

SHARD = "__0_0.distcp"


def arguments(load: Path | None, **changes: object) -> Namespace:
    values = {"ckpt_step": None, "load_latest_valid": False, "save": None, "save_keep_last": None,
              "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None,
              "pretrained_checkpoint": None, "mock_data": True, "finetune": True,
              "train_samples": None, "no_save_optim": None, "no_save_rng": None}  # fmt: skip
    return Namespace(load=load and str(load), **{**values, **changes})


def choose(load: Path, **changes: object) -> tuple[int | None, int | None]:
    """Return the chosen iteration and Megatron-LM's ``ckpt_step``."""
    args = arguments(load, **changes)
    return choose_checkpoint(args), args.ckpt_step


def refusal(load: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        choose(load, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_recorded(path: Path) -> bool:
    """Return True if a checkpoint has a record; check that it matches the files."""
    if not (path / files.DOCUMENT).exists():
        return False
    recorded = files.read_document(path)["files"]
    assert recorded.keys() == {file.name for file in path.iterdir()} - {files.DOCUMENT}
    files.check_files(path, recorded, recorded)
    return True


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob(".iter_*"))
