"""Attributes of a package that are imported when they are first used: torch takes seconds."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from sys import modules as imported
from typing import Any


def lazy_attributes(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a ``__getattr__`` and a ``__dir__`` (PEP 562), and the ``__all__`` of a package.

    ``modules``: names of attributes by the submodule that has them, one dot before a sibling.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package} has no attribute {name}")
        return getattr(import_module(f".{homes[name]}", package), name)

    def __dir__() -> list[str]:
        special = {name for name in vars(imported[package]) if name.startswith("__")}
        return sorted(special | homes.keys())

    return __getattr__, __dir__, sorted(homes)
