"""Makes Triton's interpreter replace the language's functions once a launch, when it is imported.

Triton 3.6 does it again in every call of a device function, without an effect: the launch has
replaced them already. That takes two fifths of the time of a launch.
"""

import inspect
from functools import cache

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


def _patch_once(function):
    if any(tl.core.is_builtin(module.arange) for module in _languages(function)):
        return _patch_lang(function)
    return interpreter._LangPatchScope()


@cache
def _languages(function) -> list:
    """Return the modules of the language that a function uses."""
    modules = filter(inspect.ismodule, function.__globals__.values())
    return [module for module in modules if module in (tl, tl.core)]


interpreter._patch_lang = _patch_once
