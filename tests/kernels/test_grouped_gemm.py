"""Products of many matrices by one launch, against sums in FP64."""

import numpy as np
import pytest
import torch

from megatron_lowbit.kernels import grouped_gemm
from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.grouped_gemm import grouped_pair
from megatron_lowbit.kernels.operands import ExactBF16, Transposed
from megatron_lowbit.kernels.sections import steps_per_program
from megatron_lowbit.kernels.split import RowSlices, SeparateMatrices, as_matrix_list, rows_of
from megatron_lowbit.numerics import Quantizer, Request, Requests, format_by_name
from tests.kernels.test_fused import BOUNDS
from tests.kernels.test_quantize import DEVICE
from tests.marks import others_slow

TOKENS = [72, 0, 16]
IN, OUT = 144, 136
TILES = {"scale_format": "pow2"}
CASES = {  # formats and options of both operands; True for gradients of weights; True to add
    "nvfp4": (("nvfp4", {}), ("nvfp4-2d", {}), False, False),
    "nvfp4, along tokens": (("nvfp4", {}), ("nvfp4", {}), True, True),
    "mxfp8": (("mxfp8-e4m3", {}), ("mxfp8-e4m3", {}), True, False),
    "fp8 gradients": (("fp8-1x128-e5m2", TILES), ("fp8-1x128-e4m3", TILES), True, True),
    "fp8 tiles": (("fp8-1x128-e4m3", TILES), ("fp8-128x128-e4m3", TILES), False, False),
    "fp8 tensors": (("fp8-tensor-e5m2", {}), ("fp8-tensor-e4m3", {}), False, True),
    "bf16": (None, None, True, False),
    "bf16 by fp4": (None, ("nvfp4", {}), False, True),
}
QUICK = ("nvfp4, along tokens", "fp8 gradients", "fp8 tiles", "fp8 tensors", "bf16")
# Triton's interpreter cuts BF16 off.
BF16_ERROR = 2.0**-8 if DEVICE == "cuda" else 2.0**-7


def draws(rows: int, columns: int, seed: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16().to(DEVICE)


def operands_of(engine, case: str):
    """Return the operands of products: tokens and weights, or both along tokens."""
    *formats, wgrad, _ = CASES[case]
    formats = [None if one is None else format_by_name(one[0], **one[1]) for one in formats]
    xs = [draws(count, OUT if wgrad else IN, 9 + count) for count in TOKENS]
    ys = [draws(count, IN, 99 + count) for count in TOKENS]
    if not wgrad:
        ys = [draws(OUT, IN, 1 + number) for number in range(len(TOKENS))]
    sides = []
    for number, (matrices, format) in enumerate(zip((xs, ys), formats, strict=True)):
        if format is None:
            sides.append([x.t() if wgrad else x for x in matrices])
            continue
        partner, left = formats[1 - number], number == 0
        # What is saved comes as codes where those are smaller.
        request = Request(
            Quantizer(format), partner=partner, transpose_partner=partner, left=left, saved=not left
        )
        requests = Requests(request)
        pair = (None, requests) if wgrad else (requests, requests if format.square else None)
        sides.append(engine.quantize_all(matrices, *pair)[wgrad])
    return sides


def exact(operand) -> torch.Tensor:
    if isinstance(operand, ExactBF16):
        factor = 1.0 if operand.tensor_scale is None else operand.tensor_scale.double()
        return operand.values.double() * factor
    if isinstance(operand, Transposed):
        return exact(operand.of).t()
    if isinstance(operand, torch.Tensor):
        return operand.double()
    return operand.dequantize().double()


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["few terms", "many terms"]
)
def many_terms(request, monkeypatch):
    """Take all products for those with many terms, which have larger tiles."""
    if request.param:
        monkeypatch.setattr(grouped_gemm, "_FEW_TERMS", -1)


def results_of(case: str, together: bool) -> list[torch.Tensor]:
    """Return memory for products, parts of one matrix or each apart, that holds 3."""
    *_, wgrad, beta = CASES[case]
    rows, columns = [OUT if wgrad else count for count in TOKENS], IN if wgrad else OUT
    options = {"dtype": torch.float32 if beta else torch.bfloat16, "device": DEVICE}
    if together:
        return list(torch.full((sum(rows), columns), 3.0, **options).split(rows))
    return [torch.full((count, columns), 3.0, **options) for count in rows]


@pytest.mark.usefixtures("many_terms", "not_a_number_in_free_memory")
@pytest.mark.parametrize("case", others_slow(CASES, QUICK))
def test_products(case, together=False):
    *_, beta = CASES[case]
    engine = FusedEngine((9, 0))
    lhs, rhs = operands_of(engine, case)
    outs = results_of(case, together)
    route = engine.route(next(iter(lhs)), next(iter(rhs)))
    pair = grouped_pair(route, lhs, rhs, as_matrix_list(outs))
    assert (pair is None) == (grouped_gemm.LOOP_FROM == 0)
    engine.gemm_all(lhs, rhs, outs, beta)
    for left, right, out in zip(lhs, rhs, outs, strict=True):
        a, b = exact(left), exact(right)
        terms = min(a.shape[1], b.shape[1])
        a, b = a[:, :terms], b[:, :terms]
        expected, magnitude = a @ b.t() + 3.0 * beta, a.abs() @ b.abs().t() + 3.0 * beta
        bound = magnitude * BOUNDS[route.name](terms)
        bound += expected.abs() * (1e-5 if beta else BF16_ERROR) + 1e-30
        assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    "case", others_slow(["mxfp8", "fp8 gradients", "fp8 tensors", "fp8 tiles"], ["fp8 tensors"])
)
@pytest.mark.parametrize("together", others_slow([False, True], [True]))
def test_a_long_product_and_whole_tiles(together, case, monkeypatch):
    """Products of FP8 whose results are parts of one matrix, and not."""
    monkeypatch.setitem(globals(), "TOKENS", [16, 900, 0, 128])
    test_products(case, together)


def test_programs_have_their_share_of_steps():
    """A tile longer than a program's share is the only one of its program."""
    steps = np.array([40, 9, 9, 2, 2, 2, 2, 2, 1, 1])
    assert [*steps_per_program(steps, 3)] == [2, 40, 9 + 2 + 2 + 2 + 1, 9 + 2 + 2 + 1]
    assert [*steps_per_program(np.full(5, 7), 2)] == [2, 21, 14]
    assert [*steps_per_program(np.array([], dtype=np.int64), 1)] == [1, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["mxfp8", "fp8 gradients", "fp8 tensors", "fp8 tiles", "nvfp4"])
def test_large_products_one_by_one(case, monkeypatch):
    """By cuBLAS, of any numbers of tokens: scales of a group are not aligned."""
    monkeypatch.setattr(grouped_gemm, "LOOP_FROM", 0)
    monkeypatch.setitem(globals(), "TOKENS", [72, 0, 40, 17, 24])
    test_products(case)


def test_what_takes_a_launch_each():
    engine = FusedEngine((9, 0))
    lhs, rhs = operands_of(engine, "bf16")
    route = engine.route(lhs[0], rhs[0])
    outs = [torch.empty(OUT, IN, device=DEVICE) for _ in TOKENS]
    assert grouped_pair(route, lhs, rhs, as_matrix_list(outs)) is not None
    odd = [torch.empty(OUT, IN - 1, device=DEVICE) for _ in TOKENS]
    assert grouped_pair(route, lhs, [y[1:] for y in rhs], SeparateMatrices(odd)) is None
    rows = rows_of(tuple(TOKENS))
    outs = RowSlices(torch.empty(sum(TOKENS), OUT, device=DEVICE), rows)
    weights, x = [draws(OUT, IN, 1) for _ in TOKENS], draws(sum(TOKENS), 2 * IN, 2)
    given = {
        "rows": x[:, :IN], "a scalar": x[:1, :1].expand(len(x), IN),
        "a row": x[:1, :IN].expand(len(x), IN), "every other column": x[:, ::2],
    }  # fmt: skip
    pairs = {name: grouped_pair(route, RowSlices(of, rows), weights, outs)
             for name, of in given.items()}  # fmt: skip
    assert [name for name, pair in pairs.items() if pair is not None] == ["rows"]
    large = torch.empty(1, device="meta").expand(grouped_gemm.LOOP_FROM // (2 * 16), 1)
    assert grouped_pair(route, lhs, rhs, SeparateMatrices([large] * len(TOKENS))) is None
