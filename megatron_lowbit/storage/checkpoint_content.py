"""Types and ranges of what a checkpoint's pickles hold, and the places of its tensors.

A pickle that runs no code may still hold anything. Megatron-LM and torch use its values unchecked,
some of them only after many steps of training.
"""

import math
import reprlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
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


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= sys.maxsize


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) > 1 and all(map(_is_number, value))


def _is_setting(value: Any) -> bool:
    return value is None or _is_number(value) or isinstance(value, torch.Tensor)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


_Rules = tuple[tuple[str, Callable[[Any], bool], str], ...]
"""Names of values, a test of each, and the words for what passes it."""
_SPAN: _Rules = (("offset length", _is_count, "a number of bytes"),)
_COMMON_STATE: _Rules = (
    ("iteration total_iters", _is_count, "an integer from 0 on"),
    ("checkpoint_version num_floating_point_operations_so_far", _is_number, "a finite number"),
    ("content_metadata opt_param_scheduler lr_scheduler",
     lambda value: isinstance(value, dict), "a dictionary"),
)  # fmt: skip
_ARGUMENTS: _Rules = (
    ("consumed_train_samples skipped_train_samples consumed_valid_samples", _is_count, "a count"),
    ("no_save_optim no_save_rng ckpt_fully_parallel_save async_save", _is_flag, "true or false"),
)
_PARAM_GROUP: _Rules = (
    ("lr max_lr min_lr lr_mult weight_decay wd_mult step", _is_setting, "a finite number"),
    ("amsgrad maximize foreach capturable differentiable fused", _is_flag, "true or false"),
    # A NaN here ends the run at its first step, with a line about it.
    ("eps", lambda value: type(value) in (int, float), "a number"),
    ("betas", _are_numbers, "finite numbers"),
)


def _check_values(values: Mapping[str, Any], rules: _Rules, place: str) -> None:
    """Raise UserError for a value that breaks the rule of its name; missing ones pass."""
    for names, is_valid, wanted in rules:
        for name in filter(values.__contains__, names.split()):
            text = f"{place}: {name} {_show(values[name])}: must be {wanted}"
            require(is_valid(values[name]), text)


def check_metadata(metadata: Any, place: str) -> None:
    """Raise UserError where torch's ``.metadata`` does not describe tensors in files of its folder.

    ``place`` is the file, for errors.
    """
    is_metadata = isinstance(metadata, Metadata)
    require(is_metadata, f"{place}: holds {type(metadata).__name__}, not torch's Metadata")
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    require(isinstance(entries, dict), f"{place}: state_dict_metadata: must be a dictionary")
    require(isinstance(places, dict), f"{place}: storage_data: must be a dictionary")
    for name in {stored.relative_path for stored in places.values()}:
        inside = isinstance(name, str) and is_inside(name)
        require(inside, f"{place}: {_show(name)}: not the name of a file in this folder")
    for index, stored in places.items():
        named = isinstance(index, MetadataIndex) and index.fqn in entries
        require(named, f"{place}: storage_data: {_show(index)}: no entry of this name")
        is_place = isinstance(stored, _StorageInfo)
        require(is_place, f"{place}: {index.fqn}: {type(stored).__name__} instead of a place")
        span = {"offset": stored.offset, "length": stored.length}
        _check_values(span, _SPAN, f"{place}: {index.fqn}")
    for key, entry in entries.items():
        require(isinstance(key, str), f"{place}: key {_show(key)}: must be a string")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(key, entry, places, f"{place}: {key}")
        else:
            is_object = isinstance(entry, BytesStorageMetadata) and MetadataIndex(key) in places
            require(is_object, f"{place}: {key}: neither a tensor nor an object of a file")


def _check_tensor(
    key: str, entry: TensorStorageMetadata, places: Mapping[Any, Any], place: str
) -> None:
    size, dtype = entry.size, entry.properties.dtype
    shaped = isinstance(size, tuple) and all(map(_is_count, size))
    require(shaped, f"{place}: size {_show(size)}: must be a shape")
    require(isinstance(dtype, torch.dtype), f"{place}: dtype {_show(dtype)}: must be torch's")
    require(entry.chunks or not math.prod(size), f"{place}: has no chunks")
    for chunk in entry.chunks:
        is_chunk = isinstance(chunk, ChunkStorageMetadata)
        require(is_chunk, f"{place}: {type(chunk).__name__} in its chunks")
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

    ``place`` is the checkpoint's folder, for errors.
    """
    is_state = isinstance(state, dict)
    require(is_state, f"{place}: its common state is damaged ({type(state).__name__})")
    _check_size(state, place)
    _check_values(state, _COMMON_STATE, place)
    if "args" in state:
        args, place_of_args = state["args"], f"{place}: args"
        are_args = isinstance(args, Namespace)
        require(are_args, f"{place_of_args}: {type(args).__name__} instead of arguments")
        for name, value in vars(args).items():
            require(isinstance(name, str), f"{place_of_args}: {_show(name)}: must be a name")
            # Comparisons of these have no truth value.
            plain, shown = not hasattr(value, "__array__"), type(value).__name__
            require(plain, f"{place_of_args}: {name}: {shown} is no argument's value")
        _check_values(vars(args), _ARGUMENTS, place_of_args)
    for group in _groups(state.get("optimizer", {}), place):
        where = f"{place}: optimizer: param_groups"
        require(isinstance(group, dict), f"{where}: {_show(group)}: must be a dictionary")
        _check_values(group, _PARAM_GROUP, where)
        # Adam's step reads both; a schedule sets the rates and decays that are missing.
        both = ("eps" in group) == ("betas" in group)
        require(both, f"{where}: has one of eps and betas, not both")
        require(not group.get("amsgrad"), f"{where}: amsgrad: Megatron-LM has no such optimizer")


def _groups(optimizer: Any, place: str) -> Iterable[Any]:
    """Return the parameter groups of an optimizer, or of all that are chained."""
    is_state = isinstance(optimizer, dict | list)
    require(is_state, f"{place}: optimizer {_show(optimizer)}: must be a dictionary")
    if isinstance(optimizer, list):
        return chain.from_iterable(_groups(part, place) for part in optimizer)
    if "optimizer" in optimizer:  # the state of torch's optimizer within Megatron-LM's
        return _groups(optimizer["optimizer"], place)
    if all(type(key) is int for key in optimizer):
        return _groups(list(optimizer.values()), place)
    groups: list[Any] = optimizer.get("param_groups", [])
    is_list = isinstance(groups, list)
    require(is_list, f"{place}: optimizer: param_groups {_show(groups)}: must be a list")
    return groups


def _check_size(state: Any, place: str) -> None:
    """Raise UserError for values that are nested too deeply or too many to be walked through."""
    level = [state]
    total = 0
    for _ in range(MAX_DEPTH):
        level = list(islice(chain.from_iterable(map(_inner, level)), _MOST_VALUES + 1))
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


def _show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # of an object that the pickle did not complete, or a long integer
        return type(value).__name__
