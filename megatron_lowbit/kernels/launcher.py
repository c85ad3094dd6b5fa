"""Launches that skip Triton's inspection of each argument."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Size = TypeVar("Size", int, np.ndarray)


def cdiv(size: Size, part: int) -> Size:
    """Divide rounding up: ``triton.cdiv`` takes a third of a kernel's launch."""
    return -(-size // part)


class Launcher:
    """A kernel with its constexprs, for arguments of the same types.

    Triton compiles a kernel again for other types, for pointers that are not aligned to 16 bytes,
    and for numbers that are 1, multiples of 16 or wider than 32 bits. It looks at every argument of
    every launch to find out, which takes nine tenths of a launch's time on the CPU. Here only the
    arguments that may differ are inspected, by their indices: callers keep a launcher for each
    shape, dtype and device. A compiled kernel is launched as torch's compiler launches it, without
    the hooks of Triton's profiler, and gets addresses in place of tensors, which Triton would look
    up. Numbers that do not vary are taken from the first launch.

    Args:
        kernel: Triton's, also for its interpreter.
        programs: their number.
        constants: constexprs, behind the arguments.
        varying: indices of arguments whose type may vary.
        views: dtypes by the indices of tensors that the kernel takes as another dtype; addresses
            need no such view.
        options: of the launch.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        constants: Sequence[Any],
        varying: Sequence[int],
        views: Mapping[int, torch.dtype] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self._kernel, self._programs, self._varying = kernel, programs, varying
        self._constants, self._views, self._options = constants, views, options
        self._compiled: dict[tuple, Callable[[Sequence[Any], int], None]] = {}

    def __call__(self, arguments: Sequence[Any], programs: int | None = None) -> None:
        """Launch the kernel with all its arguments.

        ``programs``: their number where it differs from launch to launch.
        """
        programs = self._programs if programs is None else programs
        types = tuple([_type_key(arguments[index]) for index in self._varying])
        launch = self._compiled.get(types)
        if launch is not None:
            launch(arguments, programs)
            return
        given = list(arguments)
        for index, dtype in self._views.items():
            given[index] = None if given[index] is None else given[index].view(dtype)
        kernel = self._kernel[(programs,)](*given, *self._constants, **self._options)
        if kernel is not None:  # Triton's interpreter compiles nothing
            self._compiled[types] = self._launch_by_address(kernel, arguments)

    def _launch_by_address(
        self, kernel: Any, arguments: Sequence[Any]
    ) -> Callable[[Sequence[Any], int], None]:
        """Return a function that launches a kernel compiled for arguments of these types."""
        run, head = kernel.run, (kernel.packed_metadata, None, None, None)
        if run.global_scratch_size or run.profile_scratch_size:
            launch, head = run, (kernel.function, *head)  # which allocates that memory
        else:
            options = run.launch_cooperative_grid, run.launch_pdl
            launch, head = run.launch, (kernel.function, *options, None, None, *head)
        stream = partial(torch._C._cuda_getCurrentRawStream, torch.cuda.current_device())
        first = [None if isinstance(x, Tensor) else x for x in arguments]
        first += self._constants
        pointers = [index for index, x in enumerate(arguments) if isinstance(x, Tensor)]
        numbers = [i for i in self._varying if isinstance(arguments[i], (int, tuple))]

        def launch_again(arguments: Sequence[Any], programs: int) -> None:
            given = first.copy()
            for index in pointers:
                given[index] = arguments[index].data_ptr()
            for index in numbers:
                given[index] = arguments[index]
            launch(programs, 1, 1, stream(), *head, *given)

        return launch_again


@lru_cache(maxsize=4096)
def table_launcher(
    kernel: Any,
    constants: tuple,
    options: tuple[tuple[str, Any], ...],
    varying: tuple[int, ...],
    *types: Any,
) -> Launcher:
    """Return the launcher of a kernel that takes a table of matrices.

    ``types`` are what the types of its arguments depend on, except those that vary.
    """
    return Launcher(kernel, 0, constants, varying, **dict(options))


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

    Its constexprs are the tile's rows and columns, both sides, True for whole tiles, and ``more``.
    """
    even = shape[0] % tile[0] == 0 and shape[1] % tile[1] == 0
    programs = cdiv(shape[0], tile[0]) * cdiv(shape[1], tile[1])
    constants = (*tile, row, col, even, *more)
    return Launcher(kernel, programs, constants, varying, enable_fp_fusion=False, **options)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors: programs that certainly run at the same time.

    Triton's interpreter runs one after another.
    """
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _type_key(argument: Any) -> Any:
    if argument is None:
        return None
    if isinstance(argument, int):
        return "narrow" if -(2**31) <= argument < 2**31 else "wide"
    if isinstance(argument, tuple):
        # Triton compiles numbers of a tuple as what they are, whatever the kernel says.
        return *map(_type_key, argument), *[1 if n == 1 else 2 * (n % 16 > 0) for n in argument]
    return argument.data_ptr() % 16
