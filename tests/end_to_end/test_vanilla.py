"""Runs without a recipe equal Megatron-LM's to the bit; recipes in other scripts.

Dropout is on, as it is upstream unless an argument turns it off: its random numbers count too.
"""

import runpy
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import ROOT, arguments_for, done

# isort: split
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from megatron_lowbit.megatron.arguments.cpu import _ADDED
from megatron_lowbit.megatron.pretrain import teardown
from megatron_lowbit.megatron.upstream_gaps import use_prebuilt_dataset_helpers

DROPOUT = ("--hidden-dropout", 0.1, "--attention-dropout", 0.1)
RUN = ("--mock-data", "--train-iters", 3, "--eval-iters", 1, "--eval-interval", 2)
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
def upstream(memory, main_of, arguments, tmp_path) -> dict[str, list[tuple[int, float]]]:
    """Records of Megatron-LM's own run."""
    if "upstream" not in memory:
        main_of(megatron_lm, without_own(arguments("upstream")))
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
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        on_cpu = [word for argument in _ADDED for word in argument]
        monkeypatch.setattr(sys, "argv", ["script.py", *argv, *on_cpu])
        with teardown():
            main()

    return run


def datasets(samples: tuple[int, int, int], vp_stage: int | None = None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, split=args.split,
        tokenizer=get_tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    build = BlendedMegatronDatasetBuilder(MockGPTDataset, list(samples), lambda: True, config)
    return build.build()


datasets.is_distributed = True


def forward_step(data, model):
    """Run one microbatch like Megatron-LM's own script without parallelism."""
    assert mpu.get_model_parallel_group().size() == 1
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(output):
        mask = batch["loss_mask"].view(-1)
        total = torch.sum(output.view(-1) * mask)
        tokens = mask.sum().to(torch.int)
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    return output, loss


def megatron_lm() -> None:
    """Train by Megatron-LM alone, without hooks and arguments of this project."""
    use_prebuilt_dataset_helpers()
    args = parse_and_validate_args()
    config = gpt_config_from_args(args)
    container = pretrain_cfg_container_from_args(args, config)
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


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
def test_a_script_of_ones_own_computes_the_same(arguments, main_of, ours, tmp_path, recipe):
    script = partial(runpy.run_path, str(ROOT / "examples" / "own_script.py"), None, "__main__")
    main_of(script, arguments("script", *recipe))
    found = ours(*DROPOUT, *recipe)
    assert recorded(tmp_path / "script") == found
    if recipe:
        assert ours(*DROPOUT) != found
