"""``--dry-run``: parameters compared with actual models, and the output."""

import re
import shlex
from argparse import Namespace

import pytest
import torch

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.arguments.precision import Machine
from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import GpuEngine, ReferenceEngine
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.recipe_hook import _products, model_config_of
from megatron_lowbit.megatron.run import dry_run
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.recipes.show import model_layers

# isort: split
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.models.dist_utils import build_virtual_pipeline_stages
from megatron.training.training import destroy_global_state

RUN = """
    --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 500 --normalization RMSNorm --swiglu
    --disable-bias-linear --position-embedding-type rope --dry-run
"""
LAYERS = "--num-layers 4"
EXPERTS = f"{LAYERS} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96"
LATENT = f"{LAYERS} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-layernorm"
MTP = f"{LAYERS} --mtp-num-layers 1"
HYBRID = "--hybrid-layer-pattern M-M*ME --num-experts 4 --mamba-head-dim 16 --mamba-num-groups 2"
MODELS = {
    "dense, tied": LAYERS,
    "dense": f"{LAYERS} --untie-embeddings-and-output-weights",
    "GPT-2": "--num-layers 2 --no-position-embedding --group-query-attention --num-query-groups 2",
    "experts": EXPERTS,
    "multi-token prediction": MTP,
    "hybrid": HYBRID,
}
LAYOUTS = {
    "1 rank": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
}
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Leave no global variable of Megatron-LM and no environment variable behind."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    yield
    destroy_global_state()


def parse(line: str, ranks: int = 1) -> Namespace:
    destroy_global_state()
    return parse_arguments(shlex.split(f"{RUN} {line} --world-size {ranks}"))


def built(args: Namespace, stage: int) -> int:
    """Count the parameters of a rank of a model whose tensors have memory."""
    with dry_run.rank_of_stage(args, stage):
        config = model_config_of(args)
        builder = config.get_builder_cls()(config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        virtual = args.virtual_pipeline_model_parallel_size
        chunks = build_virtual_pipeline_stages(builder.build_model, groups, virtual)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    assert not any(p.is_meta for p in parameters)
    return sum(p.numel() for p in parameters)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_of_a_rank_are_those_of_the_model_with_memory(model, layout):
    ranks, flags = layout
    args = parse(f"{model} {flags}", ranks)
    stages = dry_run.model_stages(args)
    assert len(stages) == args.pipeline_model_parallel_size
    for number, stage in enumerate(stages):
        assert stage.parameters.rank == built(args, number)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_layout_has_the_same_parameters_in_all(model):
    def whole(layout: tuple[int, str]) -> int:
        args = parse(f"{model} {layout[1]}", layout[0])
        return sum(stage.parameters.stage for stage in dry_run.model_stages(args))

    assert len({whole(layout) for layout in LAYOUTS.values()}) == 1


def test_experts_are_divided_over_the_ranks_that_share_them():
    args = parse(f"{EXPERTS} --expert-model-parallel-size 2", 2)
    (stage,) = dry_run.model_stages(args)
    # Two of four experts in each of four blocks: gate, up and down projection.
    assert stage.parameters.experts == 4 * 2 * 3 * 64 * 96
    assert stage.parameters.stage == stage.parameters.rank + stage.parameters.experts


@pytest.mark.parametrize("rank", [(), (32,)], ids=["queries", "low-rank queries"])
@pytest.mark.parametrize("pattern", ["M-M*ME", "ME+-/+E/+E", "M*/*M"])
def test_layers_that_recipes_are_shown_for_are_the_models(pattern, rank):
    """lowbit-recipes show builds no model; of all experts it has the first."""
    line = f"{HYBRID} --hybrid-layer-pattern {pattern} --fp4-recipe nvfp4 --moe-router-topk 2"
    if "+" in pattern:
        line += " --multi-latent-attention --kv-lora-rank 16"
        line += "".join(f" --q-lora-rank {size}" for size in rank)
    (stage,) = dry_run.model_stages(parse(line))
    found = {layer._replace(path=re.sub(r"(?<=ts\.)\d", "0", layer.path)) for layer in stage.layers}
    shown = model_layers(pattern, 1, *rank)
    assert len(shown) == len(set(shown)) and set(shown) == found


def test_blocks_that_local_layers_lack_are_refused():
    """Megatron-LM would build modules that return their input."""
    args = parse(HYBRID.replace("M-M*ME", "M-G") + " --transformer-impl local")
    with pytest.raises(
        UserError, match="M-G with --transformer-impl local: D and G would be empty"
    ):
        model_config_of(args)


def test_multi_latent_attention_counted_by_hand():
    (stage,) = dry_run.model_stages(parse(LATENT))
    heads, rotary, nope, value = 4, 64, 128, 128
    query = 64 * 32 + 32 + 32 * heads * (nope + rotary)
    key_value = 64 * (16 + rotary) + 16 + 16 * heads * (nope + value)
    block = query + key_value + heads * value * 64 + 3 * 64 * 128 + 2 * 64
    assert stage.parameters.rank == 4 * block + 512 * 64 + 64


def test_interleaved_stages_hold_their_chunks():
    stages = dry_run.model_stages(
        parse(f"{LAYERS} {INTERLEAVED} --fp4-recipe nvfp4 --global-batch-size 8", 8)
    )
    blocks = [sorted({layer.block for layer in stage.layers}) for stage in stages]
    assert blocks == [[0, 2], [1, 3]] and [stage.blocks for stage in stages] == [2, 2]


def run(line: str, capsys, ranks: int = 1) -> str:
    pretrain.main(shlex.split(f"{RUN} {line} --world-size {ranks}"))
    return capsys.readouterr().out


@pytest.mark.parametrize("model", [LAYERS, EXPERTS, HYBRID])
def test_recipe_parameters_memory_and_time_are_printed_once(model, capsys):
    shown = run(f"{model} --fp4-recipe nvfp4 {LAYOUTS['PP2'][1]}", capsys, 16)
    assert shown.count("linear layers quantized") == 1
    assert shown.count("parameters; world size 16: TP 1, CP 1, EP 1, PP 2, DP 8") == 1
    assert "GiB per rank" in shown and "tokens/s per GPU" in shown
    assert "using world size: 16" in shown and "end of arguments" not in shown
    assert shown.rstrip().endswith("dry run: nothing was trained, nothing was written")


def test_layers_and_products_are_those_of_the_gpus_that_are_described(capsys):
    """Megatron-LM's default there is Transformer Engine's layers."""
    line = f"{LAYERS} --precision-recipe mxfp8"
    shown = run(f"{line} --gpu h100", capsys)
    assert "planned for 1 x NVIDIA H100" in shown and "from --gpu" in shown
    assert "quantization engine: fused (GPU of compute capability 9.0)" in shown
    assert ": folded to FP8 tensors, " in shown
    assert "transformer layers: transformer_engine" in shown
    assert "mxfp8: this project's kernels" in shown
    assert "mxfp8: Transformer Engine MXFP8BlockScaling" in run(f"{line} --gpu b200", capsys)
    odd = f"{HYBRID} --mamba-state-dim 4 --precision-recipe fp8-tile-e4m3 --gpu h100"
    assert re.search(r"weights of \d+ x \d+: this project's kernels", run(odd, capsys))
    shown = run(f"{line} --transformer-impl local --quantization-engine reference", capsys)
    assert "transformer layers: local" in shown and "local layers, BF16" in shown
    assert "quantization engine: reference (requested)" in shown


@pytest.mark.parametrize(
    ("point", "is_reached"),
    [
        ("iteration: 1", True),
        ("iteration: 2", False),
        ("tokens: 64", True),
        ("tokens: 65", False),
        ("fraction: 0.5", True),
        ("fraction: 0.51", False),
    ],
)
def test_a_switch_after_the_end_is_named(capsys, point, is_reached):
    """It takes over at the start of an iteration, of which there are two with 64 tokens."""
    switch = f"switches.late='{{{point}, to: bf16}}'"
    line = f"{LAYERS} --global-batch-size 2 --precision-recipe mxfp8 --recipe-set {switch}"
    shown = run(f"{line} --gpu h100", capsys)
    message = "switch late is not reached: the run has 2 iterations of 64 tokens"
    assert (message in shown) != is_reached and "switch late: from " in shown


def test_a_missing_checkpoint_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="holds no checkpoint; omit it"):
        run(f"{LAYERS} --load {tmp_path}", capsys)
    run(f"{LAYERS} --load {tmp_path} --save {tmp_path} --save-interval 1", capsys)


def test_what_gpus_refuse_is_refused(capsys):
    with pytest.raises(UserError, match="its causal layers make their own mask"):
        run(f"{LAYERS} --reset-attention-mask", capsys)
    with pytest.raises(UserError, match="lowbit needs --cross-entropy-loss-fusion"):
        run(f"{LAYERS} --cross-entropy-fusion-impl lowbit", capsys)
    local = f"{LAYERS} --reset-attention-mask --transformer-impl local"
    with pytest.raises(UserError, match="give --no-masked-softmax-fusion"):
        run(local, capsys)
    run(f"{local} --no-masked-softmax-fusion", capsys)


def test_the_table_is_of_the_whole_model(capsys):
    shown = run(f"{LAYERS} --fp8-recipe fp8-tile {LAYOUTS['PP2'][1]}", capsys, 2)
    assert "of 16 linear layers quantized" in shown


def test_without_a_recipe_there_is_no_table(capsys):
    shown = run(LAYERS, capsys)
    assert "nothing is quantized" in shown and "linear layers quantized" not in shown
    assert "tokens/s per GPU" in shown


def test_a_model_that_plans_do_not_cover_says_so(capsys):
    shown = run(f"{LATENT} --fp4-recipe nvfp4", capsys)
    assert "linear layers quantized" in shown and "parameters; world size 1:" in shown
    assert "memory and time are not planned: --multi-latent-attention" in shown


def test_nothing_is_written_and_no_run_is_left_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = f"{LAYERS} --fp4-recipe nvfp4 --save save --tensorboard-dir board --save-interval 1"
    run(f"{lines} --data-cache-path cache", capsys)
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()
    run(lines, capsys)


def test_other_ranks_of_a_launcher_say_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    pretrain.main(shlex.split(f"{RUN} {LAYERS} --fp4-recipe nvfp4"))
    assert "recipe" not in capsys.readouterr().out.split("end of arguments")[-1]


def test_llama_3_405b_takes_no_memory(capsys):
    """Its stages have 126 blocks of 3.2 billion parameters, 1.6 TB in all."""
    line = """--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128
        --group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights
        --vocab-size 128256 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 9
        --sequence-parallel --global-batch-size 2048 --seq-length 8192
        --max-position-embeddings 8192 --fp4-recipe nvfp4 --make-vocab-size-divisible-by 1"""
    layer = 16384 * (16384 + 2 * 8 * 128) + 16384 * 16384 + 3 * 16384 * 53248 + 2 * 16384
    whole = 126 * layer + 2 * 128256 * 16384 + 16384
    shown = run(line, capsys, 9216)
    assert f"{whole:,} parameters; world size 9216:" in shown.replace("\n", " ")


def test_a_recipe_for_layers_that_the_model_lacks_is_refused(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: nowhere\n"
        "description: for layers that no model has\n"
        "configs: {bf16: {}}\n"
        "matchers:\n"
        "  nowhere: {type: glob, pattern: '*nowhere*', config: bf16, enabled: true}\n"
    )
    with pytest.raises(UserError, match="matches no"):
        run(f"{LAYERS} --precision-recipe {recipe}", capsys)


def test_cuda_graphs_are_described_where_they_cannot_run(capsys):
    """They spare the CPU its launches, and refuse what they refuse on a GPU."""
    graphs = f"{LAYERS} --fp4-recipe nvfp4 --cuda-graph-impl local"
    fresh = "--precision-recipe if4 --recipe-set wgrad.hadamard.signs=fresh"
    with pytest.raises(UserError, match="fresh signs of a format without kernels"):
        run(f"{LAYERS} --cuda-graph-impl local {fresh}", capsys)

    def waits(flags: str) -> float:
        shown = run(flags, capsys)
        line = next(line for line in shown.splitlines() if "waiting for the CPU" in line)
        return float(line.split("│")[2])

    assert waits(f"{graphs} --eval-iters 0") < waits(f"{LAYERS} --fp4-recipe nvfp4 --eval-iters 0")


def test_graphs_of_experts_are_described_by_their_parts(capsys):
    experts = f"{LAYERS} --fp4-recipe nvfp4 --eval-iters 0 --num-experts 2 --disable-bias-linear"
    graphs = f"{experts} --cuda-graph-impl transformer_engine"
    with pytest.raises(UserError, match="give --cuda-graph-modules attn moe_router"):
        run(graphs, capsys)
    run(f"{graphs} --cuda-graph-modules attn moe_router moe_preprocess", capsys)


def test_cuda_graphs_on_gpus_are_those_that_megatron_lm_makes_of_the_arguments(monkeypatch):
    graphs = "--cuda-graph-impl local --eval-iters 0"
    here = parse(f"{LAYERS} {graphs}")
    assert (here.cuda_graph_impl, here.cuda_graph_impl_on_gpus) == ("none", "local")
    monkeypatch.setattr(Machine, "current", lambda: Machine((9, 0), transformer_engine=True))
    for flags in (graphs, "--enable-cuda-graph --eval-iters 0"):
        assert parse(f"{LAYERS} {flags}").cuda_graph_impl_on_gpus == "local"


# -- products of a recipe --------------------------------------------------------------------------

TILES = "fp8-1x128-e4m3 pow2 x fp8-128x128-e4m3 pow2"
NARROW = "fprop.accumulation={inner: bf16, promote_every: 128}"


def products(engine, *overrides, name="fp8-tile"):
    return list(_products(load_recipe(name, overrides), engine, model_layers(None, 4)))


@pytest.mark.parametrize("engine", [ReferenceEngine("requested"), GpuEngine((9, 0))])
def test_sums_are_those_of_the_recipe(engine):
    """Emulated sums are the same on every device; other GEMMs keep the engine's."""
    plain, changed = products(engine), products(engine, NARROW)
    narrow = f"  fprop, {TILES}: dequantized to FP32, BF16 sums of 128 products, added in FP32"
    assert narrow in changed and narrow not in plain
    assert len(changed) == len(plain) and len(set(changed) - set(plain)) == 1
    (never,) = set(products(engine, "wgrad.accumulation={inner: fp8, promote_every: null}")) - {
        *plain
    }
    assert never.startswith("  wgrad, ") and never.endswith(": dequantized to FP32, FP8 sums")


def test_a_gemm_in_high_precision_with_narrow_sums_is_named():
    accumulation = "accumulation={inner: bf16, promote_every: 64}"
    shown = products(
        ReferenceEngine("requested"), f"configs.bf16.fprop.{accumulation}", name="bf16"
    )
    assert shown == [
        "  fprop, bf16 x bf16: dequantized to FP32, BF16 sums of 64 products, added in FP32"
    ]


def test_products_that_are_not_folded_are_named():
    engine = GpuEngine((9, 0))
    folded, plain = products(engine, name="mxfp8"), products(engine, "folding=false", name="mxfp8")
    assert all("folded to FP8 tensors" in line for line in folded)
    assert all("exact BF16, FP32" in line for line in plain)
