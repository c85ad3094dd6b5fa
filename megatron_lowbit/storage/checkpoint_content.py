"""Checks of what a checkpoint's pickles hold: types, ranges, and the places of its tensors.

A pickle that runs no code may still hold anything. Megatron-LM and torch use its values unchecked,
some of them only after many steps of training.
"""

import math
import reprlib
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_lowbit.errors import require
from megatron_lowbit.json_files import MAX_DEPTH, is_inside

_MOST_VALUES = 1_000_000
_MOST_BITS = 4096
"""Size of an integer that Python still prints."""
_COUNTS = ("iteration", "total_iters")
_NUMBERS = ("checkpoint_version", "num_floating_point_operations_so_far")
_OBJECTS = ("content_metadata", "opt_param_scheduler", "lr_scheduler")
_SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_SWITCHES = ("no_save_optim", "no_save_rng", "ckpt_fully_parallel_save", "async_save")
_OPTIMIZER_NUMBERS = ("lr", "max_lr", "min_lr", "lr_mult", "weight_decay", "wd_mult", "step")
_OPTIMIZER_FLAGS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")


def check_metadata(metadata: Any, place: str) -> None:
    """Raise UserError where torch's ``.metadata`` does not describe tensors in files of its folder.

    Args:
        metadata: unpickled content of the file.
        place: its name, for errors.
    """
    require(
        isinstance(metadata, Metadata), f"{place}: holds {_kind(metadata)}, not torch's Metadata"
    )
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    require(isinstance(entries, dict), f"{place}: state_dict_metadata: must be a dictionary")
    require(isinstance(places, dict), f"{place}: storage_data: must be a dictionary")
    for name in {stored.relative_path for stored in places.values()}:
        inside = isinstance(name, str) and is_inside(name)
        require(inside, f"{place}: {_show(name)}: not the name of a file in this folder")
    for index, stored in places.items():
        named = isinstance(index, MetadataIndex) and index.fqn in entries
        require(named, f"{place}: storage_data: {_show(index)}: no entry of this name")
        _check_stored(stored, f"{place}: {index.fqn}")
    for key, entry in entries.items():
        require(isinstance(key, str), f"{place}: key {_show(key)}: must be a string")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(key, entry, places, f"{place}: {key}")
        else:
            is_object = isinstance(entry, BytesStorageMetadata) and MetadataIndex(key) in places
            require(is_object, f"{place}: {key}: neither a tensor nor an object of a file")


def _check_stored(stored: Any, place: str) -> None:
    require(isinstance(stored, _StorageInfo), f"{place}: {_kind(stored)} instead of a place")
    for name in ("offset", "length"):
        value = getattr(stored, name)
        require(_is_count(value), f"{place}: {name} {_show(value)}: must be a number of bytes")


def _check_tensor(
    key: str, entry: TensorStorageMetadata, places: Mapping[Any, Any], place: str
) -> None:
    size, dtype = entry.size, entry.properties.dtype
    shaped = isinstance(size, tuple) and all(map(_is_count, size))
    require(shaped, f"{place}: size {_show(size)}: must be a shape")
    require(isinstance(dtype, torch.dtype), f"{place}: dtype {_show(dtype)}: must be torch's")
    require(entry.chunks or not math.prod(size), f"{place}: has no chunks")
    for chunk in entry.chunks:
        require(isinstance(chunk, ChunkStorageMetadata), f"{place}: {_kind(chunk)} in its chunks")
        pairs = list(zip(chunk.offsets, chunk.sizes, size, strict=True))
        inside = all(_is_count(o) and _is_count(s) and o + s <= n for o, s, n in pairs)
        require(inside, f"{place}: chunk {_show(chunk)}: outside of a tensor {list(size)}")
        numbers = math.prod(chunk.sizes)
        stored = places.get(MetadataIndex(key, chunk.offsets))
        require(stored is not None or not numbers, f"{place}: chunk {_show(chunk)}: has no place")
        # Compressed chunks may be shorter.
        if stored is not None and not stored.transform_descriptors:
            least = numbers * dtype.itemsize
            enough = stored.length >= least
            require(enough, f"{place}: chunk {_show(chunk)}: {stored.length} bytes, not {least}")


def check_common_state(state: Any, place: str) -> None:
    """Raise UserError where the common state of a checkpoint is none that Megatron-LM writes.

    Args:
        state: unpickled dictionary.
        place: the checkpoint's folder, for errors.
    """
    require(isinstance(state, dict), f"{place}: its common state is damaged ({_kind(state)})")
    _check_size(state, place)
    for name in filter(state.__contains__, _COUNTS):
        value = state[name]
        require(_is_count(value), f"{place}: {name} {_show(value)}: must be an integer from 0 on")
    for name in filter(state.__contains__, _NUMBERS):
        value = state[name]
        require(_is_number(value), f"{place}: {name} {_show(value)}: must be a finite number")
    for name in filter(state.__contains__, _OBJECTS):
        value = state[name]
        require(isinstance(value, dict), f"{place}: {name} {_show(value)}: must be a dictionary")
    if "args" in state:
        _check_args(state["args"], place)
    for group in _groups(state.get("optimizer", {}), place):
        _check_group(group, f"{place}: optimizer: param_groups")


def _check_args(args: Any, place: str) -> None:
    require(isinstance(args, Namespace), f"{place}: args: {_kind(args)} instead of arguments")
    for name, value in vars(args).items():
        require(isinstance(name, str), f"{place}: args: {_show(name)}: must be a name")
        # Comparisons of these have no truth value.
        plain = not hasattr(value, "__array__")
        require(plain, f"{place}: args: {name}: {_kind(value)} is no argument's value")
    for name in filter(args.__contains__, _SAMPLES):
        value = getattr(args, name)
        require(_is_count(value), f"{place}: args: {name} {_show(value)}: must be a count")
    for name in filter(args.__contains__, _SWITCHES):
        value = getattr(args, name)
        known = value is None or isinstance(value, bool)
        require(known, f"{place}: args: {name} {_show(value)}: must be true or false")


def _groups(optimizer: Any, place: str) -> Iterable[Any]:
    """Return the parameter groups of an optimizer, or of all that are chained."""
    kinds = isinstance(optimizer, dict | list)
    require(kinds, f"{place}: optimizer {_show(optimizer)}: must be a dictionary")
    if isinstance(optimizer, list):
        return chain.from_iterable(_groups(part, place) for part in optimizer)
    if "optimizer" in optimizer:  # the state of torch's optimizer within Megatron-LM's
        return _groups(optimizer["optimizer"], place)
    if all(type(key) is int for key in optimizer):
        return chain.from_iterable(_groups(part, place) for part in optimizer.values())
    groups = optimizer.get("param_groups", [])
    is_list = isinstance(groups, list)
    require(is_list, f"{place}: optimizer: param_groups {_show(groups)}: must be a list")
    return groups


def _check_group(group: Any, place: str) -> None:
    require(isinstance(group, dict), f"{place}: {_show(group)}: must be a dictionary")
    for name in filter(group.__contains__, _OPTIMIZER_NUMBERS):
        value = group[name]
        known = value is None or _is_number(value) or isinstance(value, torch.Tensor)
        require(known, f"{place}: {name} {_show(value)}: must be a finite number")
    # Adam's step reads both; a schedule sets the rates and decays that are missing.
    both = ("eps" in group) == ("betas" in group)
    require(both, f"{place}: has one of eps and betas, not both")
    eps, betas = group.get("eps", 0.0), group.get("betas", ())
    for name in filter(group.__contains__, _OPTIMIZER_FLAGS):
        value = group[name]
        known = value is None or isinstance(value, bool)
        require(known, f"{place}: {name} {_show(value)}: must be true or false")
    require(not group.get("amsgrad"), f"{place}: amsgrad: Megatron-LM has no such optimizer")
    # A NaN here ends the run at its first step, with a line about it.
    require(type(eps) in (int, float), f"{place}: eps {_show(eps)}: must be a number")
    pair = isinstance(betas, tuple | list) and all(map(_is_number, betas))
    pair = pair and ("betas" not in group or len(betas) > 1)
    require(pair, f"{place}: betas {_show(betas)}: must be finite numbers")


def _check_size(state: Any, place: str) -> None:
    """Raise UserError for values that are nested too deeply or too many to be walked through."""
    level = [state]
    total = 0
    for _ in range(MAX_DEPTH):
        inner = chain.from_iterable(map(_inner, level))
        level = list(islice(inner, _MOST_VALUES + 1))
        total += len(level)
        require(total <= _MOST_VALUES, f"{place}: more than {_MOST_VALUES:,} values")
        longest = max((value.bit_length() for value in level if type(value) is int), default=0)
        require(longest <= _MOST_BITS, f"{place}: an integer of {longest:,} bits")
        if not level:
            return
    require(False, f"{place}: nested more than {MAX_DEPTH} deep")


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= sys.maxsize


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _kind(value: Any) -> str:
    return type(value).__name__


def _show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # of an object that the pickle did not complete, or a long integer
        return _kind(value)
