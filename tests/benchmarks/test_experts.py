"""The benchmark of experts: contenders run, on a CPU as well; Transformer Engine by a stand-in."""

import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks import experts, records
from benchmarks.timing import Ceilings

LIMITS = Ceilings(1.0, {}, {})
GROUPED = [f"TE {name}, grouped tensors" for name in ("BF16", "current scaling", "blockwise")]


class GroupedLinear(torch.nn.Module):
    """Stand-in with one weight, which refuses current scaling as an old cuBLASLt does."""

    built: list["GroupedLinear"]
    recipe = None

    def __init__(
        self, experts: int, inputs: int, outputs: int, params_dtype: torch.dtype, **options
    ):
        super().__init__()
        self.options, self.counts = options, []
        self.weight = torch.nn.Parameter(torch.ones(outputs, inputs, dtype=params_dtype))
        self.built.append(self)

    def forward(self, x, counts):
        if self.options["single_grouped_weight"] and self.recipe == "Float8CurrentScaling":
            raise RuntimeError("Single grouped parameters require the native path")
        self.counts.append(counts)
        return x @ self.weight.t()


@pytest.fixture
def built(monkeypatch):
    """List of the stand-in's layers, on a CPU; Transformer Engine sees cuBLASLt 13.10."""
    monkeypatch.setattr(GroupedLinear, "built", [], raising=False)
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    @contextmanager
    def autocast(enabled, recipe):
        with monkeypatch.context() as patch:
            patch.setattr(GroupedLinear, "recipe", recipe)
            yield

    names = ("Float8CurrentScaling", "Float8BlockScaling")
    recipe = SimpleNamespace(**{name: lambda name=name: name for name in names})
    pytorch = SimpleNamespace(GroupedLinear=GroupedLinear, autocast=autocast)
    common = SimpleNamespace(recipe=recipe)
    for name, module in {
        "transformer_engine": SimpleNamespace(common=common, pytorch=pytorch),
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": recipe,
        "transformer_engine.pytorch": pytorch,
        "transformer_engine_torch": SimpleNamespace(get_cublasLt_version=lambda: 131004),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return GroupedLinear.built


def test_grouped_tensors_have_one_weight_and_counts_on_the_device(built):
    size = experts.Size(4, 512, 64, 32)
    rows = experts.run(size, ["TE BF16", *GROUPED], LIMITS, 1e-6)
    refused = {row["contender"]: row["refused"] for row in rows if "refused" in row}
    assert refused == {
        GROUPED[1]: "RuntimeError: Single grouped parameters require the native path"
    }
    one_by_one, *grouped = built
    assert one_by_one.counts[0] == [128] * 4
    assert not one_by_one.options["use_grouped_tensor"]
    assert [bool(layer.counts) for layer in grouped] == [True, False, True]
    for layer in grouped:
        assert layer.options["use_grouped_tensor"] and layer.options["single_grouped_weight"]
        for counts in layer.counts:
            assert counts.dtype == torch.int64 and counts.tolist() == [128] * 4
    assert os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] == "1"


def test_blocks_of_parts_of_tokens_are_refused_before_the_gpu_stops(built):
    size = experts.Size(4, 256, 64, 32)
    rows = experts.run(size, GROUPED, LIMITS, 1e-6)
    refused = {row["contender"] for row in rows if "multiples of 128" in row.get("refused", "")}
    assert refused == {GROUPED[2]}


def test_rows_have_the_cublaslt_that_transformer_engine_sees(built, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        version = records.cublaslt()
    assert version == "13.10.4"
    monkeypatch.setattr(records, "cublaslt", lambda: version)
    rows = experts.run(experts.Size(4, 256, 64, 32), GROUPED, LIMITS, 1e-6)
    assert [row["cublaslt"] for row in rows] == [version] * 3


def test_skewed_tokens():
    tokens = experts.Size(128, 32768, 2048, 768, 1).tokens_per_expert()
    assert sum(tokens) == 32768 and not any(count % 16 for count in tokens)
    assert tokens[0] >= 32768 // 2 and tokens.count(0) == 32


def test_kernels_in_the_order_of_a_call():
    calls = [[("a", 1.0), ("b", 5.0)], [("a", 2.0), ("b", 4.0)], [("a", 9.0), ("b", 3.0)]]
    assert experts.in_order([one for call in calls for one in call]) == [("a", 2.0), ("b", 4.0)]
    assert experts.in_order([("a", 1.0)] * 3 * (experts.MOST_KERNELS + 1)) == []
    assert experts.in_order([]) == []


@pytest.mark.slow
def test_experts_and_their_ratios():
    size = experts.Size(4, 256, 64, 128, 1)
    rows = experts.run(size, ["BF16", "fp8-tile", "nvfp4, kept"], LIMITS, 0.001)
    assert [row["contender"] for row in rows] == ["BF16", "fp8-tile", "nvfp4, kept"]
    assert rows[0]["as_fast_as_bf16"] == 1
    assert all(row["forward_ms"] > 0 and row["cpu_ms"] > 0 for row in rows)
