"""Whole checkpoints from Hugging Face's files to Megatron-LM's and back, one tensor at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lowbit.conversion import gpt2, llama, mixtral, nemotron_h
from megatron_lowbit.conversion.checkpoints import open_checkpoint
from megatron_lowbit.conversion.hugging_face_files import (
    CONFIG,
    carry,
    write_tensors,
)
from megatron_lowbit.conversion.megatron_files import NORM_BEFORE_EXPERTS
from megatron_lowbit.conversion.megatron_writer import (
    COMMON,
    by_size,
    extra_states,
    write_iteration,
)
from megatron_lowbit.conversion.model_arguments import argument_file, saved_arguments
from megatron_lowbit.conversion.pieces import check_names, made, piece
from megatron_lowbit.conversion.plan import Family, Rule, as_named
from megatron_lowbit.conversion.quantization_report import finish
from megatron_lowbit.conversion.quantized import QuantizedAs, plan_quantization
from megatron_lowbit.conversion.quantized import made as made_quantized
from megatron_lowbit.conversion.quantized_folder import QUANTIZATION, open_folder
from megatron_lowbit.conversion.resumable_output import progress, resumable_output
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries, read_object

FAMILIES = {family.ARCHITECTURE: family for family in (nemotron_h, mixtral, gpt2, llama)}
"""Families by architecture in config.json. The last claims what no other does."""
ITERATION = 0
SHARD_BYTES = 5 * 10**9
MODEL_ARGUMENTS, BESIDE = "model.args", "hugging_face"
"""Names beside a converted checkpoint: its model's arguments, and its source's other files."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def to_megatron(
    source: Path, output: Path, force: bool = False, file_bytes: int = SHARD_BYTES
) -> Family:
    """Convert a folder of Hugging Face's into a checkpoint directory for ``--load --finetune``.

    ``output`` gets iteration 0, without an optimizer; config.json, tokenizer and generation files;
    and ``model.args``, Megatron-LM's arguments that make the model. Weights keep their dtype;
    quantized ones become BF16. ``file_bytes`` is the most in a file, but for one tensor.

    Raises UserError, and leaves nothing, where the source is of no known family or not whole.
    Interrupted, the same call goes on with the files that were not finished.
    """
    folder = open_folder(source)
    family = as_named(family_of(source, folder.config), folder.file_of)
    check_names(folder, family)
    rules = [*family.rules, *_other_norms(family.rules)]
    pieces = [piece(folder, rule) for rule in rules]
    pieces += extra_states(rule.place for rule in rules)
    common = COMMON | {"iteration": ITERATION, "args": saved_arguments(family.model)}
    task = {"task": "to-megatron", "source": str(source.absolute()), "config": folder.config,
            "files": folder.files(), "file_bytes": file_bytes}  # fmt: skip
    with resumable_output(output, force, task) as partial, progress(len(pieces)) as done:
        write_iteration(partial, partial.path, common, by_size(pieces, file_bytes), done)
        carry(source, partial.path / BESIDE, family.config)
        (partial.path / MODEL_ARGUMENTS).write_text(argument_file(family))
    return family


def _other_norms(rules: Sequence[Rule]) -> list[Rule]:
    """Return rules for the norms before experts under their other name, for all kinds of layers."""
    if not any(".experts." in rule.place.key for rule in rules):
        return []
    local, transformer_engine = NORM_BEFORE_EXPERTS
    return [
        rule._replace(
            place=rule.place._replace(key=rule.place.key.replace(local, transformer_engine))
        )
        for rule in rules
        if local in rule.place.key
    ]


def to_hugging_face(
    source: Path,
    output: Path,
    dtype: str | None = None,
    carried: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    quantized: QuantizedAs | None = None,
    vocab_size: int | None = None,
) -> Family:
    """Convert a checkpoint directory's newest checkpoint into a folder of Hugging Face's.

    Args:
        source: what ``--save`` wrote, in any layout, or one of its iterations.
        output: a folder that is not there yet.
        dtype: of the weights, one of ``DTYPES``; None keeps theirs.
        carried: a folder with tokenizer and generation files to take along, and a config.json whose
            further entries are kept; by default what :func:`to_megatron` put beside a checkpoint.
        shard_bytes: the most in a file, but for a single tensor.
        force: whether a folder that is there may be replaced.
        quantized: how to store the weights that the recipe quantizes; None stores them as they are.
        vocab_size: rows of the vocabulary to keep; None for the run's own ``--vocab-size``, or else
            all, with those that only pad.

    Raises UserError, and leaves nothing, where the source is of no known family or not whole.
    """
    checkpoint = open_checkpoint(source)
    model, tensors = checkpoint.model(vocab_size), checkpoint.tensors
    family = next(family for family in FAMILIES.values() if family.claims(model))
    if carried is None and (source / BESIDE).is_dir():
        carried = source / BESIDE
    config = read_object(carried / CONFIG) if carried and (carried / CONFIG).is_file() else {}
    for newer in ("rope_parameters", "dtype"):  # than the entries that follow, for the same
        config.pop(newer, None)
    config |= family.to_config(model)
    rules = family.rules(model)
    tensors.check(rule.place for rule in rules)
    wanted = DTYPES[dtype] if dtype else None
    config["torch_dtype"] = dtype or str(tensors.dtype(rules[0].place)).removeprefix("torch.")
    config.pop(QUANTIZATION, None)
    plan, tensors_to_come = None, made(tensors, rules, wanted)
    if quantized is not None:
        plan = plan_quantization(quantized, checkpoint, rules, model["num_layers"])
        config[QUANTIZATION] = plan.config
        tensors_to_come = made_quantized(tensors, rules, wanted, plan)
    task = {"task": "to-hugging-face", "source": str(checkpoint.path.absolute()),
            "files": checkpoint.fingerprint(), "quantized": repr(quantized), "config": config,
            "dtype": dtype, "shard_bytes": shard_bytes}  # fmt: skip
    with resumable_output(output, force, task) as partial, progress(len(tensors_to_come)) as done:
        write_tensors(partial, tensors_to_come, shard_bytes, done)
        carry(carried, partial.path, config)
        if plan is not None:
            finish(partial.path, tensors, plan)
    return Family(family.ARCHITECTURE, model, config, rules)


def family_of(source: Path, config: dict[str, Any]) -> Family:
    """Return the family member that a folder's config.json describes.

    Raises UserError where no family is of its architecture, or does not take its entries.
    """
    entries = Entries(config, str(source / CONFIG))
    names = entries.strings("architectures") or [entries.string("model_type", "none")]
    found = FAMILIES.get(names[0])
    if found is None:
        raise UserError(
            f"{source / CONFIG}: architecture {names[0]} is not one of {', '.join(FAMILIES)}"
        )
    return found.from_config(config)
