"""Figures of kinds of GPUs, with their sources, from ``hardware.yaml``."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_lowbit.errors import UserError

SCANS = ("mamba-ssm", "mamba-ssm-scan", "torch")
"""Implementations of a hybrid's scan whose time and memory are known."""
FILE = Path(__file__).with_name("hardware.yaml")


class Figure(NamedTuple):
    """A number, and where it comes from: measured, data sheet, published or estimate, and more."""

    value: float
    source: str


@dataclass(frozen=True, eq=False)
class GPU:
    """A kind of GPU. Figures of a group have names such as ``gemm.bf16``."""

    name: str
    capability: tuple[int, int]
    figures: Mapping[str, Figure]

    def __getitem__(self, key: str) -> float:
        """Return a figure's value, in the unit that ``hardware.yaml`` says."""
        return self.figures[key].value


@cache
def gpu(kind: str) -> GPU:
    """Return the GPU of that name.

    Raises UserError for one that the table lacks.
    """
    table = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    if kind not in table:
        raise UserError(f"--gpu {kind}: not in the table, use {', '.join(table)}")
    own = table[kind]
    figures = {}
    if "like" in own:
        other = gpu(own["like"])
        figures = {
            key: Figure(figure.value, f"{figure.source} ({own['like']})")
            for key, figure in other.figures.items()
            # Tensor cores of another generation multiply other formats.
            if not (key.startswith("gemm.") and "gemm" in own)
        }
    capability = own.get("capability") or gpu(own["like"]).capability
    return GPU(own["name"], tuple(capability), figures | dict(_figures(own)))


def kinds() -> list[str]:
    """Return the GPUs that the table has."""
    return list(yaml.safe_load(FILE.read_text(encoding="utf-8")))


def _figures(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Figure]]:
    found = []
    for key, entry in table.items():
        if isinstance(entry, dict):
            found += _figures(entry, f"{prefix}{key}.")
        elif key not in ("name", "capability", "like"):
            found.append((prefix + key, Figure(*entry)))
    return found
