"""A folder for serving engines, of a model that ``convert`` converted, with training's bits."""

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG, write_json, write_tensors
from megatron_lowbit.conversion import SHARD_BYTES
from megatron_lowbit.conversion.layouts.layout import write_documents
from megatron_lowbit.conversion.live import plan_export, unwrapped
from megatron_lowbit.conversion.quantized_folder import QUANTIZATION
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.storage.resumable_output import resumable_output


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: str = "compressed-tensors",
    *,
    force: bool = False,
) -> None:
    """Write a converted model with the codes and scales that its forward pass multiplies.

    The folder has safetensors and config.json, and generation_config.json where the model has one;
    ``tokenizer.save_pretrained(folder)`` adds the tokenizer.

    Args:
        model: a model of transformers on any device, after :func:`megatron_lowbit.convert`.
        folder: a new folder.
        layout: one of ``conversion.LAYOUTS``.
        force: replace an existing folder.

    Raises:
        UserError: the model has no ``config``, the folder exists; as
            :func:`megatron_lowbit.conversion.live.quantized_weights`. Nothing is left then.
    """
    output = Path(folder)
    require(force or not os.path.lexists(output), f"{output} exists; force=True replaces it")
    described: Any = unwrapped(model)
    if not hasattr(getattr(described, "config", None), "to_json_string"):
        raise UserError(f"export: {type(model).__name__} has no config, as transformers' models do")
    plan = plan_export(described, None, layout)
    # As transformers saves it, which adds the first two to what a model was made from.
    config = json.loads(described.config.to_json_string()) | {
        "architectures": [type(described).__name__.removeprefix("FSDP")],
        "dtype": str(described.dtype).removeprefix("torch."),
        QUANTIZATION: plan.config,
    }
    tied = set(getattr(described, "_tied_weights_keys", None) or ())
    left_out = tied if getattr(described.config, "tie_word_embeddings", False) else set()
    contents = [lazy for lazy in plan.contents if not left_out & lazy.outline.keys()]
    with resumable_output(output, force, None, len(contents)) as partial:
        write_tensors(partial, contents, SHARD_BYTES)
        write_json(partial.path / CONFIG, config)
        if getattr(described, "generation_config", None) is not None:
            described.generation_config.save_pretrained(partial.path)
        write_documents(partial.path, plan.layout, plan.config)
