"""The example for Hugging Face's Trainer: it learns, in the recipe's precision, and resumes."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from megatron_lowbit import LowbitLinear
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.pytorch import linear

SCRIPT = Path(__file__).parents[2] / "examples" / "hugging_face_trainer.py"
STEPS, SAVED = 8, 5


class Recorder(Trainer):
    """A trainer that the test finds again."""

    last: Trainer

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Recorder.last = self

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.state.log_history if "loss" in entry]


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Runs the script with more arguments; returns its trainer."""
    monkeypatch.setattr(linear, "select_engine", lambda device: ReferenceEngine("tests"))

    def run(*more: str) -> Recorder:
        arguments = f"--output_dir {tmp_path} --max_steps {STEPS} --save_steps {SAVED} --use_cpu"
        arguments += " --logging_steps 1 --learning_rate 3e-3 --disable_tqdm true"
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments.split(), *more])
        main = runpy.run_path(str(SCRIPT))["main"]
        main.__globals__["Trainer"] = Recorder
        main()
        return Recorder.last

    return run


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--bf16"], marks=pytest.mark.slow),
        pytest.param(
            ["--activation_checkpointing", "--gradient_accumulation_steps", "2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_it_learns_and_resumes_bit_for_bit(options, train, tmp_path):
    whole = train(*options)
    names = [name for name, m in whole.model.named_modules() if type(m) is LowbitLinear]
    assert len(names) == 14 and {name.split(".")[2] for name in names} == {"1", "2"}
    assert whole.losses[-1] < whole.losses[0] - 0.5
    parameters = {name: value.clone() for name, value in whole.model.state_dict().items()}
    resumed = train(*options, "--resume_from_checkpoint", str(tmp_path / f"checkpoint-{SAVED}"))
    assert resumed.losses == whole.losses
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, parameters[name]), name
