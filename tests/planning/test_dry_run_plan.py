"""A dry run plans as ``lowbit-plan --as-given`` does, on any machine."""

import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from megatron_lowbit.command_line import shipped_presets
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.planning.command import main as lowbit_plan
from megatron_lowbit.planning.report import describe_plan
from tests.marks import others_slow

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LLAMA = f"@llama3-8b --global-batch-size 64 {SHARDED}"
# Arguments of Megatron-LM's functional tests, without folders and logs.
GPT3_7B = """--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --untie-embeddings-and-output-weights --micro-batch-size 1
    --global-batch-size 8 --seq-length 8192 --max-position-embeddings 8192 --train-iters 25
    --lr 0.00015 --lr-decay-iters 320000 --distributed-backend nccl --eval-interval 1000
    --transformer-impl transformer_engine --deterministic-mode --no-gradient-accumulation-fusion
    --use-mcore-models --ckpt-format torch_dist --async-save --use-persistent-ckpt-worker"""
MOE = """--num-layers 12 --hidden-size 512 --num-attention-heads 8 --swiglu --disable-bias-linear
    --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-permute-fusion
    --moe-token-dispatcher-type alltoall --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 2 --train-iters 50 --lr 1e-4 --disable-bias-linear --normalization RMSNorm"""
LISTS = [  # GPUs and arguments
    (8, f"{LLAMA} --grad-reduce-in-bf16 --cross-entropy-loss-fusion"),
    (8, f"{LLAMA} --precision-recipe nvfp4 --tensor-model-parallel-size 8 --sequence-parallel"),
    (8, f"{LLAMA} --transformer-impl local --fp8-recipe fp8-tile --cross-entropy-loss-fusion"),
    (16, f"{LLAMA} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"),
    (8, f"{LLAMA} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"),
    (8, f"{LLAMA} --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
        f"--exp-avg-sq-dtype bf16"),
    (8, f"{LLAMA} --precision-recipe nvfp4 --quantized-param-gather"),
    (4, f"{LLAMA} --cuda-graph-impl local --precision-recipe fp8-tile --eval-iters 0"),
    (8, f"{LLAMA} --fp8-format hybrid --fp8-recipe blockwise"),
    (8, "@hybrid-12b --precision-recipe fp8-tile-e4m3 --tensor-model-parallel-size 8 "
        "--sequence-parallel"),
    (4, GPT3_7B + " --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"),
    (4, GPT3_7B + " --tensor-model-parallel-size 4 --micro-batch-size 2"),
    (8, MOE + " --expert-model-parallel-size 2"),
    (8, MOE + " --expert-model-parallel-size 4 --fp8-recipe mxfp8 --tensor-model-parallel-size 2 "
              "--sequence-parallel"),
    (64, "@llama3-70b --tensor-model-parallel-size 8 --sequence-parallel --global-batch-size 64 "
         + SHARDED),
    (8, "@qwen3-30b-a3b --expert-model-parallel-size 8 --moe-grouped-gemm --global-batch-size 64"),
    *[(8, f"@{Path(name).stem} --global-batch-size 256 {SHARDED}") for name in shipped_presets()
      if "405b" not in name and "70b" not in name and "30b" not in name],
]  # fmt: skip
_ENDS = ("dry run", "--", "added because", "torchrun", "lowbit-pretrain")
SMALL = [1, 2, 8, 12]
"""Numbers of lists for every run of the tests."""


def words(line: str) -> list[str]:
    line = f"{line} {DATA}"
    return [f"@{EXAMPLES / w[1:]}.args" if w[0] == "@" else w for w in shlex.split(line)]


def tables(output: str) -> list[str]:
    """Return the lines from the table of memory on.

    The last words of a dry run, and the advice and the command of lowbit-plan, are not among them.
    """
    lines = output.splitlines()
    first = next(n for n, line in enumerate(lines) if "GiB per rank" in line)
    return [
        line.rstrip() for line in takewhile(lambda line: not line.startswith(_ENDS), lines[first:])
    ]


@pytest.mark.parametrize("number", others_slow(range(len(LISTS)), SMALL))
def test_a_dry_run_prints_the_plan_of_lowbit_plan(number, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    gpus, line = LISTS[number]
    lowbit_plan(["--gpus", str(gpus), "--as-given", *words(line)])
    expected = tables(capsys.readouterr().out)
    pretrain.main([*words(line), "--dry-run", "--world-size", str(gpus)])
    assert tables(capsys.readouterr().out) == expected


REFUSED = {
    "--pad-documents-to-multiple-of 4": "of 4 needs --dataloader-inter-document-masking",
    "--context-parallel-size 2 --dataloader-inter-document-masking": (
        "masking needs --pad-documents-to-multiple-of 4, or a multiple"
    ),
    "--context-parallel-size 2 --transformer-impl local": "2 with --transformer-impl local: its ",
    "--mxnorm --normalization RMSNorm --precision-recipe mxfp8": "needs --transformer-impl local",
    "--quantized-param-gather --use-distributed-optimizer": "needs a recipe, such as bf16",
    "--skip-bad-iterations 2": "needs --save and --load with the same folder",
    "--num-layers-at-end-in-bf16 2": "needs --first-last-layers-bf16",
    "--sandwich-norm": "exclude --transformer-impl transformer_engine",
    "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --fp8-recipe mxfp8": (
        "it replays as one; use local"
    ),
}
"""Arguments that training refuses, and parts of the errors."""


@pytest.mark.parametrize("flags", REFUSED)
def test_what_training_refuses_has_no_plan_and_no_dry_run(flags):
    line = words(f"{LLAMA} --transformer-impl transformer_engine {flags}")
    for refused in (
        lambda: lowbit_plan(["--gpus", "8", "--as-given", *line]),
        lambda: lowbit_plan(["--gpus", "8", *line]),
        lambda: pretrain.main([*line, "--dry-run", "--world-size", "8"]),
    ):
        with pytest.raises(UserError, match=REFUSED[flags]):
            refused()


def test_a_dry_run_refuses_what_the_fused_all_reduce_excludes():
    """Its models are built without it."""
    line = words(f"{LLAMA} --transformer-impl local --tensor-model-parallel-size 2 "
                 "--precision-recipe bf16 --fused-allreduce-norm --apply-layernorm-1p")  # fmt: skip
    with pytest.raises(UserError, match=r"-norm needs a model without --apply-layernorm-1p$"):
        pretrain.main([*line, "--dry-run", "--world-size", "8"])


@pytest.mark.parametrize(("flags", "gib"), [("", "29.92"), ("--grad-reduce-in-bf16", "14.96")])
def test_main_gradients_have_the_bytes_that_are_asked_for(flags, gib, capsys):
    """8,030,261,248 parameters of 4 or 2 bytes."""
    line = f"@{EXAMPLES / 'llama3-8b'}.args --vocab-size 128256 --bf16 {flags} --dry-run"
    for part in describe_plan(line.split(), 8, "h200", "from --gpu"):
        plain_console(130).print(part)
    rows = capsys.readouterr().out.splitlines()
    (row,) = (row for row in rows if "main gradients" in row)
    assert row.split("│")[2].strip() == gib == f"{8_030_261_248 * (2 if flags else 4) / 2**30:.2f}"


def test_a_short_log_does_not_change_the_plan(capsys):
    line = f"@{EXAMPLES / 'llama3-8b'}.args --vocab-size 128256 --bf16 --save runs --dry-run"
    plans = []
    for flags in ([], ["--short-log"]):
        for part in describe_plan([*line.split(), *flags], 8, "h200", "from --gpu"):
            plain_console(130).print(part)
        plans.append(capsys.readouterr().out)
    assert "main gradients" in plans[0] and plans[0] == plans[1]


def test_a_kind_of_gpu_without_figures_is_refused(capsys):
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1"
    line += " --max-position-embeddings 32 --micro-batch-size 1 --train-iters 1 --dry-run"
    with pytest.raises(ValueError, match=r"--gpu h300: not in hardware\.yaml; use one of h200"):
        pretrain.main([*words(line), "--gpu", "h300"])
