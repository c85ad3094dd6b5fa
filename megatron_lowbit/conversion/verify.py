"""Comparing both sides of a conversion by logits: of transformers' model and of ours."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial as bind
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG, LazyTensors
from megatron_lowbit.checkpoints.model_arguments import argument_file
from megatron_lowbit.checkpoints.reader import EMBEDDING, open_checkpoint
from megatron_lowbit.conversion import TOKENS
from megatron_lowbit.conversion.families import from_config
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.layouts.gpt_oss import stack_experts
from megatron_lowbit.conversion.megatron_model import loaded_model
from megatron_lowbit.conversion.quantized import QuantizedAs, recipe_of
from megatron_lowbit.conversion.quantized_folder import QUANTIZATION, QuantizedFolder
from megatron_lowbit.errors import UserError, as_user_error, require
from megatron_lowbit.recipes import LinearPrecision

LIMIT = 2**-13
"""Largest difference of logits in FP32 that the order of sums explains, of the largest logit."""
ROUNDED_LIMIT = 2**-4
"""The same where an export rounds weights to another dtype."""
_ANY_WIDTH = {"experts_implementation": "eager"}
"""Setting of transformers' models: torch's grouped GEMM needs experts of a multiple of 16 bytes."""


def verify(
    folder: Path,
    checkpoint: Path,
    tokens: Sequence[int] = TOKENS,
    quantized: QuantizedAs | None = None,
) -> tuple[float, float]:
    """Compare a folder of Hugging Face's with a checkpoint directory's newest checkpoint, in FP32.

    ``quantized`` is what the folder was exported as: this project's model then quantizes those
    weights, and no activation, and transformers' has them dequantized in FP32. Returns the largest
    difference of logits, and the largest logit of transformers'.
    """
    opened = QuantizedFolder(folder)
    converted = from_config(opened.config, str(folder / CONFIG))
    size = converted.model["vocab_size"]
    batch = torch.tensor([list(tokens)])
    with torch.no_grad(), as_user_error(f"--verify: transformers cannot compute {folder}"):
        theirs = _transformers_model(opened, exact=quantized is not None)(batch).logits.float()
    ours = _of_megatron(checkpoint, converted, batch, quantized)[..., :size]
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def wrong_weight(folder: Path, dtype: str | None) -> str | None:
    """Load a folder as its next command does; return the name of a weight that differs from it.

    That is a parameter of transformers' model, in this ``dtype`` or, if None, in the files', whose
    values are not as ``to-megatron`` reads them; or the error that transformers raises; None if all
    are equal.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", **_ANY_WIDTH)
        with torch.no_grad():
            model(torch.tensor([TOKENS[:1]]))  # compressed-tensors may dequantize here
    except Exception as error:
        # transformers raises errors of many kinds.
        return f"none was loaded ({type(error).__name__}: {' '.join(str(error).split())})"
    loaded = model.state_dict()
    for name, expected in _transformers_model(
        QuantizedFolder(folder), exact=False
    ).named_parameters():
        seen = loaded.get(name)
        if seen is None or seen.shape != expected.shape:
            return name
        # One of them may have been rounded to BF16, or twice.
        if not torch.allclose(seen.float(), expected, rtol=2**-7, atol=0):
            return name
    return None


def check_needs(
    source: Path, command: str, tokens: Sequence[int], vocab_size: int | None = None
) -> None:
    """Check that :func:`verify` can compare what a command is going to convert.

    Raises UserError where transformers is not installed or does not know the folder's model, or a
    token is not in the vocabulary.
    """
    if command == "to-megatron":
        model = from_config(QuantizedFolder(source).config, str(source / CONFIG)).model
    else:
        model = open_checkpoint(source, check=False).model_arguments(vocab_size)
    if find_spec("transformers") is None:
        raise UserError("--verify needs transformers: pip install transformers")
    for token in tokens:
        inside = 0 <= token < model["vocab_size"]
        last = model["vocab_size"] - 1
        require(inside, f"--verify-tokens {token}: the vocabulary is 0 to {last}")
    if command == "to-megatron":
        from transformers import AutoConfig

        with as_user_error(f"--verify: transformers does not take {source / CONFIG}"):
            AutoConfig.from_pretrained(source)


def _transformers_model(folder: QuantizedFolder, exact: bool) -> nn.Module:
    """Return transformers' model in FP32; weights are dequantized exactly, or rounded to BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder.path)
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)  # the weights come dequantized
    model_class = type(AutoModelForCausalLM.from_config(config))

    def read(name: str) -> dict[str, Tensor]:
        return {name: (folder.dequantized(name) if exact else folder.read(name)).float()}

    parts = [
        LazyTensors({name: torch.empty(folder.shape(name)[0], device="meta")}, bind(read, name))
        for name in folder.file_of
    ]
    weights: dict[str, Tensor] = {}
    for part in stack_experts(parts, folder.config):
        weights |= part.make()
    model: nn.Module = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, **_ANY_WIDTH
    )
    # transformers 5.23 leaves what it does not load, such as rotary frequencies, without a value.
    fresh = dict(model_class(config).named_buffers())
    for name, buffer in model.named_buffers():
        if name not in weights:
            buffer.copy_(fresh[name])
    return model.eval()


def _of_megatron(
    checkpoint: Path, converted: ConvertibleModel, tokens: Tensor, quantized: QuantizedAs | None
) -> Tensor:
    opened, recipe = open_checkpoint(checkpoint, check=False), None
    if quantized is not None:
        recipe = recipe_of(quantized, opened)
        # Weights are quantized in fprop, and nothing else.
        weights = {
            name: LinearPrecision(replace(precision.fprop, lhs=None))
            for name, precision in recipe.configs.items()
        }
        recipe = replace(recipe, configs=weights, switches=(), output_layer=None)
    rows = opened.model[EMBEDDING].size[0]
    arguments = [
        *shlex.split(argument_file(converted.name, converted.model), comments=True),
        "--padded-vocab-size", str(rows), "--seq-length", str(tokens.shape[1]),
        "--quantization-engine", "reference", "--eval-precision", "recipe",
    ]  # fmt: skip
    with loaded_model(checkpoint, arguments, recipe) as model, torch.no_grad():
        device = next(model.parameters()).device
        positions = torch.arange(tokens.shape[1], device=device)[None]
        logits: Tensor = model(tokens.to(device), positions, attention_mask=None)
        return logits.float().cpu()
