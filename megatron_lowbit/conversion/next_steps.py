"""Reader of a conversion's result and the next command, as ``lowbit-convert`` prints them."""

import json
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from megatron_lowbit.conversion.convert import COMPANIONS, MODEL_ARGUMENTS
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.gguf_file import GGUFSummary

_MOST_TOKENS = 2048
"""Longest sequence in the suggested training command."""


class Reader(NamedTuple):
    """transformers with what else it needs to load a folder.

    Attributes:
        packages: versions of its packages that the tests load with.
        families: families of models that the tests load.
        dtype: dtype of the model; None for that of the files.
    """

    packages: Mapping[str, str]
    families: tuple[str, ...]
    dtype: str | None = None


_TRANSFORMERS = {"transformers": "5.23.0"}
_LLAMA_CPP = {"xllamacpp": "2026.10.11549"}
READERS = {
    None: Reader(_TRANSFORMERS, ("Llama", "Mixtral", "GPT-2", "Nemotron-H", "gpt-oss", "Gemma-3")),
    "fp8-blocks": Reader(_TRANSFORMERS | {"accelerate": "1.15.0"}, ("Llama", "Mixtral")),
    # Its weights are dequantized to BF16, so the others must be BF16, too.
    "compressed-tensors": Reader(
        _TRANSFORMERS | {"compressed-tensors": "0.20.0"}, ("Llama",), "bfloat16"
    ),
    "gpt-oss": Reader(_TRANSFORMERS, ("gpt-oss",), "bfloat16"),
}
"""Readers by layout of quantized weights, None for weights as they are."""


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
        f"next: {shlex.join(map(str, command))}",
    ]


def after_to_hugging_face(
    output: Path, converted: ConvertibleModel, layout: str | None
) -> list[str]:
    """Describe a folder of Hugging Face's: its path, its reader, and the command that loads it."""
    kind = "" if layout is None else f", quantized as {layout}"
    written = f"written: {output} ({converted.name}{kind})"
    reader = READERS.get(layout)
    if reader is None or converted.name not in reader.families:
        command = shlex.join(["lowbit-convert", "to-megatron", str(output), "CHECKPOINT"])
        return [
            written,
            f"loads in: lowbit-convert to-megatron (tested); not in {_listed(_TRANSFORMERS)}",
            f"next: {command}",
        ]
    dtype = "" if reader.dtype is None else f', dtype="{reader.dtype}"'
    load = f"AutoModelForCausalLM.from_pretrained({json.dumps(str(output))}{dtype})"
    code = f"from transformers import AutoModelForCausalLM; print({load})"
    return [
        written,
        f"loads in: {_listed(reader.packages)} (tested)",
        f"next: {shlex.join(['python', '-c', code])}",
    ]


def after_to_gguf(output: Path, summary: GGUFSummary) -> list[str]:
    """Describe a GGUF file: its content, its reader, and the command that serves it."""
    types = ", ".join(f"{count} matrices in {type}" for type, count in summary.types.items())
    return [
        f"written: {output} ({summary.family}, {types})",
        f"loads in: llama.cpp by {_listed(_LLAMA_CPP)} (tested)",
        f"next: {shlex.join(['llama-server', '--model', str(output)])}",
    ]


def _listed(packages: Mapping[str, str]) -> str:
    return " with ".join(map(" ".join, packages.items()))
