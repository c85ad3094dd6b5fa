"""GPU time of a step by kind of kernel, against a trace added up by hand."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import gpu_time


def event(name: str, start: float, length: float, category: str = "kernel") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


TRACE = {
    "traceEvents": [
        event("ProfilerStep#10", 0, 9000, "user_annotation"),
        event("ProfilerStep#11", 9000, 9000, "user_annotation"),
        event("aten::mm", 0, 500, "cpu_op"),
        {"ph": "i", "name": "a mark", "ts": 3},
        event("nvjet_qqtst_128x256", 1000, 4000),
        event("quantize_kernel", 3000, 3000),  # beside the GEMM for two of its three ms
        event("row_amax_kernel", 7000, 1000),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 9000, 500),
        event("void rmsnorm_fwd_kernel<bf16>", 10000, 250),
        event("multi_tensor_apply_kernel<AdamFunctor>", 11000, 100),
        event("vectorized_elementwise_kernel", 12000, 50),
        event("Memcpy DtoD", 13000, 50, "gpu_memcpy"),
    ]
}


def test_milliseconds_of_each_kind():
    assert gpu_time.milliseconds(TRACE) == {
        "busy": 3.48,  # (5 + 1 + 0.5 + 0.25 + 0.1 + 0.05 + 0.05) / 2
        "attention": 0.25,
        "optimizer": 0.05,
        "amaxes": 0.5,
        "GEMMs": 2.0,
        "quantization": 1.5,
        "norms": 0.12,
        "others": 0.05,
    }


def test_the_longest_kernels():
    found = gpu_time.longest(TRACE)
    assert list(found.items())[:2] == [("nvjet_qqtst_128x256", 2.0), ("quantize_kernel", 1.5)]
    assert len(found) == 8


def test_an_operand_of_another_dtype_is_no_quantization():
    kernel = "unrolled_elementwise_kernel<CUDAFunctor_add<float>, LoadWithCast<2>, StoreWithCast>"
    assert gpu_time.kind_of(kernel) == gpu_time.OTHERS
    assert gpu_time.kind_of("block_scaled_1d_cast_transpose_kernel") == "quantization"


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(ValueError, match="2 steps and 0 kernels"):
        gpu_time.milliseconds({"traceEvents": TRACE["traceEvents"][:3]})


def test_cases_are_profiled_once(monkeypatch, tmp_path, capsys):
    trained = []

    def train(script, words, gpus, device):
        trained.append(words)
        if len(trained) == 1:
            return {"error": "out of memory"}
        folder = Path(words[words.index("--tensorboard-dir") + 1]).parent / "torch_profile"
        folder.mkdir()
        with gzip.open(folder / "rank-0.json.gz", "wt") as file:
            json.dump(TRACE, file)
        return {"median_ms": 9.0}

    monkeypatch.setattr(gpu_time, "train", train)
    arguments = ["--only", "llama-8b fp8-tile", "llama-8b mxfp8", "--output", f"{tmp_path}/a.json"]
    gpu_time.main(arguments)
    gpu_time.main(arguments)
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["llama-8b mxfp8", "llama-8b fp8-tile"]
    assert len(trained) == 3 and all(row["milliseconds"]["GEMMs"] == 2.0 for row in rows)
    assert all(next(iter(row["longest"])) == "nvjet_qqtst_128x256" for row in rows)
    assert "--use-pytorch-profiler" in trained[0] and "3.48" in capsys.readouterr().out
