"""Conversion of whole checkpoints between Hugging Face and Megatron-LM, tensor by tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lowbit.checkpoints.hugging_face_files import (
    CONFIG,
    WEIGHT_DTYPES,
    Folder,
    LazyTensors,
    companion_files,
    copy_companions,
    write_tensors,
)
from megatron_lowbit.checkpoints.model_arguments import argument_file, saved_arguments
from megatron_lowbit.checkpoints.reader import (
    EMBEDDING,
    TensorSlice,
    TensorSource,
    open_checkpoint,
    other_name,
)
from megatron_lowbit.checkpoints.writer import COMMON, LazyChunk, extra_states, write_iteration
from megatron_lowbit.conversion import SHARD_BYTES
from megatron_lowbit.conversion.families import family_of, from_config
from megatron_lowbit.conversion.families.rope import rope_entries, rope_type
from megatron_lowbit.conversion.families.with_images import OF_IMAGES, RENAMED, text_config
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.layouts import LAYOUTS
from megatron_lowbit.conversion.layouts.gpt_oss import check_experts, stack_experts
from megatron_lowbit.conversion.layouts.layout import scales_lost_in_engines
from megatron_lowbit.conversion.mapping import HEAD, Rule
from megatron_lowbit.conversion.quantized import (
    Quantization,
    QuantizedAs,
    plan_quantization,
    quantized_tensors,
    recipe_digest,
    recipe_of,
)
from megatron_lowbit.conversion.quantized_folder import QUANTIZATION, QuantizedFolder
from megatron_lowbit.conversion.report import finish
from megatron_lowbit.errors import UserError, require, say
from megatron_lowbit.json_files import Entries, read_object
from megatron_lowbit.recipes import Recipe
from megatron_lowbit.storage.resumable_output import resumable_output

ITERATION = 0
MODEL_ARGUMENTS, COMPANIONS = "model.args", "hugging_face"
"""Names in a converted checkpoint's folder: model arguments, and the other files of the source."""
_USUAL_HEAD = "lm_head.weight"
_PADDING = "pad_vocab_size_multiple"
"""The entry of config.json by which a model says that its vocabulary has rows without tokens."""


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
    folder = QuantizedFolder(source)
    part = "multi-token prediction"
    text_only = text_config(folder.config, str(source / CONFIG))
    if text_only is not None:
        folder.config, part = text_only, "images"
    converted = from_config(folder.config, str(source / CONFIG))
    ignored = folder.leave_out((*converted.ignored, *(OF_IMAGES if text_only else ())))
    rules = _with_names_of(folder, converted.rules)
    check_names(folder, rules)
    if converted.model.keys() & {"num_experts", "multi_latent_attention"}:
        rules = [*rules, *_other_norms(rules)]
    chunks = [*_chunks_of_layers(folder, rules)]
    targets = [target for rule in rules for target in rule.targets]
    chunks += extra_states([*targets, TensorSlice(HEAD)])  # Hybrids load it if tied, too.
    common = COMMON | {"iteration": ITERATION, "args": saved_arguments(converted.model)}
    task = {"task": "to-megatron", "source": str(source.absolute()), "config": folder.config,
            "files": folder.files(), "file_bytes": file_bytes}  # fmt: skip
    with resumable_output(output, force, task, len(chunks)) as partial:
        write_iteration(partial, common, chunks, file_bytes)
        copy_companions(source, partial.path / COMPANIONS, folder.config)
        text = argument_file(converted.name, converted.model)
        (partial.path / MODEL_ARGUMENTS).write_text(text)
    if rope_type(rope_entries(Entries(folder.config, CONFIG))) == "dynamic":
        say(
            f"{source}: dynamic scaling of rotary embeddings begins after max_position_embeddings "
            "tokens; the model and its exports do not have it"
        )
    if ignored:
        say(f"{source}: {ignored} tensors of {part} are ignored")
    return converted


def _with_names_of(folder: Folder, rules: Sequence[Rule]) -> Sequence[Rule]:
    """Return the rules with a folder's names.

    These lack ``transformer.`` in the original GPT-2, and are longer in a model with images.
    """

    def stored(name: str) -> str:
        names = [name, name.partition(".")[2]]
        for start, others in RENAMED.items():
            if name.startswith(start):
                names += [other + name.removeprefix(start) for other in others]
        return next((each for each in names if each in folder.file_of), name)

    return [replace(rule, names=tuple(map(stored, rule.names))) for rule in rules]


def _other_norms(rules: Sequence[Rule]) -> list[Rule]:
    """Return rules for norms under their other name, so that all kinds of layers load a model."""
    renamed = [
        tuple(target._replace(key=other_name(target.key)) for target in rule.targets)
        for rule in rules
    ]
    pairs = zip(rules, renamed, strict=True)
    return [replace(rule, targets=targets) for rule, targets in pairs if targets != rule.targets]


def check_names(folder: Folder, rules: Sequence[Rule]) -> None:
    """Raise UserError where a folder's tensors differ from the tensors of the rules.

    A model whose embedding and output are tied may hold the embedding again as ``lm_head.weight``.
    """
    names = {rule.targets[0].key: rule.names[0] for rule in rules}
    head = names.get(HEAD)
    if head and head not in folder.file_of:
        raise UserError(
            f"{folder.path}: no tensor {head}, but {CONFIG} says that embedding and output are "
            'not tied; "tie_word_embeddings": true takes the embedding for both'
        )
    expected = {name for rule in rules for name in rule.names}
    if not head and _USUAL_HEAD in folder.file_of:
        embedding = names[EMBEDDING]
        folder.check(expected | {_USUAL_HEAD})
        if not torch.equal(folder.read(embedding), folder.read(_USUAL_HEAD)):
            raise UserError(
                f"{folder.path}: {_USUAL_HEAD} differs from {embedding}, but {CONFIG} says that "
                'they are tied; it needs "tie_word_embeddings": false'
            )
        expected.add(_USUAL_HEAD)
    folder.check(expected)


def _chunks_of_layers(folder: Folder, rules: Sequence[Rule]) -> Iterator[LazyChunk]:
    """Yield the chunks of all rules.

    Raises UserError where layers that Megatron-LM stacks differ in shape or dtype.
    """
    stacks: dict[str, tuple[str, list[int], torch.dtype | None]] = {}
    for rule in rules:
        for chunk in lazy_chunks(folder, rule):
            mine = (rule.names[0], [*chunk.size], chunk.dtype)
            name, size, dtype = stacks.setdefault(chunk.key, mine)
            require(
                mine[1:] == (size, dtype),
                f"{folder.path}: {mine[0]} is of another shape or dtype than {name}, but "
                f"Megatron-LM stacks them: {mine[1]} {mine[2]} instead of {size} {dtype}",
            )
            yield chunk


def lazy_chunks(folder: Folder, rule: Rule) -> list[LazyChunk]:
    """Return the chunks of Megatron-LM's tensors that a rule makes of a folder's tensors.

    Raises UserError where their shapes differ from config.json.
    """
    # Tensors without content: what does not fit fails before anything is written.
    parts: list[Tensor] = []
    multiple = Entries(folder.config, CONFIG).integer(_PADDING, 1) if rule.is_padded else 1
    for name, rows in zip(rule.names, rule.rows, strict=True):
        shape, dtype = folder.shape(name)
        tensor = f"{folder.path}: {name}"
        known = " or ".join(map(str, WEIGHT_DTYPES))
        require(dtype in WEIGHT_DTYPES, f"{tensor} is {dtype}; a weight is {known}")
        stored = shape[-1:] if rule.is_transposed else shape[:1]
        message = f"{tensor} has {[*stored, 'no'][0]} rows; {CONFIG} says {rows}"
        if rule.is_padded and stored > (rows,):
            message += f" (vocab_size); rows without tokens need {_PADDING} there"
        require(stored in ((rows,), (-(-rows // multiple) * multiple,)), message)
        part = torch.empty(shape, dtype=dtype, device="meta")
        parts.append(part)
        require(
            (part.shape[1:], dtype) == (parts[0].shape[1:], parts[0].dtype),
            f"{tensor} is {list(shape)} {dtype} and does not fit {rule.names[0]}, "
            f"{list(parts[0].shape)} {parts[0].dtype}",
        )
        columns = shape[:1] if rule.is_transposed else shape[1:]
        message = f"{tensor} is {list(shape)}; {CONFIG} says {rule.columns} input features"
        require(len(shape) == 1 or rule.columns is None or columns == (rule.columns,), message)
    try:
        outlines = rule.to_megatron(parts)
    except RuntimeError:
        raise UserError(
            f"{folder.path}: {rule.names[0]} is {list(parts[0].shape)}, not of the model's shape"
        ) from None

    def make(number: int) -> Tensor:
        return rule.to_megatron([folder.read(name) for name in rule.names])[number]

    chunks = []
    for number, (target, outline) in enumerate(zip(rule.targets, outlines, strict=True)):
        shape = tuple(outline.shape)
        offset, sizes = target.block(shape)
        stacked = (*target.leading, *shape)
        chunks.append(
            LazyChunk(target.key, offset, sizes, stacked, outline.dtype, bind(make, number))
        )
    return chunks


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
            :func:`to_megatron` wrote into a checkpoint's folder.
        shard_bytes: largest size of a file that holds several tensors.
        force: replace an existing folder.
        quantized: how to store the weights that the recipe quantizes; None stores them as they are.
        vocab_size: rows of the vocabulary to keep; None for the run's, or else all.

    Raises UserError, and leaves nothing, where the source is of no known family or not complete.
    """
    if companions is not None:
        holds_some = companion_files(companions) or (companions / CONFIG).is_file()
        require(bool(holds_some), f"--carry {companions}: holds neither a tokenizer nor {CONFIG}")
    checkpoint = open_checkpoint(source)
    model = checkpoint.model_arguments(vocab_size)
    kept = checkpoint.path.parent / COMPANIONS
    if companions is None and kept.is_dir():
        companions = kept
        require(not companions.is_symlink(), f"{companions}: a link is not followed; delete it")
        companion_files(companions)
    others = _other_entries(companions)
    family = family_of(model, others)
    rules, wanted = family.rules(model), getattr(torch, dtype) if dtype else None
    config = others | family.to_config(model)
    checkpoint.check(target for rule in rules for target in rule.targets)
    stored = checkpoint.dtype(rules[0].targets[0])
    config["torch_dtype"] = dtype or str(stored).removeprefix("torch.")
    plan = None
    amaxes: dict[str, Tensor] = {}
    if quantized is not None:
        recipe, layout = recipe_of(quantized, checkpoint), LAYOUTS[quantized.layout]
        if quantized.calibration is not None:
            described = ConvertibleModel(family.name, model, rules)
            amaxes = _calibrate(quantized.calibration, recipe, source, described, companions)
        plan = plan_quantization(recipe, layout, checkpoint, rules, model["num_layers"], amaxes)
        quantized_names = [name for names in plan.weights for name in names]
        check_experts(quantized_names, config, plan.layout.name)
        config[QUANTIZATION] = plan.config
        if advice := scales_lost_in_engines(plan.weights.items()):
            say(advice)
    contents = stack_experts([*planned_tensors(checkpoint, rules, plan, wanted)], config)
    task = {"task": "to-hugging-face", "source": str(checkpoint.path.absolute()),
            "files": checkpoint.fingerprint(), "quantized": repr(quantized), "config": config,
            "recipe": quantized and recipe_digest(quantized, checkpoint), "dtype": dtype,
            "inputs": {path: float(amax) for path, amax in amaxes.items()},
            "shard_bytes": shard_bytes}  # fmt: skip
    with resumable_output(output, force, task, len(contents)) as partial:
        write_tensors(partial, contents, shard_bytes)
        copy_companions(companions, partial.path, config)
        if plan is not None:
            finish(partial.path, checkpoint, plan)
    return ConvertibleModel(family.name, model, rules)


def _calibrate(
    text: Path, recipe: Recipe, source: Path, model: ConvertibleModel, tokenizer: Path | None
) -> dict[str, Tensor]:
    """Return the amaxes of inputs in a forward pass over text; see ``calibration.py``.

    Raises UserError where the recipe needs none, or there is no tokenizer.
    """
    inputs = [precision.fprop.lhs for precision in recipe.configs.values()]
    needed = any(side is not None and side.format.tensor_scaled for side in inputs)
    message = f"--calibrate: recipe {recipe.name} quantizes no input with a tensor scale"
    require(needed, f"{message}; omit it, or give --recipe qat-nvfp4-activations")
    if tokenizer is None:
        raise UserError("--calibrate needs a tokenizer: give its folder as --carry")
    # It needs megatron-core's models, which take seconds to import.
    from megatron_lowbit.conversion.calibration import input_amaxes

    return input_amaxes(source, model, text, tokenizer)


def planned_tensors(
    tensors: TensorSource,
    rules: Sequence[Rule],
    plan: Quantization | None,
    dtype: torch.dtype | None = None,
) -> Iterator[LazyTensors]:
    """Yield the tensors of each rule, quantized where the plan has its weight.

    ``dtype``: of the others; None for their own.
    """
    for rule in rules:
        if plan is not None and rule.names in plan.weights:
            yield quantized_tensors(tensors, plan.weights[rule.names], plan.layout)
        else:
            yield lazy_tensors(tensors, rule, dtype)


def lazy_tensors(tensors: TensorSource, rule: Rule, dtype: torch.dtype | None) -> LazyTensors:
    """Return Hugging Face's tensors of a checkpoint's, in this dtype or, if None, in theirs.

    Biases of a router's scores keep theirs, as in transformers: rounded, they route other tokens.
    Raises UserError where their shapes are not the model's, or the dtype cannot hold a value.
    """
    if dtype is None or rule.names[0].endswith("e_score_correction_bias"):
        dtype = tensors.dtype(rule.targets[0])

    def split(joined: Tensor) -> dict[str, Tensor]:
        parts = zip(rule.names, rule.to_hugging_face(joined), strict=True)
        return {name: _cast(name, part, dtype) for name, part in parts}

    return LazyTensors(split(rule.outline(tensors)), lambda: split(rule.read(tensors)))


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor, or raise UserError where a finite value becomes infinite."""
    cast = tensor.to(dtype)
    if not (tensor.is_meta or cast.dtype == tensor.dtype or cast.isfinite().all()):
        holds_all = bool((cast.isfinite() | ~tensor.isfinite()).all())
        advice = "give --dtype bfloat16" if dtype == torch.float16 else "omit --dtype"
        limit = f"{torch.finfo(dtype).max:g}, the largest of {dtype}"
        require(holds_all, f"{name}: a value is beyond {limit}; {advice}")
    return cast


def _other_entries(companions: Path | None) -> dict[str, Any]:
    """Return a folder's config.json without the entries that a conversion replaces."""
    if companions is None or not (companions / CONFIG).is_file():
        return {}
    # Newer names of entries that the family writes, and entries that change models of any family.
    replaced = ("rope_parameters", "dtype", "original_max_position_embeddings", "layer_types",
                "is_causal", "per_layer_config", QUANTIZATION)  # fmt: skip
    return {k: value for k, value in read_object(companions / CONFIG).items() if k not in replaced}
