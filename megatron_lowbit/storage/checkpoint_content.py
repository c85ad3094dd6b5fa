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

from megatron_lowbit.errors import UserError, requiring
from megatron_lowbit.json_files import MAX_DEPTH, is_inside

_MOST_VALUES = 1_000_000


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


def _check_values(values: Mapping[str, Any], rules: _Rules, source: str) -> None:
    """Raise UserError for a value that breaks the rule of its name; missing ones pass."""
    for names, is_valid, wanted in rules:
        for name in filter(values.__contains__, names.split()):
            if not is_valid(values[name]):
                raise UserError(f"{source}: {name} {_show(values[name])}: must be {wanted}")


def check_metadata(metadata: Any, source: str) -> None:
    """Raise UserError where torch's ``.metadata`` does not describe tensors in files of its folder.

    ``source`` is the file, for errors. Values are shown only in an error, not formatted for each of
    the many entries.
    """
    check = requiring(source)
    is_metadata = isinstance(metadata, Metadata)
    check(is_metadata, f"holds {type(metadata).__name__}, not torch's Metadata")
    entries, locations = metadata.state_dict_metadata, metadata.storage_data
    check(isinstance(entries, dict), "state_dict_metadata: must be a dictionary")
    check(isinstance(locations, dict), "storage_data: must be a dictionary")
    for name in {stored.relative_path for stored in locations.values()}:
        inside = isinstance(name, str) and is_inside(name)
        check(inside, f"{_show(name)}: not the name of a file in this folder")
    for index, stored in locations.items():
        named = isinstance(index, MetadataIndex) and index.fqn in entries
        if not named:
            raise UserError(f"{source}: storage_data: {_show(index)}: no entry of this name")
        is_location = isinstance(stored, _StorageInfo)
        check(is_location, f"{index.fqn}: {type(stored).__name__} instead of a place")
        span = {"offset": stored.offset, "length": stored.length}
        _check_values(span, _SPAN, f"{source}: {index.fqn}")
    for key, entry in entries.items():
        if not isinstance(key, str):
            raise UserError(f"{source}: key {_show(key)}: must be a string")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(key, entry, locations, f"{source}: {key}")
        else:
            is_object = isinstance(entry, BytesStorageMetadata) and MetadataIndex(key) in locations
            check(is_object, f"{key}: neither a tensor nor an object of a file")


def _check_tensor(
    key: str, entry: TensorStorageMetadata, locations: Mapping[Any, Any], source: str
) -> None:
    check, size, dtype = requiring(source), entry.size, entry.properties.dtype
    shaped = isinstance(size, tuple) and all(map(_is_count, size))
    check(shaped, f"size {_show(size)}: must be a shape")
    check(isinstance(dtype, torch.dtype), f"dtype {_show(dtype)}: must be torch's")
    check(entry.chunks or not math.prod(size), "has no chunks")
    for chunk in entry.chunks:
        is_chunk = isinstance(chunk, ChunkStorageMetadata)
        check(is_chunk, f"{type(chunk).__name__} in its chunks")
        pairs = list(zip(chunk.offsets, chunk.sizes, size, strict=True))
        inside = all(_is_count(o) and _is_count(s) and o + s <= n for o, s, n in pairs)
        if not inside:
            raise UserError(f"{source}: chunk {_show(chunk)}: outside of a tensor {list(size)}")
        numbers = math.prod(chunk.sizes)
        stored = locations.get(MetadataIndex(key, chunk.offsets))
        if stored is None and numbers:
            raise UserError(f"{source}: chunk {_show(chunk)}: has no place")
        # Compressed chunks may be shorter.
        if stored is not None and not stored.transform_descriptors:
            least = numbers * dtype.itemsize
            if stored.length < least:
                shown = f"chunk {_show(chunk)}: {stored.length} bytes, not {least}"
                raise UserError(f"{source}: {shown}")


def check_common_state(state: Any, source: str) -> None:
    """Raise UserError where the common state of a checkpoint is none that Megatron-LM writes.

    ``source`` is the checkpoint's folder, for errors.
    """
    is_state = isinstance(state, dict)
    requiring(source)(is_state, f"its common state is damaged ({type(state).__name__})")
    _check_size(state, source)
    _check_values(state, _COMMON_STATE, source)
    if "args" in state:
        args, check = state["args"], requiring(f"{source}: args")
        check(isinstance(args, Namespace), f"{type(args).__name__} instead of arguments")
        for name, value in vars(args).items():
            check(isinstance(name, str), f"{_show(name)}: must be a name")
            # Comparisons of these have no truth value.
            is_plain = not hasattr(value, "__array__")
            check(is_plain, f"{name}: {type(value).__name__} is no argument's value")
        _check_values(vars(args), _ARGUMENTS, f"{source}: args")
    source_of_groups = f"{source}: optimizer: param_groups"
    check = requiring(source_of_groups)
    for group in _groups(state.get("optimizer", {}), source):
        check(isinstance(group, dict), f"{_show(group)}: must be a dictionary")
        _check_values(group, _PARAM_GROUP, source_of_groups)
        # Adam's step reads both; a schedule sets the rates and decays that are missing.
        check(("eps" in group) == ("betas" in group), "has one of eps and betas, not both")
        check(not group.get("amsgrad"), "amsgrad: Megatron-LM has no such optimizer")


def _groups(optimizer: Any, source: str) -> Iterable[Any]:
    """Return the parameter groups of an optimizer, or of all that are chained."""
    check, is_state = requiring(source), isinstance(optimizer, dict | list)
    check(is_state, f"optimizer {_show(optimizer)}: must be a dictionary")
    if isinstance(optimizer, list):
        return chain.from_iterable(_groups(part, source) for part in optimizer)
    if "optimizer" in optimizer:  # the state of torch's optimizer within Megatron-LM's
        return _groups(optimizer["optimizer"], source)
    if all(type(key) is int for key in optimizer):
        return _groups(list(optimizer.values()), source)
    groups: list[Any] = optimizer.get("param_groups", [])
    check(isinstance(groups, list), f"optimizer: param_groups {_show(groups)}: must be a list")
    return groups


def _check_size(state: Any, source: str) -> None:
    """Raise UserError for values that are nested too deeply or too many to be walked through."""
    check, level, total = requiring(source), [state], 0
    for _ in range(MAX_DEPTH):
        level = list(islice(chain.from_iterable(map(_inner, level)), _MOST_VALUES + 1))
        total += len(level)
        check(total <= _MOST_VALUES, f"more than {_MOST_VALUES:,} values")
        longest = max((value.bit_length() for value in level if type(value) is int), default=0)
        # Python prints integers up to this size.
        check(longest <= 4096, f"an integer of {longest:,} bits")
        if not level:
            return
    check(False, f"nested more than {MAX_DEPTH} deep")


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
