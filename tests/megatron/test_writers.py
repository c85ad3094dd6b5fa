"""Every writer of the package leaves alone what a link in its folder points to."""

import os
import re
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from megatron_lowbit.analysis.comparison import read_contenders
from megatron_lowbit.analysis.comparison_page import write_page
from megatron_lowbit.analysis.loss_curve import plot_loss
from megatron_lowbit.data import preprocess as preprocessing
from megatron_lowbit.data.index_cache import building
from megatron_lowbit.data.tokenizer import train_tokenizer
from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.folders import replace_text, replacing
from megatron_lowbit.megatron.run.bad_iterations import NOTES, skip_bad_iterations
from megatron_lowbit.megatron.run.checkpoint_guard import CheckpointGuard
from megatron_lowbit.megatron.run.metrics import MetricsWriter
from megatron_lowbit.megatron.run.short_log import _Log
from megatron_lowbit.storage import files
from megatron_lowbit.storage.lock import FolderLock, output_lock, temporary_folder
from megatron_lowbit.storage.resumable_output import JOURNAL, ResumableOutput, resumable_output
from megatron_lowbit.study.definition import Job
from megatron_lowbit.study.runner import run
from tests.marks import by_turns

METRICS = '{"iteration": 1, "lm_loss": 2.5, "consumed_tokens": 1}\n'


def write_metrics(folder: Path) -> None:
    writer = MetricsWriter(folder, None, 1, 1)
    writer.add_text("args", "", 0)
    writer.add_scalar("lm loss", 2.5, 1)
    writer.close()


def draw_loss(folder: Path) -> None:
    (folder / "source").write_text(METRICS)
    plot_loss({"a": folder / "source"}, folder / "loss.png")


def compare(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text(METRICS)
    write_page(read_contenders([("a", folder / "run")]), folder, "title")


def record_bad_iteration(folder: Path) -> None:
    args = Namespace(skip_bad_iterations=9, save=str(folder), load=str(folder), rank=0,
                     check_for_nan_in_loss_and_grad=True, rerun_mode="disabled", world_size=2,
                     iterations_to_skip=[], curr_iteration=3)  # fmt: skip
    with skip_bad_iterations(args):
        raise RuntimeError("Unexpected result")


def save_into(folder: Path) -> None:
    args = Namespace(
        save=str(folder), load=None, save_keep_last=None, non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=None,
    )  # fmt: skip
    CheckpointGuard(args)._take_save_folder(folder)


def cache_indices(folder: Path) -> None:
    name = f"{'0' * 32}-GPTDataset-train"
    with building(folder):
        (folder / f"{name}-description.txt").write_text("{}")
        np.save(f"{folder}/{name}-shuffle_index.npy", np.arange(9))


def convert(folder: Path) -> None:
    task = {"source": "/nowhere", "more": 7}
    with resumable_output(folder / "out", False, task, 1) as partial:
        partial.write(partial.path / "a", [b"1"], lambda stream, part: stream.write(part))


def go_on_converting(folder: Path) -> None:
    """Continue an interrupted task, with links in the hidden folder."""
    path, task = folder / "dir", {"source": "/nowhere"}
    if not (path / JOURNAL).is_symlink():
        (path / JOURNAL).write_text('{"source": "/nowhere"}\n{"file": "a", "bytes": 6}\n')
    partial = ResumableOutput(path, task, 1)
    for name in ("a", "b"):
        partial.write(path / name, [b"1"], lambda stream, part: stream.write(part))


def study(folder: Path) -> None:
    with suppress(TrainingError):
        run([Job("a", 1, folder / "dir", ["false"], None)], [None], True, lambda jobs: ("", set()))


def preprocess(folder: Path) -> None:
    preprocessing.check_targets(f"{folder}/data", [f"{folder}/data"])
    with temporary_folder(preprocessing.temporary_path(f"{folder}/data"), "place"):
        pass


INDEX = f"{'0' * 32}-GPTDataset-train"
WRITERS: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda folder: replace_text(folder / "a", "text"), ["a", ".a.partial"]),
    (lambda folder: files.write_tracker(folder, 7), [files.TRACKER, f".{files.TRACKER}.partial"]),
    (lambda folder: files.write_document(folder, {}), ["lowbit.json", ".lowbit.json.partial"]),
    (lambda folder: FolderLock(folder).close(), [".lock"]),
    (lambda folder: output_lock(folder / "out").close(), [".out.lock"]),
    (lambda folder: _Log(Namespace(save=str(folder))).close(), ["megatron.log"]),
    (write_metrics, ["metrics.jsonl", ".metrics.jsonl.partial"]),
    (draw_loss, ["loss.png", ".loss.png.partial"]),
    (compare, ["comparison.png", "comparison.html", ".comparison.png.partial"]),
    (record_bad_iteration, [NOTES, f".{NOTES}.0.partial"]),
    (save_into, [".lock", files.TRACKER, "metrics.jsonl", "megatron.log", "progress.txt",
                 "non_persistent"]),
    (cache_indices, [".lock", f"{INDEX}-description.txt", f"{INDEX}-shuffle_index.npy",
                     f".{INDEX}-shuffle_index.npy.partial"]),
    (convert, [".out.lock", ".out.partial", ".out.replaced"]),
    (go_on_converting, ["dir/a", "dir/b", f"dir/{JOURNAL}", f"dir/.{JOURNAL}.partial"]),
    (study, ["dir", "dir/study.json", "dir/output.log", "dir/.study.json.partial"]),
    (preprocess, ["data.json", "data.bin", "data.idx", ".preprocess.data"]),
    (lambda folder: train_tokenizer(["words"] * 9, 257, folder),
     ["tokenizer.json", "tokenizer_config.json", ".tokenizer.json.partial", ".lock"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "target"),
    by_turns(
        [(write, name) for write, names in WRITERS for name in names], ["file", "folder", "nothing"]
    ),
)
@pytest.mark.usefixtures("single_process")
def test_links_are_not_followed(tmp_path, written, target):
    (write, name), victim, folder = written, tmp_path / "victim", tmp_path / "folder"
    (folder / "dir").mkdir(parents=True)
    if target == "file":
        victim.write_text(METRICS)
    elif target == "folder":
        (victim / "iter_0000007").mkdir(parents=True)
        (victim / "thesis").write_text("text")
    if name == "dir":
        (folder / name).rmdir()
    (folder / name).symlink_to(victim)
    with suppress(UserError, TrainingError, OSError):
        write(folder)
    if target == "file":
        assert victim.read_text() == METRICS
    elif target == "folder":
        assert sorted(os.listdir(victim)) == ["iter_0000007", "thesis"]
    else:
        assert not victim.exists()


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as stream:
        stream.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]
    replace_text(path, "né")
    assert path.read_bytes() == "né".encode() and os.listdir(tmp_path) == ["a"]


def test_only_replacing_and_a_few_named_places_open_files_to_write():
    """New writers use ``folders.replacing`` or are added to the list above, and to this one."""
    package = Path(files.__file__).parents[1]
    pattern = re.compile(
        r"write_text|write_bytes|O_CREAT|open\([^)]*[\"'][rb]*[wax][b+]*[\"']|savefig|copy2|rmtree"
    )
    found = {
        str(file.relative_to(package)): sum(
            bool(pattern.search(line)) for line in file.read_text().splitlines()
        )
        for file in package.rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == {
        "folders.py": 1, "storage/lock.py": 3, "storage/files.py": 2,
        "storage/resumable_output.py": 3, "data/index_cache.py": 1, "megatron/run/metrics.py": 1,
        "megatron/run/short_log.py": 1,
        "analysis/loss_curve.py": 1, "study/runner.py": 2, "study/sensitivity.py": 1,
        "checkpoints/hugging_face_files.py": 2,
        "conversion/convert.py": 1,
    }  # fmt: skip
