"""The command: what it refuses, what it leaves out, how it ranks, and figures counted by hand."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from built import parse

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.command import main
from megatron_lowbit.planning.communication import Cluster, data_parallel, link
from megatron_lowbit.planning.compute import Device, gemm_seconds
from megatron_lowbit.planning.estimate import Estimate
from megatron_lowbit.planning.hardware import GPU, Figure, gpu, kinds
from megatron_lowbit.planning.layouts import Layout, candidate_of, candidates
from megatron_lowbit.planning.memory import in_flight, state
from megatron_lowbit.planning.model import Parameters
from megatron_lowbit.planning.routing import adds_products, gemm_name
from megatron_lowbit.planning.search import plan
from megatron_lowbit.planning.training_arguments import TrainingArguments
from megatron_lowbit.recipes import Layer, load_recipe, load_recipes

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA_8B = f"@{EXAMPLES}/llama3-8b.args --vocab-size 128256"
SIMPLE = GPU(
    "simple",
    (9, 0),
    {
        key: Figure(value, "made up")
        for key, value in {
            "copy_tb_per_s": 1.0, "kernel_share": 1.0, "gemm_sustained": 1.0, "gemm.bf16": 100.0,
            "nvlink_gb_per_s": 100.0, "nvlink_latency_us": 0.0, "network_gb_per_s": 10.0,
            "network_latency_us": 0.0,
        }.items()
    },
)  # fmt: skip


def planned(text: str, gpus: int = 1, kind: str = "h200", per_node: int = 8) -> Estimate:
    args = TrainingArguments(shlex.split(text)).parse(gpus)
    device = Device(gpu(kind), True, "mamba-ssm")
    tried = [candidate_of(args, gpus)]
    return plan(
        tried,
        load_recipes(args.precision_recipe, args.recipe_set),
        128256,
        device,
        Cluster(device.gpu, per_node),
    )[0]


def searched(text: str, gpus: int, kind: str = "h200") -> list[Estimate]:
    tried = [
        one
        for one in candidates(TrainingArguments(shlex.split(text)), gpus, 8)
        if not isinstance(one, str)
    ]
    args = tried[0].args
    device = Device(gpu(kind), True, "mamba-ssm")
    return plan(
        tried,
        load_recipes(args.precision_recipe, args.recipe_set),
        128256,
        device,
        Cluster(device.gpu, 8),
    )


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
        f"--gpus 8 {LLAMA_8B} --as-given --context-parallel-size 2": "do not cover",
        f"--gpus 37 {LLAMA_8B}": "--gpus 37: no layout is possible; --global-batch-size",
        f"--gpus 8 {LLAMA_8B} --context-parallel-size 0": "--context-parallel-size 0: must be an",
        f"--gpus 8 {LLAMA_8B} --padded-vocab-size 0": "--padded-vocab-size 0: must be an",
        f"--gpus 2 @{EXAMPLES}/hybrid-tiny.args --vocab-size 100 --hybrid-layer-pattern M*-E": (
            "E needs --num-experts"
        ),
        f"--gpus 8 {LLAMA_8B} --tokens -3": "--tokens -3.0: must be positive",
        f"--gpus 8 {LLAMA_8B} --recipes bf16,nvfp5": "nvfp5",
        f"--gpus 8 {LLAMA_8B} --recipes bf16 --precision-recipe nvfp4": (
            "--recipes excludes --precision-recipe"
        ),
        f"--gpus 8 {LLAMA_8B} --pipeline-model-parallel-size 2 --as-given "
        "--decoder-first-pipeline-num-layers 40": "--decoder-first-pipeline-num-layers 40",
        f"--gpus 8 {LLAMA_8B} --pipeline-model-parallel-size 2 --as-given "
        "--pipeline-model-parallel-layout Ettt|ttL": "must match num_layers 32",
        f"--gpus 8 {LLAMA_8B} --recipes ''": "unknown recipe ''",
        f"--gpus 8 {LLAMA_8B} --num-layers 100000": "--num-layers 100000: layouts of at most",
        f"--gpus 8 {LLAMA_8B} --vocab-size {2**63}": "an integer from 1 to 2**63 - 1",
        LLAMA_8B: "--gpus",
    }.items(),
)
def test_errors_name_the_argument_in_one_line(words, named):
    with pytest.raises(UserError, match=re.escape(named)) as error:
        main(shlex.split(words))
    assert "\n" not in str(error.value)


def test_what_does_not_fit_is_left_out_and_counted(capsys):
    main(shlex.split(f"--gpus 4 --gpu h100 --top 1000 {LLAMA_8B}"))
    shown = capsys.readouterr().out
    found = searched(LLAMA_8B, 4, "h100")
    usable = (gpu("h100")["memory_gib"] - gpu("h100")["reserve_gib"]) * 2**30
    fits = [one for one in found if one.most_memory <= usable]
    assert 0 < len(fits) < len(found)
    assert f"{len(found)} layouts tried: {len(found) - len(fits)} do not fit" in shown
    rows = [line for line in shown.splitlines() if line.count("│") == 13]
    assert len(rows) == len(fits)
    columns = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]
    assert all(float(row[8]) * 2**30 <= usable + 2**27 for row in columns)
    speeds = [float(row[9].replace(",", "")) for row in columns]
    assert speeds == sorted(speeds, reverse=True)


def cells(text: str, columns: int) -> list[list[str]]:
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows if len(row) == columns]


def test_recipes_side_by_side_are_the_fastest_layout_of_each(capsys):
    main(shlex.split(f"--gpus 2 --gpu h200 {LLAMA_8B} --recipes bf16,fp8-tile --tokens 1e12"))
    rows = cells(capsys.readouterr().out, 9)
    assert [row[0] for row in rows] == ["bf16", "fp8-tile"]
    usable = (gpu("h200")["memory_gib"] - gpu("h200")["reserve_gib"]) * 2**30
    speeds = []
    for name, *_, speed, ratio, _, days in rows:
        found = searched(f"{LLAMA_8B} --precision-recipe {name}", 2)
        fitting = [one.tokens_per_second for one in found if one.most_memory <= usable]
        speeds.append(max(fitting))
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
        ("--gpu h100 --recipes bf16,fp8-tensorwise", None),
    ],
)
def test_formats_without_tensor_cores_of_their_own_are_named(capsys, words, expected):
    layout = "--as-given --tensor-model-parallel-size 8 --sequence-parallel"
    main(shlex.split(f"--gpus 8 {layout} {LLAMA_8B} {words}"))
    shown = capsys.readouterr().out.replace("\n", " ")
    assert re.search(expected, shown) if expected else "runs as" not in shown


def test_every_layout_has_all_gpus_the_whole_batch_and_arguments_that_training_takes():
    words = TrainingArguments(shlex.split(LLAMA_8B))
    layouts = {one.layout for one in candidates(words, 16, 8) if not isinstance(one, str)}
    assert len(layouts) > 100
    for layout in layouts:
        assert layout.tensor * layout.pipeline * layout.data == 16 and layout.tensor <= 8
        assert layout.data * layout.micro_batch * layout.microbatches == 256
        assert sum(layout.chunks) == 32 and len(layout.chunks) == layout.pipeline * layout.virtual
    for layout in sorted(layouts)[::25]:
        args = words.parse(16, ["--global-batch-size", "256", *layout.arguments()])
        assert candidate_of(args, 16).layout == layout


@pytest.mark.parametrize(
    "given_too",
    [
        "--tensor-model-parallel-size 4 --sequence-parallel",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 8",
    ],
)
def test_a_search_takes_no_notice_of_the_layout_that_is_given(given_too):
    words = TrainingArguments(shlex.split(f"{LLAMA_8B} {given_too}"))
    tried = [one for one in candidates(words, 4, 8) if not isinstance(one, str)]
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
    one = planned(LLAMA_8B)
    split = planned(f"{LLAMA_8B} --tensor-model-parallel-size 2 --sequence-parallel", 2)
    assert split.most_memory < one.most_memory
    assert one.tokens_per_second < split.tokens_per_second < 2 * one.tokens_per_second


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
                found = gemm_name(precision, gemm, (9, 0), False)
                start = next(text for key, text in words.items() if found.startswith(key))
                assert engine.describe(sides.lhs.format, sides.rhs.format).startswith(start)
                seen.add(found)
    assert len(seen) == 4


def test_gemms_that_add_to_the_main_gradient_are_the_engines():
    from megatron_lowbit.kernels import routes
    from megatron_lowbit.kernels.gemm import PRODUCTS_TO

    adding = {"bf16": routes.EXACT, "fp8 per tensor": routes.FOLDED, "fp8 per row": routes.ROWS,
              "fp8 1x128 . 128x128": routes.TILES, "fp32": routes.DEQUANTIZED}  # fmt: skip
    for name, route in adding.items():
        assert adds_products(name) == (route in PRODUCTS_TO and route is not routes.TILES)


def test_fused_accumulation_moves_the_main_gradient_inside_the_gemm():
    """BF16 dW written, read and added: 12 bytes a weight, which fused GEMMs do not move."""
    model = f"{LLAMA_8B} --micro-batch-size 2 --precision-recipe"
    separate = "--no-gradient-accumulation-fusion"
    bandwidth = gpu("h200")["copy_tb_per_s"] * gpu("h200")["kernel_share"] * 1e12
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without the embedding and norms
    layers = weights - 128256 * 4096
    for recipe in ("bf16", "fp8-tensorwise"):
        fused = planned(f"{model} {recipe}").seconds
        apart = planned(f"{model} {recipe} {separate}").seconds
        more = (apart["elementwise"] - fused["elementwise"]) / 128
        assert more == pytest.approx(12 * weights / bandwidth, rel=1e-6)
        # An FP8 GEMM takes longer by what it reads and writes, but in a step's first microbatch.
        longer = (fused["GEMM"] - apart["GEMM"]) / 127
        assert longer == pytest.approx(8 * layers / bandwidth if "fp8" in recipe else 0, rel=1e-6)
    # GEMMs with a scale a row return a product in FP32, which is added to the gradient after them.
    rows = planned(f"{model} fp8-row").seconds["elementwise"]
    apart = planned(f"{model} fp8-row {separate}").seconds["elementwise"]
    assert (rows - apart) / 128 == pytest.approx((4 * layers - 12 * 128256 * 4096) / bandwidth)


def test_what_is_folded_is_read_twice():
    """2 bytes an element for the amax: of inputs, gradients, and weights once a step."""
    model = f"{LLAMA_8B} --micro-batch-size 2 --precision-recipe fp8-tile"
    folded = planned(model).seconds["quantization"]
    apart = planned(f"{model} --recipe-set folding=false").seconds["quantization"]
    bandwidth = gpu("h200")["copy_tb_per_s"] * gpu("h200")["kernel_share"] * 1e12
    layers = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    tokens = 256 * 4096 * sum(inputs + outputs for inputs, outputs in layers)
    weights = sum(inputs * outputs for inputs, outputs in layers)
    assert folded - apart == pytest.approx(2 * 32 * (tokens + weights) / bandwidth)


def test_blackwell_multiplies_nvfp4_only_through_transformer_engine():
    precision = load_recipe("nvfp4").configs["nvfp4"]
    assert gemm_name(precision, "fprop", (10, 0), True) == "nvfp4"
    assert gemm_name(precision, "fprop", (10, 0), False) == "bf16"
    assert gemm_name(precision, "fprop", (8, 0), True) == "fp32"


def test_a_gemm_takes_its_flops_or_its_bytes():
    # 2 * 1000^3 FLOPs at 100 TFLOP/s; 2 * (3 * 1000 * 1000) bytes at 1 TB/s are less.
    assert gemm_seconds(1000, 1000, 1000, "bf16", SIMPLE) == pytest.approx(20e-6)
    # One column: 2 * (1e6 + 1000 + 1000) bytes.
    assert gemm_seconds(1000, 1000, 1, "bf16", SIMPLE) == pytest.approx(2.004e-6)


def test_collectives_over_a_host_and_between_hosts():
    cluster = Cluster(SIMPLE, 8)
    # 8e9 bytes over 4 ranks of a host: 3/4 of it at 100 GB/s.
    assert link(cluster, 4, 1).gather(8e9, 4) == pytest.approx(0.06)
    # 16 ranks next to each other: 8 cards of 10 GB/s a host. Every eighth rank: one card.
    assert link(cluster, 16, 1).bandwidth == 80e9
    assert link(cluster, 2, 8).bandwidth == 10e9


def test_the_distributed_optimizer_moves_as_much_as_an_all_reduce_of_three_quarters():
    layout = Layout(1, 1, 1, 4, 1, 1, 1, 0, (1,))
    args = parse("@llama3-tiny --use-distributed-optimizer")
    count, cluster = Parameters(10**9, 0), Cluster(SIMPLE, 8)
    sharded = data_parallel(args, count, layout, cluster)
    assert sharded.gradients == pytest.approx(4e9 * 0.75 / 100e9)
    assert sharded.parameters == pytest.approx(2e9 * 0.75 / 100e9)
    halved = parse("@llama3-tiny --use-distributed-optimizer --grad-reduce-in-bf16")
    assert 2 * data_parallel(halved, count, layout, cluster).gradients == sharded.gradients
    whole = data_parallel(parse("@llama3-tiny"), count, layout, cluster)
    assert whole.gradients == pytest.approx(2 * sharded.gradients) and whole.parameters == 0


def test_18_bytes_a_parameter_of_which_12_are_sharded():
    args = parse("@llama3-tiny --use-distributed-optimizer")
    layout = Layout(1, 1, 1, 4, 1, 1, 1, 0, (1,))
    found = state(args, Parameters(1000, 0), layout)
    assert found == {"weights": 2000, "main gradients": 4000, "optimizer": 3000}
    one = state(parse("@llama3-tiny"), Parameters(1, 0), layout._replace(data=1))
    assert sum(one.values()) == 18


def test_1f1b_holds_a_microbatch_less_in_each_later_stage():
    layout = Layout(1, 4, 1, 1, 1, 1, 8, 0, (8,) * 4)
    assert [in_flight(layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(layout._replace(microbatches=2), 0) == 2
    # Interleaved, the first of 4 stages with 2 pieces each warms up 2 * 3 + 4 pieces, and 1.
    assert in_flight(layout._replace(virtual=2), 0) == 5.5


def test_the_bubble_is_that_of_the_textbook():
    """(p - 1) / m of the time of the microbatches, where stages are equal."""
    text = f"@{EXAMPLES}/llama3-8b.args --num-layers 32 --pipeline-model-parallel-size 4"
    args = TrainingArguments(shlex.split(text)).parse(4)
    device = Device(gpu("h200"), True, "mamba-ssm")
    # A vocabulary so small that the ends weigh nothing.
    (found,) = plan(
        [candidate_of(args, 4)],
        load_recipes(args.precision_recipe, args.recipe_set),
        128,
        device,
        Cluster(device.gpu, 8),
    )
    seconds = Counter(found.seconds)
    work = found.step - seconds["pipeline bubble"] - seconds["optimizer"]
    assert seconds["pipeline bubble"] / work == pytest.approx(3 / 256, rel=0.02)


def test_every_figure_says_where_it_comes_from():
    for kind in kinds():
        figures = gpu(kind).figures
        assert figures.keys() >= gpu("h100").figures.keys() - {
            "gemm.fp8 1x128 . 128x128", "gemm.fp8 1x128 . 1x128"
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
    found = planned(f"{model} --precision-recipe {recipe} --quantized-param-gather", gpus=2)
    parts = found.memory[0].parts
    weights = parts["weights"] + parts.get("quantized weights", 0)
    assert weights == pytest.approx(2 * others + kept * linears, rel=1e-3)
    plain = planned(f"{model} --precision-recipe {recipe}", gpus=2)
    bandwidth = gpu("h200")["nvlink_gb_per_s"] * 1e9
    less = plain.seconds["data parallel"] - found.seconds["data parallel"]
    assert less == pytest.approx((2 - sent) * linears / 2 / bandwidth, rel=1e-3, abs=1e-9)
