"""Changes of Triton 3.6's interpreter, made by importing this module.

It replaces the language's functions once a launch. Triton does it again in every call of a device
function, without an effect: the launch has replaced them already. That takes two fifths of the time
of a launch. Loops may end at a tensor, BF16 is multiplied, and multiply-adds are fused.
"""

import inspect
from functools import cache

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from megatron_lowbit.numerics.fused_multiply_add import fused_multiply_add

_patch_lang = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor
_multiply = interpreter.InterpreterBuilder.create_dot


def _patch_once(function):
    if any(tl.core.is_builtin(module.arange) for module in _languages(function)):
        return _patch_lang(function)
    return interpreter._LangPatchScope()


@cache
def _languages(function) -> list:
    """Return the modules of the language that a function uses."""
    modules = filter(inspect.ismodule, function.__globals__.values())
    return [module for module in modules if module in (tl, tl.core)]


def _patch_with_index(tensor, scope) -> None:
    """Give a loop its end as a number: NumPy 2.4 makes none of an array with one element."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _multiply_numbers(builder, a, b, *rest):
    """Multiply BF16 as the numbers that its bits, which the interpreter takes, stand for."""
    if a.dtype == tl.bfloat16:
        a, b = (
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            for x in (a, b)
        )
    return _multiply(builder, a, b, *rest)


def _multiply_add(builder, x, y, z):
    """Round once, as a GPU does."""
    shape = np.broadcast_shapes(*(one.data.shape for one in (x, y, z)))
    numbers = (torch.from_numpy(np.broadcast_to(one.data, shape).copy()) for one in (x, y, z))
    return interpreter.TensorHandle(fused_multiply_add(*numbers).numpy(), z.dtype.scalar)


interpreter._patch_lang = _patch_once
interpreter._patch_lang_tensor = _patch_with_index
interpreter.InterpreterBuilder.create_dot = _multiply_numbers
interpreter.InterpreterBuilder.create_fma = _multiply_add
