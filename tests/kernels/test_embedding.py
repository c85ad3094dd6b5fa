"""Rows added by id: the kernel, the reference, and FP64."""

import pytest
import torch

from megatron_lowbit.kernels.embedding import add_rows
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.select import select_engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceEngine("test").add_rows
ROWS = 50
IDS = {
    "repeated": lambda draws: torch.randint(0, ROWS, (90,), generator=draws),
    "of one kind": lambda draws: torch.full((21,), 7),
    "masked": lambda draws: torch.randint(-1, 4, (40,), generator=draws),
    "all masked": lambda draws: torch.full((5,), -1),
    "ends": lambda draws: torch.tensor([ROWS - 1, 0, ROWS - 1, -1]),
    "one": lambda draws: torch.tensor([3]),
    "none": lambda draws: torch.empty(0, dtype=torch.int64),
}


def case(name, columns=200, dtype=torch.bfloat16, sums_dtype=torch.float32):
    """Return sums, ids and rows."""
    draws = torch.Generator().manual_seed(2)
    ids = IDS[name](draws)
    sums = torch.randn(ROWS, columns, generator=draws).to(sums_dtype)
    rows = torch.randn(len(ids), columns, generator=draws).to(dtype)
    return [x.to(DEVICE) for x in (sums, ids, rows)]


def added(function, sums, ids, rows):
    sums = sums.clone()
    function(sums, ids, rows)
    return sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "columns"), [*((name, 200) for name in IDS), ("repeated", 8), ("masked", 1032)]
)
def test_sums_are_those_of_fp64(name, columns, dtype):
    """Within an ulp of FP32 for each of the sum's additions; rows without an id keep their bits."""
    sums, ids, rows = case(name, columns, dtype)
    own = ids >= 0
    exact = sums.double().index_add_(0, ids[own], rows[own].double())
    sizes = sums.double().abs().index_add_(0, ids[own], rows[own].double().abs())
    untouched = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    untouched[ids[own]] = False
    for function in (add_rows, REFERENCE):
        result = added(function, sums, ids, rows)
        assert ((result - exact).abs() <= (1 + len(ids)) * 2.0**-24 * sizes).all()
        assert torch.equal(result[untouched], sums[untouched])


@pytest.mark.parametrize("sums_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IDS)
def test_the_kernel_has_the_bits_of_sums_in_the_order_of_tokens(name, sums_dtype):
    sums, ids, rows = case(name, sums_dtype=sums_dtype)
    totals = torch.zeros(ROWS, rows.shape[1], device=DEVICE)
    for id, row in zip(ids.tolist(), rows.float(), strict=True):
        if id >= 0:
            totals[id] += row
    expected = (sums.float() + totals).to(sums_dtype)
    assert torch.equal(added(add_rows, sums, ids, rows), expected)
    if DEVICE == "cpu":
        assert torch.equal(added(REFERENCE, sums, ids, rows), expected)


def test_strided_rows_and_narrow_ids():
    """As a gradient of a transposed output, and of a sum."""
    sums, ids, rows = case("repeated")
    expected = added(add_rows, sums, ids, rows)
    assert torch.equal(added(add_rows, sums, ids.int(), rows.t().contiguous().t()), expected)
    ones = torch.ones(1, 1, dtype=rows.dtype, device=DEVICE).expand(rows.shape)
    expected = added(add_rows, sums, ids, ones.contiguous())
    assert torch.equal(added(add_rows, sums, ids, ones), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["repeated", "of one kind", "masked"])
def test_a_graph_adds_the_same_each_time(name):
    """16384 tokens: nothing waits for the host, and no order varies."""
    sums, ids, _ = case(name, 1000)
    ids = ids.repeat(16384)[:16384]
    rows = torch.randn(16384, 1000, device=DEVICE).bfloat16()
    function = select_engine(sums.device).add_rows
    expected, captured = added(function, sums, ids, rows), sums.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(captured, ids, rows)
    for _ in range(3):
        captured.copy_(sums)
        graph.replay()
        assert torch.equal(captured, expected)
