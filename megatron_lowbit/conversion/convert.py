"""Conversion of whole checkpoints between Hugging Face and Megatron-LM, tensor by tensor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lowbit.checkpoints.hugging_face_files import (
    CONFIG,
    Folder,
    companion_files,
    copy_companions,
    write_tensors,
)
from megatron_lowbit.checkpoints.model_arguments import argument_file, saved_arguments
from megatron_lowbit.checkpoints.reader import open_checkpoint, other_name
from megatron_lowbit.checkpoints.writer import COMMON, extra_states, write_iteration
from megatron_lowbit.conversion import SHARD_BYTES
from megatron_lowbit.conversion.families import family_of, from_config
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.layouts.gpt_oss import check_experts, stack_experts
from megatron_lowbit.conversion.lazy_tensors import check_names, lazy_chunk, lazy_tensors
from megatron_lowbit.conversion.mapping import Rule
from megatron_lowbit.conversion.quantization_report import finish
from megatron_lowbit.conversion.quantized import (
    QuantizedAs,
    plan_quantization,
    quantized_tensors,
    recipe_digest,
)
from megatron_lowbit.conversion.quantized_folder import QUANTIZATION, open_folder
from megatron_lowbit.errors import require, say
from megatron_lowbit.json_files import read_object
from megatron_lowbit.storage.resumable_output import resumable_output

ITERATION = 0
MODEL_ARGUMENTS, COMPANIONS = "model.args", "hugging_face"
"""Names beside a converted checkpoint: its model's arguments, and its source's other files."""


def to_megatron(
    source: Path, output: Path, force: bool = False, file_bytes: int = SHARD_BYTES
) -> ConvertibleModel:
    """Convert a folder of Hugging Face's into a checkpoint directory for ``--load --finetune``.

    ``output`` gets iteration 0 without an optimizer, the companions of the source and
    ``model.args``, the arguments that make the model. Weights keep their dtype; quantized ones
    become BF16. The same call continues an interrupted conversion.

    Raises UserError, and leaves nothing, where the source is of no known family or not complete.
    """
    companion_files(source)
    folder = open_folder(source)
    converted = from_config(folder.config, str(source / CONFIG))
    left_out = folder.leave_out(converted.left_out)
    rules = _with_names_of(folder, converted.rules)
    check_names(folder, rules)
    if "num_experts" in converted.model:
        rules += _other_norms(rules)
    chunks = [lazy_chunk(folder, rule) for rule in rules]
    chunks += extra_states(rule.target for rule in rules)
    common = COMMON | {"iteration": ITERATION, "args": saved_arguments(converted.model)}
    task = {"task": "to-megatron", "source": str(source.absolute()), "config": folder.config,
            "files": folder.files(), "file_bytes": file_bytes}  # fmt: skip
    with resumable_output(output, force, task, len(chunks)) as partial:
        write_iteration(partial, common, chunks, file_bytes)
        copy_companions(source, partial.path / COMPANIONS, folder.config)
        text = argument_file(converted.name, converted.model)
        (partial.path / MODEL_ARGUMENTS).write_text(text)
    if left_out:
        say(f"{source}: {left_out} tensors of multi-token prediction are left out")
    return converted


def _with_names_of(folder: Folder, rules: Sequence[Rule]) -> list[Rule]:
    """Return the rules with a folder's names, which lack ``transformer.`` in GPT-2's own files."""
    short = [
        rule._replace(names=tuple(name.partition(".")[2] for name in rule.names)) for rule in rules
    ]
    first, short_first = rules[0].names[0], short[0].names[0]
    is_short = first not in folder.file_of and short_first in folder.file_of
    return short if is_short else list(rules)


def _other_norms(rules: Sequence[Rule]) -> list[Rule]:
    """Return rules for norms under their other name, so that all kinds of layers load a model."""
    renamed = [
        rule._replace(target=rule.target._replace(key=other_name(rule.target.key)))
        for rule in rules
    ]
    return [new for new, rule in zip(renamed, rules, strict=True) if new != rule]


def to_hugging_face(
    source: Path,
    output: Path,
    dtype: str | None = None,
    companions: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    quantized: QuantizedAs | None = None,
    vocab_size: int | None = None,
) -> ConvertibleModel:
    """Convert a checkpoint directory's newest checkpoint into a folder of Hugging Face's.

    Args:
        source: what ``--save`` wrote, in any layout, or one of its iterations.
        output: a new folder.
        dtype: dtype of the weights, one of ``conversion.DTYPES``; None keeps theirs.
        companions: folder of the tokenizer and of further entries of config.json; by default what
            :func:`to_megatron` put beside a checkpoint.
        shard_bytes: largest size of a file that holds several tensors.
        force: replace an existing folder.
        quantized: how to store the weights that the recipe quantizes; None stores them as they are.
        vocab_size: rows of the vocabulary to keep; None for the run's, or else all.

    Raises UserError, and leaves nothing, where the source is of no known family or not complete.
    """
    checkpoint = open_checkpoint(source)
    model = checkpoint.model_arguments(vocab_size)
    family = family_of(model)
    if companions is None and (source / COMPANIONS).is_dir():
        companions = source / COMPANIONS
        require(not companions.is_symlink(), f"{companions}: a link is not followed; delete it")
    if companions is not None:
        companion_files(companions)
    rules, wanted = family.rules(model), getattr(torch, dtype) if dtype else None
    config = _other_entries(companions) | family.to_config(model)
    checkpoint.check(rule.target for rule in rules)
    config["torch_dtype"] = dtype or str(checkpoint.dtype(rules[0].target)).removeprefix("torch.")
    if quantized is None:
        plan, contents = None, lazy_tensors(checkpoint, rules, wanted)
    else:
        plan = plan_quantization(quantized, checkpoint, rules, model["num_layers"])
        quantized_names = [name for names in plan.weights for name in names]
        check_experts(quantized_names, config, plan.layout.name)
        config[QUANTIZATION] = plan.config
        contents = quantized_tensors(checkpoint, rules, wanted, plan)
    contents = stack_experts(contents, config)
    task = {"task": "to-hugging-face", "source": str(checkpoint.path.absolute()),
            "files": checkpoint.fingerprint(), "quantized": repr(quantized), "config": config,
            "recipe": quantized and recipe_digest(quantized, checkpoint), "dtype": dtype,
            "shard_bytes": shard_bytes}  # fmt: skip
    with resumable_output(output, force, task, len(contents)) as partial:
        write_tensors(partial, contents, shard_bytes)
        copy_companions(companions, partial.path, config)
        if plan is not None:
            finish(partial.path, checkpoint, plan)
    return ConvertibleModel(family.name, model, config, rules)


def _other_entries(companions: Path | None) -> dict[str, Any]:
    """Return a folder's config.json without the entries that a conversion writes anew."""
    if companions is None or not (companions / CONFIG).is_file():
        return {}
    # The first two are newer names of entries that the family writes.
    replaced = ("rope_parameters", "dtype", QUANTIZATION)
    return {k: value for k, value in read_object(companions / CONFIG).items() if k not in replaced}
