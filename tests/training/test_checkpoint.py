"""Checkpoints resume to the bit, change layout exactly, and a failed save changes nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tiny_gpt
import torch
from tiny_gpt import HIDDEN, SHAPE, Training, initialize_distributed, parallel_args, shutdown

from megatron_lowbit.errors import UserError
from megatron_lowbit.training.checkpoint import (
    DOCUMENT,
    TRACKER,
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)

HERE = Path(tiny_gpt.__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE)))}
LAYOUTS = {
    "tp2": ["--tensor=2"],
    "tp2-plain": ["--tensor=2", "--plain"],
    "pp2-plain": ["--pipeline=2", "--plain"],
    # The parameters are each other's replicas here, so that rank 0 writes them all.
    "dp2-overlap": ["--overlap", "--full-disk=0"],
}


def layouts(*names: str) -> list:
    """Parameters; tests/end_to_end/test_hybrid.py goes through tp2 and pp2, too."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name == "dp2-overlap" else slow) for name in names]


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def single_process():
    initialize_distributed(parallel_args())
    yield
    shutdown()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint directory at iteration 2, for tests that only read it."""
    directory = tmp_path_factory.mktemp("saved")
    training = Training(distributed_optimizer=False)
    training.train(1, 2)
    training.save(directory, 2)
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], Path]:
    """Gives the directory that two processes of ``tiny_gpt`` left behind in a layout."""
    if torch.cuda.device_count() == 1:
        pytest.skip("two processes need two GPUs, or none")

    @cache
    def directory(layout: str) -> Path:
        found = tmp_path_factory.mktemp(layout)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        if layout == "dp2-overlap":
            training = Training(distributed_optimizer=True, bf16=True)
            training.train(1, 2)
            training.save(found / "bf16", 2)
        command += [tiny_gpt.__file__, str(found), *LAYOUTS[layout]]
        done = run(command)
        assert done.returncode == 0, done.stderr[-4000:]
        return found

    return directory


def reports(directory: Path) -> list[dict]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_resumes_to_the_bit(tmp_path, distributed, bf16):
    training = Training(distributed, bf16=bf16)
    training.train(1, 3)
    path = training.save(tmp_path, 3)
    assert names(tmp_path) == {"iter_0000003", TRACKER}
    assert path == tmp_path / "iter_0000003"
    expected, continued = training.tensors(), training.train(4, 6)

    resumed = Training(distributed, bf16=bf16, seed=8)
    assert resumed.load(tmp_path) == {
        "iteration": 3,
        "state": {"model": SHAPE, "consumed_samples": 12},
    }
    actual = resumed.tensors()
    assert actual.keys() == expected.keys()
    for name, tensors in expected.items():
        for key in ("param", "main", "exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(actual[name][key], tensors[key]), (name, key)
    assert resumed.scheduler.num_steps == 3
    assert resumed.train(4, 6) == continued
    assert Training(distributed, bf16=bf16, seed=8).train(4, 6) != continued


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_steps_are_not_shared_after_loading(tmp_path, distributed, bf16):
    training = Training(distributed, bf16=bf16)
    training.train(1, 1)
    training.save(tmp_path, 1)
    training.load(tmp_path)
    steps = [state["step"] for state in training.optimizer.chained_optimizers[0].state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) > 1


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_saves_before_the_first_step(tmp_path, distributed):
    training = Training(distributed)
    training.save(tmp_path, 0)
    resumed = Training(distributed, seed=8)
    resumed.load(tmp_path)
    assert resumed.train(1, 2) == training.train(1, 2)


def test_saves_again_and_removes_what_a_killed_save_left(tmp_path):
    training = Training(distributed_optimizer=False)
    killed = tmp_path / ".iter_0000009.partial"
    killed.mkdir()
    (killed / "__0_0.distcp").write_bytes(b"half")
    training.save(tmp_path, 1)
    training.save(tmp_path, 1)
    training.save(tmp_path, 2)
    assert names(tmp_path) == {"iter_0000001", "iter_0000002", TRACKER}
    assert latest_iteration(tmp_path) == 2


@pytest.mark.parametrize("layout", layouts(*LAYOUTS))
def test_two_processes_resume_to_the_bit(runs, layout):
    for report in reports(runs(layout)):
        assert report["resumed"] == report["continued"]
    assert any(loss > 1 for loss in reports(runs(layout))[1]["continued"])


@pytest.mark.parametrize("layout", layouts(*LAYOUTS))
def test_full_disk_of_one_rank_ends_all_ranks(runs, layout):
    for report in reports(runs(layout)):
        assert report["error"].startswith(f"cannot write the checkpoint to {runs(layout)}: ")
        assert "\n" not in report["error"]
    assert not list(runs(layout).glob(".iter_*"))
    assert not (runs(layout) / "iter_0000005").exists()
    assert latest_iteration(runs(layout)) == 2


@pytest.mark.parametrize("layout", layouts(*LAYOUTS))
def test_damaged_shard_ends_all_ranks(runs, layout):
    """Both ranks name the file, though only one of them reads it."""
    errors = [report["damaged"] for report in reports(runs(layout))]
    assert errors[0] == errors[1]
    assert re.search(r"__[01]_0\.distcp: its content differs from what was saved; ", errors[0])


@pytest.mark.parametrize("layout", layouts("tp2", "tp2-plain"))
def test_tensor_parallel_checkpoint_loads_in_one_process(runs, layout):
    training = Training(distributed_optimizer=layout == "tp2", seed=8)
    training.load(runs(layout))
    shards = [torch.load(runs(layout) / f"{rank}.pt") for rank in range(2)]
    split = 0
    for name, whole in training.tensors().items():
        parts = [shard[name] for shard in shards]
        shape, dim = parts[0]["param"].shape, parts[0]["partition_dim"]
        for key in ("param", "main", "exp_avg", "exp_avg_sq"):
            expected = parts[0][key].view(shape)
            if dim >= 0:
                expected = torch.cat([part[key].view(shape) for part in parts], dim)
            assert torch.equal(whole[key].view(expected.shape), expected), (name, key)
        split += dim >= 0
        assert whole["step"] == 2
    assert split > 4


@pytest.mark.parametrize("alone", [False, True], ids=["with optimizer", "model alone"])
@pytest.mark.parametrize("layout", layouts("pp2-plain", "dp2-overlap"))
def test_other_layouts_load_in_one_process(runs, layout, alone):
    """Without the gather that saving forces, overlap would leave old parameters in the file."""
    training = Training(distributed_optimizer="plain" not in layout, seed=8)
    if alone:
        load_checkpoint(runs(layout), training.model, None, None, SHAPE)
    else:
        training.load(runs(layout))
    whole = training.tensors()
    for rank in range(2):
        for name, tensors in torch.load(runs(layout) / f"{rank}.pt").items():
            if layout == "pp2-plain" and rank == 1:
                # The second stage numbers its one layer from zero.
                name = name.replace("layers.0", "layers.1")
            assert torch.equal(whole[name]["param"], tensors["param"]), name


def test_each_rank_gets_fp32_parameters_of_a_bf16_checkpoint(runs):
    """The file holds them rounded to BF16 too, and each rank the exact ones of but its own part."""
    single = Training(distributed_optimizer=True, seed=8)
    single.load(runs("dp2-overlap") / "bf16")
    expected = single.parameters()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in expected.values())
    for rank in range(2):
        found = torch.load(runs("dp2-overlap") / f"{rank} from bf16.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), rank


def test_full_disk_leaves_the_previous_checkpoint(tmp_path):
    """Wherever in the file it happens: torch reports it as one of several exceptions."""
    code = (
        "import sys; from pathlib import Path; from tiny_gpt import *\n"
        "initialize_distributed(parallel_args()); training = Training(True)\n"
        "training.train(1, 1); directory = Path(sys.argv[1]); training.save(directory, 1)\n"
        "training.train(2, 2)\n"
        "for size in (0, 20_000, 150_000, 270_000, 390_000, 435_000):\n"
        "    limit_file_size(size)\n"
        "    try: training.save(directory, 2)\n"
        "    except UserError as error: print(error)\n"
    )
    done = run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"cannot write the checkpoint to {tmp_path}: File too large\n" * 6
    assert names(tmp_path) == {"iter_0000001", TRACKER}
    assert Training(True, seed=8).load(tmp_path)["iteration"] == 1


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the checkpoint to .*file: File exists"):
        Training(distributed_optimizer=False).save(tmp_path / "file", 1)


def test_state_needs_the_model_shape(tmp_path):
    with pytest.raises(ValueError, match='"model"'):
        save_checkpoint(tmp_path, 1, [], None, None, {})


def test_another_model_is_refused_before_reading_tensors(saved):
    training = Training(distributed_optimizer=False, seed=8)
    before = training.tensors()
    other = {"num_layers": 2, "hidden_size": 64, "heads": 4, "vocab_size": 64}
    with pytest.raises(UserError) as caught:
        load_checkpoint(saved, training.model, training.optimizer, training.scheduler, other)
    message = str(caught.value)
    assert f"hidden_size was {HIDDEN}, now 64" in message
    assert "heads was absent, now 4" in message
    assert "num_layers" not in message and "\n" not in message
    for name, tensors in training.tensors().items():
        assert torch.equal(tensors["param"], before[name]["param"])


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_another_optimizer_kind_is_refused(tmp_path, distributed):
    Training(distributed).save(tmp_path, 1)
    saved, current = ("distributed", "plain") if distributed else ("plain", "distributed")
    said = f"saved with optimizer {saved}, but this run's is {current}; --use-distributed-optimizer"
    with pytest.raises(UserError, match=said):
        Training(not distributed).load(tmp_path)


@pytest.mark.parametrize("bf16", [False, True], ids=["from fp32", "from bf16"])
def test_distributed_optimizer_changes_precision_exactly(tmp_path, bf16):
    """The FP32 main parameters and moments; parameters are those, rounded to what they are now."""
    training = Training(distributed_optimizer=True, bf16=bf16)
    training.train(1, 2)
    training.save(tmp_path, 2)
    other = Training(distributed_optimizer=True, bf16=not bf16, seed=8)
    other.load(tmp_path)
    expected, actual = training.tensors(), other.tensors()
    assert actual.keys() == expected.keys()
    for name, tensors in actual.items():
        for key in ("main", "exp_avg", "exp_avg_sq", "step"):
            assert tensors[key].dtype == torch.float32
            assert torch.equal(tensors[key], expected[name][key]), (name, key)
        param = tensors["param"]
        assert param.dtype == (torch.float32 if bf16 else torch.bfloat16)
        assert torch.equal(param.flatten(), tensors["main"].flatten().to(param.dtype))
    assert other.train(3, 5) == pytest.approx(training.train(3, 5), rel=1e-3)


@pytest.mark.parametrize("bf16", [False, True], ids=["from fp32", "from bf16"])
def test_plain_optimizer_refuses_another_precision(tmp_path, bf16):
    Training(distributed_optimizer=False, bf16=bf16).save(tmp_path, 1)
    other = Training(distributed_optimizer=False, bf16=not bf16, seed=8)
    before = other.parameters()
    saved, current = ("BF16", "FP32") if bf16 else ("FP32", "BF16")
    said = f"saved by a run computing in {saved}, but this one is in {current}; .*--bf16"
    with pytest.raises(UserError, match=said) as caught:
        other.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in other.parameters().items())


def test_another_schedule_is_refused(saved):
    training = Training(distributed_optimizer=False)
    training.scheduler.lr_decay_steps = 99
    with pytest.raises(UserError, match=r"another schedule .*: lr_decay_steps was 20, now 99$"):
        training.load(saved)
    training.scheduler.override_opt_param_scheduler = True
    assert training.load(saved)["iteration"] == 2


def test_model_alone_loads(saved):
    training, reference = (Training(distributed_optimizer=False, seed=seed) for seed in (8, 9))
    reference.load(saved)
    load_checkpoint(saved, training.model, None, None, SHAPE)
    expected = reference.tensors()
    for name, tensors in training.tensors().items():
        assert torch.equal(tensors["param"], expected[name]["param"])


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        (None, f"not a checkpoint directory: it holds no {TRACKER}"),
        ("", "'' is not an iteration"),
        ("12x", "'12x' is not an iteration"),
        ("-1", "'-1' is not an iteration"),
        (
            "7",
            rf"iter_0000007: missing; {TRACKER} names iter_0000007 \(complete: iter_0000002; ",
        ),
    ],
)
def test_tracker_that_names_no_checkpoint(tmp_path, saved, tracker, message):
    (tmp_path / "iter_0000002").symlink_to(saved / "iter_0000002")
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    with pytest.raises(UserError, match=message):
        Training(distributed_optimizer=False).load(tmp_path)


def test_missing_directory(tmp_path):
    assert latest_iteration(tmp_path / "nowhere") is None
    with pytest.raises(UserError, match="nowhere: not a checkpoint directory"):
        load_checkpoint(tmp_path / "nowhere", [], None, None, SHAPE)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format_version": 2, "state": {}}'])
def test_damaged_document(tmp_path, content):
    training = Training(distributed_optimizer=False)
    path = training.save(tmp_path, 1)
    (path / DOCUMENT).write_text(content)
    with pytest.raises(UserError, match=r"lowbit\.json: damaged"):
        training.load(tmp_path)


def test_later_format(tmp_path):
    training = Training(distributed_optimizer=False)
    document = training.save(tmp_path, 1) / DOCUMENT
    document.write_text(document.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(UserError, match="format_version 3, but"):
        training.load(tmp_path)
