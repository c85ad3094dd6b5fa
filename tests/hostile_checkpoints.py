"""Checkpoints whose pickles hold other values than Megatron-LM writes, by name or by seed.

Nothing here knows what a reader checks: mutations change any value of the common state or of
torch's ``.metadata``, or bytes of any file.
"""

import io
import os
import pickle
import random
import shutil
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_lowbit.storage.pickles import Reader

COMMON = "common_state/shard_0_1"
OTHERS = (
    None, "x", "\x1b]0;PWN\x07\n", "", 5, -1, 0, True, 10**30, 10**400, 1e30, float("nan"),
    float("inf"), [], [1], [None], {}, {"a": 1}, (), (1, 2, 3), b"x", torch.zeros(2),
    torch.float64, torch.complex128, Namespace(), Namespace(a=1), "../../etc/passwd", "/dev/zero",
    2**62, -(2**63), 1j, {1: 2},
)  # fmt: skip
"""Values that replace others."""


class Evil:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.trace),)


def metadata_of(path: Path) -> Metadata:
    """Return the content of a good checkpoint's ``.metadata``."""
    return Reader(path).read_metadata()


def write_metadata(path: Path, metadata: Any) -> None:
    """Write any object as ``.metadata``."""
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def write_object(path: Path, content: Any, key: str = COMMON) -> Path:
    """Append an object to a shard, and let ``key`` be read from there; return the shard."""
    metadata, stream = metadata_of(path), io.BytesIO()
    torch.save(content, stream)
    (index,) = [index for index in metadata.storage_data if index.fqn == key]
    name = metadata.storage_data[index].relative_path
    start, length = (path / name).stat().st_size, len(stream.getvalue())
    with open(path / name, "ab") as file:
        file.write(stream.getvalue())
    metadata.storage_data[index] = _StorageInfo(name, start, length)
    write_metadata(path, metadata)
    return path / name


def common_of(path: Path) -> dict[str, Any]:
    """Return the common state of a good checkpoint."""
    reader = Reader(path)
    return reader.read_object(metadata_of(path).storage_data[MetadataIndex(COMMON)])[0]


def copy_of(source: Path, target: Path) -> Path:
    """Copy a ``--save`` directory without its records; return the folder of its iteration."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("lowbit.json", "*.png"))
    (path,) = target.glob("iter_*")
    return path


# -- the mutations by name -------------------------------------------------------------------------


def _set(key: str, value: Any) -> Callable[[dict], None]:
    return lambda common: common.__setitem__(key, value)


def _set_arg(key: str, value: Any) -> Callable[[dict], None]:
    return lambda common: setattr(common["args"], key, value)


def _groups(value: Any) -> Callable[[dict], None]:
    return lambda common: common["optimizer"].__setitem__("param_groups", value)


def _in_groups(key: str, value: Any) -> Callable[[dict], None]:
    return lambda common: [g.__setitem__(key, value) for g in common["optimizer"]["param_groups"]]


COMMON_STATES: dict[str, Callable[[dict], Any]] = {
    **{f"args {value!r}": _set("args", value) for value in (None, "x", {}, Namespace(), [])},
    **{f"iteration {value!r}": _set("iteration", value) for value in ("x", None, [1], -1, 1.5)},
    **{f"version {value!r}": _set("checkpoint_version", value) for value in ("x", None, [])},
    **{f"scheduler {value!r}": _set("opt_param_scheduler", value) for value in (None, "x", {}, [])},
    **{f"optimizer {value!r}": _set("optimizer", value) for value in (None, "x", {}, [], 5)},
    **{f"metadata {value!r}": _set("content_metadata", value) for value in ("x", [1], None, 5)},
    **{
        f"flops {value!r:.9}": _set("num_floating_point_operations_so_far", value)
        for value in ("x", 10**400, None, float("nan"))
    },
    **{f"groups {value!r}": _groups(value) for value in ([], None, "x", [1], [{}])},
    **{
        f"group {key} {value!r}": _in_groups(key, value)
        for key, value in (("lr", "x"), ("betas", "x"), ("betas", (0.9,)), ("eps", "x"),
                           ("weight_decay", "x"), ("step", "x"), ("wd_mult", []), ("foreach", "x"),
                           ("amsgrad", "x"), ("betas", (0.9, "x")), ("max_lr", None))
    },
    "group no betas": lambda common: [g.pop("betas") for g in common["optimizer"]["param_groups"]],
    "no iteration": lambda common: common.pop("iteration"),
    "no scheduler": lambda common: common.pop("opt_param_scheduler"),
    "no optimizer": lambda common: common.pop("optimizer"),
    "rng_state 'x'": _set("rng_state", "x"),
    "consumed 'x'": _set_arg("consumed_train_samples", "x"),
    "consumed -1": _set_arg("consumed_train_samples", -1),
    "skipped 'x'": _set_arg("skipped_train_samples", "x"),
    "validated 'x'": _set_arg("consumed_valid_samples", "x"),
    "no_save_optim 'x'": _set_arg("no_save_optim", "x"),
    "no_save_rng []": _set_arg("no_save_rng", []),
    "position []": _set_arg("position_embedding_type", []),
    "recipe 5": _set_arg("precision_recipe", 5),
    "layers 'x'": _set_arg("num_layers", "x"),
    "hidden tensor": _set_arg("hidden_size", torch.zeros(2)),
    "names": lambda common: vars(common["args"]).update({1: 2}),
    "averaged 5": _set("averaged", 5),
    "long integer": _set_arg("num_layers", 10**5000),
    "long base": _set_arg("rotary_base", 10**5000),
    "factor nan": _set_arg("rope_scaling_factor", float("nan")),
    "long activation": _set_arg("swiglu", "\x1b[31m" * 10**6),
    "a cycle": lambda common: common["args"].__setattr__("again", common),
}  # fmt: skip
WHOLE_STATES: dict[str, Any] = {
    repr(value): value for value in ([], [None], 5, "x", None, {}, [[]])
}


def _place(field: str, value: Any) -> Callable[[Metadata], None]:
    return lambda m: [object.__setattr__(place, field, value) for place in m.storage_data.values()]


def _dtype(dtype: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "properties"):
                entry.properties.dtype = dtype

    return change


def _entries(change: Callable[[dict], Any], name: str = "state_dict_metadata") -> Callable:
    return lambda metadata: change(getattr(metadata, name))


def _sizes(size: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "size"):
                entry.size = size

    return change


def _chunks(change: Callable[[list], Any]) -> Callable[[Metadata], Any]:
    return lambda metadata: [
        change(entry.chunks)
        for entry in metadata.state_dict_metadata.values()
        if hasattr(entry, "chunks")
    ]


METADATA: dict[str, Callable[[Metadata], Any]] = {
    **{f"offset {value!r}": _place("offset", value) for value in (-1, "x", None, 10**15, 2**70)},
    **{f"length {value!r}": _place("length", value) for value in (-1, "x", None, 10**12, 0)},
    **{
        f"path {value!r}": _place("relative_path", value)
        for value in (5, None, "../../etc/passwd", "/dev/zero", "x\0y", "\x1b[31m", [], "missing")
    },
    "transforms": _place("transform_descriptors", ["x"]),
    **{f"dtype {value!r}": _dtype(value) for value in (torch.complex128, "x", None, torch.bits8)},
    **{f"sizes {value!r}": _sizes(value) for value in ("x", None, (-1, 2), (2**40, 2**40), ())},
    **{
        f"{name} {value!r}": lambda m, n=name, v=value: setattr(m, n, v)
        for name in ("state_dict_metadata", "storage_data")
        for value in (None, "x", {}, [])
    },
    "planner_data 'x'": lambda m: setattr(m, "planner_data", "x"),
    "integer keys": _entries(lambda d: [d.__setitem__(i, d.pop(k)) for i, k in enumerate([*d])]),
    "none for entries": _entries(lambda d: [d.__setitem__(key, None) for key in [*d]]),
    "no common state": _entries(lambda d: d.pop(COMMON)),
    "an index is missing": _entries(lambda d: d.pop(next(iter(d))), "storage_data"),
    "no places": _entries(lambda d: d.clear(), "storage_data"),
    "string index": _entries(lambda d: d.update(x=next(iter(d.values()))), "storage_data"),
    "no chunks": _chunks(lambda chunks: chunks.clear()),
    "chunks twice": _chunks(lambda chunks: chunks.extend(chunks)),
}  # fmt: skip


def mutate(path: Path, name: str) -> None:
    """Apply a mutation: ``common: NAME``, ``state: NAME``, ``metadata: NAME`` or a seed."""
    kind, _, which = name.partition(": ")
    if kind == "common":
        common = deepcopy(common_of(path))
        COMMON_STATES[which](common)
        write_object(path, [common])
    elif kind == "state":
        write_object(path, WHOLE_STATES[which])
    elif kind == "metadata":
        metadata = metadata_of(path)
        METADATA[which](metadata)
        write_metadata(path, metadata)
    else:
        mutate_randomly(path, random.Random(int(which)))


NAMES = [
    *(f"common: {name}" for name in COMMON_STATES),
    *(f"state: {name}" for name in WHOLE_STATES),
    *(f"metadata: {name}" for name in METADATA),
]


# -- mutations by a seed ---------------------------------------------------------------------------


def mutate_randomly(path: Path, generator: random.Random) -> None:
    """Replace one to three values of a pickle, or bytes of a file."""
    kind = generator.choice(["common", "common", "args", "metadata", "metadata", "object", "bytes"])
    if kind == "bytes":
        file = generator.choice(sorted(path.iterdir()))
        content = bytearray(file.read_bytes())
        for _ in range(generator.choice([1, 3, 100])):
            content[generator.randrange(len(content))] = generator.randrange(256)
        if generator.random() < 0.3:
            content = content[: generator.randrange(len(content))]
        file.write_bytes(content)
        return
    if kind == "object":
        keys = sorted(i.fqn for i in metadata_of(path).storage_data if "/shard_" in i.fqn)
        other = generator.choice(OTHERS)
        write_object(path, generator.choice([other, [other]]), generator.choice(keys))
        return
    if kind == "metadata":
        content: Any = metadata_of(path)
    else:
        content = deepcopy(common_of(path))
    for _ in range(generator.choice([1, 1, 3])):
        part = content["args"] if kind == "args" and "args" in content else content
        _replace_one(part, generator)
    write_metadata(path, content) if kind == "metadata" else write_object(path, [content])


def _replace_one(content: Any, generator: random.Random) -> None:
    """Replace a value at a random place within nested containers and objects."""
    while True:
        is_object = not isinstance(content, dict | list)
        slots = vars(content) if is_object else content
        keys = [*slots] if isinstance(slots, dict) else range(len(slots))
        if not keys:
            return
        key = generator.choice(list(keys))
        value = slots[key]
        inner = isinstance(value, dict | list) or hasattr(value, "__dict__")
        if (
            inner
            and not isinstance(value, type)
            and not callable(value)
            and generator.random() < 0.9
        ):
            content = value
            continue
        other = generator.choice(OTHERS)
        if is_object:
            object.__setattr__(content, key, other)
        elif isinstance(content, dict) and generator.random() < 0.2:
            del content[key]
        else:
            content[key] = other
        return


def turn_bit(file: Path, position: int | None = None) -> None:
    """Change a bit of a file's byte, by default the one in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    file.write_bytes(content)
