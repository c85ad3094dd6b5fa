"""The tools for checkpoints, on those of a tiny run: looked at, averaged, cut anew."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import average_checkpoints
import inspect_checkpoint
import pytest
import reshard_checkpoint
import tiny_run
import torch
from safetensors.torch import load_file
from tiny_run import arguments_for, losses, start_from

from megatron_lowbit.conversion.average import average
from megatron_lowbit.conversion.checkpoints import chosen_iterations
from megatron_lowbit.conversion.convert import to_hugging_face
from megatron_lowbit.conversion.megatron_files import Tensors
from megatron_lowbit.conversion.reshard import reshard
from megatron_lowbit.errors import UserError
from megatron_lowbit.training import checkpoint_files

RUN = ("--num-query-groups", 4, "--lr", 1e-3, "--use-distributed-optimizer", "--save-interval", 2)
LAYOUTS = {"tensor": (2, 1), "pipeline": (1, 2)}


def options(tensor: int, pipeline: int) -> tuple:
    return "--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """``single``: 4 iterations; ``start``: its second; by layout: that cut anew."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_run.write_corpus(folder)
    run_here(folder, *RUN, "--train-iters", 4, "--save", folder / "single")
    start_from(folder / "single", 2, folder / "start")
    for name, layout in LAYOUTS.items():
        reshard_checkpoint.main([
            str(folder / "start"), str(folder / f"{name} start"), *map(str, options(*layout))
        ])  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def runs(saved) -> Path:
    """From ``start`` on, by layout: from it as it is, and cut anew."""
    folder, jobs = saved, {}
    for name, layout in LAYOUTS.items():
        for begin in ("start", f"{name} start"):
            save = folder / f"{name} from {begin}"
            jobs[save.name] = arguments_for(
                folder,
                (*RUN, *options(*layout), "--train-iters", 4, "--load", folder / begin,
                 "--save", save),
            )  # fmt: skip
    (folder / "job.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", tiny_run.__file__, str(folder / "job.json")]  # fmt: skip
    result = subprocess.run(
        command, env=tiny_run.ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def run_here(folder: Path, *arguments) -> None:
    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit):
        patch.setattr(sys, "argv", sys.argv)
        tiny_run.run_script(arguments_for(folder, arguments))


def opened(folder: Path, iteration: int) -> Tensors:
    return Tensors(folder / f"iter_{iteration:07d}")


def everything(tensors: Tensors) -> dict[str, torch.Tensor]:
    entries = tensors.model | tensors.state
    return {
        key: tensors.read_part(key, [0] * len(entry.size), entry.size)
        for key, entry in entries.items()
    }


def cuts(tensors: Tensors) -> dict[tuple, str]:
    """Each piece of the model and optimizer -> the file that it is in."""
    entries = tensors.model | tensors.state
    found = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, entry in entries.items()
        for chunk in entry.chunks
    }
    return {
        (index.fqn, tuple(index.offset), found[index.fqn, tuple(index.offset)]): info.relative_path
        for index, info in tensors.places.items()
        if index.offset is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_resharded_training_goes_on_as_from_the_original(runs, name):
    whole, cut = (losses(runs / f"{name} from {begin}") for begin in ("start", f"{name} start"))
    assert whole == cut
    assert whole.keys() == {3, 4}
    assert whole[4] == pytest.approx(losses(runs / "single")[4], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_resharded_pieces_are_those_of_a_run(runs, name):
    """Bits, cuts and objects, of model and optimizer; a replica may be of another rank."""
    before, after = opened(runs / "start", 2), opened(runs / f"{name} start", 2)
    one, other = everything(before), everything(after)
    assert one.keys() == other.keys()
    assert any(key.startswith("optimizer.state.exp_avg") for key in one)
    assert all(torch.equal(other[key], tensor) for key, tensor in one.items())
    assert sorted(after.objects) == sorted(before.objects)
    key = before.objects[0]
    assert after.read_object(key) == before.read_object(key)
    written = cuts(opened(runs / f"{name} from start", 4))
    resharded = cuts(after)
    assert resharded.keys() == written.keys()
    split = {piece for piece in written if name == "pipeline" or piece not in cuts(before)}
    assert split
    assert {piece: resharded[piece] for piece in split} == {p: written[p] for p in split}


def test_resharded_twice_is_what_it_was(saved, tmp_path):
    reshard(saved / "tensor start", tmp_path / "back", 1, 1)
    assert cuts(opened(tmp_path / "back", 2)).keys() == cuts(opened(saved / "start", 2)).keys()


def test_a_layout_that_does_not_divide_is_refused(saved, tmp_path):
    for layout, named in (((3, 1), "num_query_groups 4"), ((1, 3), "num_layers 4"),
                          ((0, 1), "at least 1")):  # fmt: skip
        with pytest.raises(UserError, match=named):
            reshard(saved / "start", tmp_path / "out", *layout)
    assert not list(tmp_path.iterdir())


def test_the_average(saved, tmp_path, capsys):
    """FP32 means of the model, for --finetune and for Hugging Face's format."""
    average_checkpoints.main([str(saved / "single"), str(tmp_path / "mean"), "--last", "2"])
    assert "the mean of iterations 2, 4" in capsys.readouterr().out
    first, last, mean = (
        everything(opened(folder, iteration))
        for folder, iteration in (
            (saved / "single", 2),
            (saved / "single", 4),
            (tmp_path / "mean", 4),
        )
    )
    assert mean.keys() == {key for key in last if not key.startswith("optimizer.")}
    assert all(torch.equal(t, (first[key] + last[key]) / 2) for key, t in mean.items())
    assert not torch.equal(mean["output_layer.weight"], last["output_layer.weight"])
    to_hugging_face(tmp_path / "mean", tmp_path / "converted", 1e-5)
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], mean["output_layer.weight"])
    load = ("--load", tmp_path / "mean", "--finetune", "--save", tmp_path / "tuned")
    run_here(saved, *RUN, "--train-iters", 1, *load)
    assert losses(tmp_path / "tuned")[1] < losses(saved / "single")[1]


def test_what_cannot_be_averaged_is_refused(saved, tmp_path):
    single, mixed = saved / "single", tmp_path / "mixed"
    for last, named, message in (
        (3, [], "holds 2 complete"),
        (None, [2, 7], "no complete checkpoint of iteration 7"),
    ):
        with pytest.raises(UserError, match=message):
            chosen_iterations(single, last, named)
    for key, value, message in (
        ("model", {"hidden_size": 1}, "different models: hidden_size is 64 and 1"),
        ("recipes", ["nvfp4"], "different recipes"),
    ):
        start_from(single, 2, mixed)
        start_from(single, 4, mixed)
        path = mixed / "iter_0000004"
        document = checkpoint_files.read_document(path)
        was = document["state"][key]
        document["state"][key] = was | value if isinstance(was, dict) else value
        checkpoint_files.write_document(path, document)
        with pytest.raises(UserError, match=message):
            average(mixed, [2, 4], tmp_path / "out")
        shutil.rmtree(mixed)
    assert not list(tmp_path.iterdir())


def test_inspection(saved, tmp_path, capsys):
    """The newest of a run, one iteration, and Hugging Face's folder."""
    to_hugging_face(saved / "single", tmp_path / "converted", 1e-5)
    found = {}
    for name, path in (
        ("newest", saved / "single"),
        ("second", saved / "single" / "iter_0000002"),
        ("cut", saved / "tensor start"),
        ("converted", tmp_path / "converted"),
    ):
        inspect_checkpoint.main([str(path), "--json"])
        found[name] = json.loads(capsys.readouterr().out)
    assert [found[name]["iteration"] for name in found] == [4, 2, 2, None]
    assert len({found[name]["parameters"] for name in found}) == 1
    assert found["newest"]["model"]["hidden_size"] == 64
    assert found["newest"]["recipes"] == ["bf16"]
    assert found["newest"]["optimizer"]["bytes"] == 3 * found["newest"]["bytes"]
    rows = {row["key"]: row for row in found["cut"]["tensors"]}
    row = rows["decoder.layers.mlp.linear_fc2.weight"]
    assert (row["shape"], row["pieces"], row["piece_shapes"]) == ([4, 64, 128], 8, [[1, 64, 64]])
    assert row["bytes"] == 4 * 64 * 128 * 4
    inspect_checkpoint.main([str(saved / "tensor start")])
    text = capsys.readouterr().out
    assert "iteration 2" in text and "8 x [1, 64, 64]" in text and "hidden_size: 64" in text
    with pytest.raises(UserError, match="neither a checkpoint directory"):
        inspect_checkpoint.main([str(tmp_path)])
