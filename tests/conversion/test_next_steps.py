"""Reader and next command as lowbit-convert prints them, and needs that it checks first."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from small_llama import write_llama

from megatron_lowbit.command_line import shell_line
from megatron_lowbit.conversion import LAYOUTS, next_steps
from megatron_lowbit.conversion.command import main
from megatron_lowbit.errors import UserError
from megatron_lowbit.planning.training_arguments import TrainingArguments

ROOT = Path(__file__).parents[2]
SIZES = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder but for a Llama of 14 blocks, of which nvfp4 keeps 3 in BF16."""
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "source", SIZES | {"num_hidden_layers": 14})
    return tmp_path


def converted(capsys, *words: str) -> dict[str, str]:
    """Run the command and return its last lines by their first words."""
    main(words)
    lines = capsys.readouterr().out.splitlines()[-3:]
    return dict(line.split(": ", 1) for line in lines)


def exported(capsys, layout: str, recipe: str) -> dict[str, str]:
    main(["to-megatron", "source", "checkpoint"])
    words = ("to-hugging-face", "checkpoint", "out", "--quantized", layout, "--recipe", recipe)
    return converted(capsys, *words)


def test_a_checkpoint_names_the_command_that_trains_it(folder, capsys):
    (folder / "source" / "tokenizer.json").write_text("{}")
    printed = converted(capsys, "to-megatron", "source", "out folder")
    assert printed["written"].startswith("out folder (Llama")
    assert printed["loads in"] == f"megatron-core {version('megatron-core')} (tested)"
    words = shlex.split(printed["next"])
    assert words[:2] == ["lowbit-pretrain", "@out folder/model.args"]
    assert words[words.index("--tokenizer-model") + 1] == "out folder/hugging_face"
    assert words[words.index("--seq-length") + 1] == "64"  # all that the model takes
    assert TrainingArguments(words[1:]).parse(1).save == "RUN"


def test_a_checkpoint_without_a_tokenizer_leaves_it_open(folder, capsys):
    words = shlex.split(converted(capsys, "to-megatron", "source", "out")["next"])
    assert words[words.index("--tokenizer-model") + 1] == "TOKENIZER"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recipe"), [("compressed-tensors", "nvfp4"), ("fp8-blocks", "fp8-tile")]
)
def test_the_command_loads_a_quantized_export(folder, capsys, layout, recipe):
    printed = exported(capsys, layout, recipe)
    assert f"transformers {version('transformers')}" in printed["loads in"]
    python, *rest = shlex.split(printed["next"])
    assert python == "python"
    # The command prints the model; here it computes logits, too.
    code = rest[1].replace("print(", "model = (") + "; import torch"
    rest[1] = f"{code}; print(model(torch.arange(8)[None]).logits.isfinite().all())"
    result = subprocess.run([sys.executable, *rest], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["tensor(True)"]


def test_the_next_command_of_a_modelopt_export(folder, capsys):
    printed = exported(capsys, "modelopt", "nvfp4")
    assert "not in transformers 5.23.0" in printed["loads in"]
    words = shlex.split(printed["next"])
    assert words[:3] == ["lowbit-convert", "to-megatron", "out"]
    main(words[1:])
    assert (folder / "CHECKPOINT" / "model.args").is_file()


def test_versions_are_those_that_are_installed_for_tests():
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for layout, reader in next_steps.READERS.items():
        assert layout is None or layout in LAYOUTS
        for package, tested in reader.packages.items():
            assert pinned.get(package, tested) == tested


def test_a_missing_package_is_named_before_anything_is_written(folder, capsys, monkeypatch):
    main(["to-megatron", "source", "checkpoint"])
    capsys.readouterr()

    def lacking(package: str) -> str:
        if package == "accelerate":
            raise PackageNotFoundError(package)
        return version(package)

    def stopped(*args):
        raise UserError("stopped")

    monkeypatch.setattr(next_steps, "version", lacking)
    monkeypatch.setattr("megatron_lowbit.conversion.convert.to_hugging_face", stopped)
    with pytest.raises(UserError, match="stopped"):
        main(["to-hugging-face", "checkpoint", "out", "--quantized", "fp8-blocks"])
    assert "pip install accelerate" in capsys.readouterr().err
    assert next_steps.missing_packages("compressed-tensors") is None
    assert next_steps.missing_packages("modelopt") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("to-megatron source out --verify-tokens 500", "--verify-tokens 500: .* 0 to 99"),
        ("to-megatron unknown out", "transformers does not take unknown/config.json.*model_type"),
        ("to-hugging-face checkpoint out --verify-tokens 500", "--verify-tokens 500: .* 0 to 99"),
    ],
)
def test_verify_checks_its_needs_before_it_converts(folder, words, message):
    # The family is known by its architecture; transformers wants the type, too.
    write_llama(folder / "unknown")
    main(["to-megatron", "source", "checkpoint"])
    with pytest.raises(UserError, match=message):
        main([*words.split(), "--verify"])
    assert not list(folder.glob("*out*"))


def test_verify_names_transformers_before_it_converts(folder, monkeypatch):
    monkeypatch.setattr("megatron_lowbit.conversion.verify.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--verify needs transformers"):
        main(["to-megatron", "source", "out", "--verify"])
    assert not list(folder.glob("*out*"))


def test_blocks_that_all_stay_in_bf16_are_named(folder):
    write_llama(folder / "small", SIZES | {"num_hidden_layers": 2})
    main(["to-megatron", "small", "checkpoint"])
    words = ["to-hugging-face", "checkpoint", "out", "--quantized", "modelopt", "--recipe", "nvfp4"]
    with pytest.raises(UserError, match="nvfp4 keeps all 2 blocks in BF16: nothing"):
        main(words)
    assert not list(folder.glob("*out*"))
    main([*words, "--recipe-set", "bf16_blocks=none"])


@pytest.mark.parametrize(
    "word", ["a\nb", "it's\n", "\udcff", "x\x1b[2J\\", "\u0085", "é\t1", "a b", ""]
)
def test_a_suggested_command_can_be_pasted_whatever_the_names(word):
    """``say`` leaves printable lines as they are."""
    line = shell_line(["printf", "%s.", word])
    assert line.isprintable()
    shown = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert shown == os.fsencode(f"{word}.")


@pytest.mark.parametrize("size", ["0", "-1"])
def test_a_file_has_at_least_a_byte(folder, size):
    with pytest.raises(UserError, match=f"--shard-bytes {size}: must be positive"):
        main(["to-megatron", "source", "out", "--shard-bytes", size])
    assert [path.name for path in folder.iterdir()] == ["source"]
