"""Extra states of layers in a checkpoint: pickles within its objects, kept as tensors of bytes.

Older versions of Transformer Engine unpickle them without any restriction.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import SafeUnpickler

from megatron_lowbit.errors import UserError
from megatron_lowbit.storage.pickles import load_restricted

KEY = "_extra_state"
_KNOWN = SafeUnpickler._SAFE_CLASSES | {
    # In checkpoints of older versions, where a layer computes in a Transformer Engine recipe that
    # megatron-core has no name for. Transformer Engine ignores them.
    ("transformer_engine.common.recipe", "CustomRecipe"),
    ("megatron_lowbit.megatron.transformer_engine_layers", "factory"),
}


class _Inert(dict[Any, Any]):
    """Stands for any class of an extra state, and does nothing with what it is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _NamesOnly(pickle.Unpickler):
    """Unpickler that finds the names that an extra state may hold, and calls none."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _Inert


def check_extra_states(file: Path, key: str, content: Any) -> None:
    """Raise UserError where an extra state of a layer could run code.

    Args:
        file: the checkpoint's file, for errors.
        key: key of a loaded object.
        content: the object; dictionaries in it may hold extra states under keys of their own.
    """
    for state in _states(key, content):
        if isinstance(state, io.BytesIO):  # written before Transformer Engine 2.0
            load_restricted(file, state)
            state.seek(0)
        else:
            try:
                _NamesOnly(io.BytesIO(state.numpy().tobytes())).load()
            except Exception as error:  # a damaged pickle raises almost anything
                raise UserError(
                    f"{file}: {key}: refused: damaged, or an extra state that could run code "
                    f"({error})"
                ) from None


def _states(key: str, content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _states(f"{key}.{name}", value)
    elif KEY in key:
        for value in content if isinstance(content, list | tuple) else (content,):
            # Transformer Engine takes the bytes of tensors of any dtype.
            is_tensor = isinstance(value, torch.Tensor) and value.numel() > 0
            if is_tensor or isinstance(value, io.BytesIO):
                yield value
