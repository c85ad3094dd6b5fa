"""Outcome of loading an export in transformers, as ``tests/conversion/test_readers.py`` finds it.

On a CPU, where transformers dequantizes weights. It stores the experts of a layer in one tensor,
which it makes while it loads those of ``ONE_BY_ONE``: there the result depends on the share of
experts that are quantized.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_lowbit.conversion.quantization_report import REPORT
from megatron_lowbit.conversion.quantized_folder import open_folder
from megatron_lowbit.json_files import read_object
from megatron_lowbit.numerics.block_formats.fp8 import TILE

TRANSFORMERS = {"transformers": "5.23.0"}
LOADS, WRONG, FAILS, NOT_TRIED = "loads", "wrong", "fails", "not tried"
ONE_BY_ONE = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3")
"""Families with a file's tensor for each expert."""
SHARES = ("all", "some", "none")
"""Shares of experts that are quantized."""
_ALWAYS, _ALL_EXPERTS = (LOADS, LOADS, LOADS), (LOADS, FAILS, FAILS)
WITH_EXPERTS: Mapping[str, tuple[str, str, str]] = {
    "fp8-128x128-e4m3": _ALWAYS,
    "nvfp4": (WRONG, FAILS, FAILS),
    "mxfp4": _ALL_EXPERTS,
    "mxfp8-e4m3": (FAILS, FAILS, LOADS),
    "int4-1x32": _ALL_EXPERTS,
    "int4-1x128": _ALL_EXPERTS,
}
"""Outcomes for ``ONE_BY_ONE``, by the format of the quantized weights and the share of experts.

Other families load each of these formats, and several of them together.
"""
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Reader(NamedTuple):
    """transformers with the other packages that a layout needs.

    Attributes:
        packages: versions of its packages that the tests load with.
        dtype: dtype of the model; None for the dtype of the files.
    """

    packages: Mapping[str, str]
    dtype: str | None = None


READERS = {
    None: Reader(TRANSFORMERS),
    "fp8-blocks": Reader(TRANSFORMERS | {"accelerate": "1.15.0"}),
    # Its weights are dequantized to BF16, so the others must be BF16, too.
    "compressed-tensors": Reader(TRANSFORMERS | {"compressed-tensors": "0.20.0"}, "bfloat16"),
    "gpt-oss": Reader(TRANSFORMERS, "bfloat16"),
}
"""Readers by layout of quantized weights, None for weights as they are."""


class Outcome(NamedTuple):
    """Outcome of loading, one of ``LOADS`` to ``NOT_TRIED``, and what it depends on."""

    result: str
    reason: str = ""


def outcome(folder: Path, family: str, layout: str | None) -> Outcome:
    """Return the outcome of loading a written folder in transformers.

    Args:
        folder: an export, with its quantization report if it has a layout.
        family: name of its family of models.
        layout: layout of its quantized weights; None for weights as they are.
    """
    if layout is None:
        return Outcome(LOADS)
    if layout == "modelopt":
        return Outcome(FAILS, "it does not know modelopt")
    if layout == "gpt-oss":
        loads = family == "gpt-oss"
        return Outcome(LOADS) if loads else Outcome(FAILS, f"it has this layout for no {family}")
    if layout == "fp8-blocks" and (ragged := _ragged(folder)):
        return ragged
    if family not in ONE_BY_ONE:
        return Outcome(LOADS)
    report = read_object(folder / REPORT)
    quantized = [name for name in report["weights"] if _EXPERT.search(name)]
    kept = [name for name in report["kept"] if _EXPERT.search(name)]
    share = SHARES[0 if not kept else 1 if quantized else 2]
    formats = {_name(weight["format"]) for weight in report["weights"].values()}
    if len(formats) > 1:
        return Outcome(NOT_TRIED, f"{' and '.join(sorted(formats))} in one {family}")
    (format,) = formats
    result = WITH_EXPERTS[format][SHARES.index(share)]
    return Outcome(result, f"{format} weights with {share} of the experts quantized")


def _name(format: str) -> str:
    """Return the name of a report's format in blocks of one row."""
    return format.split()[0].removesuffix("-2d")


def _ragged(folder: Path) -> Outcome | None:
    """Return the outcome for FP8 weights of which a last tile is ragged; None without one.

    transformers divides a side by its number of scales, so that a side below 128 is one tile.
    """
    opened, found = open_folder(folder), None
    for name in read_object(folder / REPORT)["weights"]:
        shape = opened.shape(name)[0]
        if not any(size > TILE and size % TILE for size in shape):
            continue
        reason = f"{name} {shape} is not made of whole {TILE}x{TILE} tiles"
        if any(size % -(-size // TILE) for size in shape):
            return Outcome(FAILS, reason)
        found = found or Outcome(WRONG, reason)
    return found
