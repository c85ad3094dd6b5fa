"""Whole checkpoints from Hugging Face's files to Megatron's and back: streaming, all or nothing."""

from pathlib import Path
from typing import Any

import torch

from megatron_lowbit.conversion import gpt2, llama, megatron_files, mixtral, nemotron_h
from megatron_lowbit.conversion.hugging_face_files import (
    CONFIG,
    carry,
    read_json,
    write_tensors,
)
from megatron_lowbit.conversion.megatron_writer import COMMON, by_size, write_iteration
from megatron_lowbit.conversion.partial import progress, whole
from megatron_lowbit.conversion.pieces import check_names, made, piece
from megatron_lowbit.conversion.plan import Family, as_named
from megatron_lowbit.conversion.quantization_report import finish
from megatron_lowbit.conversion.quantized import QuantizedAs, plan_quantization
from megatron_lowbit.conversion.quantized import made as made_quantized
from megatron_lowbit.conversion.quantized_folder import QUANTIZATION, open_folder
from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_files as files

FAMILIES = {family.ARCHITECTURE: family for family in (nemotron_h, mixtral, gpt2, llama)}
"""By the name that config.json has for them, the last the one that claims what no other does."""
ITERATION = 0
SHARD_BYTES = 5 * 10**9
MODEL_ARGUMENTS, BESIDE = "model.args", "hugging_face"
"""What stands beside a converted checkpoint: its model's arguments, its source's other files."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def to_megatron(
    source: Path, output: Path, force: bool = False, file_bytes: int = SHARD_BYTES
) -> Family:
    """Convert a folder of Hugging Face's into a checkpoint directory that ``--load`` takes.

    ``output`` gets iteration 0, without an optimizer (``--finetune``), config.json, tokenizer and
    generation files, and ``model.args``, the arguments that make the model. Weights keep their
    dtype; quantized ones become BF16. ``file_bytes`` is the most in a file, but for one tensor.

    Raises UserError, and leaves nothing, where the source is of no known family or not whole.
    Interrupted, the same call goes on with the files that were not finished.
    """
    folder = open_folder(source)
    family = as_named(_family(source, folder.config), folder.file_of)
    check_names(folder, family)
    pieces = [piece(folder, rule) for rule in family.rules]
    task = {"task": "to-megatron", "source": str(source.absolute()), "config": folder.config,
            "files": folder.files(), "file_bytes": file_bytes}  # fmt: skip
    with whole(output, force, task) as partial, progress(len(pieces)) as done:
        state = {"model": family.model, "recipes": [], "recipe_set": []}
        document = {"iteration": ITERATION, "optimizer": None, "scheduler": None, "state": state}
        contents = by_size(pieces, file_bytes)
        write_iteration(partial, partial.path, document, COMMON, contents, done)
        carry(source, partial.path / BESIDE, family.config)
        (partial.path / MODEL_ARGUMENTS).write_text(arguments(family))
    return family


def to_hugging_face(
    source: Path,
    output: Path,
    norm_epsilon: float,
    dtype: str | None = None,
    carried: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    quantized: QuantizedAs | None = None,
) -> Family:
    """Convert a checkpoint directory's newest checkpoint into a folder of Hugging Face's.

    Args:
        source: what ``--save`` wrote, in any layout.
        output: a folder that is not there yet.
        norm_epsilon: of the model's norms, which checkpoints do not hold.
        dtype: of the weights, one of ``DTYPES``; None keeps theirs.
        carried: a folder with tokenizer and generation files to take along, and a config.json whose
            further entries are kept; by default what :func:`to_megatron` put beside a checkpoint.
        shard_bytes: the most in a file, but for a single tensor.
        force: whether a folder that is there may be replaced.
        quantized: how to store the weights that the recipe quantizes; None stores them as they are.

    Raises UserError, and leaves nothing, where the source is of no known family or not whole.
    """
    iteration = files.latest_iteration(source)
    if iteration is None:
        raise UserError(f"{source}: not a checkpoint directory: it holds no {files.TRACKER}")
    path = files.iteration_directory(source, iteration)
    document = files.read_document(path)
    model = document["state"]["model"]
    family = next(family for family in FAMILIES.values() if family.claims(model))
    files.check_files(path, document["files"], document["files"])
    if carried is None and (source / BESIDE).is_dir():
        carried = source / BESIDE
    config = read_json(carried / CONFIG) if carried and (carried / CONFIG).is_file() else {}
    for newer in ("rope_parameters", "dtype"):  # than the entries that follow, for the same
        config.pop(newer, None)
    config |= family.to_config(model, norm_epsilon)
    tensors = megatron_files.Tensors(path)
    rules = family.rules(model)
    tensors.check(rule.place for rule in rules)
    wanted = DTYPES[dtype] if dtype else None
    config["torch_dtype"] = dtype or str(tensors.dtype(rules[0].place)).removeprefix("torch.")
    config.pop(QUANTIZATION, None)
    plan, tensors_to_come = None, made(tensors, rules, wanted)
    if quantized is not None:
        plan = plan_quantization(quantized, document, rules, tensors)
        config[QUANTIZATION] = plan.config
        tensors_to_come = made_quantized(tensors, rules, wanted, plan)
    task = {"task": "to-hugging-face", "source": str(path.absolute()), "document": document,
            "quantized": repr(quantized), "config": config, "dtype": dtype,
            "shard_bytes": shard_bytes}  # fmt: skip
    with whole(output, force, task) as partial, progress(len(tensors_to_come)) as done:
        write_tensors(partial, tensors_to_come, shard_bytes, done)
        carry(carried, partial.path, config)
        if plan is not None:
            finish(partial.path, tensors, plan)
    return Family(family.ARCHITECTURE, model, config, rules, norm_epsilon)


def arguments(family: Family) -> str:
    """The arguments that make the model, as a file for ``@FILE``."""
    model, lines = family.model, [f"# {family.name}, converted from Hugging Face"]
    for key, value in model.items():
        option = f"--{key.replace('_', '-')}"
        if key == "num_query_groups":
            lines.append(f"--group-query-attention {option} {value}")
        elif value is True:
            lines.append(option)
        elif value is not False and key != "vocab_size":
            lines.append(f"{option}={value}")  # a hybrid's pattern may begin with "-"
    lines.append(f"--norm-epsilon {family.norm_epsilon}")
    lines.append("--make-vocab-size-divisible-by 1")
    return "\n".join(lines) + "\n"


def _family(source: Path, config: dict[str, Any]) -> Family:
    names = config.get("architectures") or [config.get("model_type", "none")]
    found = FAMILIES.get(names[0])
    if found is None:
        raise UserError(
            f"{source / CONFIG}: architecture {names[0]} is not one of {', '.join(FAMILIES)}"
        )
    try:
        return found.from_config(config)
    except KeyError as error:
        raise UserError(f"{source / CONFIG}: a {names[0]} needs the entry {error}") from None
