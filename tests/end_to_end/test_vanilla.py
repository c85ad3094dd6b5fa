"""Runs without a recipe equal Megatron-LM's to the bit; recipes in other scripts.

Dropout is on, as it is upstream unless an argument turns it off: its random numbers count too.
"""

import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import ENVIRONMENT, ROOT, arguments_for, done

from megatron_lowbit.arguments.cpu import _ADDED
from megatron_lowbit.megatron.pretrain import teardown
from tests import processes

DROPOUT = ("--hidden-dropout", 0.1, "--attention-dropout", 0.1)
RUN = ("--mock-data", "--train-iters", 3, "--eval-iters", 1, "--eval-interval", 2)
ON_CPU = shlex.split("""
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
    --no-create-attention-mask-in-dataloader --rerun-mode disabled
""")
NVFP4 = ("--precision-recipe", "nvfp4")


def recorded(board: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (iteration, value) of losses and gradient norms, from TensorBoard's files."""
    events = EventAccumulator(str(board)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in ("lm loss", "grad-norm", "lm loss validation")
    }


@pytest.fixture
def ours(memory, pretrain_here, tmp_path_factory) -> Callable[..., dict]:
    """Function that returns what this project's run records; each is trained once."""

    def train(*extra: object) -> dict[str, list[tuple[int, float]]]:
        if extra not in memory:
            board = tmp_path_factory.mktemp("ours")
            done(pretrain_here(*RUN, *extra, "--tensorboard-dir", board))
            memory[extra] = recorded(board)
        return memory[extra]

    return train


@pytest.fixture
def upstream(memory, arguments, tmp_path) -> dict[str, list[tuple[int, float]]]:
    """Records of stock Megatron-LM's run, in a process without this package."""
    if "upstream" not in memory:
        command = [sys.executable, "-P", Path(__file__).with_name("stock_run.py")]
        command += [*without_own(arguments("upstream")), *ON_CPU]
        result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        done(result)
        memory["upstream"] = recorded(tmp_path / "upstream")
    return memory["upstream"]


@pytest.fixture
def arguments(corpus, tmp_path) -> Callable[..., list[str]]:
    """Function that builds a command line, with logs in the folder NAME."""

    def make(name: str, *extra: object) -> list[str]:
        board = ("--tensorboard-dir", tmp_path / name)
        return arguments_for(corpus, (*RUN, *DROPOUT, *board, *extra))

    return make


@pytest.fixture
def main_of(monkeypatch):
    """Function that runs a main with ``sys.argv`` and the launcher's environment variables."""

    def run(main: Callable[[], object], argv: list[str]) -> None:
        _store, addresses = processes.rendezvous()
        on_cpu = [word for argument in _ADDED for word in argument]
        with monkeypatch.context() as patch, teardown():
            for name, value in addresses.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["script.py", *argv, *on_cpu])
            main()

    return run


def without_own(argv: list[str]) -> list[str]:
    """Remove this project's arguments, each of which has one value here."""
    at = [number for number, word in enumerate(argv) if word == "--quantization-engine"]
    return [word for number, word in enumerate(argv) if number not in {*at, *(n + 1 for n in at)}]


@pytest.mark.parametrize("more", [(), ("--precision-recipe", "bf16")], ids=["none", "bf16"])
def test_without_quantization_a_run_is_megatron_lms(upstream, ours, more):
    assert [step for step, _ in upstream["lm loss"]] == [1, 2, 3]
    assert len({value for _, value in upstream["lm loss"]}) == 3
    assert ours(*DROPOUT, *more) == upstream


def test_dropout_counts(ours):
    """Runs with and without dropout differ, so that the comparisons can fail."""
    assert ours(*DROPOUT) != ours()


@pytest.mark.parametrize("recipe", [(), NVFP4], ids=["none", "nvfp4"])
def test_a_users_script_computes_the_same(arguments, main_of, ours, tmp_path, recipe):
    script = partial(runpy.run_path, str(ROOT / "examples" / "own_script.py"), None, "__main__")
    main_of(script, arguments("script", *recipe))
    found = ours(*DROPOUT, *recipe)
    assert recorded(tmp_path / "script") == found
    if recipe:
        assert ours(*DROPOUT) != found
