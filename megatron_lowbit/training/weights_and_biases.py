"""Weights & Biases, where it is installed and asked for."""

import importlib
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_lowbit.errors import UserError


def import_wandb() -> ModuleType:
    """The wandb package. Raises UserError where it is not installed."""
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        wandb = None
    # wandb leaves its files in ./wandb, which Python takes for a package of that name.
    if not hasattr(wandb, "init"):
        raise UserError("--wandb-project needs wandb, which is not installed: pip install wandb")
    return wandb


def start_wandb(args: Namespace) -> Any:
    """A Weights & Biases run as the arguments say; None without --wandb-project. On one rank only.

    Raises:
        UserError: wandb is not installed, or refuses the run.
    """
    if not args.wandb_project:
        return None
    wandb = import_wandb()
    directory = args.wandb_save_dir or (Path(args.save) / "wandb" if args.save else None)
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
    try:
        return wandb.init(
            project=args.wandb_project,
            name=args.wandb_exp_name,
            dir=directory and str(directory),
            config=vars(args),
        )
    except wandb.Error as error:
        raise UserError(f"--wandb-project {args.wandb_project}: {error}") from None
