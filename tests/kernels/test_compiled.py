"""The fused CPU functions against the reference, bit for bit.

A C++ build costs seconds, so they are built for what the shipped recipes quantize with, and for a
few more: every other format differs from one of these in constants only. In `make test` they are
four, which all its tests share. Tests keep to sizes that need no other build: neither square nor a
single block.
"""

import _ctypes
import os
import subprocess
import sys
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch._dynamo.utils import counters

from megatron_lowbit.kernels import compiled
from megatron_lowbit.numerics import (
    FORMATS,
    Accumulation,
    Draw,
    Hadamard,
    Quantizer,
    Request,
    Rounding,
    format_by_name,
    gemm,
)
from megatron_lowbit.numerics.randomness import uniform
from megatron_lowbit.recipes import load_recipe, shipped_recipes
from tests.kernels.test_quantize import bits, check_same
from tests.marks import others_slow
from tests.numerics.conftest import INPUTS, Golden, Lab, codes_of

pytestmark = pytest.mark.skipif(
    compiled.missing_compiler() is not None, reason=str(compiled.missing_compiler())
)

ROOT = Path(__file__).parents[2]
NEW_PROCESS = """
import torch
from torch._dynamo.utils import counters
from megatron_lowbit.kernels.compiled import CompiledEngine
from megatron_lowbit.numerics import Quantizer, Request, format_by_name
request = Request(Quantizer(format_by_name("fp8-tensor-e4m3")))
for rows in (3, 5):
    CompiledEngine("test").quantize(torch.ones(rows, 40), request, None)
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
"""
ENGINE = compiled.CompiledEngine("tests")
GOLDEN, LAB = Golden(), Lab()
NEAREST, STOCHASTIC = Rounding.NEAREST_EVEN, Rounding.STOCHASTIC
# Rows and groups of a shard in the middle of a larger tensor.
SHARD = Draw(2**64 - 3, torch.arange(128) + 2**31, (torch.arange(16) + 5) * 7)


def recipe_quantizers() -> set[Quantizer]:
    """Return the quantizers of the shipped recipes."""
    recipes = map(load_recipe, shipped_recipes())
    gemms = [g for r in recipes for config in r.configs.values() for g in config.gemms.values()]
    sides = [side for gemm in gemms for side in (gemm.lhs, gemm.rhs) if side is not None]
    return {replace(side, splits_mean=False) for side in sides}


RECIPES = recipe_quantizers()
MORE = {  # two dimensions with MXFP6, stochastic FP8, other tiles
    Quantizer(format_by_name("mxfp6-e2m3-2d", scale_rounding="even"), NEAREST),
    Quantizer(format_by_name("fp8-tensor-e4m3"), STOCHASTIC),
    Quantizer(format_by_name("fp8-1x128-e5m2", block=64), NEAREST),
    Quantizer(format_by_name("fp8-128x128-e4m3", scale_format="pow2", block=32), NEAREST),
    Quantizer(format_by_name("nvfp4", sixteen_seventeenths=True), STOCHASTIC),
    Quantizer(format_by_name("nvfp4-ue5m3", tensor_scaled=False), NEAREST),
    Quantizer(format_by_name("nvfp4", row_scaled=True), STOCHASTIC),
}
QUANTIZERS = sorted(RECIPES | MORE, key=lambda q: (str(q.format), q.rounding.value))
# torch.compile guards what a class of formats does, so one of each class shows it.
GUARDED = (
    format_by_name("mxfp4", scale_rounding="rceil"),
    format_by_name("fp8-1x128-e4m3", scale_format="pow2"),
    *map(format_by_name, ("nvfp4", "fp8-tensor-e4m3", "fp8-row-e4m3", "nvfp4-ue5m3", "quartet2",
                          "tetrajet2", "if4", "int4-1x128")),
)  # fmt: skip


def name_of(q: Quantizer) -> str:
    return f"{q.format} {q.rounding.value}"


BUILT = (
    Quantizer(FORMATS["nvfp4"], STOCHASTIC),
    Quantizer(format_by_name("mxfp4", scale_rounding="rceil"), NEAREST),
)
"""What `make test` builds: both roundings, both kinds of scales of blocks.

The arithmetic of others is the reference's, which other tests hold to golden vectors.
"""


def golden_inputs(format):
    """Return the golden inputs: one tensor if each block stands alone, else one after another."""
    inputs = [GOLDEN.x(name) for name in INPUTS]
    return inputs if format.tensor_scaled else [torch.cat(inputs)]


def assert_same(quantizer, x, **options):
    """Return the engine's result, once it and its values are found to be the reference's."""
    expected = quantizer(x, **options)
    result, _ = ENGINE.quantize(x, Request(quantizer, **options), None)
    check_same(result, expected)
    assert result.format == expected.format
    values = result.dequantize(compiled.FUSED)
    assert torch.equal(bits(values), bits(expected.dequantize()))
    return result


def draw_of(quantizer, key=0xFEDC_BA98_7654_3210):
    return {"draw": Draw(key)} if quantizer.rounding is STOCHASTIC else {}


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    """Build what most machines run: for one thread, torch.compile omits parallel loops."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def forget():
    """Discard what is compiled."""
    compiled._fused.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def traced_only(monkeypatch):
    """The engine without its C++: what is traced and guarded is the same, and traced again."""
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        yield
    forget()


@pytest.mark.slow
@pytest.mark.parametrize("first", [NEAREST, STOCHASTIC])
@pytest.mark.parametrize("format", GUARDED, ids=str)
def test_rounding_is_guarded_in_either_order(traced_only, format, first):
    """Whichever rounding a format is traced with first, the other one is not given its result.

    In `make test`, tests below have NVFP4 with one rounding after the other, and the first again.
    """
    second = STOCHASTIC if first is NEAREST else NEAREST
    x = torch.randn(260, 300, generator=torch.Generator().manual_seed(1))
    codes = []
    for rounding in (first, second, first):
        quantizer = Quantizer(format, rounding)
        codes.append(bits(assert_same(quantizer, x, **draw_of(quantizer)).codes))
    assert torch.equal(codes[0], codes[2]) and not torch.equal(codes[0], codes[1])


def test_what_is_covered():
    """Every recipe that quantizes, every class of format, two dimensions, both roundings."""
    assert len(RECIPES) >= 15
    assert set(GUARDED) <= {q.format for q in RECIPES}
    # MS-EDEN draws scales, not codes.
    kinds = {type(f) for f in FORMATS.values()} - {type(FORMATS["ms-eden"])}
    assert {type(f) for f in GUARDED} == kinds
    assert {type(q.format) for q in RECIPES} == {type(format) for format in FORMATS.values()}
    assert {q.rounding for q in RECIPES} == set(Rounding)
    assert {q.format.name for q in QUANTIZERS} >= {"nvfp4-2d", "mxfp4-2d", "mxfp6-e2m3-2d"}
    assert set(BUILT) <= RECIPES


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name_of)
def test_fused_is_the_reference(quantizer):
    """Golden inputs, then ragged ones, then both ends of FP32, NaN and infinity."""
    for x in golden_inputs(quantizer.format):
        assert_same(quantizer, x, **draw_of(quantizer))
        assert_same(quantizer, x, **draw_of(quantizer), hadamard=Hadamard())
    generator = torch.Generator().manual_seed(6)
    for shape in ((130, 257), (2, 150, 300)):
        x = torch.randn(shape, generator=generator) * 1e3
        assert_same(quantizer, x, **draw_of(quantizer, 12))
        assert_same(quantizer, x.movedim(-1, 0), **draw_of(quantizer, 13))
    # Fused C++ must not flush subnormals nor reassociate where a product over- or underflows.
    for exponent in (-44, -38, -30, 30, 38):
        x = torch.randn(260, 300, generator=generator, dtype=torch.float64) * 10.0**exponent
        assert_same(quantizer, x.clamp(-3e38, 3e38).float(), **draw_of(quantizer, exponent + 50))
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(260, 300, generator=generator)
        x[70, 140] = value
        assert_same(quantizer, x, **draw_of(quantizer))


@pytest.mark.parametrize(
    "quantizer",
    others_slow([q for q in QUANTIZERS if q.rounding is STOCHASTIC], BUILT),
    ids=name_of,
)
def test_shard(quantizer):
    """Rows and columns of a shard in the middle of a larger tensor."""
    for x in (GOLDEN.x("gauss"), GOLDEN.x("heavy").float()):
        assert_same(quantizer, x, draw=SHARD)
        assert_same(quantizer, x, draw=SHARD, hadamard=Hadamard(64, "fresh", "fp32"), sign_key=5)


@pytest.mark.parametrize(
    ("key", "format"),
    [("nvfp4_1x16", "nvfp4"), pytest.param("nvfp4_16x16", "nvfp4-2d", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", INPUTS)
def test_golden_codes(name, key, format):
    """Straight against the golden arrays: no step of ours in between."""
    q, _ = ENGINE.quantize(GOLDEN.x(name), Request(Quantizer(FORMATS[format])), None)
    np.testing.assert_array_equal(q.codes.numpy(), GOLDEN[f"{name}/{key}/row_codes"])
    np.testing.assert_array_equal(
        q.scales.view(torch.uint8).numpy(), GOLDEN[f"{name}/{key}/row_scales_e4m3"]
    )


METHODS = {  # golden key -> our format
    "te_mae_256": format_by_name("nvfp4", four_over_six="mae", max_scale=256),
    "te_mse_448": format_by_name("nvfp4", four_over_six="mse"),
    "te_mae_256_2d": format_by_name("nvfp4-2d", four_over_six="mae", max_scale=256),
    "quartet2_fwd": format_by_name("quartet2"),
    "tetrajet": format_by_name("tetrajet2"),
    "ue5m3": format_by_name("nvfp4-ue5m3"),
    "ue5m3_1level": format_by_name("nvfp4-ue5m3", tensor_scaled=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", METHODS)
@pytest.mark.parametrize("name", Lab.INPUTS)
def test_golden_codes_of_newer_methods(name, key):
    """Codes in all blocks whose scale is not 0, where values are; scales in every block."""
    x = LAB.x(name)
    q, _ = ENGINE.quantize(x, Request(Quantizer(METHODS[key])), None)
    stored = q.scales.view(torch.uint8).numpy()
    stored = stored[:, 4:] if key == "tetrajet" else stored[:: q.format.block_rows]
    scales = LAB[f"{name}/{key}/{'inner' if key == 'tetrajet' else 'scales'}"]
    np.testing.assert_array_equal(stored, scales)
    shown = (scales > 0).repeat(q.format.block_rows, 0).repeat(16, 1)
    codes = codes_of(q)
    codes = np.where(codes == 8, 0, codes)  # zeros without a sign
    np.testing.assert_array_equal(codes[shown], LAB.codes(f"{name}/{key}")[shown])


@pytest.mark.parametrize("bits", others_slow([8, 16], [8]))
def test_uniform(bits):
    draw = SHARD
    arguments = (draw.key_words(torch.device("cpu")), draw.rows, draw.groups, bits)
    fused = compiled.FUSED.uniform(*arguments)
    assert torch.equal(fused, uniform(*arguments))


def test_gemm():
    """Same operands, same matmul: equal, not close."""
    a = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    b = torch.randn(30, 50, generator=torch.Generator().manual_seed(2))
    left, _ = ENGINE.quantize(a, Request(Quantizer(FORMATS["nvfp4"])), None)
    right, _ = ENGINE.quantize(b, Request(Quantizer(FORMATS["nvfp4"])), None)
    for operands in ((left, right), (left, b), (a, right), (a, b)):
        assert torch.equal(ENGINE.gemm(*operands), gemm(*operands))
    assert torch.equal(ENGINE.transpose(left, b.t()), left.dequantize().t())
    assert ENGINE.gemm(a.bfloat16(), b.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
def test_gemm_takes_operands_and_biases_of_other_dtypes(dtype, bias_dtype):
    """FP32 where an operand is quantized, as in the reference."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(rows, 50, generator=generator).to(dtype) for rows in (20, 30))
    bias = None if bias_dtype is None else torch.randn(30, generator=generator).to(bias_dtype)
    left, _ = ENGINE.quantize(a, Request(Quantizer(FORMATS["nvfp4"])), None)
    right, _ = ENGINE.quantize(b, Request(Quantizer(FORMATS["nvfp4"])), None)
    for operands in ((left, right), (left, b), (a, right)):
        for out_dtype in (None, torch.bfloat16):
            for accumulation in (None, Accumulation("bf16", 16)):
                options = (*operands, bias, accumulation, out_dtype)
                result, expected = ENGINE.gemm(*options), gemm(*options)
                assert result.dtype == expected.dtype and torch.equal(result, expected)


def test_nothing_to_quantize():
    """A layer without tokens."""
    for name in ("nvfp4", "mxfp4", "fp8-1x128-e4m3", "fp8-tensor-e4m3", "int4-1x128"):
        assert_same(Quantizer(FORMATS[name]), torch.empty(0, 256))


def test_other_sizes_and_views_do_not_recompile():
    """Sizes are dynamic, keys are data, and how a tensor came about does not matter."""
    stochastic = Quantizer(FORMATS["nvfp4"], Rounding.STOCHASTIC)

    def use(*xs):
        for key, x in enumerate(xs):
            q, _ = ENGINE.quantize(x, Request(stochastic, draw=Draw(key)), None)
            q.dequantize(compiled.FUSED)

    use(torch.ones(48, 96), torch.ones(64, 112))
    before = counters["stats"]["unique_graphs"]
    views = torch.ones(96, 48).t(), torch.ones(160, 80)[::2, 16:]
    use(torch.ones(80, 160), torch.ones(37, 51), *views, torch.ones(32, 64, requires_grad=True))
    assert counters["stats"]["unique_graphs"] == before > 0


def test_calls_leave_nothing_in_the_context():
    """torch 2.13 adds a variable for each patch of the configuration, and frees none."""
    request = Request(Quantizer(FORMATS["nvfp4"]))
    x = torch.ones(48, 96)
    counts = []
    for _ in range(4):
        ENGINE.quantize(x, request, None)[0].dequantize(compiled.FUSED)
        counts.append(len(copy_context()))
    assert counts[1:] == 3 * counts[:1]  # the first call compiles


@pytest.mark.slow
@pytest.mark.parametrize("format", GUARDED, ids=str)
def test_only_sizes_are_symbols(monkeypatch, format):
    """Inputs of the compiled graphs are tensors of plain dtypes, and their sizes."""
    graphs = []

    def keep(graph, inputs, **_):
        graphs.append(graph)
        return graph.forward

    forget()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=keep))
        quantizer = Quantizer(format, STOCHASTIC)
        assert_same(quantizer, torch.ones(260, 300), **draw_of(quantizer))
    forget()
    assert len(graphs) >= 3
    for graph in graphs:
        values = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        sizes = {str(size) for tensor in tensors for size in tensor.shape}
        symbols = {str(value) for value in values if not isinstance(value, torch.Tensor)}
        assert symbols <= sizes
        assert not any(tensor.dtype is torch.float64 for tensor in tensors)  # a Python float


def test_truncated_libraries_are_removed_from_the_cache(tmp_path, monkeypatch):
    """Whole ones stay, and those that another process is building."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    whole = Path(_ctypes.__file__).read_bytes()
    contents = {
        "whole": whole, "empty": b"", "header": whole[:63], "half": whole[: len(whole) // 2],
        "byte": whole[:-1], "zeros": bytes(len(whole)), "building": whole[:100],
    }  # fmt: skip
    (tmp_path / "ab").mkdir()
    for name, content in contents.items():
        (tmp_path / "ab" / f"{name}.main.so").write_bytes(content)
    (tmp_path / "locks").mkdir()
    compiled._remove_truncated_libraries.cache_clear()
    with FileLock(tmp_path / "locks" / "building.lock"):
        compiled._remove_truncated_libraries()
    kept = {path.name for path in (tmp_path / "ab").iterdir()}
    assert kept == {"whole.main.so", "building.main.so"}


@pytest.mark.slow
def test_compiling_is_said_and_done_once(tmp_path):
    """A second process takes the code from the cache on disk, and says nothing.

    Where its libraries are truncated, they are built again.
    """
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run() -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", NEW_PROCESS]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    first, second = run(), run()
    line = f"compiling kernels for these formats, once: they stay in {tmp_path}\n"
    assert first.stderr.count(line) == 1 and first.stdout == "1 0\n"
    assert "compiling" not in second.stderr and second.stdout == "0 1\n"
    for library in tmp_path.glob("*/*.so"):
        os.truncate(library, 5000)
    assert run().stdout == "0 1\n"
