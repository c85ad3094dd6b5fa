"""Bad input ends in one line that names the argument, file or key, with exit code 2."""

import json
import shlex
import shutil

import pytest
from tiny_run import refused

from megatron_lowbit.errors import UserError
from megatron_lowbit.training.arguments import parse_arguments

GOOD = shlex.split("""--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --train-iters 2 --lr 1e-3 --data-path x""")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--fp4-recpie", "nvfp4"], ["--fp4-recpie", "--fp4-recipe"]),
        (["--num-attention-heads", "6"], ["--hidden-size 64", "--num-attention-heads 6"]),
        (
            ["--tensor-model-parallel-size", "3", "--hidden-size", "48"],
            ["--num-attention-heads 4", "--tensor-model-parallel-size 3"],
        ),
        (["--pipeline-model-parallel-size", "3"], ["--num-layers 4", "--pipeline"]),
        (["--sequence-parallel"], ["--sequence-parallel", "--tensor-model-parallel-size"]),
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--min-lr", "1"], ["--min-lr", "--lr"]),
        (["--lr-decay-style", "WSD"], ["--lr-wsd-decay-iters"]),
        (["--lr-warmup-iters", "2"], ["--lr-warmup-iters", "--lr-decay-iters"]),
        (["--seq-length", "64", "--max-position-embeddings", "32"], ["--max-position-embeddings"]),
        (["--train-iters", "0"], ["--train-iters", "positive"]),
        (["--precision-recipe", "a", "--fp4-recipe", "b"], ["--precision-recipe", "--fp4-recipe"]),
        (["--precision-recipe", "a", "--fp8-recipe", "b"], ["--precision-recipe", "--fp8-recipe"]),
        (["--overlap-param-gather"], ["--use-distributed-optimizer"]),
        (["--recompute-granularity", "full"], ["--recompute-method"]),
        (["--openai-gelu", "--squared-relu"], ["--openai-gelu", "--squared-relu"]),
        (["@missing.args"], ["missing.args"]),
    ],
)
def test_arguments_that_do_not_fit(extra, words):
    with pytest.raises(UserError) as caught:
        parse_arguments([*GOOD, *extra])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_unknown_recipe_names_the_near_one(pretrain_command, tmp_path):
    save = tmp_path / "run"
    error = refused(pretrain_command("--fp4-recipe", "nvpf4", "--train-iters", 1, "--save", save))
    assert "nvpf4" in error and "nvfp4" in error
    assert not save.exists()


SWITCH = ["--fp4-recipe", "nvfp4", "--recipe-set"]
TWO = ["--fp8-recipe", "fp8-tile", "--fp4-recipe", "mxfp4-backward"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fp8-recipe", "blokwise"], ["blokwise", "fp8-tile"]),
        (["--precision-recipe", "none.yaml"], ["none.yaml", "does not exist"]),
        (
            ["--precision-recipe", "nvfp4", "--fp4-recipe", "nvfp4"],
            ["--precision-recipe", "--fp4-recipe"],
        ),
        (["--fp8-recipe", "fp8-tile", "--fp4-recipe", "mxpf4"], ["mxpf4", "mxfp4"]),
        (
            [*TWO, "--recipe-set", "grad.rounding=nearest"],
            ["forward.grad.rounding=nearest", "backward.grad.rounding=nearest"],
        ),
        ([*TWO, "--recipe-set", "backward.grad.runding=nearest"], ["grad.runding", "rounding"]),
        (
            [*TWO, "--recipe-set", "forward.switches.heal={iteration: 1, to: bf16}"],
            ["fp8-tile", "switches", "combined"],
        ),
        ([*SWITCH, "switches.heal={iteration: 3, to: bf61}"], ["switches.heal.to", "bf61", "bf16"]),
        ([*SWITCH, "switches.heal={to: bf16}"], ["switches.heal", "iteration, tokens, fraction"]),
        (
            [*SWITCH, "switches.heal={iteration: 3, tokens: 9, to: bf16}"],
            ["switches.heal", "iteration, tokens, fraction"],
        ),
        (
            [*SWITCH, "switches.heal={fraction: 1.5, to: bf16}"],
            ["switches.heal.fraction", "less than 1"],
        ),
        (
            [*SWITCH, "switches.heal={iteration: 3, to: bf16, part: half}"],
            ["switches.heal.part", "forward", "backward"],
        ),
        (
            ["--fp8-recipe", "fp8-delayed", "--recipe-set", "amax_history.just_in_time=17"],
            ["just_in_time 17", "16"],
        ),
    ],
)
def test_recipes_that_do_not_fit(pretrain_here, tmp_path, arguments, words):
    """Nothing is left behind, not even the folder to save to."""
    save = tmp_path / "run"
    error = refused(pretrain_here(*arguments, "--train-iters", 1, "--save", save))
    for word in words:
        assert word in error, error
    assert not save.exists()


def test_switch_whose_rule_matches_nothing(pretrain_here, tmp_path):
    """Found at the start, not when the switch comes."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\nconfigs: {low: {input: {format: nvfp4}}}\nmatchers:\n"
        "  typo: {type: glob, pattern: '*linear_fc3', config: low, enabled: true}\n"
    )
    switch = f"switches.heal={{iteration: 1, to: {recipe}}}"
    save = tmp_path / "run"
    error = refused(pretrain_here(*SWITCH, switch, "--train-iters", 2, "--save", save))
    assert "mine" in error and "typo" in error
    assert not save.exists()


def test_layer_rule_that_matches_nothing(pretrain_here, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\nconfigs: {low: {input: {format: nvfp4}}}\nmatchers:\n"
        "  typo: {type: glob, pattern: '*linear_fc3', config: low, enabled: true}\n"
    )
    error = refused(pretrain_here("--precision-recipe", recipe, "--train-iters", 1))
    assert "typo" in error and "linear_fc" in error


def test_dataset_missing_truncated_or_of_another_tokenizer(pretrain_here, corpus, tmp_path):
    missing = refused(pretrain_here("--train-iters", 1, "--data-path", tmp_path / "none"))
    assert "none" in missing
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(corpus / f"data{suffix}", tmp_path / f"data{suffix}")
    with (tmp_path / "data.bin").open("r+b") as file:
        file.truncate(1000)
    truncated = refused(pretrain_here("--train-iters", 1, "--data-path", tmp_path / "data"))
    assert "data.bin" in truncated
    shutil.copy(corpus / "data.bin", tmp_path / "data.bin")
    sidecar = json.loads((tmp_path / "data.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps(sidecar | {"tokenizer_sha256": "0" * 64}))
    foreign = refused(pretrain_here("--train-iters", 1, "--data-path", tmp_path / "data"))
    assert "tokenizer" in foreign


def test_checkpoint_of_another_shape_is_refused(pretrain_here, tmp_path):
    save = tmp_path / "run"
    assert pretrain_here("--train-iters", 1, "--save", save).returncode == 0
    before = sorted(path.name for path in save.iterdir())
    error = refused(
        pretrain_here("--train-iters", 2, "--load", save, "--save", save, "--num-layers", 2)
    )
    assert "num_layers" in error and "4" in error and "2" in error
    assert sorted(path.name for path in save.iterdir()) == before


@pytest.mark.slow
def test_full_disk_while_saving_leaves_the_previous_checkpoint(
    pretrain_here, pretrain_command, tmp_path
):
    """A limit on file size stands for the full disk: the kernel refuses the write in mid-file."""
    import resource
    import subprocess

    save = tmp_path / "run"
    assert pretrain_here("--train-iters", 1, "--save", save).returncode == 0
    limit = 100_000
    original = subprocess.run

    def limited(*args, **kwargs):
        def lower():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return original(*args, preexec_fn=lower, **kwargs)

    subprocess.run = limited
    try:
        error = refused(pretrain_command("--train-iters", 2, "--load", save, "--save", save))
    finally:
        subprocess.run = original
    assert "checkpoint" in error
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000001"]
    assert not list(save.glob(".iter*"))
    assert pretrain_here("--train-iters", 2, "--load", save, "--save", save).returncode == 0
