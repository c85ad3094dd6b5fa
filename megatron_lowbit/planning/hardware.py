"""Figures of kinds of GPUs, with their sources, from ``hardware.yaml``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_lowbit.errors import UserError

SCANS = ("mamba-ssm", "mamba-ssm-scan", "torch")
"""Implementations of a hybrid's scan whose time and memory are known."""


class Figure(NamedTuple):
    """A number and its source: measured, data sheet, published or estimate, with details."""

    value: float
    source: str


@dataclass(frozen=True, eq=False)
class GPU:
    """A kind of GPU. Figures of a group have names such as ``gemm.bf16``."""

    name: str
    capability: tuple[int, int]
    figures: Mapping[str, Figure]

    def __getitem__(self, key: str) -> float:
        """Return a figure's value, in the unit of ``hardware.yaml``."""
        return self.figures[key].value


@cache
def _table() -> dict[str, dict[str, Any]]:
    file = Path(__file__).with_name("hardware.yaml")
    table: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return table


def gpu_names() -> list[str]:
    """Return the names of the GPUs in the table."""
    return list(_table())


@cache
def gpu(gpu_name: str) -> GPU:
    """Return the GPU of that name, with the figures of a similar GPU where it has none.

    Raises UserError for a name that the table lacks.
    """
    if gpu_name not in _table():
        raise UserError(f"--gpu {gpu_name}: not in hardware.yaml; use one of {', '.join(_table())}")
    row = _table()[gpu_name]
    figures: dict[str, Figure] = {}
    if "like" in row:
        figures = {
            key: Figure(figure.value, f"{figure.source} ({row['like']})")
            for key, figure in gpu(row["like"]).figures.items()
            # Tensor cores of another generation multiply other formats.
            if not (key.startswith("gemm.") and "gemm" in row)
        }
    capability = row.get("capability") or gpu(row["like"]).capability
    return GPU(row["name"], tuple(capability), figures | dict(_figures(row)))


def _figures(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Figure]]:
    for key, entry in group.items():
        if isinstance(entry, dict):
            yield from _figures(entry, f"{prefix}{key}.")
        elif key not in ("name", "capability", "like"):
            yield prefix + key, Figure(*entry)
