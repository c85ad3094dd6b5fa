"""Matrices that are quantized by one launch: the operands of a launch for each."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from megatron_lowbit.kernels.fused import FusedEngine
from megatron_lowbit.kernels.launch import quantize_both
from megatron_lowbit.kernels.launch_sections import quantize_sections, takes_sections
from megatron_lowbit.kernels.launcher import cdiv
from megatron_lowbit.kernels.operands import Transposed
from megatron_lowbit.kernels.routes import Form
from megatron_lowbit.kernels.sections import table_of
from megatron_lowbit.kernels.split import SeparateMatrices, as_matrix_list
from megatron_lowbit.numerics import (
    Draw,
    Hadamard,
    Quantizer,
    Request,
    Requests,
    Rounding,
    format_by_name,
)
from tests.kernels.test_quantize import DEVICE, values
from tests.marks import others_slow

ROWS = (24, 0, 16)
CASES = {  # format, options, rounding, transform's size, forms of both sides
    "nvfp4": ("nvfp4", {}, "stochastic", 16, "BF16 CODES"),
    "nvfp4 folded": ("nvfp4", {"block_scales": "foldable-up"}, "stochastic", 16, "FOLDED FOLDED"),
    "nvfp4 4/6": ("nvfp4", {"four_over_six": "mse"}, "stochastic", 16, "BF16 CODES"),
    "nvfp4-2d 4/6": ("nvfp4-2d", {"four_over_six": "mae"}, "nearest", None, "CODES BF16"),
    "ue5m3": ("nvfp4-ue5m3", {}, "stochastic", 16, "BF16 CODES"),
    "ue5m3-2d": ("nvfp4-ue5m3-2d", {"tensor_scaled": False}, "nearest", None, "CODES BF16"),
    "quartet2": ("quartet2", {}, "nearest", None, "BF16 CODES"),
    "ms-eden": ("ms-eden", {}, "stochastic", 128, "CODES BF16"),
    "tetrajet2": ("tetrajet2", {}, "stochastic", 16, "CODES CODES"),
    "nvfp4-2d": ("nvfp4-2d", {}, "nearest", None, "CODES CODES"),
    "fp8 tiles": ("fp8-1x128-e4m3", {"scale_format": "pow2"}, "nearest", None, "CODES FOLDED"),
    "fp8 tensor": ("fp8-tensor-e5m2", {}, "nearest", None, "CODES CODES"),
    "mxfp8": ("mxfp8-e4m3", {}, "stochastic", None, "FOLDED CODES"),
    "mxfp4": ("mxfp4", {"three_quarters": True}, "stochastic", 64, "FOLDED CODES"),
}


def request_of(case: str, key: int, **changes) -> Request:
    name, options, rounding, size, _ = CASES[case]
    quantizer = Quantizer(format_by_name(name, **options), Rounding(rounding))
    transform = None if size is None else Hadamard(size, "fresh", "fp32")
    partner = quantizer.format
    return Request(quantizer, transform, key + 100, Draw(key), partner=partner, **changes)


def requests_of(case: str, keys: range, **changes) -> Requests:
    template = request_of(case, keys[0], **changes)
    return Requests(template, keys, [key + 100 for key in keys])


def check_same(made, expected, beside: bool = False) -> None:
    """Compare tensors and the rest, except strides of codes in the columns of a wider matrix."""
    assert type(made) is type(expected)
    if isinstance(expected, Transposed):
        return check_same(made.of, expected.of)
    for field in fields(expected):
        mine, other = getattr(made, field.name), getattr(expected, field.name)
        if not isinstance(other, torch.Tensor):
            assert mine == other
            continue
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        first = 1 if beside and field.name == "codes" else 0
        assert mine.stride()[first:] == other.stride()[first:]
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (mine, other)]
        assert torch.equal(*bits)


# Others have the kernels of these, with other options.
QUICK = ("nvfp4 folded", "ue5m3-2d", "quartet2", "fp8 tiles")


@pytest.mark.parametrize("case", others_slow(CASES, QUICK))
def test_the_operands_of_a_launch_for_each(case):
    compare_with_a_launch_for_each(case, values(sum(ROWS), 48, torch.bfloat16), ROWS)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((24, 0, 300), 320), pytest.param((24, 3000, 0, 700), 1056, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("case", others_slow(["mxfp8", "fp8 tiles", "fp8 tensor"], ["fp8 tensor"]))
def test_amaxes_of_several_programs(case, rows, columns):
    """On a GPU programs of the smaller wait for each other's amaxes; others have a launch."""
    x = values(sum(rows), columns, torch.bfloat16)
    x[-1, -1] = 3e4  # the largest number of the last matrix is its last one's alone
    for _ in range(1 if DEVICE == "cpu" else 50):
        compare_with_a_launch_for_each(case, x, rows)


def compare_with_a_launch_for_each(case, x, heights):
    forms = tuple(Form[form] for form in CASES[case][-1].split())
    xs = x.to(DEVICE).split(heights)
    rows = requests_of(case, range(7, 7 + len(xs)), left=True)
    cols = requests_of(case, range(17, 17 + len(xs)))
    assert takes_sections(as_matrix_list(xs), rows, cols)
    left, right = quantize_sections(as_matrix_list(xs), rows, cols, forms)
    assert len(left) == len(right) == len(xs)
    for number, (x, by_row, by_col) in enumerate(zip(xs, left, right, strict=True)):
        if len(x):
            expected = quantize_both(x, rows[number], cols[number], forms=forms)
            check_same(by_row, expected[0])
            check_same(by_col, expected[1], right.layout.stacks_columns)


FORMS = {"mxfp8": "FOLDED", "fp8 tensor": "CODES"}


@pytest.mark.usefixtures("not_a_number_in_free_memory")
@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("rows", others_slow([(24, 0, 16), (128, 256), (64, 128)], [(24, 0, 16)]))
def test_zeros_fill_up_codes_that_lie_beside_others(rows, case):
    """GEMMs read whole steps of 128 terms, and a row of all matrices' codes as one."""
    xs = as_matrix_list(values(sum(rows), 48, torch.bfloat16).to(DEVICE).split(rows))
    cols, form = requests_of(case, range(len(rows))), Form[FORMS[case]]
    _, group = quantize_sections(xs, None, cols, (Form.CODES, form))
    parts = group.codes.view(torch.uint8).view(48, -1).split([cdiv(n, 128) * 128 for n in rows], 1)
    for part, operand, count in zip(parts, group, rows, strict=True):
        if count:
            assert torch.equal(part[:, :count], operand.codes.view(torch.uint8)[:, :count])
        assert not part[:, count:].any()


@pytest.mark.parametrize("side", [0, 1])
def test_one_side(side):
    """Take matrices that are not neighbours in memory, as weights are, and of whole tiles."""
    xs = [values(64, 128, torch.float32).to(DEVICE) + i for i in range(2)]
    requests = requests_of("mxfp8", range(2))
    sides = [None, None]
    sides[side] = requests
    made = quantize_sections(as_matrix_list(xs), *sides, (Form.CODES, Form.CODES))
    assert made[1 - side] is None
    for number, (x, operand) in enumerate(zip(xs, made[side], strict=True)):
        pair = [None, None]
        pair[side] = requests[number]
        check_same(operand, quantize_both(x, *pair)[side], made[side].layout.stacks_columns)


def test_square_blocks_that_serve_both_sides():
    engine = FusedEngine((9, 0))
    xs = [values(32, 48, torch.bfloat16).to(DEVICE) + i for i in range(2)]
    request = request_of("nvfp4-2d", 0, saved=True)
    requests = Requests(request)
    both = engine.quantize_all(xs, requests, requests)
    for x, *made in zip(xs, *both, strict=True):
        for operand, expected in zip(made, engine.quantize(x, request, request), strict=True):
            check_same(operand, expected)


def test_what_takes_a_launch_each():
    x, requests = torch.zeros(16, 32), Requests(request_of("mxfp8", 0))
    assert takes_sections(SeparateMatrices([x, x[:0]]), requests, None)
    for others in ([x, x[:, :16]], [x, x.bfloat16()], [x, x.t().contiguous().t()], [x[:0]]):
        assert not takes_sections(SeparateMatrices(others), requests, None)
    assert not takes_sections(
        SeparateMatrices([x.half()] * 2), requests, None
    )  # which is a TypeError
    rows = Requests(Request(Quantizer(format_by_name("fp8-row-e4m3"))))
    assert not takes_sections(SeparateMatrices([x, x]), rows, None)
    draw = Draw(0, groups=torch.arange(2))
    assert not takes_sections(
        SeparateMatrices([x, x]), Requests(replace(requests.template, draw=draw)), None
    )


def test_too_many_matrices_for_the_numbers_of_a_table():
    with pytest.raises(ValueError, match="up to 32767 matrices, not 32768"):
        table_of(np.ones(32768, dtype=np.int64), (), torch.device("cpu"))
