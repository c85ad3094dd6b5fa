"""Output of lowbit-plan: refusals, arguments that change the answer, the command at the end."""

import re
import shlex
import subprocess
import sys
from itertools import pairwise

import pytest
from built import EXAMPLES, LLAMA_8B

from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.command import main
from megatron_lowbit.planning.layouts import layout_of
from megatron_lowbit.planning.search import changes, enough_gpus, plan_run
from megatron_lowbit.planning.training_arguments import TrainingArguments

TINY = f"@{EXAMPLES}/llama3-tiny.args --vocab-size 1000"
EXPERTS = f"@{EXAMPLES}/qwen3-30b-a3b.args --vocab-size 151936 --num-layers 4"


def searched(text: str, gpus: int = 1, gpu_name: str = "h200", gpus_per_node: int = 8):
    return plan_run(shlex.split(text), gpu_name, gpus, gpus_per_node)


def printed(text: str, capsys) -> list[str]:
    main(shlex.split(text))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "enough"),
    [
        pytest.param(
            f"--gpus 8 --gpu b200 @{EXAMPLES}/llama3-405b.args --vocab-size 128256",
            48,
            marks=pytest.mark.slow,
        ),
        (f"--gpus 1 --gpu h100 {LLAMA_8B} --recipes bf16 fp8-tile", 2),
        (f"--gpus 1 --gpu h100 {LLAMA_8B} --as-given", 2),
        # Without a sharded optimizer no number of replicas helps, another layout does.
        (f"--gpus 8 --gpu h100 {LLAMA_8B} --as-given", 8),
        (f"--gpus 37 {LLAMA_8B}", 48),
    ],
)
def test_an_impossible_plan_names_a_number_of_gpus_and_prints_nothing(
    words, enough, capsys, caplog
):
    caplog.set_level("INFO")
    with pytest.raises(UserError, match=f"; use --gpus {enough}\\b") as error:
        main(shlex.split(words))
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == caplog.text == ""


def test_the_layout_as_given_of_more_layers_than_are_searched():
    message = (
        r"needs \d+ GiB per GPU of \d+ usable; layouts of more than 1024 layers are not searched"
    )
    with pytest.raises(UserError, match=f"the layout as given {message}$"):
        main(shlex.split(f"--gpus 1 {LLAMA_8B} --num-layers 1025 --as-given"))


def test_the_number_of_gpus_is_the_smallest_of_those_tried():
    model = f"{LLAMA_8B} --num-layers 64 --precision-recipe fp8-tile"
    assert enough_gpus(searched(model, gpu_name="h100")) == 4
    assert searched(model, gpu_name="h100", gpus=4).ranked
    assert not searched(model, gpu_name="h100", gpus=3).ranked


def test_no_number_of_gpus_is_enough_for_a_batch_that_none_divides():
    assert enough_gpus(searched(LLAMA_8B, gpus=37, gpus_per_node=37)) is None


def test_no_number_of_gpus_is_searched_that_cannot_hold_the_weights(monkeypatch):
    run = searched(f"{LLAMA_8B} --ffn-hidden-size {2**62}")
    monkeypatch.setattr("megatron_lowbit.planning.search.candidates", None)
    assert enough_gpus(run) is None


def test_grouped_experts_are_named_with_the_speed_that_a_search_finds(capsys):
    plain, grouped = (
        searched(f"{EXPERTS}{more}", gpus=2, gpu_name="b200").best.tokens_per_second
        for more in ("", " --moe-grouped-gemm")
    )
    assert grouped > 1.1 * plain
    lines = printed(f"--gpus 2 --gpu b200 {EXPERTS}", capsys)
    (line,) = (line for line in lines if line.startswith("--moe-grouped-gemm"))
    ratio = float(re.search(r"([\d.]+)x the tokens/s", line)[1])
    assert ratio == pytest.approx(grouped / plain, rel=0.02)
    given = list(changes(searched(f"{EXPERTS} --moe-grouped-gemm", gpus=2)))
    assert not any("grouped" in line for line in given)


def test_a_fused_all_reduce_that_no_searched_layout_has_is_named(capsys):
    words = f"--gpus 2 {TINY} --precision-recipe bf16 --fused-allreduce-norm"
    *lines, command = printed(words, capsys)
    assert sum(line.startswith("--fused-allreduce-norm: ignored") for line in lines) == 1
    assert "--fused-allreduce-norm" not in command
    layout = "--as-given --transformer-impl local --tensor-model-parallel-size 2"
    *lines, command = printed(f"{words} {layout}", capsys)
    assert not any("ignored" in line for line in lines) and "--fused-allreduce-norm" in command


def test_arguments_that_a_given_layout_lacks_are_named(capsys):
    lines = printed(f"--gpus 8 --gpu h200 --as-given {EXPERTS} --micro-batch-size 1", capsys)
    (line,) = (line for line in lines if line.startswith("--use-distributed-optimizer"))
    assert float(re.search(r"([\d.]+)x the memory", line)[1]) < 0.9


@pytest.mark.parametrize(
    ("words", "starts"),
    {
        f"--gpus 1 {TINY}": f"lowbit-pretrain @{EXAMPLES}",
        f"--gpus 16 {TINY} --lr 1e-3": "torchrun --nnodes 2 ",
        f"--gpus 12 --gpus-per-node 8 {TINY} --global-batch-size 24": "torchrun --nnodes 2 ",
        f"--gpus 8 --gpu h100 --as-given {LLAMA_8B} --tensor-model-parallel-size 8": (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 "
        ),
        f"--gpus 2 --gpu h100 --as-given {TINY} --context-parallel-size 2": (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 "
        ),
        f"--gpus 8 --gpu b200 --as-given {LLAMA_8B} --tensor-model-parallel-size 8": (
            "torchrun --nproc-per-node 8 "
        ),
        f"--gpus 8 {TINY} --recompute-granularity selective --recompute-modules core_attn": (
            "torchrun --nproc-per-node 8 --no-python lowbit-pretrain --num-layers"
        ),
        f"--gpus 2 {LLAMA_8B} --recipes bf16 fp8-tile --data-path 'my data'": "torchrun",
    }.items(),
)
def test_the_last_line_is_a_command_that_asks_for_the_first_layout(words, starts, capsys):
    lines = printed(words, capsys)
    assert lines[-1].startswith(starts) and not lines[-1].endswith(" ")
    tokens = shlex.split(lines[-1])
    run = tokens[tokens.index("lowbit-pretrain") + 1 :]
    gpus = int(re.search(r"--gpus (\d+)", words)[1])
    args = TrainingArguments(run).parse(gpus)
    layout = layout_of(args, gpus)
    if "--as-given" not in words and "--recipes" not in words:
        row = [str(size) for size in layout[:7]]
        table = [re.split(r"\s*│\s*", line.strip("│ ")) for line in lines if line.startswith("│")]
        assert next(cells for cells in table if len(cells) == 12)[:7] == row
    if "--recipes" in words:
        assert args.precision_recipe == ["fp8-tile"] and args.data_path == ["my data"]
        assert "--mock-data" not in run
    assert ("--tokenizer-type", "NullTokenizer") in pairwise(run)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", True),
        ("--tokenizer-type HuggingFaceTokenizer", True),
        ("--tokenizer-type NullTokenizer", False),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m", False),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model t", False),
        ("--tokenizer-model t", True),
        ("--vocab-file v --merge-file m", True),
    ],
)
def test_the_command_has_the_given_tokenizer(given, added, capsys):
    model = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
    batch = "--micro-batch-size 1 --global-batch-size 8 --vocab-size 1000"
    command = printed(f"--gpus 1 --gpu h100 {model} {batch} {given}", capsys)[-1]
    count = given.count("--tokenizer-type") + added
    assert command.count("--tokenizer-type") == count
    assert added == command.endswith("--mock-data --tokenizer-type NullTokenizer")


def test_batch_sizes_by_schedule_are_refused(capsys):
    words = f"--gpus 8 --gpu h100 {LLAMA_8B} --step-batch-size-schedule '0:8 1e6:16'"
    with pytest.raises(UserError, match=r"^--step-batch-size-schedule: "):
        main(shlex.split(words))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_parameters_are_named_before_connections(ranks, monkeypatch):
    """Whatever number of connections this machine has."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    words = f"--gpus 8 --gpu h100 {LLAMA_8B} --use-megatron-fsdp --ckpt-format fsdp_dtensor"
    with pytest.raises(UserError, match="fully sharded data parallelism: "):
        main(shlex.split(f"{words} --tensor-model-parallel-size {ranks}"))


@pytest.mark.slow
def test_the_command_trains(tmp_path):
    """As a shell runs it, on a CPU, from the output in a pipe."""
    plan = [f"{sys.prefix}/bin/lowbit-plan", "--gpus", "1", *shlex.split(TINY)]
    words = ["--train-iters", "2", "--global-batch-size", "2", "--lr-warmup-iters", "0"]
    words += ["--eval-iters", "1"]
    out = subprocess.run([*plan, *words], capture_output=True, text=True, check=True).stdout
    command = out.splitlines()[-1].replace("lowbit-pretrain", f"{sys.prefix}/bin/lowbit-pretrain")
    run = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-500:]
    assert "validation loss at iteration 2" in run.stdout
