"""A training run in progress: its state, to and from checkpoints, and its data."""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.megatron.layer_state import (
    forget_quantized_weights,
    set_recipe,
)
from megatron_lowbit.recipes import Progress, Recipe
from megatron_lowbit.training.background_saves import BackgroundSaves
from megatron_lowbit.training.checkpoint import load_checkpoint, take_snapshot, write_snapshot
from megatron_lowbit.training.data import batch_iterator
from megatron_lowbit.training.distributed import print_rank0
from megatron_lowbit.training.metrics import MetricLogger
from megatron_lowbit.training.sentinels import DataPosition
from megatron_lowbit.training.step import data_parallel_size


@dataclass
class Run:
    """A training run in progress."""

    args: Namespace
    recipe: Recipe
    config: TransformerConfig
    model: list
    optimizer: Any
    scheduler: Any
    train_data: Any
    valid_data: Any
    model_shape: dict[str, Any]
    iteration: int = 0
    active_recipe: Recipe | None = None
    data: DataPosition = field(default_factory=DataPosition)
    after_backward: Callable[[int, list], None] | None = None
    beat: Callable[[str], None] = lambda doing: None
    background: BackgroundSaves | None = None

    @property
    def trained_samples(self) -> int:
        return self.iteration * self.args.global_batch_size

    def set_precision(self) -> None:
        """Compute as the recipe says at this point of the run."""
        progress = Progress(
            iteration=self.iteration,
            tokens=self.trained_samples * self.args.seq_length,
            fraction=self.iteration / self.args.train_iters,
        )
        current = self.recipe.at(progress)
        if current != self.active_recipe:
            set_recipe(self.model, current)
            if self.recipe.switches:
                print_rank0(f"iteration {self.iteration}: recipe {current.name}")
            self.active_recipe = current


def restore(run: Run, directory: str, iteration: int) -> None:
    """Go to the state of a checkpoint directory's iteration: one that valid_iteration() found."""
    run.beat(f"loading the checkpoint of iteration {iteration}")
    # Before loading: which layers have amax histories to load depends on it.
    run.iteration = iteration
    run.set_precision()
    # megatron's schedule adds what it loads to the steps that it has made.
    run.scheduler.num_steps = 0
    loaded = load_checkpoint(
        directory, run.model, run.optimizer, run.scheduler, run.model_shape, iteration
    )
    forget_quantized_weights(run.model)
    saved = loaded["state"]
    if saved["global_batch_size"] != run.args.global_batch_size:
        raise UserError(
            f"--global-batch-size {run.args.global_batch_size} differs from the checkpoint's "
            f"{saved['global_batch_size']}: data would repeat or be skipped"
        )
    bad = [tuple(samples) for samples in saved.get("bad_samples", [])]
    run.data = DataPosition(saved["consumed_samples"], bad)


def start_from(run: Run, directory: str, iteration: int) -> None:
    """Take the model of a checkpoint alone: training begins at iteration 0, with its own data."""
    run.beat(f"loading the model of iteration {iteration}")
    run.set_precision()
    load_checkpoint(directory, run.model, None, None, run.model_shape, iteration)
    forget_quantized_weights(run.model)
    # In BF16 the optimizer has FP32 copies of what the model was when it was made.
    run.optimizer.reload_model_params()


def finish_saving(run: Run) -> None:
    """Until every checkpoint is written; raises UserError where one cannot be."""
    if run.background is not None:
        run.background.wait()


def saving_failed(run: Run) -> bool:
    """Whether this rank knows that :func:`finish_saving` will raise."""
    return run.background is not None and run.background.failed


def save(run: Run, logger: MetricLogger) -> None:
    """Save a checkpoint, or begin to where --async-save asks for it."""
    start = time.perf_counter()
    run.beat(f"the save of iteration {run.iteration}")
    finish_saving(run)
    state = {
        "model": run.model_shape,
        "global_batch_size": run.args.global_batch_size,
        "consumed_samples": run.data.samples,
        "bad_samples": run.data.bad,
        "recipes": run.args.recipes,
        "recipe_set": run.args.recipe_set,
    }
    write = run.background.start if run.background else write_snapshot
    snapshot = take_snapshot(
        run.args.save,
        run.iteration,
        run.model,
        run.optimizer,
        run.scheduler,
        state,
        copy=run.background is not None,
    )
    write(run.args.save, snapshot, run.args.save_keep_last)
    logger.log_save(run.iteration, time.perf_counter() - start)
    run.beat(f"iteration {run.iteration}, saved")


def batches(run: Run, dataset: Any, consumed_samples: int) -> Any:
    """The microbatches of this rank, once for each model chunk that reads them."""

    def one() -> Any:
        return batch_iterator(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=run.args.micro_batch_size,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=data_parallel_size(),
            num_workers=run.args.num_workers,
        )

    return [one() for _ in run.model] if len(run.model) > 1 else one()
