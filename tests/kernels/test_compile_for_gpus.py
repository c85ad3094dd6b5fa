"""Kernels of quantization, grouped GEMMs and the loss compile for a Hopper GPU, without one.

Triton's interpreter runs what its compiler may refuse. The launcher is called with tensors on the
meta device, and what it would launch is compiled.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FORMATS = {  # format, options, rounding and transform of both sides, forms
    "fp8-tile": ("fp8-1x128-e4m3", {"scale_format": "pow2"}, "nearest", None, "CODES FOLDED"),
    "fp8-tile 2d": ("fp8-128x128-e4m3", {}, "nearest", None, "CODES CODES"),
    "fp8-tensor": ("fp8-tensor-e5m2", {}, "nearest", None, "CODES CODES"),
    "fp8-tensor delayed": ("fp8-tensor-e4m3", {}, "nearest", None, "CODES CODES"),
    "fp8-row": ("fp8-row-e4m3", {}, "nearest", None, "CODES CODES"),
    "mxfp8": ("mxfp8-e4m3", {"scale_rounding": "rceil"}, "stochastic", None, "FOLDED CODES"),
    "mxfp4": ("mxfp4", {"three_quarters": True}, "stochastic", 64, "FOLDED CODES"),
    "nvfp4": ("nvfp4", {}, "stochastic", 16, "BF16 CODES"),
    "nvfp4-fold": ("nvfp4", {"block_scales": "foldable-up"}, "stochastic", 16, "FOLDED CODES"),
    "nvfp4-fold 2d": ("nvfp4-2d", {"block_scales": "foldable"}, "nearest", None, "FOLDED FOLDED"),
    "nvfp4-4/6": ("nvfp4", {"four_over_six": "mse"}, "stochastic", 16, "BF16 CODES"),
    "nvfp4-4/6 2d": ("nvfp4-2d", {"four_over_six": "abs_max"}, "nearest", None, "BF16 CODES"),
    "nvfp4 rows": ("nvfp4", {"row_scaled": True}, "stochastic", 16, "BF16 CODES"),
    "nvfp4 rows long": ("nvfp4", {"row_scaled": True}, "nearest", 256, "BF16 CODES"),
    "ue5m3": ("nvfp4-ue5m3", {}, "stochastic", 16, "BF16 CODES"),
    "ue5m3 2d": ("nvfp4-ue5m3-2d", {"tensor_scaled": False}, "nearest", None, "CODES BF16"),
    "quartet2": ("quartet2", {}, "nearest", None, "BF16 CODES"),
    "ms-eden": ("ms-eden", {}, "stochastic", 128, "BF16 CODES"),
    "torchao": ("ms-eden", {"arithmetic": "torchao"}, "stochastic", 128, "BF16 CODES"),
    "tetrajet2": ("tetrajet2", {}, "stochastic", 16, "CODES CODES"),
    "tetrajet2 plain": ("tetrajet2", {}, "nearest", None, "CODES CODES"),
    "nvfp4-4/6 long": ("nvfp4", {"four_over_six": "mae"}, "nearest", 128, "BF16 CODES"),
    "two transforms": ("mxfp4", {}, "stochastic", 16, "CODES CODES"),
    "shortest transform": ("mxfp4", {}, "stochastic", 2, "CODES CODES"),
    "long transform": ("mxfp4", {}, "stochastic", 128, "CODES CODES"),
    "longest transform": ("mxfp4", {}, "stochastic", 256, "CODES CODES"),
    "nvfp4-4/6 longest": ("nvfp4", {"four_over_six": "mae"}, "nearest", 256, "BF16 CODES"),
}

PRODUCTS = ["fp8", "fp8 added", "fp8 tiles", "fp8 tiles added", "bf16", "bf16 added", "few terms"]
SHARED_MEMORY = 227 * 1024
"""Bytes of a multiprocessor of compute capability 9.0 that a program can have."""
STACK = 64
"""Bytes of local memory of a thread: a few registers that are spilled, no numbers of a loop."""


OTHERS = ROWS, SWIGLU, NORM, LOSS, BLOCKS, TABLES = (
    "rows", "swiglu", "norm", "loss", "blocks", "tables",
)  # fmt: skip
QUICK = ["fp8-tensor delayed", "fp8-row", "nvfp4 rows", "fp8", *OTHERS]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="some"),
        pytest.param([*FORMATS, *PRODUCTS, *OTHERS], id="all", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile(names):
    result = subprocess.run(
        [sys.executable, __file__, *names],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split("\n")[:-1] == names


def resource_of(cubin: bytes, name: str) -> int:
    """Return a kernel's use of a resource, by the tool that Triton comes with.

    ``STACK`` is in bytes, ``REG`` are registers; both per thread.
    """
    import triton

    tool = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(told.partition(f" {name}:")[2].split()[0])


def main(cases: list[str]) -> None:
    """Compile what each of these cases launches; print its name."""
    from dataclasses import replace

    import numpy as np
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_lowbit.kernels import (
        amaxes,
        block_gemm,
        conditional,
        device_tables,
        embedding,
        grouped_gemm,
        launch,
        launch_sections,
        loss,
        rms_norm,
        swiglu,
    )
    from megatron_lowbit.kernels.operand_group import Stack, matrices_of
    from megatron_lowbit.kernels.routes import Form
    from megatron_lowbit.kernels.split import DeviceRows, Rows, RowSlices, SeparateMatrices
    from megatron_lowbit.numerics import (
        DelayedAmax,
        Draw,
        Hadamard,
        Quantizer,
        Request,
        Requests,
        Rounding,
        format_by_name,
    )

    types = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
             torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
             torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}  # fmt: skip

    class Compiler:
        def __init__(self, kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid):
            return self.compile

        def compile(self, *arguments, **options) -> None:
            signature, constants, aligned = {}, {}, {}
            for place, value in enumerate(arguments):
                parameter = self.kernel.params[place]
                name, is_key = parameter.name, parameter.name.endswith(("key", "signs"))
                number = None if is_key or type(value) is not int else value
                if isinstance(value, torch.Tensor) or (number is not None and number % 16 == 0):
                    aligned[(place,)] = [["tt.divisibility", 16]]
                if isinstance(value, torch.Tensor):
                    signature[name] = "*" + types[value.dtype]
                elif isinstance(value, tuple) and not parameter.is_constexpr:
                    signature[name] = ("i64",) * len(value)
                elif value is None or parameter.is_constexpr or number == 1:
                    signature[name], constants[name] = "constexpr", value
                else:
                    signature[name] = "i64" if is_key else "i32"
            source = ASTSource(self.kernel, signature, constants, aligned)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert compiled.metadata.shared <= SHARED_MEMORY
            assert resource_of(compiled.asm["cubin"], "STACK") <= STACK, self.kernel.fn.__name__
            self.single_reads = compiled.asm["ptx"].count("ld.global.b16")
            self.wide_reads = compiled.asm["ptx"].count("ld.global.v4.b32")
            self.registers = resource_of(compiled.asm["cubin"], "REG")

    for module, names in (
        (launch, ["quantize_kernel"]),
        (launch_sections, ["quantize_kernel", "amax_kernel"]),
        (amaxes, ["amax_kernel"]),
        (block_gemm, ["block_gemm_kernel"]),
        (conditional, ["_record_kernel"]),
        (device_tables, ["table_kernel"]),
        (embedding, ["_add_rows_kernel"]),
        (swiglu, ["_swiglu_kernel"]),
        (rms_norm, ["norm_kernel"]),
        (loss, ["cross_entropy_kernel", "cross_entropy_gradient_kernel"]),
        (grouped_gemm, ["grouped_kernel", "stacked_kernel"]),
    ):
        for name in names:
            setattr(module, name, Compiler(getattr(module, name)))
    earlier = torch.empty((), device="meta")
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    odd = torch.empty(272, 528, dtype=torch.bfloat16, device="meta")
    numbers = torch.empty(272, dtype=torch.int32, device="meta")
    gathered = RowSlices(odd, Rows([100, 172]), numbers)
    for name in [name for name in FORMATS if name in cases]:
        format, options, rounding, size, forms = FORMATS[name]
        quantizer = Quantizer(format_by_name(format, **options), Rounding(rounding))
        transform = None if size is None else Hadamard(size, "fresh", "fp32")
        key = torch.empty((), dtype=torch.int64, device="meta") if "two" in name else 3
        request = Request(quantizer, transform, key, Draw(key), left=True, partner=quantizer.format)
        amax = DelayedAmax(earlier, earlier) if name.endswith("delayed") else None
        sides = tuple(Form[form] for form in forms.split())
        launch.quantize_both(x, request, request, (amax, amax), sides)
        many = [Requests(replace(request, sign_key=3, draw=Draw(3)), [3, 3], [3, 3])] * 2
        both = SeparateMatrices([odd, odd])  # not of whole tiles
        if amax is None and launch_sections.takes_sections(both, *many):
            launch_sections.quantize_sections(both, *many, sides)
            reads = [m.quantize_kernel.single_reads for m in (launch, launch_sections)]
            # One more is the number of the tile's matrix.
            assert reads[1] == reads[0] + 1, f"{name}: numbers of many are read one by one"
            if (size or 0) <= 64:  # of recipes whose experts' rows may be gathered
                launch_sections.quantize_sections(gathered, *many, sides)
                assert launch_sections.quantize_kernel.single_reads == reads[1], name
            with pytest.MonkeyPatch.context() as patch:  # as many as run at the same time
                patch.setattr(launch_sections, "multiprocessors", lambda device: 132)
                launch_sections.quantize_sections(both, *many, sides)
        print(name)
    grouped_gemm.multiprocessors = lambda device: 132
    for name in [name for name in PRODUCTS if name in cases]:
        fp8, beta, terms = name.startswith("fp8"), name.endswith("added"), 2048
        if name.startswith("few"):
            terms = 256
        lhs_type = torch.float8_e5m2 if fp8 else torch.bfloat16
        lhs = torch.empty(terms, 256, dtype=lhs_type, device="meta").t()
        lhs = lhs.contiguous() if fp8 else lhs
        rhs_type = torch.float8_e4m3fn if fp8 else torch.bfloat16
        rhs = torch.empty(384, terms, dtype=rhs_type, device="meta")
        out = torch.empty(256, 384, dtype=torch.float32 if beta else torch.bfloat16, device="meta")
        pair = [matrices_of([matrix] * 3) for matrix in (lhs, rhs)]
        if "tiles" in name:
            pair = [matrices._replace(scales=[16] * 3) for matrices in pair]
        elif fp8:
            begin = np.zeros(3, np.int64)
            pair = [m._replace(stack=Stack(3 * m.rows[0], terms, begin, begin)) for m in pair]
        grouped_gemm.multiply_groups(*pair, SeparateMatrices([out] * 3), beta)
        print(name)
    if ROWS in cases:
        sums = torch.empty(64, 512, device="meta")
        embedding.add_rows(sums, torch.empty(256, dtype=torch.int64, device="meta"), x)
        print(ROWS)
    if SWIGLU in cases:
        gate_up = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
        swiglu.swiglu(gate_up)
        swiglu.swiglu_grad(gate_up, torch.empty(64, 2048, dtype=torch.bfloat16, device="meta"))
        reads = swiglu._swiglu_kernel.single_reads, swiglu._swiglu_kernel.wide_reads
        # Of gate, up and gradient: 16 tiles' rows of 1024 by 128 threads.
        assert reads == (0, 3 * 4), "reads under 16 bytes"
        print(SWIGLU)
    if NORM in cases:
        for width in (4096, 6144):
            rows = torch.empty(64, width, dtype=torch.bfloat16, device="meta")
            rms_norm.rms_norm(rows, rows[0], 1e-5)
            # Of the row and the gain: 128 threads.
            reads = rms_norm.norm_kernel.single_reads, rms_norm.norm_kernel.wide_reads
            assert reads == (0, 2 * width // 1024), "reads under 16 bytes"
        print(NORM)
    if LOSS in cases:
        kernels = loss.cross_entropy_kernel, loss.cross_entropy_gradient_kernel
        labels = torch.empty(64, dtype=torch.int64, device="meta")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            logits = torch.empty(64, 128256, dtype=dtype, device="meta")
            statistics = loss.row_statistics(logits, labels, 0)
            loss.write_gradients(logits, labels, 0, statistics, torch.empty(64, device="meta"))
            # Of whole blocks and of the last one; of a block.
            assert [kernel.wide_reads for kernel in kernels] == [4, 2], "reads under 16 bytes"
            assert all(kernel.registers <= 32 for kernel in kernels), "fewer threads than fit"
        print(LOSS)
    if BLOCKS in cases:
        scales = torch.empty(256, 16, device="meta"), torch.empty(384, 16, device="meta")
        a, b = (torch.empty(len(s), 2048, dtype=torch.bfloat16, device="meta") for s in scales)
        block_gemm.multiply_blocks(a, scales[0], b, scales[1], torch.bfloat16)
        assert block_gemm.block_gemm_kernel.single_reads == 0, "operands are read one by one"
        print(BLOCKS)
    if TABLES in cases:
        for count in (4, 128, 256):
            rows = DeviceRows(torch.empty(count, dtype=torch.int64, device="meta"), 4096)
            fields = [rows.in_units(1).before * 48, np.arange(count) ** 2, rows.numbers, 7]
            for steps in (None, 3):
                tiles = rows.in_units(64).numbers
                device_tables.make_table(tiles, fields, x.device, steps, 264)
        print(TABLES)


if __name__ == "__main__":
    main(sys.argv[1:])
