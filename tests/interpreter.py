"""Changes of Triton 3.6's interpreter, made by importing this module.

It replaces the language's functions once a launch. Triton does it again in every call of a device
function, without an effect: the launch has replaced them already. That takes two fifths of the time
of a launch. Of the rest, half goes into types and constants, which are therefore made once, and
into a test of integers for overflow, which reports nothing outside of debugging. Operands of one
shape or type are not compared size by size, and numbers are broadcast by NumPy. Loops may end at a
tensor, BF16 is multiplied, and multiply-adds are fused.
"""

import inspect
import math
from dataclasses import replace
from functools import cache, cached_property, partial

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from megatron_lowbit.numerics.block_formats.ms_eden import fused_multiply_add

_patch_lang = interpreter._patch_lang
_patch_tensor = interpreter._patch_lang_tensor
_multiply = interpreter.InterpreterBuilder.create_dot
_make_block_type = tl.block_type.__init__
_broadcast = TritonSemantic.broadcast_impl_value
_cast = TritonSemantic.cast
_cast_numbers = interpreter.InterpreterBuilder.cast_impl
_constant = cache(partial(TritonSemantic.scalar_constant, interpreter.interpreter_semantic))
_is_equal = tl.dtype.__eq__
_unwrap = tl.core._unwrap_if_constexpr
_block_types: dict[tuple, dict] = {}
_number_type_of = cache(interpreter._get_np_dtype)


def _patch_once(function):
    if any(tl.core.is_builtin(module.arange) for module in _languages(function)):
        return _patch_lang(function)
    return interpreter._LangPatchScope()


@cache
def _languages(function) -> list:
    """Return the modules of the language that a function uses."""
    modules = filter(inspect.ismodule, function.__globals__.values())
    return [module for module in modules if module in (tl, tl.core)]


def _patch_function(owner, name, member, builder, scope) -> None:
    """Give a function of the language the interpreter, without the wrapper that asks for one."""
    function = getattr(member, "__wrapped__", member)

    def call(*arguments, _semantic=None, **options):
        return function(*arguments, _semantic=interpreter.interpreter_semantic, **options)

    scope.set_attr(owner, name, call)


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


def _widen_or_cast(builder, source, target):
    """Convert BF16 to FP32 by a shift of its bits."""
    if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
        numbers = (source.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)
    return _cast_numbers(builder, source, target)


def _multiply_add(builder, x, y, z):
    """Round once, as a GPU does; FP64 holds most sums exactly."""
    product = np.multiply(x.data, y.data, dtype=np.float64)
    total = product + z.data
    back = total - product
    if not ((product - (total - back)) + (z.data - back)).any():
        return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)
    shape = np.broadcast_shapes(*(one.data.shape for one in (x, y, z)))
    numbers = (torch.from_numpy(np.broadcast_to(one.data, shape).copy()) for one in (x, y, z))
    return interpreter.TensorHandle(fused_multiply_add(*numbers).numpy(), z.dtype.scalar)


def _block_type_once(self, element, shape) -> None:
    """Give types of the same elements and shape the same attributes."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if (element.name, sizes) not in _block_types:
        _make_block_type(self, element, list(sizes))
        _block_types[element.name, sizes] = dict(vars(self))
    vars(self).update(_block_types[element.name, sizes])


def _number_type(dtype) -> np.dtype:
    """Look a type up in a table that is made once."""
    scalar = dtype.scalar  # of a pointer, itself, which cannot be hashed
    return np.dtype(np.uint64) if scalar.is_ptr() else _number_type_of(scalar)


def _tensor_of_shape_once(self, handle, type) -> None:
    """Share the shape among tensors of a size."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(tuple(type.shape) if type.is_block() else ())


@cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _broadcast_unlike(self, lhs, rhs) -> tuple[tl.tensor, tl.tensor]:
    """Return operands of one shape, which tensors share, as they are."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


class _BinaryOperations(TritonSemantic):
    """Semantic in which NumPy broadcasts a number to the block that it meets."""

    def broadcast_impl_value(self, lhs, rhs) -> tuple[tl.tensor, tl.tensor]:
        """Give a number the type of a block, and no more elements."""
        if lhs.type.is_block() == rhs.type.is_block():
            return super().broadcast_impl_value(lhs, rhs)
        if lhs.type.is_block():
            return lhs, tl.tensor(rhs.handle, lhs.type.with_element_ty(rhs.dtype))
        return tl.tensor(lhs.handle, rhs.type.with_element_ty(lhs.dtype)), rhs


_operands = partial(
    TritonSemantic.binary_op_type_checking_impl, _BinaryOperations(interpreter.interpreter_builder)
)


def _cast_unlike(self, x, dtype, *rounding) -> tl.tensor:
    return x if x.dtype is dtype else _cast(self, x, dtype, *rounding)


def _is_same_or_equal(self, other) -> bool:
    return self is other or _is_equal(self, other)


def _unwrap_other(x):
    """Return tensors and integers, which are nearly all arguments, as they are."""
    return x if type(x) in (tl.tensor, int) else _unwrap(x)


def _tuple_of_type_on_demand(self, values, type=None) -> None:
    """Leave out the types of a tuple's values, such as a shape's, until they are looked at."""
    self.values = [*values]
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


_type_of_values = cached_property(lambda self: tl.core._type_for_tuple_values(self.values))
_type_of_values.__set_name__(tl.tuple, "type")
tl.tuple.type = _type_of_values
tl.tuple.__init__ = _tuple_of_type_on_demand
tl.tensor.__init__ = _tensor_of_shape_once
tl.block_type.__init__ = _block_type_once
tl.dtype.__eq__ = _is_same_or_equal
tl.core._unwrap_if_constexpr = _unwrap_other
TritonSemantic.broadcast_impl_value = _broadcast_unlike
TritonSemantic.cast = _cast_unlike
TritonSemantic.scalar_constant = staticmethod(_constant)
TritonSemantic.binary_op_type_checking_impl = staticmethod(_operands)
interpreter._get_np_dtype = _number_type
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
interpreter._patch_attr = _patch_function
interpreter._patch_lang = _patch_once
interpreter._patch_lang_tensor = _patch_with_index
interpreter.InterpreterBuilder.create_dot = _multiply_numbers
interpreter.InterpreterBuilder.cast_impl = _widen_or_cast
interpreter.InterpreterBuilder.create_fma = _multiply_add
