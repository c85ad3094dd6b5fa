"""``lowbit-checkpoint`` on the checkpoints of a tiny run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import MODEL, change_args, losses, model_tensors, train

from megatron_lowbit.checkpoints.command import main as checkpoint_main
from megatron_lowbit.checkpoints.inspect import _UNKNOWN, report
from megatron_lowbit.checkpoints.reader import CheckpointReader, chosen_iterations, open_checkpoint
from megatron_lowbit.checkpoints.writer import average
from megatron_lowbit.conversion.convert import to_hugging_face
from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes.record import digest, record_of
from megatron_lowbit.storage import files


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Four iterations with delayed scaling, of which the second and the last are saved."""
    folder = tmp_path_factory.mktemp("runs") / "saved"
    train(*MODEL, "--train-iters", 4, "--lr", 1e-3, "--save", folder, "--save-interval", 2,
          "--precision-recipe", "fp8-delayed", "--use-distributed-optimizer")  # fmt: skip
    return folder


def test_the_average(saved, tmp_path, capsys):
    """FP32 means of the model, for --finetune and for Hugging Face's format."""
    mean_folder = tmp_path / "mean"
    checkpoint_main(["average", str(saved), str(mean_folder), "--last", "2"])
    assert "the mean of iterations 2, 4" in capsys.readouterr().out
    paths = [saved / "iter_0000002", saved / "iter_0000004", mean_folder / "iter_0000004"]
    first, last, mean = map(model_tensors, paths)
    assert mean.keys() == last.keys()
    assert all(torch.equal(t, (first[key] + last[key]) / 2) for key, t in mean.items())
    assert not torch.equal(mean["output_layer.weight"], last["output_layer.weight"])
    assert not CheckpointReader(paths[2]).state and not CheckpointReader(paths[2]).histories
    to_hugging_face(mean_folder, tmp_path / "converted")
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], mean["output_layer.weight"][:500])


@pytest.mark.parametrize(
    "how",
    [
        ["--finetune"],
        pytest.param(
            ["--no-load-optim", "--no-load-rng", "--resume-changed", "recipe"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_loads_the_average(saved, tmp_path, how):
    """With a rate of 0 its loss is the trained model's, less than at the beginning."""
    average(saved, [2, 4], tmp_path / "mean")
    last = 1 if "--finetune" in how else 5
    train(*MODEL, "--train-iters", last, "--lr", 0, "--load", tmp_path / "mean", *how,
          "--save", tmp_path / "tuned")  # fmt: skip
    assert losses(tmp_path / "tuned").keys() == {last}
    if "--finetune" in how:
        assert losses(tmp_path / "tuned")[1] < losses(saved)[1]


def test_checkpoints_that_cannot_be_averaged_are_refused(saved, tmp_path):
    mixed = tmp_path / "mixed"
    for last, named, message in (
        (3, [], "holds 2 complete"),
        (None, [2, 7], "no complete checkpoint of iteration 7"),
    ):
        with pytest.raises(UserError, match=message):
            chosen_iterations(saved, last, named)
    for change, message in (
        ({"hidden_size": 1}, "different models: hidden_size is 64 and 1"),
        ({"qk_layernorm": True}, "different models: qk_layernorm is None and True"),
        (
            {"precision_recipe": ["nvfp4"], "recipe_record": None},
            r"different recipes: .*'fp8-delayed'\] and \['nvfp4'",
        ),
        (
            {"recipe_record": record_of(["fp8-delayed"], ["amax_history.length=9"])},
            "different recipes: recipe fp8-delayed with configs.*length .* instead of 9",
        ),
    ):
        shutil.copytree(saved, mixed)
        change_args(mixed / "iter_0000004", **change)
        with pytest.raises(UserError, match=message):
            average(mixed, [2, 4], tmp_path / "out")
        shutil.rmtree(mixed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("note", ["tracker", "saving"])
def test_checkpoints_of_before_a_run_went_back_are_not_averaged(tmp_path, note, capsys):
    for number in (1, 2, 3, 4):
        folder = files.iteration_directory(tmp_path, number)
        folder.mkdir()
        (folder / "common.pt").write_text("state")
        files.write_document(folder, {"files": files.checksums(folder)})
    files.write_tracker(tmp_path, 2 if note == "tracker" else 4)
    if note == "saving":
        files.note_saving(tmp_path, 2)
    assert chosen_iterations(tmp_path, 2, []) == [1, 2]
    assert "ignored 3, 4, which are above 2, the last saved" in capsys.readouterr().out
    assert chosen_iterations(tmp_path, None, [3, 4]) == [3, 4]
    with pytest.raises(UserError, match="holds 2 complete checkpoints up to iteration 2"):
        chosen_iterations(tmp_path, 3, [])


def test_inspection(saved, tmp_path, capsys):
    """The newest of a run, one iteration, and Hugging Face's folder."""
    to_hugging_face(saved, tmp_path / "converted", vocab_size=512)
    descriptions = {}
    for name, path in (
        ("newest", saved),
        ("second", saved / "iter_0000002"),
        ("converted", tmp_path / "converted"),
    ):
        checkpoint_main(["inspect", str(path), "--json"])
        descriptions[name] = json.loads(capsys.readouterr().out)
    newest = descriptions["newest"]
    assert [descriptions[name]["iteration"] for name in descriptions] == [4, 2, None]
    assert len({descriptions[name]["parameters"] for name in descriptions}) == 1
    assert newest["model"]["hidden_size"] == newest["args"]["hidden_size"] == 64
    assert "num_experts" not in newest["model"] and "num_experts" in newest["args"]
    assert newest["recipes"] == ["fp8-delayed"]
    assert newest["recipe_sha256"] == digest(newest["recipe_record"])
    assert newest["recipe_record"]["recipes"][0].startswith("name: fp8-delayed\n")
    assert newest["data"] == {}  # mock data
    assert newest["optimizer"]["bytes"] >= 2 * newest["bytes"]
    assert newest["checksums"] is True
    histories = {row["key"] for row in newest["amax_histories"]}
    assert "amax_history.decoder.layers.3.mlp.linear_fc2" in histories
    rows = {row["key"]: row for row in newest["tensors"]}
    row = rows["decoder.layers.mlp.linear_fc1.weight"]
    assert (row["shape"], row["pieces"], row["piece_shapes"]) == ([4, 256, 64], 8, [[1, 128, 64]])
    assert row["bytes"] == 4 * 256 * 64 * 4
    checkpoint_main(["inspect", str(saved)])
    text = capsys.readouterr().out
    assert "iteration 4" in text and "8 x [1, 128, 64]" in text and "hidden_size: 64" in text
    assert "amax histories: " in text and "recipe: fp8-delayed" in text
    with pytest.raises(UserError, match="neither a checkpoint directory"):
        checkpoint_main(["inspect", str(tmp_path)])


def test_inspection_of_a_tensor_without_elements():
    """It needs no chunk."""
    empty = {"key": "empty", "shape": [0], "dtype": "float32", "bytes": 0, "pieces": 0}
    description = _UNKNOWN | {
        "format": "torch_dist", "path": "run", "model": {}, "files": {}, "parameters": 0,
        "bytes": 0, "tensors": [empty | {"piece_shapes": []}],
    }  # fmt: skip
    assert "empty   [0]    float32  0      0, of 0 shapes" in "\n".join(report(description))


def test_verification(saved, tmp_path, capsys):
    checkpoint_main(["verify", str(saved)])
    assert "files are as they were saved" in capsys.readouterr().out
    damaged = shutil.copytree(saved, tmp_path / "damaged")
    file = next((damaged / "iter_0000004").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=file.name):
        checkpoint_main(["verify", str(damaged)])


def test_checkpoints_of_stock_megatron_lm(saved, tmp_path):
    """Without lowbit.json, and under the name that other converters give."""
    plain = tmp_path / "plain"
    shutil.copytree(saved / "iter_0000004", plain / "release")
    (plain / "release" / files.DOCUMENT).unlink()
    (plain / files.TRACKER).write_text("release")
    opened = open_checkpoint(plain)
    assert (opened.path.name, opened.files, opened.iteration) == ("release", None, 4)
    file = plain / "release" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"__0_0\.distcp"):
        open_checkpoint(plain)
