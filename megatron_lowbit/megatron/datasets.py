"""Megatron-LM's ``datasets_provider``: its own datasets, checked and built from its arguments."""

import dataclasses
import math
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args, get_tokenizer
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.utils.common_utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

from megatron_lowbit.command_line import value_of
from megatron_lowbit.data.conversations import Conversations
from megatron_lowbit.data.dataset import check_dataset, check_part, data_digest
from megatron_lowbit.data.index_cache import building, cache_folder
from megatron_lowbit.errors import UserError, as_user_error, require
from megatron_lowbit.json_files import read_object
from megatron_lowbit.megatron.run.conversations import (
    ConversationDataset,
    ConversationsConfig,
    conversation_tokenizer,
)
from megatron_lowbit.megatron.run.errors import say_on_rank_0
from megatron_lowbit.megatron.run.pipeline import has_mtp

_Blend = tuple[list[str], list[float] | None]
_PER_SPLIT = ("train", "valid", "test")
_PATHS = ("--data-path", *(f"--{name}-data-path" for name in _PER_SPLIT))


def provide_datasets(
    num_samples: tuple[int, int, int], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build the training, validation and test datasets.

    Raises UserError for one that is damaged, too small, or made with another tokenizer.
    """
    args = get_args()
    config = _config(args)
    if not config.mock:
        _check_parts(args, config, num_samples)

    def is_built_here() -> bool:
        on_this_stage = is_first_or_last_pipeline_stage(vp_stage) or has_mtp(args, vp_stage)
        # Attention of every stage stays within documents.
        on_this_stage = on_this_stage or args.dataloader_inter_document_masking
        return on_this_stage and mpu.get_tensor_model_parallel_rank() == 0

    # Rank 0 builds the cached indices while other ranks wait.
    builds_cache = config.path_to_cache is not None and dist.get_rank() == 0
    with ExitStack() as stack:
        if builds_cache:
            stack.enter_context(building(Path(config.path_to_cache), data_prefixes(args)))
        cls = _classes(args)[0]
        return BlendedMegatronDatasetBuilder(cls, list(num_samples), is_built_here, config).build()


provide_datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron-LM reads it.


def _classes(args: Namespace) -> tuple[type, type[GPTDatasetConfig]]:
    """Return the classes of the datasets and of their configuration."""
    if args.sft:
        return ConversationDataset, ConversationsConfig
    cls, config = GPTDataset, GPTDatasetConfig
    if args.fim_data:
        cls, config = GPTFIMDataset, GPTFIMDatasetConfig
    return MockGPTDataset if args.mock_data else cls, config


def data_blends(args: Namespace) -> list[_Blend]:
    """Return prefixes and weights of all data sets, for each split; UserError for wrong ones."""
    _check_per_split(args)
    flags = " and ".join(flag for flag in _PATHS if value_of(args, flag))
    source = f"--data-args-path {args.data_args_path}" if args.data_args_path else flags
    with as_user_error(f"{source}: does not list data sets"):
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    blends = [part for part in (blend, *(blend_per_split or ())) if part]
    for prefixes, weights in blends:
        for prefix, weight in zip(prefixes, weights or (), strict=False):
            is_usable = 0 < weight < math.inf
            require(
                is_usable, f"data set {prefix}: its weight {weight} must be positive and finite"
            )
    return blends


def data_prefixes(args: Namespace) -> list[str]:
    """Return the prefixes of all data sets that the arguments name; see :func:`data_blends`."""
    return [prefix for prefixes, _ in data_blends(args) for prefix in prefixes]


def _config(args: Namespace) -> GPTDatasetConfig:
    prefixes = data_prefixes(args)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if not args.mock_data and not prefixes:
        raise UserError("--data-path: give a dataset's prefix, or --mock-data")
    _, config_class = _classes(args)
    same_names = {f.name for f in dataclasses.fields(config_class) if f.init} & vars(args).keys()
    settings = {name: getattr(args, name) for name in same_names} | {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "inter_document_masking": args.dataloader_inter_document_masking,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    return config_class(**settings | _data_settings(args, prefixes))


def _data_settings(args: Namespace, prefixes: list[str]) -> dict[str, Any]:
    """Check the data, and return the settings that depend on its kind."""
    tokenizer, rows = get_tokenizer(), args.padded_vocab_size
    if tokenizer.vocab_size > rows:
        say_on_rank_0(
            f"--tokenizer-model: the tokenizer has {tokenizer.vocab_size} ids, the model's "
            f"embedding {rows} rows; data with ids from {rows} on is refused"
        )
    if args.sft:
        files = {path: Conversations(path) for path in prefixes}
        for path, conversations in files.items():
            say_on_rank_0(f"--sft: {path} has {len(conversations)} conversations, one per sequence")
        root = args.data_cache_path
        return {
            "tokenizer": conversation_tokenizer(tokenizer, args.sft_tokenizer_prompt_format),
            "path_to_cache": root
            and cache_folder(prefixes, root, lambda path: data_digest(Path(path)).encode()),
            "files": files,
        }
    eod = tokenizer.eod if args.tokenizer_type == "HuggingFaceTokenizer" else None
    for prefix in prefixes:
        check_dataset(prefix, tokenizer.vocab_size, args.tokenizer_model, rows, eod)
        has_file = Path(args.tokenizer_model or "", "tokenizer.json").is_file()
        if args.tokenizer_model and not has_file and Path(f"{prefix}.json").is_file():
            say_on_rank_0(f"--data-path {prefix}: not compared with the tokenizer, which has no "
                          "tokenizer.json")  # fmt: skip
    settings = {
        "tokenizer": tokenizer,
        "path_to_cache": cache_folder(prefixes, args.data_cache_path) if prefixes else None,
    }
    if args.fim_data:
        settings["fim_extra_tokens"] = {
            name: getattr(args, f"fim_{name}_token")
            for name in ("prefix", "middle", "suffix", "pad", "eod")
        }
    return settings


def _check_per_split(args: Namespace) -> None:
    """Raise UserError for arguments that name no dataset, or not one for each split.

    Megatron-LM would raise an exception that does not name the argument.
    """
    for flag in _PATHS:
        require(value_of(args, flag) != [], f"{flag}: give a dataset's prefix, or omit it")
    if args.per_split_data_args_path is None:
        return
    argument = "--per-split-data-args-path"
    content = read_object(Path(args.per_split_data_args_path), argument)
    file = f"{argument} {args.per_split_data_args_path}"
    for name in _PER_SPLIT:
        if name not in content:
            raise UserError(f"{file}: needs the entry {name!r}")
        entry = content[name]
        prefixes = entry.split() if isinstance(entry, str) else entry
        is_list = isinstance(prefixes, list) and all(isinstance(item, str) for item in prefixes)
        if entry is not None and not (is_list and prefixes):
            raise UserError(f"{file}: {name} must be null or list weights and prefixes")


def _check_parts(
    args: Namespace, config: GPTDatasetConfig, num_samples: tuple[int, int, int]
) -> None:
    """Remove splits that need no samples; raise UserError for other splits without samples.

    Megatron-LM counts epochs in an endless loop if a split has no tokens.
    """
    # Bounds of the splits in one blend (--split), or one blend for each split.
    parts = config.blend_per_split if config.blend is None else config.split_matrix
    for number, name in enumerate(("training", "validation", "test")):
        if num_samples[number] == 0:
            parts[number] = None
        if parts[number] is None:
            continue
        if config.blend is not None:
            blend, bounds, argument = config.blend, parts[number], "--data-path"
        else:
            blend, bounds, argument = parts[number], (0.0, 1.0), _per_split_argument(args, number)
        samples_of_each = _samples_of_each(blend, num_samples[number])
        for prefix, samples in zip(blend[0], samples_of_each, strict=True):
            if args.sft:
                config.files[prefix].check_part(name, bounds, argument)
                continue
            check_part(prefix, name, bounds, args.seq_length, args.split, argument, samples)


def _samples_of_each(blend: _Blend, samples: int | None) -> list[float]:
    """Return the number of samples from each dataset of a blend; 0 for one that is read once."""
    prefixes, weights = blend
    if samples is None or (weights is None and len(prefixes) > 1):
        return [0.0] * len(prefixes)
    weights = weights or [1.0]
    return [samples * weight / sum(weights) for weight in weights]


def _per_split_argument(args: Namespace, number: int) -> str:
    """Return the argument that names the datasets of a split."""
    if args.per_split_data_args_path is not None:
        return "--per-split-data-args-path"
    return f"--{_PER_SPLIT[number]}-data-path"
