"""Whole checkpoints from Hugging Face's files to Megatron's and back: streaming, all or nothing."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from megatron_lowbit.conversion import llama, megatron_files, mixtral
from megatron_lowbit.conversion.hugging_face_files import (
    CONFIG,
    Folder,
    carry,
    read_json,
    write_tensors,
)
from megatron_lowbit.conversion.plan import Family, Rule
from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_files as files

FAMILIES = {family.ARCHITECTURE: family for family in (llama, mixtral)}
"""By the name that config.json has for them."""
ITERATION = 0
SHARD_BYTES = 5 * 10**9
MODEL_ARGUMENTS, BESIDE = "model.args", "hugging_face"
"""What stands beside a converted checkpoint: its model's arguments, its source's other files."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def to_megatron(source: Path, output: Path, force: bool = False) -> Family:
    """Convert a folder of Hugging Face's into a checkpoint directory that ``--load`` takes.

    ``output`` gets iteration 0, without an optimizer (``--finetune``), config.json, tokenizer and
    generation files, and ``model.args``, the arguments that make the model. Weights keep their
    dtype.

    Raises UserError, and leaves nothing, where the source is of no known family or not whole.
    """
    folder = Folder(source)
    family = _family(source, folder.config)
    folder.check(name for rule in family.rules for name in rule.names)
    pieces = [_piece(folder, rule) for rule in family.rules]
    with _whole(output, force) as partial, _progress(len(pieces)) as done:
        path = files.iteration_directory(partial, ITERATION)
        path.mkdir()
        megatron_files.write(path, pieces, lambda piece: done())
        torch.save({"iteration": ITERATION, "checkpoint_version": 3.0}, path / "common.pt")
        save_config(CheckpointingConfig("torch_dist"), str(path))
        state = {"model": family.model, "recipes": [], "recipe_set": []}
        document = {"iteration": ITERATION, "optimizer": None, "scheduler": None, "state": state}
        files.write_document(path, document | {"files": files.checksums(path, 0)})
        (partial / files.TRACKER).write_text(f"{ITERATION}\n")
        carry(source, partial / BESIDE, family.config)
        (partial / MODEL_ARGUMENTS).write_text(arguments(family))
    return family


def to_hugging_face(
    source: Path,
    output: Path,
    norm_epsilon: float,
    dtype: str | None = None,
    carried: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
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

    Raises UserError, and leaves nothing, where the source is of no known family or not whole.
    """
    iteration = files.latest_iteration(source)
    if iteration is None:
        raise UserError(f"{source}: not a checkpoint directory: it holds no {files.TRACKER}")
    path = files.iteration_directory(source, iteration)
    document = files.read_document(path)
    model = document["state"]["model"]
    if "hybrid_override_pattern" in model:
        raise UserError(f"{path}: hybrid models are not converted yet")
    family = mixtral if "num_experts" in model else llama
    files.check_files(path, document["files"], document["files"])
    if carried is None and (source / BESIDE).is_dir():
        carried = source / BESIDE
    config = read_json(carried / CONFIG) if carried and (carried / CONFIG).is_file() else {}
    config.pop("rope_parameters", None)  # newer than the entries that follow, for the same
    config |= family.to_config(model, norm_epsilon)
    tensors = megatron_files.Tensors(path)
    rules = family.rules(model)
    tensors.check(rule.place for rule in rules)
    kept = DTYPES[dtype] if dtype else tensors.dtype(rules[0].place)
    config["torch_dtype"] = str(kept).removeprefix("torch.")
    with _whole(output, force) as partial, _progress(len(rules)) as done:
        write_tensors(partial, _parts(tensors, rules, kept, done), shard_bytes)
        carry(carried, partial, config)
    return Family(family.ARCHITECTURE, model, config, rules)


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
            lines.append(f"{option} {value}")
    lines.append(f"--norm-epsilon {family.config.get('rms_norm_eps', 1e-6)}")
    lines.append("--make-vocab-size-divisible-by 1")
    return "\n".join(lines) + "\n"


def _family(source: Path, config: dict[str, Any]) -> Family:
    names = config.get("architectures") or [config.get("model_type", "none")]
    found = FAMILIES.get(names[0])
    if found is None:
        raise UserError(
            f"{source / CONFIG}: architecture {names[0]} is not one of {', '.join(FAMILIES)}"
        )
    if "quantization_config" in config:
        raise UserError(f"{source / CONFIG}: quantized weights are not converted yet")
    return found.from_config(config)


def _piece(folder: Folder, rule: Rule) -> megatron_files.Piece:
    shapes = [folder.shape(name) for name in rule.names]
    for name, (shape, _), rows in zip(rule.names, shapes, rule.join.rows, strict=True):
        if shape[0] != rows:
            raise UserError(f"{folder.path}: {name} has {shape[0]} rows; config.json says {rows}")
    whole = (sum(shape[0] for shape, _ in shapes), *shapes[0][0][1:])

    def make() -> Tensor:
        return rule.join.join([folder.read(name) for name in rule.names])

    return megatron_files.Piece(rule.place, whole, shapes[0][1], make)


def _parts(
    tensors: megatron_files.Tensors, rules: Sequence[Rule], dtype: torch.dtype, done: Callable
) -> Iterator[tuple[str, Tensor]]:
    for rule in rules:
        parts = rule.join.split(tensors.read(rule.place))
        for name, part in zip(rule.names, parts, strict=True):
            yield name, part.to(dtype, copy=True).contiguous()
        done()


@contextmanager
def _whole(output: Path, force: bool) -> Iterator[Path]:
    """A folder to write into, which becomes ``output`` if all goes well and else disappears."""
    if output.exists() and not force:
        raise UserError(f"{output} exists; --force replaces it")
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        files.replace_directory(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal; what it gives is called for each tensor."""
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("tensors", total=total)
        yield lambda: progress.advance(task)
