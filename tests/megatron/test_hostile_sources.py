"""No argument that names a checkpoint lets code of its files run.

A table: each kind of bytes in a checkpoint, by each argument that reads them, while arguments are
parsed and before the model is loaded.
"""

import argparse
import io
import os
import pickle
import shutil
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    load,
    save,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.training import checkpointing, training
from megatron.training.arguments import add_megatron_arguments
from megatron.training.distillation.utils_logits import decode_logprobs_payload

from megatron_lowbit.arguments.from_checkpoint import check_loads
from megatron_lowbit.arguments.parser import add_recipe_arguments
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run.checkpoint_guard import CheckpointGuard
from megatron_lowbit.megatron.run.load_source import check_extra_states
from megatron_lowbit.storage import files
from tests.hostile_checkpoints import Evil, common_of, metadata_of, write_metadata, write_object

pytestmark = pytest.mark.usefixtures("single_process")

EXTRA = "model.extra/shard_0_1"
COMMON = "common_state/shard_0_1"


def in_planner_data(path: Path, evil: Evil) -> None:
    whole = metadata_of(path)
    write_metadata(path, Metadata(whole.state_dict_metadata, evil, whole.storage_data))


def in_legacy_format(path: Path, evil: Evil, name: str = "mp_rank_00/model_optim_rng.pt") -> None:
    shutil.rmtree(path)
    file = path / "mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"args": Namespace(), "iteration": 3, "checkpoint_version": 3.0}, file)
    torch.save({"state": evil}, path / name)


def in_fsdp_format(path: Path, evil: Any) -> None:
    """Write args and iteration as objects of their own, as fsdp_dtensor and torch_dcp do."""
    shutil.rmtree(path)
    save({"args": evil, "iteration": 3}, checkpoint_id=path, no_dist=True)


BYTES: dict[str, Callable[[Path, Evil], Any]] = {
    ".metadata": write_metadata,
    "planner data": in_planner_data,
    "common state": lambda path, evil: write_object(path, [evil], COMMON),
    "within common state": lambda path, evil: write_object(
        path, [{**common_of(path), "iteration": evil}], COMMON
    ),
    "common.pt": lambda path, evil: torch.save(evil, path / "common.pt"),
    "old common.pt": lambda path, evil: torch.save(
        evil, path / "common.pt", _use_new_zipfile_serialization=False
    ),
    "torch": in_legacy_format,
    "fsdp_dtensor": in_fsdp_format,
}
"""Places that are read for the arguments as well as for the model."""
MORE_BYTES: dict[str, Callable[[Path, Evil], Any]] = {
    "object": lambda path, evil: write_object(path, [evil], EXTRA),
    "distrib_optim.pt": lambda path, evil: in_legacy_format(
        path, evil, "mp_rank_00/distrib_optim.pt"
    ),
    "layer_wise_optimizer_0.pt": lambda path, evil: in_legacy_format(
        path, evil, "mp_rank_00/layer_wise_optimizer_0.pt"
    ),
}
"""Places that are read for the model."""


def as_release(args: Namespace, saved: Path) -> Path:
    args.load = str(saved)
    (saved / "iter_0000003").rename(saved / "release")
    (saved / files.TRACKER).write_text("release")
    return saved / "release"


def as_temporary(args: Namespace, saved: Path) -> Path:
    """Put the checkpoint into LOAD/non_persistent, with an older good one in LOAD."""
    args.load, args.non_persistent_ckpt_type = str(saved), "global"
    folder = saved / "non_persistent"
    folder.mkdir()
    (saved / "iter_0000003").rename(folder / "iter_0000003")
    files.write_tracker(folder, 3)
    files.write_tracker(saved, 2)
    return folder / "iter_0000003"


def as_temporary_elsewhere(args: Namespace, saved: Path) -> Path:
    path = as_temporary(args, saved)
    elsewhere = saved.parent / "elsewhere"
    path.parent.rename(elsewhere)
    args.non_persistent_global_ckpt_dir = str(elsewhere)
    return elsewhere / path.name


def set_to(saved: Path, path: str = "iter_0000003", **changes: Any) -> Callable[..., Path]:
    def arrange(args: Namespace, saved: Path) -> Path:
        vars(args).update({key: value or str(saved) for key, value in changes.items()})
        return saved / path

    return arrange


WAYS: dict[str, Callable[[Namespace, Path], Path]] = {
    "--load": set_to("", load=None),
    "--load --finetune": set_to("", load=None, finetune=True),
    "--load --ckpt-step": set_to("", "iter_0000002", load=None, ckpt_step=2),
    "--load --auto-detect-ckpt-format": set_to("", load=None, auto_detect_ckpt_format=True),
    "--load --ckpt-format torch": set_to("", load=None, ckpt_format="torch"),
    "release": as_release,
    "--pretrained-checkpoint": set_to("", pretrained_checkpoint=None),
    "--pretrained-checkpoint, --load empty": set_to("", pretrained_checkpoint=None, load="nowhere"),
    "--non-persistent-ckpt-type global": as_temporary,
    "--non-persistent-global-ckpt-dir": as_temporary_elsewhere,
}


@pytest.fixture(scope="module")
def defaults() -> Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_recipe_arguments(add_megatron_arguments(parser)).parse_args([])


@pytest.fixture(scope="module")
def good(write_checkpoint, tmp_path_factory) -> Path:
    """Folder with checkpoints of iterations 2 and 3, on record, with the simplest arguments."""
    directory = tmp_path_factory.mktemp("good") / "saved"
    for number in (2, 3):
        path = write_checkpoint(files.iteration_directory(directory, number))
        files.write_document(path, {"files": files.checksums(path)})
    files.write_tracker(directory, 3)
    return directory


@pytest.fixture
def saved(good, tmp_path) -> Path:
    return shutil.copytree(good, tmp_path / "saved")


@pytest.fixture
def args(defaults) -> Namespace:
    return Namespace(**vars(defaults))


@pytest.fixture
def trace(tmp_path) -> Path:
    return tmp_path / "trace"


def unrecorded(path: Path) -> None:
    (path / files.DOCUMENT).unlink(missing_ok=True)


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_arguments(args: Namespace) -> None:
    """Take over arguments as ``parse_and_validate_args`` does."""
    checkpointing.load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
    checkpointing.load_args_from_checkpoint(args)


def run_hooks(args: Namespace) -> None:
    """Run the guard's hook, which comes before Megatron-LM loads."""
    guard = CheckpointGuard(args)
    try:
        guard([torch.nn.Linear(1, 1)])
    finally:
        guard.close()


CELLS = [
    *((kind, way, read_arguments) for kind in BYTES for way in WAYS),
    *((kind, way, run_hooks) for kind in BYTES | MORE_BYTES for way in WAYS),
]


@pytest.mark.parametrize(
    ("kind", "way", "read"), CELLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_no_source_runs_code_by_any_argument(saved, args, trace, monkeypatch, kind, way, read):
    """Even where torch is told to load pickles without restriction."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = WAYS[way](args, saved)
    (BYTES | MORE_BYTES)[kind](path, Evil(trace))
    unrecorded(path)
    error = refusal(lambda: read(args))
    assert "refused: " in error and str(path) in error
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["planner data", "within common state", "torch"])
def test_the_planted_code_runs_without_the_checks(saved, trace, kind):
    """The table is about something: Python's own unpickler runs what it holds."""
    path = saved / "iter_0000003"
    BYTES[kind](path, Evil(trace))
    if kind == "planner data":
        pickle.loads((path / ".metadata").read_bytes())
    elif kind == "torch":
        torch.load(path / "mp_rank_00/model_optim_rng.pt", weights_only=False)
    else:
        place = metadata_of(path).storage_data[MetadataIndex(COMMON)]
        stream = io.BytesIO((path / place.relative_path).read_bytes()[place.offset :])
        torch.load(stream, weights_only=False)
    assert trace.is_dir()


@pytest.mark.parametrize("way", WAYS)
def test_good_checkpoints_pass_in_every_way(saved, args, way):
    path = WAYS[way](args, saved)
    read_arguments(args)
    run_hooks(args)
    assert args.iteration == (2 if path.name == "iter_0000002" else 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", [read_arguments, run_hooks])
def test_lengths_and_checksums_are_compared_in_every_way(saved, args, way, read):
    path = WAYS[way](args, saved)
    content = bytearray((path / "metadata.json").read_bytes())
    content[3] ^= 1
    (path / "metadata.json").write_bytes(content)
    assert f"{path / 'metadata.json'}: its content differs" in refusal(lambda: read(args))
    unrecorded(path)
    os.truncate(path / "__0_0.distcp", 100)
    assert f"{path / '__0_0.distcp'}: 100 bytes instead of" in refusal(lambda: read(args))


def test_a_valid_older_one_is_not_taken_for_a_damaged_temporary_one(saved, args):
    """Megatron-LM would load the temporary one all the same."""
    path = as_temporary(args, saved)
    os.truncate(path / "__0_0.distcp", 100)
    args.load_latest_valid = True
    assert "without --non-persistent-ckpt-type" in refusal(lambda: run_hooks(args))


# -- torch's readers in the process ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [".metadata", "planner data", "common state", "object"])
def test_torchs_own_readers_run_no_code(saved, args, trace, kind):
    """In scripts of a user's own, too, which parse with ``add_recipe_arguments``."""
    path = saved / "iter_0000003"
    (BYTES | MORE_BYTES)[kind](path, Evil(trace))
    state, reader = {EXTRA: None, COMMON: None}, FileSystemReader(path)
    with pytest.raises(CheckpointException):
        load(state, storage_reader=reader, no_dist=True)
    with pytest.raises(BaseException) as caught:
        reader.read_metadata()  # torch 2.11's load drops the error of this call
        load(state, storage_reader=reader, no_dist=True)
    assert "refused: " in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_readers_read_good_checkpoints_as_before(tmp_path, args, flat):
    written = {"x": torch.arange(3.0), "deep": {"object": "text"}}
    read: dict[str, Any] = {"x": torch.zeros(3), "deep": {"object": ""}}
    planner = DefaultLoadPlanner(flatten_state_dict=flat, flatten_sharded_tensors=False)
    save(written, checkpoint_id=tmp_path, planner=DefaultSavePlanner(flat), no_dist=True)
    load(read, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert torch.equal(read["x"], written["x"]) and read["deep"] == written["deep"]


# -- arguments of a checkpoint ---------------------------------------------------------------------


def save_args(path: Path, **changes: Any) -> None:
    common = common_of(path)
    vars(common["args"]).update(changes)
    write_object(path, [common], COMMON)
    unrecorded(path)


@pytest.mark.parametrize("given", [None, ["mine", "spec"]])
def test_a_module_that_a_checkpoint_names_is_not_imported(saved, args, given):
    sys.modules.pop("this", None)
    args.load, args.use_checkpoint_args, args.spec = str(saved), True, given
    save_args(saved / "iter_0000003", spec=["this", "c"])
    error = refusal(lambda: read_arguments(args))
    assert "spec ['this', 'c']: names Python code to import; give the same --spec" in error
    assert "this" not in sys.modules


def test_a_module_that_the_command_line_names_as_well_is_the_users(saved, args):
    args.load, args.spec = str(saved), ["mine", "spec"]
    save_args(saved / "iter_0000003", spec=["mine", "spec"], num_layers=4)
    read_arguments(args)
    assert args.num_layers == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", "x"), ("num_layers", 2**40), ("num_layers", [1]), ("rotary_base", "x"),
        ("rotary_percent", 2.5), ("swiglu", "yes"), ("normalization", "x"),
        ("normalization", []), ("tiktoken_pattern", "\x1b]0;PWN\x07"), ("moe_layer_freq", {}),
        ("ffn_hidden_size", -5), ("tokenizer_model", 5.5), ("add_position_embedding", "x"),
    ],
)  # fmt: skip
def test_values_are_checked_as_those_of_a_command_line(saved, args, capsys, name, value):
    args.load = str(saved)
    save_args(saved / "iter_0000003", **{name: value})
    error = refusal(lambda: read_arguments(args))
    assert error.startswith(f"--use-checkpoint-args: {saved / 'iter_0000003'}: {name} ")
    assert "\x1b" not in error + capsys.readouterr().out


def test_what_is_printed_of_a_checkpoint_is_escaped(saved, args, capsys):
    args.load = str(saved)
    save_args(saved / "iter_0000003", tokenizer_model="a\x1b[31m\nb")
    with pytest.raises(UserError):
        read_arguments(args)
    assert r"Setting tokenizer_model to a\x1b[31m\nb from checkpoint" in capsys.readouterr().out


# -- other arguments that read pickles -------------------------------------------------------------


def test_checkpoints_that_nothing_can_check_are_refused(args):
    check_loads(args)
    args.non_persistent_ckpt_type = "local"
    assert "--non-persistent-ckpt-type local" in refusal(lambda: check_loads(args))
    args.non_persistent_ckpt_type, args.enable_msc = None, True
    assert "--enable-msc" in refusal(lambda: check_loads(args))


def test_logits_of_a_teacher_run_no_code(trace):
    """``--logits-load-dir``, by Megatron-LM itself."""
    zstandard = pytest.importorskip("zstandard")
    stream = io.BytesIO()
    torch.save(Evil(trace), stream)
    with pytest.raises(pickle.UnpicklingError):
        decode_logprobs_payload(zstandard.ZstdCompressor().compress(stream.getvalue()))
    assert not trace.exists()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int64, io.BytesIO])
def test_extra_states_of_layers_run_no_code(tmp_path, trace, kind, deep):
    """Transformer Engine unpickles them."""
    if kind is io.BytesIO:
        stream = io.BytesIO()
        torch.save(Evil(trace), stream)
        stream.seek(0)
        state: Any = stream
    else:
        content = pickle.dumps({"a": Evil(trace)})
        state = torch.frombuffer(bytearray(content.ljust(8 * len(content), b".")), dtype=kind)
    key, content = "decoder.layers.0.linear_fc1._extra_state/shard_0_1", [state]
    if deep:
        key, content = "", {"model": {"decoder.layers.0.linear_fc1._extra_state": state}}
    error = refusal(lambda: check_extra_states(tmp_path / "x.distcp", key, content))
    assert error.startswith(str(tmp_path / "x.distcp")) and "refused: " in error
    assert not trace.exists()


def test_extra_states_as_transformer_engine_writes_them(tmp_path, monkeypatch):
    module = ModuleType("transformer_engine.common.recipe")
    recipe = type("DelayedScaling", (), {"__module__": module.__name__})
    module.DelayedScaling = recipe
    for name in ("transformer_engine", "transformer_engine.common", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    module.CustomRecipe = type("CustomRecipe", (), {"__module__": module.__name__})
    layers = ModuleType("megatron_lowbit.megatron.transformer_engine_layers")
    layers.factory = type("factory", (), {"__module__": layers.__name__})  # pickled by its name
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    made, custom = recipe(), module.CustomRecipe()
    made.margin, custom.qfactory = 0, layers.factory
    own = torch.frombuffer(bytearray(pickle.dumps({"recipe": custom})), dtype=torch.uint8)
    state = {"recipe": made, "scale_fwd": torch.ones(3), "extra_fp8_variables": OrderedDict(a=1)}
    tensor = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    for content in ([tensor], [own], [torch.empty(0, dtype=torch.uint8)], [None], [{"state": 1}]):
        check_extra_states(tmp_path / "x", "layer._extra_state/shard_0_1", content)
    with pytest.raises(UserError, match="damaged"):
        check_extra_states(tmp_path / "x", "layer._extra_state", [tensor[:-5]])


# -- what Megatron-LM makes of it ------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure", [KeyError("optimizer"), TypeError("no\nlist"), SystemExit(), AttributeError("x")]
)
def test_whatever_ends_a_load_is_one_line(saved, args, monkeypatch, failure):
    """Megatron-LM leaves the process with exit code 0 on some checkpoints."""

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(training, "load_checkpoint", fail)
    args.load = str(saved)
    guard = CheckpointGuard(args)
    guard([torch.nn.Linear(1, 1)])
    try:
        assert str(saved / "iter_0000003") in refusal(lambda: training.load_checkpoint())
    finally:
        guard.close()
    assert training.load_checkpoint is fail
