"""The table that chooses an engine, and the reason it gives."""

from copy import deepcopy

import pytest
import torch
from torch._inductor import cpp_builder, exc

from megatron_lowbit.kernels import compiled
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.numerics import FORMATS, Quantizer, Request, gemm

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("request_", "missing", "name", "reason"),
    [
        ("reference", None, "reference", "requested"),
        ("auto", None, "compiled", "CPU with a C++ compiler"),
        ("auto", "no compiler, says the test", "reference", "no compiler, says the test"),
    ],
)
def test_choice_on_a_cpu(monkeypatch, request_, missing, name, reason):
    monkeypatch.setattr(compiled, "missing_compiler", lambda: missing)
    engine = select_engine(CPU, request_)
    assert (engine.name, engine.reason) == (name, reason)
    assert isinstance(engine, compiled.CompiledEngine) == (name == "compiled")


def test_missing_compiler_in_words(monkeypatch, tmp_path):
    """torch's own search finds none: words, not an exception."""

    def search():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", search)
    assert "install g++" in compiled.missing_compiler()
    assert "install g++" in select_engine(CPU).reason
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "Python.h" in compiled.missing_compiler()
    (tmp_path / "Python.h").touch()
    assert compiled.missing_compiler() is None
    for place in (tmp_path / "Python.h", tmp_path / "Python.h" / "cache"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place))
        assert "Python.h" in compiled.missing_compiler()
        assert "(set TORCHINDUCTOR_CACHE_DIR " in compiled.missing_compiler()


def test_other_devices():
    engine = select_engine(torch.device("meta"))
    assert engine.name == "reference" and "meta" in engine.reason


@pytest.mark.parametrize("amax", [None, torch.tensor(7.0)])
def test_reference_is_the_quantizer_itself(amax):
    engine = ReferenceEngine("why")
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    quantizer = Quantizer(FORMATS["nvfp4"])
    row, col = engine.quantize(x, Request(quantizer), Request(quantizer), (amax, amax))
    for q, expected in ((row, quantizer(x, amax)), (col, quantizer(x.t(), amax))):
        assert torch.equal(q.codes, expected.codes)
        assert torch.equal(q.tensor_scale, expected.tensor_scale)
    assert torch.equal(engine.gemm(row, row), gemm(row, row)) and engine.reason == "why"


def test_an_engine_is_shared_by_all_who_copy_it():
    """megatron-core copies the plan of each layer; what does not fold is counted over all."""
    engine = select_engine(CPU)
    assert deepcopy({"plan": engine})["plan"] is engine
