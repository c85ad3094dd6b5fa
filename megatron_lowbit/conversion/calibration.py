"""Amaxes of the inputs of linear layers in a forward pass over text.

Readers of NVFP4 inputs need a constant tensor scale. Training with ``amax_history`` records its
amax; a model without such a history is calibrated, in high precision, by some text.
"""

import shlex
from collections.abc import Sequence
from functools import partial as bind
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_lowbit.checkpoints.model_arguments import argument_file
from megatron_lowbit.checkpoints.reader import EMBEDDING, open_checkpoint
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.megatron_model import loaded_model
from megatron_lowbit.data.corpus import Corpus
from megatron_lowbit.data.dataset import beyond_rows
from megatron_lowbit.data.tokenizer import TOKENIZER_TYPE, Tokenizer, load_tokenizer
from megatron_lowbit.errors import require
from megatron_lowbit.megatron.layers.local import linears_of
from megatron_lowbit.megatron.layers.state import layer_of
from megatron_lowbit.storage import files

SEQUENCES, LENGTH = 16, 512
"""Most sequences, and their length in tokens."""


def input_amaxes(
    checkpoint: Path, described: ConvertibleModel, text: Path, tokenizer: Path
) -> dict[str, Tensor]:
    """Return the largest magnitude of each linear layer's input, FP32 scalars by the layers' paths.

    Raises UserError for text or a tokenizer that cannot be read or does not fit the model, and
    where no token reaches an expert.

    Args:
        checkpoint: directory of checkpoints, of which the newest is loaded in FP32.
        described: the model of the checkpoint.
        text: file or folder of text or JSON records; its first tokens are taken.
        tokenizer: folder with tokenizer.json.
    """
    is_directory = (checkpoint / files.TRACKER).is_file()
    require(is_directory, f"--calibrate: {checkpoint}: give the folder with {files.TRACKER}")
    model, rows = described.model, open_checkpoint(checkpoint, check=False).model[EMBEDDING].size[0]
    length = min(LENGTH, model.get("max_position_embeddings") or LENGTH)
    tokens = _first_tokens(text, load_tokenizer(TOKENIZER_TYPE, str(tokenizer)), length)
    require(max(tokens) < rows, f"--calibrate {text}: {beyond_rows(max(tokens), rows)}")
    arguments = [
        *shlex.split(argument_file(described.name, model), comments=True),
        "--padded-vocab-size", str(rows), "--seq-length", str(length),
    ]  # fmt: skip
    amaxes: dict[str, Tensor | None] = {}
    with loaded_model(checkpoint, arguments) as chunk, torch.no_grad():
        _watch(chunk, amaxes)
        device = next(chunk.parameters()).device
        for sequence in torch.tensor(tokens, device=device).split(length):
            positions = torch.arange(len(sequence), device=device)
            chunk(sequence[None], positions[None], attention_mask=None)
    for path, amax in amaxes.items():
        require(amax is not None, f"--calibrate {text}: no token reaches {path}; give more text")
    return {path: amax.cpu() for path, amax in amaxes.items() if amax is not None}


def _first_tokens(text: Path, tokenizer: Tokenizer, length: int) -> list[int]:
    """Return the first tokens of a text, with the end of each document."""
    documents = (document.texts for document in Corpus([text], None, "*", ()).documents())
    each = ([*tokenizer.tokenize(part), tokenizer.eod] for parts in documents for part in parts)
    tokens = list(islice(chain.from_iterable(each), SEQUENCES * length))
    require(len(tokens) > 1, f"--calibrate {text}: holds no text")
    return tokens


def _watch(chunk: nn.Module, amaxes: dict[str, Tensor | None]) -> None:
    """Let the linear layers of a model record the amaxes of their inputs, None before the first."""

    def record(path: str, _: nn.Module, inputs: Sequence[Tensor]) -> None:
        if inputs[0].numel():
            amax, before = inputs[0].float().abs().amax(), amaxes[path]
            amaxes[path] = amax if before is None else torch.maximum(before, amax)

    for name, module in linears_of(chunk).items():
        if (layer := layer_of(chunk, name, 0)) is not None:
            amaxes[layer.path] = None
            module.register_forward_pre_hook(bind(record, layer.path))
