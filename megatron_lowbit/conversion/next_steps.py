"""Reader of a conversion's result and the next command, as ``lowbit-convert`` prints them."""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_lowbit.command_line import shell_line
from megatron_lowbit.conversion.convert import COMPANIONS, MODEL_ARGUMENTS
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.gguf_file import GGUFSummary
from megatron_lowbit.conversion.readers import (
    FAILS,
    LOADS,
    NOT_TRIED,
    READERS,
    TRANSFORMERS,
    WRONG,
    outcome,
)
from megatron_lowbit.errors import printable

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
