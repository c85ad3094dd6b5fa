"""Blocks of a plain PyTorch model, and the modules in them as a recipe's rules see them."""

import re
from collections.abc import Iterator, Sequence

from torch import nn

from megatron_lowbit.errors import UserError, require, require_type
from megatron_lowbit.recipes import Layer

BLOCK_LISTS = ("layers", "layer", "h", "blocks", "block")
"""Names of the lists in which models keep their blocks."""
WRAPPED = "base_layer"
"""Name under which an adapter of PEFT keeps the layer that it adapts."""
_ADAPTER = re.compile(r"\blora_[ab]\b", re.IGNORECASE)
"""Part of the paths of low-rank adapters in other libraries."""


def block_paths(model: nn.Module, lists: str | Sequence[str] | None) -> list[str]:
    """Return the paths of a model's blocks, first to last.

    Args:
        model: the whole model.
        lists: path of the module whose children are the blocks (``""`` for the model itself), or
            several such paths, in order. None looks for the outermost module of a name in
            ``BLOCK_LISTS`` with numbered children. Children without a linear layer do not count.

    Raises:
        UserError: no list of blocks, or several of which none is given; a path that is not there.
        TypeError: ``lists`` is neither a path nor several.
    """
    if lists is None:
        candidates = _find_lists(model)
        names = ", ".join(BLOCK_LISTS)
        require(
            bool(candidates),
            f"no nn.Linear in the numbered children of a module named {names} (transformers' "
            "Conv1D, as in GPT-2, is none); give the path of the module whose children are the "
            "blocks as blocks=",
        )
        require(
            len(candidates) == 1,
            f"several lists of blocks in the model: {', '.join(candidates)}; give one of them as "
            "blocks=, or a list of them in order",
        )
        lists = candidates
    require_type("blocks", lists, str | Sequence, "a path or several")
    require(isinstance(lists, str) or bool(lists), f"blocks={lists!r}: give at least one path")
    paths = []
    for where in [lists] if isinstance(lists, str) else lists:
        try:
            # named_children() would omit a block that is in the list again.
            children = model.get_submodule(where)._modules.items()
        except AttributeError:
            raise UserError(f"blocks={where!r}: the model has no module of that path") from None
        blocks = [name for name, child in children if child is not None and _has_linear(child)]
        require(bool(blocks), f"blocks={where!r}: no child of that module has an nn.Linear")
        paths += [f"{where}.{name}" if where else name for name in blocks]
    return paths


def modules_in_blocks(model: nn.Module, paths: Sequence[str]) -> Iterator[tuple[Layer, nn.Module]]:
    """Yield every module in the blocks, one that is shared once for each of its paths.

    Adapters are omitted. The path of an adapted layer is its path without the adapter.
    """
    for number, path in enumerate(paths):
        block = model.get_submodule(path)
        modules = dict(block.named_modules(prefix=path, remove_duplicate=False))
        adapted = [name.removesuffix(WRAPPED) for name in modules if name.endswith(WRAPPED)]
        for name, module in modules.items():
            own_path = name.replace(f".{WRAPPED}", "")
            is_adapter = own_path == name and name.startswith(tuple(adapted))
            if not is_adapter and not _ADAPTER.search(name):
                yield Layer(own_path, number, len(paths)), module


def _find_lists(model: nn.Module) -> list[str]:
    lists: list[str] = []
    for path, module in model.named_modules():
        children = [name for name, _ in module.named_children()]
        is_list = path.rpartition(".")[2] in BLOCK_LISTS and all(map(str.isdigit, children))
        nested = any(path.startswith(f"{outer}.") for outer in lists)
        if is_list and not nested and _has_linear(module):
            lists.append(path)
    return lists


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Linear) for part in module.modules())
