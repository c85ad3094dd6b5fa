"""The command: refusals, omitted layouts, ranking, and figures counted by hand."""

import re
import shlex
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from built import EXAMPLES, LLAMA_8B, parse, planned

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.command import main
from megatron_lowbit.planning.device import Device, gemm_name
from megatron_lowbit.planning.estimate import BUBBLE, data_parallel
from megatron_lowbit.planning.hardware import GPU, Figure, gpu, gpu_names
from megatron_lowbit.planning.layouts import Layout, candidates, layout_of
from megatron_lowbit.planning.memory import in_flight
from megatron_lowbit.planning.model import Parameters
from megatron_lowbit.planning.search import plan_run
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import Layer, load_recipe

FIGURES = {
    "copy_tb_per_s": 1.0, "kernel_share": 1.0, "gemm_sustained": 1.0, "gemm.bf16": 100.0,
    "nvlink_gb_per_s": 100.0, "nvlink_latency_us": 0.0, "network_gb_per_s": 10.0,
    "network_latency_us": 0.0,
}  # fmt: skip
SIMPLE = Device(
    GPU("simple", (9, 0), {key: Figure(value, "made up") for key, value in FIGURES.items()})
)
H200 = Device(gpu("h200"))
MOVED = 1 / H200.moved(1.0)
"""Bytes/s of an H200's kernels."""


@pytest.mark.parametrize(
    ("words", "named"),
    {
        f"--gpus 8 --gpu gtx {LLAMA_8B}": "--gpu gtx",
        f"--gpus 0 {LLAMA_8B}": "--gpus 0",
        f"--gpus 8 @{EXAMPLES}/llama3-8b.args": "--vocab-size",
        f"--gpus 8 {LLAMA_8B} --fp4-recipe nvfp5": "nvfp5",
        f"--gpus 8 {LLAMA_8B} --hidden-sise 4": "--hidden-sise",
        f"--gpus 3 {LLAMA_8B} --as-given --tensor-model-parallel-size 3 --global-batch-size 3": (
            "--num-attention-heads"
        ),
        f"--gpus 6 {LLAMA_8B} --as-given --tensor-model-parallel-size 4": "world size (6)",
        f"--gpus 7 {LLAMA_8B} --as-given": "global_batch_size (256)",
        f"--gpus 8 {LLAMA_8B} --mtp-num-layers 1": "no layout is possible; --mtp-num-layers",
        f"--gpus 8 @{EXAMPLES}/hybrid-8b.args --as-given --context-parallel-size 2": "do not cover",
        f"--gpus 4 {LLAMA_8B} --seq-length 65536 --max-position-embeddings 65536 "
        "--context-parallel-size 4 --as-given --global-batch-size 4 --gpu h100": "use --gpus ",
        f"--gpus 8 {LLAMA_8B} --as-given --distill-from teacher": "--distill-from: plans of memory",
        f"--gpus 37 {LLAMA_8B}": "--gpus 37: no layout is possible; --global-batch-size",
        f"--gpus 8 {LLAMA_8B} --context-parallel-size 0": "--context-parallel-size 0: must be an",
        f"--gpus 8 {LLAMA_8B} --padded-vocab-size 0": "--padded-vocab-size 0: must be an",
        f"--gpus 2 @{EXAMPLES}/hybrid-tiny.args --vocab-size 100 --hybrid-layer-pattern M*-E": (
            "E needs --num-experts"
        ),
        f"--gpus 8 {LLAMA_8B} --as-given --scan torch": "--scan torch: only hybrids have a scan",
        f"--gpus 8 {LLAMA_8B} --as-given --recompute-granularity full --recompute-method block": (
            "full needs --recompute-num-layers"
        ),
        f"--gpus 8 {LLAMA_8B} --tokens -3": "--tokens -3.0: must be positive",
        f"--gpus 8 {LLAMA_8B} --recipes bf16 nvfp5": "nvfp5",
        f"--gpus 8 {LLAMA_8B} --recipes bf16 --precision-recipe nvfp4": (
            "--recipes excludes --precision-recipe"
        ),
        f"--gpus 8 {LLAMA_8B} --pipeline-model-parallel-size 2 --as-given "
        "--decoder-first-pipeline-num-layers 40": "--decoder-first-pipeline-num-layers 40",
        f"--gpus 8 {LLAMA_8B} --pipeline-model-parallel-size 2 --as-given "
        "--pipeline-model-parallel-layout Ettt|ttL": "must match num_layers 32",
        f"--gpus 4 {LLAMA_8B} --as-given --pipeline-model-parallel-size 4 --global-batch-size 6 "
        "--num-layers-per-virtual-pipeline-stage 4": "of 4, and these are 6; give a multiple of 4",
        f"--gpus 8 {LLAMA_8B} --recipes ''": "argument --recipes: the name is empty",
        f"--gpus 8 {LLAMA_8B} --num-layers 100000": "--num-layers 100000: layouts of at most",
        f"--gpus 8 {LLAMA_8B} --vocab-size {2**63}": "an integer from 1 to 2**63 - 1",
        LLAMA_8B: "--gpus",
    }.items(),
)
def test_errors_name_the_argument_in_one_line(words, named):
    with pytest.raises(UserError, match=re.escape(named)) as error:
        main(shlex.split(words))
    assert "\n" not in str(error.value)


NOT_MODELLED = {
    "--recompute-granularity selective --recompute-modules core_attn layernorm mlp": (
        "--recompute-modules layernorm mlp"
    ),
    "--transformer-impl local --recompute-activations": (
        "--recompute-granularity selective of local layers"
    ),
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--tensor-model-parallel-size 2 --distribute-saved-activations": "--distribute-saved-activ",
    "--use-distributed-optimizer --num-distributed-optimizer-instances 2": "--num-distributed-opt",
    "--optimizer-cpu-offload --use-precision-aware-optimizer": "--optimizer-cpu-offload",
    "--cpu-offloading-num-layers 2": "--cpu-offloading-num-layers",
    "--fine-grained-activation-offloading --offload-modules core_attn": "--fine-grained-activation",
    "--optimizer sgd": "--optimizer sgd",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 "
    "--microbatch-group-size-per-virtual-pipeline-stage 4": "--microbatch-group-size-per-virtual-",
}
"""Arguments that change memory or time in another way than the planner models."""


@pytest.mark.parametrize("flags", NOT_MODELLED)
def test_arguments_that_are_not_modelled_have_no_plan(flags):
    message = f"^{re.escape(NOT_MODELLED[flags])}.*: plans of memory and time do not cover it$"
    with pytest.raises(UserError, match=message):
        plan_run([*shlex.split(LLAMA_8B), *flags.split()], "h200", 8, as_given=True)


def test_a_stage_has_no_larger_group_than_its_layers():
    """A stage of 8 layers recomputes 8 at most, whatever the size of groups in another."""
    stages = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 24"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    eight, more = (
        plan_run(
            shlex.split(f"{LLAMA_8B} {stages} {full} {number}"), "h200", 2, as_given=True
        ).best.memory[1].parts
        for number in (8, 24)
    )  # fmt: skip
    assert more == eight


def test_a_group_of_recomputed_layers_keeps_an_input_and_is_recomputed_whole():
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    model = f"{LLAMA_8B} --num-layers 30"
    single, four, all_layers, beyond, plain = (
        planned(f"{model} {more}", vocabulary=128).memory[0].parts
        for more in (f"{full} 1", f"{full} 4", f"{full} 30", f"{full} 99", "")
    )
    inputs, stream = "recomputed layers' inputs", 4096 * 4096 * 2
    assert [parts[inputs] / stream for parts in (single, four, all_layers)] == [30, 8, 1]
    for name in ("linear inputs", "attention", "activation"):
        assert four[name] == pytest.approx(4 * single[name])
        assert all_layers[name] == pytest.approx(plain[name])
    assert beyond == all_layers


def cells(text: str, columns: int) -> list[list[str]]:
    """Return the rows of a printed table with so many columns."""
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows if len(row) == columns]


def test_layouts_beyond_the_memory_are_omitted_and_counted(capsys):
    main(shlex.split(f"--gpus 4 --gpu h100 --top 1000 {LLAMA_8B}"))
    shown = capsys.readouterr().out
    run = plan_run(shlex.split(LLAMA_8B), "h100", 4)
    tried, fits = len(run.estimates), len(run.ranked)
    assert 0 < fits < tried
    assert f"{tried} layouts planned, {tried - fits} omitted" in shown
    rows = cells(shown, 12)
    assert len(rows) == fits
    assert all(float(row[8]) * 2**30 <= run.device.usable_bytes + 2**27 for row in rows)
    speeds = [float(row[9].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True)


def test_recipes_side_by_side_are_the_fastest_layout_of_each(capsys):
    main(shlex.split(f"--gpus 2 --gpu h200 {LLAMA_8B} --recipes bf16 fp8-tile --tokens 1e12"))
    rows = cells(capsys.readouterr().out, 9)
    assert [row[0] for row in rows] == ["bf16", "fp8-tile"]
    speeds = []
    for name, *_, speed, ratio, _, days in rows:
        run = plan_run(shlex.split(f"{LLAMA_8B} --precision-recipe {name}"), "h200", 2)
        speeds.append(max(each.tokens_per_second for each in run.estimates if run.fits(each)))
        assert speed == f"{speeds[-1] / 2:,.0f}"
        assert ratio == f"{speeds[-1] / speeds[0]:.2f}"
        assert float(days) == pytest.approx(1e12 / speeds[-1] / 86400, abs=0.6)


def test_days_are_those_of_the_given_tokens_or_of_training(capsys):
    layout = "--gpus 64 --as-given --gpu h200 --use-distributed-optimizer"
    speed = planned(f"{LLAMA_8B} --use-distributed-optimizer", 64).tokens_per_second
    for more, tokens, name, digit in (
        ("", 300000 * 256 * 4096, "315 billion", 0.06),
        ("--tokens 2e12", 2e12, "2,000 billion", 0.06),
        ("--tokens 98.3e6", 98.3e6, "98.3 million", 6e-5),
    ):
        main(shlex.split(f"{layout} {LLAMA_8B} {more}"))
        shown = capsys.readouterr().out
        label, days, _ = next(row for row in cells(shown, 3) if row[0].startswith("days"))
        assert label == f"days for {name} tokens"
        assert float(days) == pytest.approx(tokens / speed / 86400, rel=0.01, abs=digit)


def test_tokens_of_a_run_are_its_iterations_or_its_samples():
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
    model += " --micro-batch-size 1"
    sizes = {
        "": None,
        "--train-iters 10": None,  # of a batch that is not given
        "--train-iters 10 --global-batch-size 8": 10 * 8 * 128,
        "--train-samples 1000": 1000 * 128,
    }
    for more, tokens in sizes.items():
        words = TrainingArguments(f"{model} {more}".split())
        assert words.tokens == tokens
        words.parse(1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gpu h100 --recipes nvfp4", "NVFP4 runs as BF16 on NVIDIA H100 SXM .*slower than BF16"),
        ("--gpu h100 --recipes mxfp4", "MXFP4 runs as FP8 on NVIDIA H100 SXM: no faster than FP8"),
        ("--gpu b200 --recipes nvfp4 --transformer-impl local", "NVFP4 runs as BF16 on .* B200"),
        ("--gpu b200 --recipes nvfp4", None),
        ("--gpu h100 --recipes bf16 fp8-tensorwise", None),
    ],
)
def test_formats_without_tensor_cores_of_their_own_are_named(capsys, words, expected):
    layout = "--as-given --tensor-model-parallel-size 8 --sequence-parallel"
    main(shlex.split(f"--gpus 8 {layout} {LLAMA_8B} {words}"))
    shown = capsys.readouterr().out.replace("\n", " ")
    assert re.search(expected, shown) if expected else "runs as" not in shown


def test_every_layout_has_all_gpus_the_whole_batch_and_arguments_that_training_takes():
    words = TrainingArguments(shlex.split(LLAMA_8B))
    layouts = {layout for layout, _ in candidates(words, 16, 8)[0]}
    assert len(layouts) > 100
    for layout in layouts:
        assert layout.tensor * layout.pipeline * layout.data == 16 and layout.tensor <= 8
        assert layout.data * layout.micro_batch * layout.microbatches == 256
        assert sum(layout.chunks) == 32 and len(layout.chunks) == layout.pipeline * layout.virtual
    for layout in sorted(layouts)[::25]:
        args = words.parse(16, ["--global-batch-size", "256", *layout.arguments()])
        assert layout_of(args, 16) == layout


@pytest.mark.parametrize(
    "given_too",
    [
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 8",
    ],
)
def test_a_search_takes_no_notice_of_the_layout_that_is_given(given_too):
    tried, _ = candidates(TrainingArguments(shlex.split(f"{LLAMA_8B} {given_too}")), 4, 8)
    assert {layout.tensor for layout, _ in tried} >= {1, 2, 4}
    assert {layout.pipeline for layout, _ in tried} >= {1, 2, 4}
    for layout, args in tried:
        assert args.tensor_model_parallel_size == layout.tensor
        assert args.sequence_parallel == (layout.tensor > 1)
        assert args.pipeline_model_parallel_size == layout.pipeline
        assert (args.virtual_pipeline_model_parallel_size or 1) == layout.virtual


def test_selective_recomputation_is_of_attention_if_no_module_is_named():
    model = f"{LLAMA_8B} --precision-recipe nvfp4 --recompute-granularity selective"
    named = planned(f"{model} --recompute-modules core_attn").memory
    assert planned(model).memory == named != planned(f"{model} --recompute-modules mlp").memory


def test_more_never_takes_less():
    # Sharded over 64 GPUs, so that the peak is not the optimizer's.
    model = f"{LLAMA_8B} --use-distributed-optimizer"
    base = planned(model, 64)
    bigger = planned(f"{model} --micro-batch-size 2", 64)
    longer = planned(f"{model} --seq-length 8192 --max-position-embeddings 8192", 64)
    assert base.most_memory < bigger.most_memory and base.most_memory < longer.most_memory
    # Attention's FLOPs a token grow with the sequence.
    assert base.tokens_per_second > longer.tokens_per_second
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    recomputed = planned(f"{model} {full}", 64)
    assert recomputed.most_memory < base.most_memory and recomputed.step > base.step
    single = planned(LLAMA_8B)
    split = planned(f"{LLAMA_8B} --tensor-model-parallel-size 2 --sequence-parallel", 2)
    assert split.most_memory < single.most_memory
    assert single.tokens_per_second < split.tokens_per_second < 2 * single.tokens_per_second


def test_recipes_rank_as_their_tensor_cores_do():
    speeds = {}
    # Two sequences, so that no recipe waits for the CPU.
    model = f"{LLAMA_8B} --micro-batch-size 2"
    for name in ("bf16", "fp8-tile", "fp8-delayed"):
        speeds[name] = planned(f"{model} --precision-recipe {name}").tokens_per_second
    assert speeds["bf16"] < speeds["fp8-tile"] < speeds["fp8-delayed"]
    every = "--fp4-recipe nvfp4 --recipe-set bf16_blocks=none"
    # On Hopper NVFP4 is multiplied in BF16, and quantized on top.
    assert planned(f"{model} {every}").tokens_per_second < speeds["bf16"]


def test_gemms_go_where_the_engine_sends_them():
    """The fused engine's own description, for each GEMM of each recipe."""
    from megatron_lowbit.kernels.fused import FusedEngine

    engine = FusedEngine((9, 0))
    words = {"fp8 1x128": ("FP8 tiles",), "bf16": ("exact BF16",),
             "fp8 per tensor": ("FP8 tensors", "folded to FP8 tensors"),
             "fp8 per row": ("FP8 rows",)}  # fmt: skip
    seen = set()
    for name in ("fp8-tile", "fp8-delayed", "fp8-row", "mxfp4", "nvfp4", "nvfp4-fold", "mxfp8"):
        precision = load_recipe(name).precision_for(Layer("decoder.layers.16.mlp.x", 16, 32))
        for gemm, sides in precision.gemms.items():
            if sides.quantized:
                name = gemm_name(precision, gemm, (9, 0), False)
                start = next(text for key, text in words.items() if name.startswith(key))
                assert engine.describe(sides.lhs.format, sides.rhs.format).startswith(start)
                seen.add(name)
    assert len(seen) == 4


def test_fused_accumulation_moves_the_main_gradient_inside_the_gemm():
    """BF16 dW written, read and added: 12 bytes per weight, which fused GEMMs do not move."""
    model = f"{LLAMA_8B} --micro-batch-size 2 --precision-recipe"
    separate = "--no-gradient-accumulation-fusion"
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without the embedding and norms
    layers = weights - 128256 * 4096
    for recipe in ("bf16", "fp8-tensorwise"):
        fused = planned(f"{model} {recipe}").seconds
        apart = planned(f"{model} {recipe} {separate}").seconds
        more = (apart["elementwise"] - fused["elementwise"]) / 128
        assert more == pytest.approx(12 * weights / MOVED, rel=1e-6)
        assert fused["GEMM"] == pytest.approx(apart["GEMM"], rel=1e-6)
    # GEMMs with a scale a row return a product in FP32, which is added to the gradient after them.
    rows = planned(f"{model} fp8-row").seconds["elementwise"]
    apart = planned(f"{model} fp8-row {separate}").seconds["elementwise"]
    assert (rows - apart) / 128 == pytest.approx((4 * layers - 12 * 128256 * 4096) / MOVED)


def test_a_loss_keeps_its_exponentials_unless_it_is_computed_in_place():
    """4096 tokens of 128256 logits: in FP32 and BF16, or only in BF16."""
    model = f"{LLAMA_8B} --num-layers 1 --micro-batch-size 1 --cross-entropy-loss-fusion"
    sizes = {
        name: planned(f"{model} --cross-entropy-fusion-impl {name}").memory[-1].parts["logits"]
        for name in ("native", "liger", "lowbit")
    }
    logits = 4096 * 128256
    assert sizes == {"native": 6 * logits, "liger": 6 * logits, "lowbit": 2 * logits}


def test_folded_operands_are_read_twice():
    """2 bytes per element for the amax: of inputs, gradients, and weights once a step.

    The amaxes of SwiGLU's output and of its input's gradient come with them, unless it is apart.
    """
    model = f"{LLAMA_8B} --micro-batch-size 2 --precision-recipe fp8-tile"
    folded, separate, clamped, offset, apart = (
        planned(f"{model} {more}").seconds["quantization"]
        for more in ("", "--no-bias-swiglu-fusion", "--activation-func-clamp-value 7",
                     "--glu-linear-offset 1", "--recipe-set folding=false")
    )  # fmt: skip
    assert separate == clamped == offset
    layers = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    tokens = 256 * 4096 * sum(inputs + outputs for inputs, outputs in layers)
    weights = sum(inputs * outputs for inputs, outputs in layers)
    assert separate - apart == pytest.approx(2 * 32 * (tokens + weights) / MOVED)
    assert separate - folded == pytest.approx(2 * 32 * 256 * 4096 * (14336 + 28672) / MOVED)


def test_the_gradient_of_swiglu_takes_its_inputs_memory():
    """Backward then needs most where fc1 computes, which was less than all three of SwiGLU's."""
    model = f"{LLAMA_8B} --micro-batch-size 16 --precision-recipe mxfp8 --global-batch-size 16"
    together, apart = (
        planned(f"{model} {more}", vocabulary=4096).memory[-1]
        for more in ("", "--no-bias-swiglu-fusion")
    )
    assert together.moment == apart.moment == "backward of a layer"
    less = apart.parts["working memory"] - together.parts["working memory"]
    assert 0 < less < 2 * 28672 * 16 * 4096
    assert together.total == apart.total - less


def test_blackwell_multiplies_nvfp4_only_through_transformer_engine():
    precision = load_recipe("nvfp4").configs["nvfp4"]
    assert gemm_name(precision, "fprop", (10, 0), True) == "nvfp4"
    assert gemm_name(precision, "fprop", (10, 0), False) == "bf16"
    assert gemm_name(precision, "fprop", (8, 0), True) == "fp32"


def test_a_gemm_takes_its_flops_or_its_bytes():
    # 2 * 1000^3 FLOPs at 100 TFLOP/s; 2 * (3 * 1000 * 1000) bytes at 1 TB/s are less.
    assert SIMPLE.multiplied(1000, 1000, 1000, "bf16") == pytest.approx(20e-6)
    # One column: 2 * (1e6 + 1000 + 1000) bytes.
    assert SIMPLE.multiplied(1000, 1000, 1, "bf16") == pytest.approx(2.004e-6)


def test_collectives_over_a_host_and_between_hosts():
    # 8e9 bytes over 4 ranks of a host: 3/4 of it at 100 GB/s.
    assert SIMPLE.link(4).gather(8e9, 4) == pytest.approx(0.06)
    # 16 ranks next to each other: 8 cards of 10 GB/s a host. Every eighth rank: one card.
    assert SIMPLE.link(16).bandwidth == 80e9
    assert SIMPLE.link(2, 8).bandwidth == 10e9


def test_the_distributed_optimizer_moves_as_much_as_an_all_reduce_of_three_quarters():
    def moved(more: str) -> tuple[float, float]:
        return data_parallel(parse(f"@llama3-tiny {more}", 4), Parameters(10**9, 0), SIMPLE)

    gradients, gathers = moved("--use-distributed-optimizer")
    assert gradients == pytest.approx(4e9 * 0.75 / 100e9)
    assert gathers == pytest.approx(2e9 * 0.75 / 100e9)
    halved, _ = moved("--use-distributed-optimizer --grad-reduce-in-bf16")
    assert 2 * halved == gradients
    assert moved("") == (pytest.approx(2 * gradients), 0)


def test_context_parallel_ranks_divide_sequences_and_the_optimizer():
    """Two ranks with half of a sequence each have all but attention as one with a half."""
    text = f"@{EXAMPLES}/llama3-8b.args --use-distributed-optimizer --max-position-embeddings 16384"
    half = planned(f"{text} --seq-length 8192 --global-batch-size 2", 2)
    split = planned(f"{text} --seq-length 16384 --global-batch-size 1 --context-parallel-size 2", 2)
    assert (half.tokens, half.gpus) == (split.tokens, split.gpus) == (16384, 2)
    assert half.memory[0].parts == split.memory[0].parts
    assert half.seconds["data parallel"] == split.seconds["data parallel"]
    alone = planned(f"{text} --seq-length 16384 --global-batch-size 1", 1)
    # Keys and values pass while scores are computed: attention takes half of one rank's time.
    assert "context parallel" not in split.seconds
    assert split.seconds["attention"] == pytest.approx(alone.seconds["attention"] / 2)
    assert split.seconds["attention"] == pytest.approx(2 * half.seconds["attention"])


def test_1f1b_holds_a_microbatch_less_in_each_later_stage():
    layout = Layout(1, 4, 1, 1, 1, 1, 8, 0, (8,) * 4)
    assert [in_flight(layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(layout._replace(microbatches=2), 0) == 2
    # Interleaved, the first of 4 stages with 2 pieces each warms up 2 * 3 + 4 pieces, and 1.
    assert in_flight(layout._replace(virtual=2), 0) == 5.5


def test_the_bubble_is_that_of_the_textbook():
    """(p - 1) / m of the time of the microbatches, where stages are equal."""
    text = f"@{EXAMPLES}/llama3-8b.args --num-layers 32 --pipeline-model-parallel-size 4"
    # A vocabulary so small that the ends weigh nothing.
    plan = planned(text, 4, vocabulary=128)
    seconds = Counter(plan.seconds)
    work = plan.step - seconds[BUBBLE] - seconds["optimizer"]
    assert seconds[BUBBLE] / work == pytest.approx(3 / 256, rel=0.02)


def test_every_figure_says_where_it_comes_from():
    for name in gpu_names():
        figures = gpu(name).figures
        assert figures.keys() >= gpu("h100").figures.keys() - {
            "gemm.fp8 1x128 . 128x128", "gemm.fp8 1x128 . 1x128", "gemm.bf16 1x128 . 1x128"
        }  # fmt: skip
        for figure in figures.values():
            assert figure.source.startswith(("measured: ", "data sheet", "published: ", "estimate"))
            assert figure.value > 0


@pytest.mark.parametrize(
    ("recipe", "kept", "sent"), [("fp8-tile", 1, 1), ("mxfp8", 33 / 16, 2), ("bf16", 2, 2)]
)
def test_weights_as_codes_take_their_bytes(recipe, kept, sent):
    model = f"@{EXAMPLES}/llama3-1b.args --vocab-size 128256 --bf16 --use-distributed-optimizer"
    linears = 16 * (2048 * 3072 + 2048 * 2048 + 2048 * 6144 + 3072 * 2048)
    others = 2 * 128256 * 2048 + 33 * 2048
    plain = planned(f"{model} --precision-recipe {recipe}", gpus=2)
    stored = planned(f"{model} --precision-recipe {recipe} --quantized-param-gather", gpus=2)
    parts = stored.memory[0].parts
    weights = parts["weights"] + parts.get("quantized weights", 0)
    assert weights == pytest.approx(2 * others + kept * linears, rel=1e-3)
    bandwidth = gpu("h200")["nvlink_gb_per_s"] * 1e9
    less = plain.seconds["data parallel"] - stored.seconds["data parallel"]
    assert less == pytest.approx((2 - sent) * linears / 2 / bandwidth, rel=1e-3, abs=1e-9)


def test_tokens_sent_as_codes_take_one_exchange_of_four_less():
    """FP8 tiles have 8.25 bits in place of 16."""
    model = (
        f"@{EXAMPLES}/qwen3-30b-a3b.args --bf16 --moe-grouped-gemm --expert-model-parallel-size 8 "
        "--precision-recipe fp8-tile --recipe-set wgrad.input.requantize=true"
    )
    plain, codes = (
        planned(model + flag, gpus=8).seconds["expert parallel"]
        for flag in ("", " --quantized-expert-dispatch")
    )
    assert codes == pytest.approx(plain * (3 + 8.25 / 16) / 4, rel=0.02)


def test_a_quantized_output_layer_has_the_rate_and_the_memory_of_its_precision():
    """FP8 with tensor scales: its GEMMs' rate, and codes of the weight for fprop and dgrad."""
    model = f"@{EXAMPLES}/llama3-1b.args --vocab-size 128256 --bf16 --precision-recipe bf16"
    plain, wide = planned(model), planned(f"{model} --recipe-set output_layer=fp8-tensorwise")
    tokens, weights, device = 8192, 128256 * 2048, Device(gpu("h200"))
    assert plain.args.micro_batch_size * plain.args.seq_length == tokens
    rates = [device.flops(name) for name in ("bf16", "fp8 per tensor")]
    assert rates[1] > 1.3 * rates[0]
    faster = plain.seconds["GEMM"] - wide.seconds["GEMM"]
    expected = 3 * 2 * tokens * weights * (1 / rates[0] - 1 / rates[1])
    assert faster == pytest.approx(plain.layout.microbatches * expected, rel=0.1)
    assert "quantization" not in plain.seconds and wide.seconds["quantization"] > 0
    assert wide.memory[0].parts["quantized weights"] == pytest.approx(2 * weights, rel=1e-3)
    # The peak stays where logits are copied to FP32; quantized gradients come after it.
    assert wide.memory[0].moment == plain.memory[0].moment == "loss"
    assert wide.memory[0].total - plain.memory[0].total == pytest.approx(2 * weights, rel=1e-3)


def test_rows_of_the_benchmark_of_stored_weights_take_what_the_options_save(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import stored_weights

    model = f"{stored_weights.MODELS['llama3.2-1b']} {stored_weights.COMMON} --train-iters 8 "
    model += "--micro-batch-size 2 --global-batch-size 4 "
    # A machine without Transformer Engine refuses its optimizer.
    rows = {name: words for name, words in stored_weights.ROWS.items() if "moments" not in name}
    memory = {
        name: planned(model + words, gpus=2, gpu_name="h100").memory[0].total
        for name, words in rows.items()
    }
    share = {name: size / memory["bf16"] for name, size in memory.items()}
    assert share["fp8-tile, codes, FP8 SwiGLU"] == pytest.approx(0.823, abs=0.001)
    for options in ("", ", codes", ", codes, FP8 SwiGLU"):
        assert share[f"nvfp4{options}"] < share[f"fp8-tile{options}"] < 1
    for recipe in ("fp8-tile", "nvfp4"):
        sizes = [share[name] for name in rows if name.startswith(recipe)]
        assert all(larger > smaller for larger, smaller in pairwise(sizes))
