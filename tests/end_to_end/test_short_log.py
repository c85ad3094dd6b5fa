"""Output of a run under ``--short-log``: its lines, their order, and the file of the others."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
from tiny_run import done, refused

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run import short_log

PARAMETERS = 2 * 512 * 64 + 4 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
"""Embedding and output layer, four layers of grouped attention, SwiGLU and two norms, a norm."""
BEGIN = "training ...\n"
EVALUATED = ("--eval-iters", 1, "--eval-interval", 2)
LINES = r"""
precision: recipe nvfp4 .*
on a CPU: .*
model: GPT, 4 layers of hidden size 64, {parameters} parameters, float32
recipe nvfp4: 8 of 16 linear layers quantized
(?: .*\n)*?quantization engine: reference .*
(?: .*\n)*?validation and test: nothing is quantized
transformer layers: local
data: {data}/data, {tokens} tokens; tokenizer {data}/tokenizer
plan: iterations 1 to 3, 4 x 32 tokens in each; validation every 2 iterations
files: {save} gets a checkpoint every 100 iterations, metrics.jsonl, and at the end loss.png
Megatron-LM: {warnings} warnings and all other lines are in {save}/megatron.log
iteration 1/3, loss \d+\.\d{{4}}
iteration 2/3, loss \d+\.\d{{4}}, [\d,]+ tokens/s, 0:00:\d\d left
iteration 2, validation loss \d\.\d{{4}}
iteration 3/3, loss \d+\.\d{{4}}, [\d,]+ tokens/s, 0:00:00 left
checkpoint of iteration 3 in {save}
iteration 3, validation loss \d\.\d{{4}}
""".lstrip()


STEP = (
    " [10:00] iteration {step:8d}/     100 | consumed samples: {samples:12d} |"
    " global batch size:     4 |{loss} loss scale: 1.0 |"
    " number of skipped iterations: {skipped:3d} |"
)


def run_with(pretrain_here, save: Path, iterations: int, *extra: object):
    return pretrain_here(
        "--precision-recipe", "nvfp4", "--recipe-set", "bf16_blocks.first=1", "--short-log",
        "--train-iters", iterations, "--save", save, *EVALUATED, *extra,
    )  # fmt: skip


def test_order(pretrain_here, corpus, memory, tmp_path_factory):
    """Every line on the terminal is this project's; Megatron-LM's lines are in the file."""
    save = memory["save"] = tmp_path_factory.mktemp("short")
    result = run_with(pretrain_here, save, 3)
    done(result)
    log = (save / "megatron.log").read_text()
    tokens = (corpus / "data.bin").stat().st_size // 2  # uint16
    expected = LINES.format(
        parameters=f"{PARAMETERS:,}", data=corpus, tokens=f"{tokens:,}", save=save,
        warnings=log.partition(BEGIN)[0].count("WARNING:"),
    )  # fmt: skip
    assert re.fullmatch(expected, result.stdout), result.stdout
    assert result.stderr == ""
    # What is logged, such as warnings, goes to pytest's handlers once another test has set them up.
    for line in ("-- end of arguments --", BEGIN, " iteration        3/       3 |"):
        assert log.count(line) == 1, line


def test_resume(pretrain_here, memory):
    """The plan begins after the checkpoint, and the file keeps the lines of the first run."""
    save = memory["save"]
    result = run_with(pretrain_here, save, 4, "--load", save, "--exit-interval", 2)
    done(result)
    assert "plan: iterations 4 to 4, 4 x 32 tokens in each;" in result.stdout
    assert result.stdout.splitlines()[-1] == "exiting program at iteration 4"
    assert (save / "megatron.log").read_text().count(BEGIN) == 2


def test_a_refused_run(pretrain_here, tmp_path):
    """It prints its error and no line of Megatron-LM, and writes no file."""
    result = run_with(pretrain_here, tmp_path / "new", 3, "--data-path", tmp_path / "none")
    assert "none.idx is missing" in refused(result)
    assert "arguments ---" not in result.stdout + result.stderr
    assert not (tmp_path / "new").exists()
    assert "--short-log needs --save" in refused(pretrain_here("--short-log"))


def test_without_it(pretrain_here, tmp_path):
    """Megatron-LM's lines stay on the terminal, and there is no file."""
    result = pretrain_here("--train-iters", 1, "--save", tmp_path)
    assert "-- end of arguments --" in result.stdout and "model: " not in result.stdout
    assert not (tmp_path / "megatron.log").exists()


def test_progress(monkeypatch, capsys, tmp_path):
    """The first line of a run has no speed; skipped iterations are counted and have no loss.

    Tokens are those that were read, whatever the batch sizes.
    """
    log = short_log._Log(Namespace(save=tmp_path, seq_length=256))
    for seconds, step, samples, skipped in ((40, 1, 4, 0), (42, 5, 20, 0), (52, 10, 60, 5)):
        monkeypatch.setattr(short_log.time, "perf_counter", lambda now=seconds: now)
        loss = " lm loss: 8.5E+00 |" if not skipped else ""
        log(STEP.format(step=step, samples=samples, loss=loss, skipped=skipped))
    assert capsys.readouterr().out.splitlines() == [
        "iteration 1/100, loss 8.5000",
        "iteration 5/100, loss 8.5000, 2,048 tokens/s, 0:00:48 left",
        "iteration 10/100, 5 skipped, 1,024 tokens/s, 0:03:00 left",
    ]


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [(RuntimeError(), True), (UserError(), False), (KeyboardInterrupt(), False)],
    ids=lambda value: str(type(value).__name__),
)
@pytest.mark.parametrize("cause", [None, SystemExit(1)], ids=["alone", "exit"])
def test_lines_that_explain_an_error(error, is_shown, cause, capsys, tmp_path):
    """Lines before training are printed where the error does not explain itself."""
    log = short_log._Log(Namespace(save=tmp_path))
    log("could not load\n")
    error.__cause__ = cause
    log.close(error)
    is_shown = is_shown or (isinstance(error, UserError) and cause is not None)
    assert capsys.readouterr().err == "could not load\n" * is_shown
    assert list(tmp_path.iterdir()) == []
