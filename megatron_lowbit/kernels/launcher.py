"""Launches without the inspection of arguments that each of Triton's own makes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from triton.runtime import driver

Size = TypeVar("Size", int, np.ndarray)


def cdiv(size: Size, part: int) -> Size:
    """Divide rounding up: ``triton.cdiv`` takes a third of a kernel's launch."""
    return -(-size // part)


class Launcher:
    """A kernel with its constexprs, for arguments of the same types.

    Triton compiles a kernel anew for other types, for pointers that are not aligned to 16 bytes,
    and for numbers that are 1, multiples of 16 or wider than 32 bits. It looks at every argument of
    every launch to find out, which takes nine tenths of a launch's time on the CPU. Here only those
    are looked at that may differ, by their places: whoever keeps a launcher keeps one for each
    shape, dtype and device. A kernel that is compiled is launched as torch's compiler launches it,
    without the hooks of Triton's profiler, and is given addresses in place of tensors, which Triton
    would look up.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        constants: Sequence[Any],
        varying: Sequence[int],
        **options: Any,
    ) -> None:
        self._kernel, self._programs, self._varying = kernel, programs, varying
        self._constants, self._options = constants, options
        self._compiled: dict[tuple, Any] = {}

    def __call__(self, arguments: Sequence[Any], programs: int | None = None) -> None:
        """Launch the kernel with all its arguments.

        ``programs``: their number where it differs from launch to launch.
        """
        programs = self._programs if programs is None else programs
        kinds = tuple([_kind(arguments[place]) for place in self._varying])
        compiled = self._compiled.get(kinds)
        if compiled is None:  # always in Triton's interpreter, which compiles nothing
            launch = self._kernel[(programs,)]
            self._compiled[kinds] = launch(*arguments, *self._constants, **self._options)
            return
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        given = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *given, *self._constants,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def table_launcher(
    kernel: Any,
    constants: tuple,
    options: tuple[tuple[str, Any], ...],
    varying: tuple[int, ...],
    *kinds: Any,
) -> Launcher:
    """Return the launcher of a kernel that takes a table of matrices.

    ``kinds`` are what the types of its arguments depend on, but for those that vary.
    """
    return Launcher(kernel, 0, constants, varying, **dict(options))


def tensors_of(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Return the places of arguments that are no numbers."""
    return tuple(place for place, one in enumerate(arguments) if not isinstance(one, int))


def tile_launcher(
    kernel: Any,
    shape: tuple[int, int],
    tile: tuple[int, int],
    row: Any,
    col: Any,
    *more: Any,
    varying: Sequence[int],
    **options: Any,
) -> Launcher:
    """Return the launcher of a kernel whose programs take a tile each of a matrix.

    Its constexprs are the tile's rows and columns, what both sides are, True for whole tiles, and
    ``more``.
    """
    even = shape[0] % tile[0] == 0 and shape[1] % tile[1] == 0
    programs = cdiv(shape[0], tile[0]) * cdiv(shape[1], tile[1])
    constants = (*tile, row, col, even, *more)
    return Launcher(kernel, programs, constants, varying, enable_fp_fusion=False, **options)


def _kind(argument: Tensor | int | None) -> int | str | None:
    if argument is None:
        return None
    if isinstance(argument, int):
        return "narrow" if -(2**31) <= argument < 2**31 else "wide"
    return argument.data_ptr() % 16
