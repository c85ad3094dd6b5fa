"""Invalid numbers, patterns and folders in Megatron-LM's arguments are refused in one line."""

import itertools
import re
import shlex
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lowbit import arguments
from megatron_lowbit.arguments.values import _OUTPUT_FOLDERS, check_profiled_iterations, range_of
from megatron_lowbit.command_line import expand_files
from megatron_lowbit.errors import UserError

# isort: split
from megatron.training import training
from megatron.training.global_vars import unset_global_variables

TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 2
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 96
""")
SECONDS = 5


@pytest.fixture(scope="module")
def parser():
    return arguments.front_parser()


@pytest.fixture(scope="module", autouse=True)
def quick(parser):
    """Build the parser once, and restore the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_lowbit.arguments.parse.front_parser", lambda: parser)
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        arguments.parse_arguments(TINY)  # Megatron-LM imports much of itself only now.
        unset_global_variables()
        yield


@contextmanager
def limited() -> Iterator[None]:
    """Stop code that takes too long, measured in processor time since machines are busy."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def refusal(argv: list[str]) -> str | None:
    """Return the error line of a command line; None if it is accepted."""
    try:
        with limited():
            arguments.parse_arguments(argv)
    except UserError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return str(error)
    finally:
        unset_global_variables()
    return None


# -- ranges ----------------------------------------------------------------------------------------


def test_defaults_of_megatron_are_in_their_ranges(parser):
    for action in parser._actions:
        if action.type in (int, float):
            low, high, _ = range_of(action)
            values = action.default if isinstance(action.default, list) else [action.default]
            assert all(v is None or low <= v <= high for v in values), action.option_strings
    assert set(_OUTPUT_FOLDERS) <= set(parser._option_string_actions)


MEANT = {
    "mtp_num_layers", "num_experts", "train_iters", "train_samples", "loss_scale", "save_interval"
}  # fmt: skip
"""Numbers that may be 0: no layers of the kind, lengths of runs, checked elsewhere, a dynamic loss
scale, and no checkpoints. Public scripts for Megatron-LM contain the last two."""


def test_numbers_of_which_megatron_takes_0_for_absent_are_not_0(parser):
    """Its training tests them as ``if args.name``; their default is not 0."""
    source = "\n".join(file.read_text() for file in Path(training.__file__).parent.rglob("*.py"))
    before, name = r"(?:\b(?:if|and|or|not)|^) +", r"(?:args\.|getattr\(args, ')(\w+)(?:', None\))?"
    names = set(re.findall(rf"(?m){before}{name}(?=:\n|\s+and |\s+or )", source))
    assert names > {"exit_duration_in_mins", "exit_interval", "ckpt_step", "train_sync_interval"}
    ints = {action.dest for action in parser._actions if action.type is int}
    names |= {name for name in ints if name.endswith("_interval")}
    numbers = [action for action in parser._actions if action.type in (int, float)]
    names -= MEANT
    tested = [action for action in numbers if action.dest in names and action.default != 0]
    assert [action.dest for action in tested if range_of(action).low <= 0] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--seed -1", "--seed -1: must be from 1 to"),
        ("--seed 99999999999", "--seed 99999999999: must be"),
        ("--clip-grad nan", "--clip-grad nan: must be finite"),
        ("--lr inf", "--lr inf: must be finite"),
        ("--weight-decay -1", "--weight-decay -1.0: must be finite and not negative"),
        ("--glu-linear-offset nan", "--glu-linear-offset nan: must be finite"),
        ("--moe-aux-loss-coeff 0.1 nan", "--moe-aux-loss-coeff nan: must be finite"),
        ("--kv-channels 0", "--kv-channels 0: must be an integer from 1 to 2**63 - 1"),
        ("--log-interval 0", "--log-interval 0: must be an integer from 1"),
        ("--save new --save-interval 0", "Megatron-LM requires --save-interval > 0"),
        ("--lr-wsd-decay-iters -1", "--lr-wsd-decay-iters -1: must be an integer from 0"),
        ("--rotary-percent 5", "--rotary-percent 5.0: must be greater than 0 and at most 1"),
        ("--hidden-dropout 1.5", "--hidden-dropout 1.5: must be from 0 to 1"),
        ("--adam-beta2 1", "--adam-beta2 1.0: must be at least 0 and less than 1"),
        ("--num-layers 100000000", "--num-layers 100000000: must be from 1 to 100000"),
        ("--num-workers 99999", "--num-workers 99999: must be from 0 to 256"),
        ("--dry-run --world-size 0", "--world-size 0: must be from 1 to"),
        ("--save a --save-interval 1 --save-keep-last 0", "an integer from 1"),
        ("--save '' --save-interval 1", "--save: the name of the folder is empty"),
        ("--load ''", "--load: the name of the folder is empty"),
        ("--distributed-timeout-minutes 99999999999999", "must be from 1 to"),
        ("--save-interval 99999999999999999999", "--save-interval 99999999999999999999: must be"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
            "--recompute-num-layers 0: must be at least 1",
        ),
        ("--train-iters 999999999999999", "--train-iters 999999999999999: the index of 4e+15"),
        ("--train-iters 0", "give --train-iters or --train-samples, at least 1"),
        ("--eval-iters 999999999999999", "--eval-iters 999999999999999: the index of 4e+15"),
        (
            "--profile --profile-step-start 2 --profile-step-end 2",
            "--profile-step-end 2: must be greater than --profile-step-start 2",
        ),
        ("--profile --use-pytorch-profiler", "--use-pytorch-profiler needs --tensorboard-dir"),
        ("--moe-layer-freq [1]*", "neither an integer nor a list"),
        ("--moe-layer-freq [1]*99999*99999", "longer than 100000 layers"),
        ("--linear-attention-freq [9**9**9]", "neither an integer nor a list"),
        ("--pipeline-model-parallel-layout t*99999999999", "more than 100000 layers"),
        ("--pipeline-model-parallel-layout t*(9)*9", "more than 100000 layers"),
        ("--split 90,nan,0", "--split 90,nan,0: must be"),
        ("--split 90,-5,0", "--split 90,-5,0: must be"),
        ("--split 0,0,0", "--split 0,0,0: must be"),
        ("--window-size 1", ": must be two numbers"),
        ("--position-embedding-type rope --kv-channels 3", "--kv-channels: must be an even number"),
        ("--position-embedding-type rope --hidden-size 4", "rotates 1 of a head's 1 --kv-channels"),
        ("--position-embedding-type rope --rotary-percent 0.2", "rotates 3 of a head's 16"),
    ],
)
def test_values_out_of_range(line, message):
    assert message in (refusal(TINY + shlex.split(line)) or "accepted")


@pytest.mark.parametrize(
    "line",
    [
        "--moe-expert-capacity-factor -1 --null-tokenizer-pad-id -1 --eval-iters -1 --fp8-margin -1"
        " --inference-batch-times-seqlen-threshold -1 --moe-router-force-biased -0.5",
        "--lr 0 --clip-grad 0 --weight-decay 0 --num-workers 0 --manual-gc-interval 0"
        " --lr-wsd-decay-iters 0 --hidden-dropout 0 --attention-dropout 1 --num-experts 0",
        "--moe-layer-freq ([1]*1+[0]*1)*1 --no-rope-freq 2 --split 969:30,1.5 --seed 4000000000",
        "--bf16 --loss-scale 0 --save-interval 0",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 0",
        "--train-iters 0 --skip-train",
        "--train-iters 999999999999999 --dry-run",  # more than this machine can train
    ],
)
def test_values_with_a_meaning_stay(line):
    assert refusal(TINY + shlex.split(line)) is None


def test_a_run_needs_a_length():
    at = TINY.index("--train-iters")
    line = TINY[:at] + TINY[at + 2 :]
    for more in ([], ["--skip-train"]):
        assert "give --train-iters or --train-samples" in (refusal(line + more) or "accepted")
    assert refusal([*line, "--dry-run"]) is None


@pytest.mark.parametrize("length", ["--train-iters 5", "--train-samples 23"])
def test_a_profile_must_end_within_the_run(length, tmp_path):
    """Torch records a CPU as well; a run has 5 iterations of 4 samples."""
    line = shlex.join(TINY).replace("--train-iters 2", length)
    line += f" --profile --use-pytorch-profiler --tensorboard-dir {tmp_path} --profile-step-start 3"
    assert refusal(shlex.split(f"{line} --profile-step-end 5")) is None
    assert refusal(shlex.split(f"{line} --profile-step-end 6 --skip-train")) is None
    message = refusal(shlex.split(f"{line} --profile-step-end 6")) or "accepted"
    assert "--profile-step-end 6: the run has 5 iterations" in message


def test_nsight_systems_may_record_until_the_run_ends():
    args = Namespace(
        profile=True, use_pytorch_profiler=False, skip_train=False, step_batch_size_schedule=None,
        train_iters=5, profile_step_start=4, profile_step_end=12,
    )  # fmt: skip
    check_profiled_iterations(args)
    args.profile_step_start = 5
    with pytest.raises(UserError, match=r"--profile-step-start 5 .*: the run has 5 iterations"):
        check_profiled_iterations(args)


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--data-cache-path"])
def test_folders_that_cannot_be_written_to(flag, tmp_path, monkeypatch):
    file, loose = tmp_path / "file", tmp_path / "loose"
    file.write_text("")
    loose.symlink_to(tmp_path / "nowhere")
    extra = ["--save-interval", "1"]
    for folder, reason in (
        (file, "is a file, not a folder"),
        (file / "below", "Not a directory"),
        (loose, "is a link to nothing"),
        (tmp_path / "new" / ("n" * 256), "a name is longer than 255 bytes"),
    ):
        message = refusal([*TINY, *extra, flag, str(folder)]) or "accepted"
        assert message.startswith(f"{flag} {folder}: ") and reason in message
    # Root may write everywhere but to a file system that is read-only.
    monkeypatch.setattr("megatron_lowbit.folders.os.access", lambda path, mode: False)
    message = refusal([*TINY, *extra, flag, str(tmp_path / "new")])
    assert message == f"{flag} {tmp_path / 'new'}: {tmp_path} cannot be written to"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loose"]


def test_load_must_be_a_folder_or_not_there_yet(tmp_path):
    assert "a folder with checkpoints is needed" in (refusal([*TINY, "--load", "/dev/null"]) or "")
    assert "File name too long" in (refusal([*TINY, "--load", "n" * 256]) or "")
    assert refusal([*TINY, "--load", str(tmp_path / "first")]) is None


# -- microbatches ----------------------------------------------------------------------------------

VIRTUAL = shlex.split("""
    --num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
    --dry-run --world-size 2
""")
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 8", None),
        ("--global-batch-size 6", "--global-batch-size 6: virtual .* of 2, and .* 3; give .* 4$"),
        ("--global-batch-size 2", "--global-batch-size 2: .* groups of 2, and these are 1"),
        ("--eval-global-batch-size 6", "--eval-global-batch-size 6: .* and these are 3"),
        ("--eval-global-batch-size 6 --eval-iters 0", None),
        ("--global-batch-size 6 --eval-global-batch-size 4 --skip-train", None),
        (f"--global-batch-size 10 {GROUP} 3", None),  # 3 microbatches, then one for each stage
        (f"--global-batch-size 8 {GROUP} 3", "--global-batch-size 8: .* groups of 3, and .* 4"),
        (f"{GROUP} 1", f"{GROUP} 1: must be at least --pipeline-model-parallel-size 2"),
    ],
)
def test_virtual_stages_take_microbatches_in_groups(flags, message):
    given = refusal([*TINY, *VIRTUAL, *flags.split()])
    assert given is None if message is None else re.match(message, given or "")


# -- files of arguments ----------------------------------------------------------------------------


def test_files_of_arguments_that_multiply(tmp_path):
    for number in range(30):
        (tmp_path / str(number)).write_text(f"@{tmp_path}/{number + 1} @{tmp_path}/{number + 1}")
    (tmp_path / "30").write_text("--bf16")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "latin").write_bytes(b"--save \xe9")
    (tmp_path / "lines").write_bytes(b"--lr 1 \\\r\n --bf16\r\n")
    for name, message in (
        ("0", "more than 100 files"),
        ("loop", "loop"),
        ("latin", "'utf-8' codec"),
        ("n" * 256, "File name too long"),
    ):
        with limited(), pytest.raises(UserError, match=message):
            expand_files([f"@{tmp_path}/{name}"])
    with limited(), pytest.raises(UserError, match="@/dev/zero: larger than"):
        expand_files(["@/dev/zero"])
    assert expand_files([f"@{tmp_path}/lines"]) == ["--lr", "1", "--bf16"]


# -- fuzz ------------------------------------------------------------------------------------------

NUMBERS = ("-1", "0", "1", "3", "nan", "-inf", "inf", "1e308", "0.5", "-0.5", "9" * 12, "9" * 25)
TEXTS = ("", "-", "--", "@", "@@", "[1]*9", "[1]*9**9", "t*9|L", "é\n", "\x1b[2J", "a" * 300, "1,2")
values = st.sampled_from(NUMBERS + TEXTS) | st.text(max_size=8) | st.integers().map(str)


@st.composite
def command_lines(draw: st.DrawFn, flags: list[str]) -> list[str]:
    """Draw the tiny command line with values replaced and arguments added."""
    argv = list(TINY)
    places = [i for i, word in enumerate(argv) if not word.startswith("--")]
    for place in draw(st.lists(st.sampled_from(places), max_size=1)):
        argv[place] = draw(values)
    for flag in draw(st.lists(st.sampled_from(flags), max_size=2)):
        argv += [flag, *draw(st.lists(values, max_size=2))]
    return argv


@pytest.mark.parametrize("examples", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_any_command_line_is_accepted_or_refused_in_one_line(
    parser, tmp_path, monkeypatch, examples
):
    exits = {"-h", "--help", "--print-completion", "--version"}
    # Folders would be made, and files of any name read.
    paths = {"--save", "--tensorboard-dir", "--wandb-save-dir", "--wandb-project"}
    flags = sorted(set(parser._option_string_actions) - exits - paths)
    monkeypatch.chdir(tmp_path)

    @settings(max_examples=examples)
    @given(command_lines(flags))
    def run(argv: list[str]) -> None:
        refusal(argv)

    run()


@pytest.mark.slow
def test_each_number_with_each_bad_value(parser):
    """The tiny model gets one numeric argument at a time."""
    numeric = [a.option_strings[0] for a in parser._actions if a.type in (int, float)]
    for flag, value in itertools.product(numeric, ("-1", "0", "nan", "9" * 25)):
        refusal([*TINY, flag, value])
