"""CPU engine: the reference arithmetic itself, fused by torch.compile into vectorized C++.

Same operations in the same order, so the same bits: torch.compile contracts no multiply-add and
reorders no sum unless asked to. The Hadamard butterfly, packing and the GEMM stay eager, where they
are fast already.
"""

import struct
import sys
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lowbit.errors import UserError, say
from megatron_lowbit.folders import check_folder
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.numerics.quantizer import Arithmetic
from megatron_lowbit.numerics.randomness import uniform

# A version for every format of the class, option and rounding: more than torch's 8. Only sizes of
# tensors are symbols: with symbols in a format, C++ calls pow for each element.
_COMPILER_SETTINGS = {"recompile_limit": 256, "specialize_int": True, "specialize_float": True}


def missing_compiler() -> str | None:
    """Return the reason why torch.compile cannot build C++ here, or None where it can."""
    # The compiler takes a second to import, which each rank of each run would spend at its start.
    from torch._inductor import cpp_builder, exc
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler found (install g++ for quantization fused by torch.compile)"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"no Python.h in {headers} (install Python's headers for fused quantization)"
    try:
        check_folder("torch's cache", cache_dir())
    except (UserError, OSError) as error:
        return f"{error} (set TORCHINDUCTOR_CACHE_DIR for fused quantization)"
    return None


@cache
def _fused(function: Callable) -> Callable:
    """Return a function that is compiled at its first call, for any sizes."""
    _remove_truncated_libraries()
    compiled = torch.compile(
        function, dynamic=True, options={"post_grad_custom_pre_pass": _announcement()}
    )

    def call(*arguments):
        # torch.compile keeps a version for every kind of view and autograd history: show it none.
        plain = [x.data.contiguous() if isinstance(x, Tensor) else x for x in arguments]
        if next(x.numel() == 0 for x in plain if isinstance(x, Tensor)):
            return function(*plain)  # a layer without tokens: sizes of 0 cannot be symbolic
        with _compiler_settings(get_ident()):
            return compiled(*plain)

    return call


@cache
def _compiler_settings(_thread: int) -> AbstractContextManager:
    """Return the context manager of a thread that applies ``_COMPILER_SETTINGS``.

    It is made once: torch 2.13 never frees the variable that each new one adds to the context. One
    thread cannot enter another thread's in torch 2.11.
    """
    from torch._dynamo import config

    return config.patch(_COMPILER_SETTINGS)


@cache
def _remove_truncated_libraries() -> None:
    """Remove libraries that a full disk or a kill truncated from torch's cache on disk.

    torch loads any file of the right name, which then ends the process; it builds a missing one.
    """
    from filelock import FileLock, Timeout
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    for library in folder.glob("*/*.so"):
        # torch holds the lock while it builds the library.
        lock = folder / "locks" / f"{library.name.partition('.')[0]}.lock"
        with suppress(OSError, Timeout):
            if _is_truncated(library):
                with FileLock(lock, timeout=0):
                    if _is_truncated(library):
                        library.unlink()


def _is_truncated(library: Path) -> bool:
    """Check whether a 64-bit ELF file ends before its section headers, which come last."""
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return sys.platform == "linux"
    (offset,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return library.stat().st_size < offset + size * count


@cache
def _announcement() -> Any:
    """Return a pass of the compiler that changes nothing, and prints a line when it is first run.

    torch runs passes only for code that its cache on disk does not have, just before the C++ build,
    which takes up to a minute and a half. The cache outlives the process.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    @cache
    def announce() -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            message = f"compiling kernels for these formats, once: they stay in {cache_dir()}"
            say(message, file=sys.stderr)

    class Announcement(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            announce()

        def uuid(self) -> str:  # part of the cache's key: constant, or nothing would be found
            return "megatron_lowbit announcement"

    return Announcement()


FUSED = Arithmetic(
    encode=lambda format, *arguments: _fused(type(format).encode)(format, *arguments),
    decode=lambda format, *arguments: _fused(type(format).decode)(format, *arguments),
    uniform=lambda *arguments: _fused(uniform)(*arguments),
)
"""The elementwise functions of each class of formats, fused by torch.compile."""


class CompiledEngine(ReferenceEngine):
    """The reference arithmetic, its elementwise functions fused by torch.compile."""

    name = "compiled"
    arithmetic = FUSED
