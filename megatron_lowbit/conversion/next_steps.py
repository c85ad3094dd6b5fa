"""Reader of a conversion's result and the next command, as ``lowbit-convert`` prints them.

Outcomes of loading an export are transformers' on a CPU, where it dequantizes weights, as
``tests/conversion/test_readers.py`` finds them. It stores the experts of a layer in one tensor,
which it makes while it loads the families of ``ONE_BY_ONE``: there the result depends on the share
of experts that are quantized.
"""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from megatron_lowbit.command_line import shell_line
from megatron_lowbit.conversion.convert import COMPANIONS, MODEL_ARGUMENTS
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.gguf_file import GGUFSummary
from megatron_lowbit.conversion.quantized_folder import QuantizedFolder
from megatron_lowbit.conversion.report import REPORT
from megatron_lowbit.errors import printable
from megatron_lowbit.json_files import read_object
from megatron_lowbit.numerics.block_formats.fp8 import TILE

TRANSFORMERS = {"transformers": "5.23.0"}
LOADS, WRONG, FAILS, NOT_TRIED = "loads", "wrong", "fails", "not tried"
ONE_BY_ONE = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3")
"""Families with a file's tensor for each expert."""
_SHARES = ("all", "some", "none")
_ALWAYS, _ALL_EXPERTS = (LOADS, LOADS, LOADS), (LOADS, FAILS, FAILS)
WITH_EXPERTS: Mapping[str, tuple[str, str, str]] = {
    "fp8-128x128-e4m3": _ALWAYS,
    "nvfp4": (WRONG, FAILS, FAILS),
    "mxfp4": _ALL_EXPERTS,
    "mxfp8-e4m3": (FAILS, FAILS, LOADS),
    "int4-1x32": _ALL_EXPERTS,
    "int4-1x128": _ALL_EXPERTS,
}
"""Outcomes for ``ONE_BY_ONE`` with all, some or no experts quantized, by the weights' format.

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

    ``folder`` has its quantization report if it is of a ``layout``; None stands for weights as they
    are. ``family`` is the name of the model's family.
    """
    if layout == "modelopt":
        return Outcome(FAILS, "it does not know modelopt")
    if layout == "gpt-oss" and family != "gpt-oss":
        return Outcome(FAILS, f"it has this layout for no {family}")
    if layout == "fp8-blocks" and (ragged := _ragged(folder)):
        return ragged
    if layout in (None, "gpt-oss") or family not in ONE_BY_ONE:
        return Outcome(LOADS)
    report = read_object(folder / REPORT)
    quantized, kept = (any(map(_EXPERT.search, report[key])) for key in ("weights", "kept"))
    share = 0 if not kept else 1 if quantized else 2
    # Names of formats in blocks of one row.
    formats = {w["format"].split()[0].removesuffix("-2d") for w in report["weights"].values()}
    if len(formats) > 1:
        return Outcome(NOT_TRIED, f"{' and '.join(sorted(formats))} in one {family}")
    (format,) = formats
    reason = f"{format} weights with {_SHARES[share]} of the experts quantized"
    return Outcome(WITH_EXPERTS[format][share], reason)


def _ragged(folder: Path) -> Outcome | None:
    """Return the outcome for FP8 weights of which a last tile is ragged; None without one.

    transformers divides a side by its number of scales, so that a side below 128 is one tile.
    """
    opened, wrong = QuantizedFolder(folder), None
    for name in read_object(folder / REPORT)["weights"]:
        shape = opened.shape(name)[0]
        reason = f"{name} {shape} is not made of whole {TILE}x{TILE} tiles"
        if any(size % -(-size // TILE) for size in shape):
            return Outcome(FAILS, reason)
        if wrong is None and any(size > TILE and size % TILE for size in shape):
            wrong = Outcome(WRONG, reason)
    return wrong


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
    missing = []
    for package in READERS[layout].packages if layout in READERS else ():
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    others = " ".join(missing)
    return (
        f"transformers loads the result only with {others}: pip install {others}"
        if others
        else None
    )


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
    written = f"{output} ({converted.name}, Megatron-LM's torch_dist)"
    return _lines(written, f"megatron-core {version('megatron-core')} (tested)", command)


def after_to_hugging_face(
    output: Path, converted: ConvertibleModel, layout: str | None
) -> list[str]:
    """Describe a folder of Hugging Face's: its path, its reader, and the command that loads it."""
    form = "" if layout is None else f", quantized as {layout}"
    written = f"{output} ({converted.name}{form})"
    result, reason = outcome(output, converted.name, layout)
    if result != LOADS:
        elsewhere = f"{_EFFECTS[result].format(_listed(TRANSFORMERS))}: {printable(reason)}"
        loads_in = f"lowbit-convert to-megatron (tested); {elsewhere}"
        return _lines(written, loads_in, ["lowbit-convert", "to-megatron", output, "CHECKPOINT"])
    reader = READERS[layout]
    dtype = "" if reader.dtype is None else f', dtype="{reader.dtype}"'
    load = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(output))}{dtype})"
    code = f"from transformers import AutoModelForCausalLM; print({load})"
    loads_in = f"{_listed(reader.packages)} (tested on a CPU)"
    return _lines(written, loads_in, ["python", "-c", code])


def after_to_gguf(output: Path, summary: GGUFSummary) -> list[str]:
    """Describe a GGUF file: its content, its reader, and the command that serves it."""
    types = ", ".join(f"{count} matrices in {type}" for type, count in summary.types.items())
    loads_in = f"llama.cpp by {_listed(_LLAMA_CPP)} (tested)"
    return _lines(f"{output} ({summary.family}, {types})", loads_in,
                  ["llama-server", "--model", output])  # fmt: skip


def _lines(written: str, loads_in: str, command: Sequence[object]) -> list[str]:
    return [f"written: {written}", f"loads in: {loads_in}", f"next: {shell_line(command)}"]


def _listed(packages: Mapping[str, str]) -> str:
    return " with ".join(map(" ".join, packages.items()))
