"""Loops that end at a tensor, and BF16, in Triton 3.6's interpreter, which lacks both."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_multiply = interpreter.InterpreterBuilder.create_dot


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


interpreter._patch_lang_tensor = _patch_with_index
interpreter.InterpreterBuilder.create_dot = _multiply_numbers
