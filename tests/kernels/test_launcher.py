"""Launches by address, of a kernel that records what it is launched with.

This file is also the process that compiles a kernel for a GPU, without one.
"""

import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lowbit.kernels import launcher
from megatron_lowbit.kernels.launcher import Launcher


class Kernel:
    """A kernel that Triton compiles, with launches by Triton and by address."""

    def __init__(self, scratch: int = 0) -> None:
        self.compiled: list[tuple] = []
        self.launches: list[tuple] = []
        self.scratch = scratch

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> SimpleNamespace:
            self.compiled.append((grid, arguments, options))

            def run(*given: Any) -> None:
                self.launches.append(("run", *given))

            run.launch = lambda *given: self.launches.append(("launch", *given))
            run.global_scratch_size, run.profile_scratch_size = self.scratch, 0
            run.launch_cooperative_grid, run.launch_pdl = False, True
            return SimpleNamespace(run=run, function=77, packed_metadata="packed")

        return launch


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device,
                        raising=False)  # fmt: skip


def aligned(count: int = 64) -> torch.Tensor:
    x = torch.zeros(count + 16)
    return x[-(x.data_ptr() // 4) % 4 :][:count]


def test_what_differs_is_given_anew():
    kernel = Kernel()
    launch = Launcher(kernel, 5, (128, None), varying=(0, 3), num_warps=4)
    first, second = aligned(), aligned()
    launch((first, 64, None, 11))
    launch((second, 64, None, 12))
    assert [grid for grid, *_ in kernel.compiled] == [(5,)]
    assert kernel.compiled[0][1:] == ((first, 64, None, 11, 128, None), {"num_warps": 4})
    head = ("launch", 5, 1, 1, 1003, 77, False, True, None, None, "packed", None, None, None)
    assert kernel.launches == [(*head, second.data_ptr(), 64, None, 12, 128, None)]


def test_other_kinds_are_compiled_anew():
    kernel, x = Kernel(), aligned()
    launch = Launcher(kernel, 1, (), varying=(0, 1))
    kinds = [(x, 1), (x[1:], 1), (None, 1), (x, 2**40), (x, x)]
    for kind in kinds:
        launch(kind)
    assert len(kernel.compiled) == len(kinds) and not kernel.launches
    for kind in kinds:
        launch(kind)
    given = [one[-2:] for one in kernel.launches]
    address = x.data_ptr()
    assert given == [
        (address, 1), (address + 4, 1), (None, 1), (address, 2**40), (address, address)
    ]  # fmt: skip


def test_no_tensor_is_kept():
    kernel = Kernel()
    launch = Launcher(kernel, 1, (), varying=(0,))
    tensors = aligned(), aligned()
    references = [weakref.ref(x) for x in tensors]
    launch(tensors)
    launch(tensors)
    del tensors
    kernel.compiled.clear()
    assert [reference() for reference in references] == [None, None]


def test_a_kernel_with_scratch_memory_is_launched_by_triton():
    kernel, x = Kernel(scratch=64), aligned()
    launch = Launcher(kernel, 0, (), varying=(0,))
    for programs in (2, 3):
        launch((x,), programs)
    head = ("run", 3, 1, 1, 1003, 77, "packed", None, None, None)
    assert kernel.launches == [(*head, x.data_ptr())]


def test_the_interpreter_compiles_nothing():
    calls = []
    kernel = {(4,): lambda *arguments: calls.append(arguments)}
    launch = launcher.Launcher(kernel, 4, (), varying=(0,))
    for _ in range(2):
        launch((7,))
    assert calls == [(7,), (7,)]


def test_arguments_are_in_the_order_of_the_installed_triton():
    """A version of Triton with other private attributes fails here, not on a user's GPU."""
    pytest.importorskip("triton")
    compiled = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stderr[-3000:]


def copy(source, target, count, SPAN: "tl.constexpr"):  # noqa: F821
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)  # noqa: F821
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)  # noqa: F821


def main() -> None:
    """Compile a kernel for Hopper, and compare its launches by Triton and by a Launcher."""
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver
    from triton.compiler import ASTSource

    globals()["tl"] = triton.language
    launches: list[tuple] = []
    record = SimpleNamespace(launch=lambda *given: launches.append(given))
    driver.libcuda_dirs = list  # CUDA's library is not there
    driver.compile_module_from_src = lambda **_: record
    torch.cuda.current_device, torch._C._cuda_getCurrentRawStream = int, lambda device: 1003
    signature = {"source": "*fp32", "target": "*fp32", "count": "i32", "SPAN": "constexpr"}
    source = ASTSource(triton.jit(copy), signature, {(3,): 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    compiled._run = driver.CudaLauncher(compiled.src, compiled.metadata)
    compiled.module, compiled.function = object(), 77  # as if loaded on a GPU
    kernel = {(5,): lambda *_: compiled}
    by_address = Launcher(kernel, 5, (128,), varying=(0, 1))
    x, y = aligned(), aligned()
    by_address((x, y, 64))
    by_address((y, x, 64))
    compiled[5, 1, 1](y.data_ptr(), x.data_ptr(), 64, 128, stream=1003)
    by_launcher, by_triton = launches
    hooks = slice(10, 13)  # of Triton's profiler, and what they are told
    assert by_launcher[hooks] == (None, None, None)
    assert (by_launcher[:10], by_launcher[13:]) == (by_triton[:10], by_triton[13:]), launches


if __name__ == "__main__":
    main()
