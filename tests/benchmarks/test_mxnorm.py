"""The benchmark of MXNorm: its parts run on a CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mxnorm
from timing import Ceilings

SMALL = """--hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128
    --seq-length 32 --max-position-embeddings 32 --quantization-engine reference"""
LIMITS = Ceilings(4.0e12, {}, {})


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(mxnorm, "SECONDS", 1e-6)
    monkeypatch.setattr(mxnorm, "FLUSH_BYTES", 0)


def test_layers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setattr(mxnorm, "MODEL", [*mxnorm.MODEL, *SMALL.split()])
    for name, value in (("TOKENS", [32]), ("BATCHES", (2,)), ("RECIPES", ("mxfp8",))):
        monkeypatch.setattr(mxnorm, name, value)
    monkeypatch.setattr(mxnorm, "LAYERS", 1)
    (rows,) = mxnorm.measure(LIMITS, ["layer"], [])
    assert {row["contender"] for row in rows} == {"MXNorm", "RMSNorm"}
    assert all(row["median_ms"] > 0 and row["tokens"] == 32 for row in rows)
    assert not torch.distributed.is_initialized()
