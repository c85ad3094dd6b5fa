"""Reader of a conversion's result and the next command, as ``lowbit-convert`` prints them.

Outcomes of loading an export are transformers' on a CPU, where it dequantizes weights, as
``tests/conversion/test_readers.py`` finds them. It stores the experts of a layer in one tensor,
which it makes while it loads those of ``ONE_BY_ONE``: there the result depends on the share of
experts that are quantized.
"""

import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from megatron_lowbit.command_line import shell_line
from megatron_lowbit.conversion.convert import COMPANIONS, MODEL_ARGUMENTS
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.gguf_file import GGUFSummary
from megatron_lowbit.conversion.quantization_report import REPORT
from megatron_lowbit.conversion.quantized_folder import open_folder
from megatron_lowbit.errors import printable
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


_MOST_TOKENS = 2048
"""Longest sequence in the suggested training command."""


_LLAMA_CPP = {"xllamacpp": "2026.10.11549"}
_EFFECTS = {
    WRONG: "not in {}, which loads wrong weights without an error",
    FAILS: "not in {}, which stops with an error",
    NOT_TRIED: "not tried in {}",
}


def missing_packages(layout: str | None) -> str | None:
    """Return a line that names the packages of a layout's reader that are not installed."""
    reader = READERS.get(layout)
    missing = [name for name in reader.packages if not _is_installed(name)] if reader else []
    if not missing:
        return None
    others = " ".join(missing)
    return f"transformers loads the result only with {others}: pip install {others}"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def after_to_megatron(output: Path, converted: ConvertibleModel) -> list[str]:
    """Describe a checkpoint: its path, its reader, and the command that trains it."""
    folder = output / COMPANIONS
    tokenizer = folder if any(folder.glob("*token*")) else "TOKENIZER"
    length = min(converted.model.get("max_position_embeddings", _MOST_TOKENS), _MOST_TOKENS)
    command = [
        "lowbit-pretrain", f"@{output / MODEL_ARGUMENTS}", "--load", output, "--finetune",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer,
        "--data-path", "DATA", "--seq-length", length, "--micro-batch-size", 1,
        "--train-iters", 100, "--lr", "1e-5", "--save", "RUN", "--save-interval", 100,
    ]  # fmt: skip
    return [
        f"written: {output} ({converted.name}, Megatron-LM's torch_dist)",
        f"loads in: megatron-core {version('megatron-core')} (tested)",
        f"next: {shell_line(command)}",
    ]


def after_to_hugging_face(
    output: Path, converted: ConvertibleModel, layout: str | None
) -> list[str]:
    """Describe a folder of Hugging Face's: its path, its reader, and the command that loads it."""
    kind = "" if layout is None else f", quantized as {layout}"
    written = f"written: {output} ({converted.name}{kind})"
    result, reason = outcome(output, converted.name, layout)
    if result != LOADS:
        command = shell_line(["lowbit-convert", "to-megatron", output, "CHECKPOINT"])
        elsewhere = f"{_EFFECTS[result].format(_listed(TRANSFORMERS))}: {printable(reason)}"
        return [
            written,
            f"loads in: lowbit-convert to-megatron (tested); {elsewhere}",
            f"next: {command}",
        ]
    reader = READERS[layout]
    dtype = "" if reader.dtype is None else f', dtype="{reader.dtype}"'
    load = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(output))}{dtype})"
    code = f"from transformers import AutoModelForCausalLM; print({load})"
    return [
        written,
        f"loads in: {_listed(reader.packages)} (tested on a CPU)",
        f"next: {shell_line(['python', '-c', code])}",
    ]


def after_to_gguf(output: Path, summary: GGUFSummary) -> list[str]:
    """Describe a GGUF file: its content, its reader, and the command that serves it."""
    types = ", ".join(f"{count} matrices in {type}" for type, count in summary.types.items())
    return [
        f"written: {output} ({summary.family}, {types})",
        f"loads in: llama.cpp by {_listed(_LLAMA_CPP)} (tested)",
        f"next: {shell_line(['llama-server', '--model', output])}",
    ]


def _listed(packages: Mapping[str, str]) -> str:
    return " with ".join(map(" ".join, packages.items()))
