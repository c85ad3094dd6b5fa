"""GPU time of a step by kind of kernel, against a trace added up by hand."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import gpu_time
from benchmarks.records import RESULTS


def event(
    name: str, start: float, length: float, category: str = "kernel", thread: int = 0, **args: int
) -> dict:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start,
        "dur": length, "args": args,
    }  # fmt: skip


TRACE = {
    "traceEvents": [
        event("ProfilerStep#10", 0, 9000, "user_annotation"),
        event("ProfilerStep#11", 9000, 9000, "user_annotation"),
        event("aten::mm", 0, 500, "cpu_op"),
        {"ph": "i", "name": "a mark", "ts": 3},
        event("nvjet_qqtst_128x256", 1000, 4000),
        event("quantize_kernel", 3000, 3000),  # overlaps the GEMM for two of its three ms
        event("row_amax_kernel", 7000, 1000),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 9000, 500),
        event("void rmsnorm_fwd_kernel<bf16>", 10000, 250),
        event("multi_tensor_apply_kernel<AdamFunctor>", 11000, 100),
        event("vectorized_elementwise_kernel", 12000, 50),
        event("Memcpy DtoD", 13000, 50, "gpu_memcpy"),
    ]
}
NONE = dict.fromkeys(("loss", "embedding", "main gradients", "SwiGLU"), 0)


def test_milliseconds_of_each_kind():
    assert gpu_time.milliseconds(TRACE) == {
        "busy": 3.48,  # (5 + 1 + 0.5 + 0.25 + 0.1 + 0.05 + 0.05) / 2
        **NONE,
        "attention": 0.25,
        "optimizer": 0.05,
        "amaxes": 0.5,
        "GEMMs": 2.0,
        "quantization": 1.5,
        "norms": 0.12,
        "others": 0.05,
    }


ENGINE = "autograd::engine::evaluate_function: "
ADD = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
    "at::native::CUDAFunctor_add<float> >(at::TensorIteratorBase&, CUDAFunctor_add<float> const&)>"
)
OPERATORS = [  # of two threads: forward's and autograd's
    ("_VocabParallelCrossEntropy", 100, 200, 1),
    ("aten::exp", 150, 10, 1),
    (ENGINE + "_VocabParallelCrossEntropyBackward", 400, 200, 2),
    ("_VocabParallelCrossEntropyBackward", 410, 100, 2),
    (ENGINE + "EmbeddingBackward0", 700, 100, 2),
    (ENGINE + "torch::autograd::AccumulateGrad", 800, 100, 2),
    ("LigerCrossEntropyFunction", 1000, 100, 1),
    ("LigerVocabParallelCEFunctionBackward", 1100, 100, 2),
]
LAUNCHES = [  # time, thread, the kernel's microseconds, and its kind
    (99, 1, 2, "others"),
    (155, 1, 20, "loss"),
    (290, 1, 200, "loss"),
    (290, 2, 2000, "others"),
    (300, 1, 4, "others"),
    (450, 2, 40, "loss"),
    (590, 2, 400, "loss"),  # the engine casts after the operator's own backward
    (750, 2, 8000, "embedding"),
    (850, 2, 16000, "main gradients"),
    (950, 2, 6, "others"),
    (1050, 1, 1000, "loss"),
    (1150, 2, 100000, "loss"),
]


@pytest.mark.parametrize("category", ["cuda_runtime", "cuda_driver"])
def test_kernels_belong_to_the_operators_that_launch_them(category):
    """Also where kernels run after their operators, and not in the order of the trace."""
    events = [event(f"ProfilerStep#{i}", 0, 9, "user_annotation") for i in (1, 2)]
    expected = dict.fromkeys(gpu_time.milliseconds(TRACE), 0.0)
    for number, (time, thread, length, kind) in enumerate(LAUNCHES):
        begin = 90000 - 9000 * number
        events.append(event(ADD, begin, length, correlation=number))
        events.append(event("launch", time, 3, category, thread, correlation=number))
        expected[kind] += length / 2000
    for name, start, length, thread in OPERATORS:
        events.append(event(name, start, length, "cpu_op", thread))
    found = gpu_time.milliseconds({"traceEvents": events})
    del found["busy"], expected["busy"]
    assert found == {kind: round(sum_, 2) for kind, sum_ in expected.items()}


def test_the_longest_kernels():
    found = gpu_time.longest(TRACE)
    assert list(found.items())[:2] == [("nvjet_qqtst_128x256", 2.0), ("quantize_kernel", 1.5)]
    assert len(found) == 8


AT, TE = "void at::native::", "void transformer_engine::"
NAMES = {
    "others": [
        ADD,
        f"{AT}elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFun",
        f"{AT}unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul"
        ">, 4, TrivialOffsetCalculator<2, unsigned int>, TrivialOffsetCalculator<1, unsigned int>, "
        "at::native::memory::LoadWithCast<2>, at::native::memory::StoreWithCast<1> >",
        f"{AT}vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(at::Tensor",
        f"{AT}vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorI",
        f"{AT}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxNanFunctor<float>",
        f"{AT}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, flo",
        f"{TE}fused_rope_forward_kernel<__nv_bfloat16>",
        "Memcpy DtoD (Device -> Device)",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1"
        "x1_kernel0_0",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >",
    ],
    "optimizer": [
        "void multi_tensor_apply_kernel<TensorListMetadata<4, false>, transformer_engine::"
        "multi_tensor_adam::AdamFunctor<float, f",
        "void multi_tensor_apply_kernel<TensorListMetadata<1, false>, transformer_engine::"
        "multi_tensor_l2norm::L2NormFunctor<floa",
    ],
    "amaxes": ["amax_kernel", f"{TE}(anonymous namespace)::amax_kernel<8, true, __nv_bfloat16>"],
    "GEMMs": [
        "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_tn_align8>(Params)",
        "grouped_kernel",
        "stacked_kernel",
    ],
    "SwiGLU": [
        "triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0",
        f"{TE}gated_act_kernel<8, float, transformer_engine::Empty, &(float transformer_engine::"
        "silu<float, float>(float, transformer_engine::Empty const&)), __nv_bfloat16, __nv_bflo",
        f"{TE}dgated_act_kernel<8, float, transformer_engine::Empty, &(float transformer_engine::"
        "silu<float, float>), &(float transformer_engine::dsilu<float, float>)",
        "_swiglu_forward_kernel",
        "swiglu_quantize_kernel",
    ],
    "quantization": [
        "quantize_kernel",
        "decode_kernel",
        "_record_kernel",
        "_recompute_kernel",
        "_sums_kernel",
        f"{TE}(anonymous namespace)::block_scaled_1d_cast_transpose_kernel<true, float, __nv_bflo",
        f"{TE}dispatch::fp8::quantize_1D_kernel::cast_fp8_1D_kernel<false, __nv_bfloat16>",
        f"{TE}unary_kernel<8, true, float, transformer_engine::Empty, __nv_bfloat16, __nv_fp8_e",
        "transpose_optimized_kernel",
        "cast_kernel",
    ],
    "norms": [
        f"{TE}normalization::rmsnorm_fwd_tuned_kernel<transformer_engine::normalization::Kernel_tra",
        f"{TE}normalization::rmsnorm_bwd_finalize_tuned_kernel<float>",
        "norm_kernel",
        "_norm_grad_kernel",
        "all_reduce_norm_kernel",
    ],
    "loss": [
        "liger_cross_entropy_kernel",
        "liger_vocab_parallel_ce_forward_kernel",
        "cross_entropy_gradient_kernel",
    ],
    "embedding": [f"{AT}(anonymous namespace)::embedding_backward_feature_kernel<float, long>"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k, names in NAMES.items() for name in names]
)
def test_a_kernel_s_name_tells_its_kind(kind, name):
    assert gpu_time.kind_of(name) == kind


def test_kinds_of_the_longest_measured_kernels():
    """Their names end at 120 characters, but all tell their kind: torch's elementwise ones none."""
    rows = json.loads((RESULTS / "gpu-time-h200.json").read_text())["rows"]
    names = {name for row in rows for name in row["longest"]}
    torchs = {name for name in names if name.startswith(AT)}
    assert {name for name in names if gpu_time.kind_of(name) == gpu_time.OTHERS} == torchs


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
