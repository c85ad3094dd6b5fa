"""Bad input ends in one line that names the argument, file or key, with exit code 2."""

import errno
import json
import shlex
import shutil

import numpy as np
import pytest
from tiny_run import LATENT, done, refused, steps

from megatron_lowbit.data import dataset
from megatron_lowbit.megatron import recipe_hook
from megatron_lowbit.storage.files import write_tracker
from tests.hostile_checkpoints import Evil, write_metadata

EXPERTS = "--num-experts 4 --moe-layer-freq"
IN_FP8 = "--activation-func-fp8-input-store"
RESET = "--recipe-set 'oscillation={start: 2, period: 5, over: 3, ratio: 1.5}'"
MXNORM = "--train-iters 2 --normalization MXNorm"
LATE = f"{MXNORM} --precision-recipe mxfp8 --recipe-set switches.late="
IN_LATE = ("--normalization MXNorm: ", "(switch late: ")
STORED = "--quantized-param-gather"
DISTRIBUTED = f"--bf16 --use-distributed-optimizer {STORED}"
REFUSED = [
    # Arguments and what the error names.
    ("--fp4-recpie nvfp4", "--fp4-recpie", "--fp4-recipe"),
    ("--tensor-model-parallel-size 3", "world size", "3"),
    ("--seq-length 64", "max_position_embeddings (32)", "seq_length (64)"),
    ("--overlap-param-gather", "--overlap-param-gather"),
    ("--recompute-granularity full", "recompute_granularity", "recompute_method"),
    ("--expert-model-parallel-size 2", "num_experts", "expert model parallelism"),
    (f"{EXPERTS} [1]", "[1]"),
    (f"{IN_FP8} --no-bias-swiglu-fusion", f"{IN_FP8} needs"),
    (f"{IN_FP8} --use-te-activation-func", f"{IN_FP8} needs"),
    # Recipes.
    ("--fp4-recipe nvpf4", "nvpf4", "nvfp4"),
    ("--fp8-recipe fp8-tile --fp4-recipe mxfp4-backward --recipe-set backward.grad.runding=nearest",
     "grad.runding", "rounding"),
    ("--precision-recipe mxfp8 --recipe-set fallback=bf16 --mxnorm",
     "fallback and hot_channels do not go with --mxnorm"),
    (f"--fp4-recipe nvfp4 {RESET} --use-distributed-optimizer",
     "--use-distributed-optimizer does not go with a recipe's oscillation"),
    # MXNorm, also after a switch.
    (f"{MXNORM} --precision-recipe bf16", "recipe bf16 quantizes none of its layers"),
    (f"{MXNORM} --fp8-recipe fp8-tensorwise",
     "--normalization MXNorm: decoder.layers.0", "fp8-tensor-e4m3"),
    (f"{MXNORM} --fp8-recipe fp8-tile", "--hidden-size 64", "block of 128"),
    (f"{MXNORM} --precision-recipe mxfp8 --mxnorm-post-round",
     "--mxnorm-post-round needs --mxnorm-p 1"),
    (f"{LATE}'{{fraction: 0.5, to: bf16, part: forward}}'", *IN_LATE,
     "from fraction 0.5 on, forward by bf16", "is not quantized", "mxfp8-e4m3"),
    (f"{LATE}'{{tokens: 200, to: fp8-tensorwise}}'", *IN_LATE,
     "from tokens 200 on, all by fp8-tensorwise", "is fp8-tensor-e4m3"),
    (f"{LATE}'{{iteration: 1, to: fp8-tile}}'", *IN_LATE,
     "from iteration 1 on", "--hidden-size 64", "128"),
    # What Megatron-LM refuses while it builds the model.
    (f"{' '.join(map(str, LATENT))} --qk-l2-norm", "qk_l2_norm is not supported with MLA"),
    # Stored weights.
    (f"{STORED} --bf16 --precision-recipe nvfp4", STORED, "needs --use-distributed-optimizer"),
    (f"{DISTRIBUTED} --precision-recipe fp8-delayed", STORED, "under delayed scaling"),
    (f"{DISTRIBUTED} --precision-recipe mxfp4-backward", STORED, "in high precision"),
    (f"{DISTRIBUTED} --precision-recipe mxfp8 --mxnorm", STORED, "excludes --mxnorm"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), [(row[0], row[1:]) for row in REFUSED])
def test_arguments_and_recipes_that_do_not_fit(pretrain_here, tmp_path, arguments, words):
    """A refused run leaves no files, not even the folder to save to."""
    save = tmp_path / "run"
    error = refused(pretrain_here("--train-iters", 1, "--save", save, *shlex.split(arguments)))
    for word in words:
        assert word in error, error
    assert not save.exists()


def test_a_rule_that_matches_nothing(pretrain_here, tmp_path):
    """Those of a switch are checked at the start, not at the switch."""
    recipe, save = tmp_path / "mine.yaml", tmp_path / "run"
    recipe.write_text(
        "name: mine\nconfigs: {low: {input: {format: nvfp4}}}\nmatchers:\n"
        "  typo: {type: glob, pattern: '*linear_fc3', config: low, enabled: true}\n"
    )
    switch = ("--recipe-set", f"switches.heal={{iteration: 1, to: {recipe}}}")
    for arguments, word in (
        (("--precision-recipe", recipe), "linear_fc"), (("--fp4-recipe", "nvfp4", *switch), "mine")
    ):  # fmt: skip
        error = refused(pretrain_here(*arguments, "--train-iters", 2, "--save", save))
        assert "typo" in error and word in error
        assert not save.exists()


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


def test_token_ids_beyond_those_looked_at_first(pretrain_here, corpus, tmp_path, monkeypatch):
    shutil.copy(corpus / "data.idx", tmp_path / "data.idx")
    ids = np.fromfile(corpus / "data.bin", np.uint16)
    ids[1:] = 60000
    ids.tofile(tmp_path / "data.bin")
    begin = ("--train-iters", 1, "--data-path", tmp_path / "data")
    assert "has token ids from" in refused(pretrain_here(*begin))
    monkeypatch.setattr(dataset, "_CHECKED_TOKENS", 1)
    assert "iteration 1: tokens from" in refused(pretrain_here(*begin))


def test_a_checkpoint_of_another_shape_is_refused(pretrain_here, tmp_path):
    save = tmp_path / "run"
    done(pretrain_here("--train-iters", 1, "--save", save))
    before = sorted(path.name for path in save.iterdir())
    other = ("--load", save, "--save", save, "--ffn-hidden-size", 96)
    error = refused(pretrain_here("--train-iters", 2, *other))
    assert f"--load {save}" in error and "shape mismatch" in error
    assert sorted(path.name for path in save.iterdir()) == before
    assert steps(save).keys() == {1}


def test_a_read_only_compile_cache_is_not_blamed_on_a_checkpoint(pretrain_here, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/cache/inductor")

    monkeypatch.setattr(recipe_hook, "select_engine", fail)
    error = refused(pretrain_here("--train-iters", 1, "--precision-recipe", "mxfp8"))
    assert error == "error: /cache/inductor: Read-only file system"


def test_rows_that_ranks_cannot_divide(pretrain_here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = ("--train-iters", 1, "--tensor-model-parallel-size", 2)
    error = refused(pretrain_here(*ranks, "--padded-vocab-size", 513))
    assert "--padded-vocab-size 513 cannot be divided by --tensor-model-parallel-size 2" in error
    assert "give --padded-vocab-size 514, also for a checkpoint with 513 rows" in error


@pytest.mark.parametrize(
    "ways",
    [
        ["--load", "evil", "--use-checkpoint-args"],
        ["--load", "evil", "--use-checkpoint-args", "--dry-run"],
        ["--load", "evil", "--dry-run"],
        ["--pretrained-checkpoint", "evil"],
        ["--pretrained-checkpoint", "evil", "--use-checkpoint-args", "--dry-run"],
        ["--load", "good", "--non-persistent-ckpt-type", "global",
         "--non-persistent-global-ckpt-dir", "evil"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_code_in_a_checkpoint_does_not_run(pretrain_here, write_checkpoint, tmp_path, ways):
    for name in ("good", "evil"):
        path = write_checkpoint(tmp_path / name / "iter_0000001")
        write_tracker(path.parent, 1)
    write_metadata(path, Evil(tmp_path / "trace"))
    ways = [str(tmp_path / word) if word in ("good", "evil") else word for word in ways]
    error = refused(pretrain_here("--train-iters", 2, "--fp4-recipe", "nvfp4", *ways))
    assert f"{path / '.metadata'}: refused: " in error
    assert not (tmp_path / "trace").exists()
