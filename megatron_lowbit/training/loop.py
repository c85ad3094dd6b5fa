"""The training loop: step after step, with evaluation, checkpoints, and what can go wrong."""

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron_lowbit.errors import TrainingError
from megatron_lowbit.megatron.layer_state import layer_states
from megatron_lowbit.training.background_saves import background_saves
from megatron_lowbit.training.checkpoint import valid_iteration
from megatron_lowbit.training.distributed import all_ranks, print_rank0, rank
from megatron_lowbit.training.metrics import METRICS_FILE, MetricLogger
from megatron_lowbit.training.profiling import Profiler
from megatron_lowbit.training.quantization_log import metrics_of, quantization_errors
from megatron_lowbit.training.run import Run, batches, finish_saving, restore, save, saving_failed
from megatron_lowbit.training.sentinels import BadSteps
from megatron_lowbit.training.signals import StopRequest, stop_on_signals
from megatron_lowbit.training.step import evaluate, train_step
from megatron_lowbit.training.weights_and_biases import start_wandb
from megatron_lowbit.training.window import LogWindow


def train(run: Run) -> None:
    """Train a run that is built and loaded to its end, or until a signal; leave its loss curve.

    Raises:
        UserError: a checkpoint that cannot be written.
        TrainingError: losses or gradients stay non-finite.
    """
    args = run.args
    save_dir = Path(args.save) if args.save else None
    board = Path(args.tensorboard_dir) if args.tensorboard_dir else None
    enabled = rank() == 0
    wandb_run = start_wandb(args) if enabled else None
    logging = MetricLogger(save_dir, board, args.train_iters, run.iteration, enabled, wandb_run)
    saving = background_saves(args.async_save, args.distributed_timeout_minutes)
    # First in, last out: no signal cuts off what ends a run, also after an error.
    with stop_on_signals() as stop, logging as logger, saving as run.background:
        validation = _iterate(run, logger, stop)
    if validation is not None:
        print_rank0(f"validation loss {validation:.4f} after {run.iteration} iterations")
    # A run that had nothing to do, or was stopped early, may have no loss to draw.
    if save_dir is not None and enabled and "lm_loss" in (save_dir / METRICS_FILE).read_text():
        # Here, for all ranks would spend half a second on matplotlib at their start.
        from megatron_lowbit.analysis.loss_curve import plot_loss

        plot_loss({run.recipe.name: save_dir / METRICS_FILE}, save_dir / "loss.png")
        print_rank0(f"checkpoint {save_dir}, loss curve {save_dir / 'loss.png'}")


def _iterate(run: Run, logger: MetricLogger, stop: StopRequest) -> float | None:
    """Train to the last iteration and return the final validation loss.

    None where the run is told to stop, or does not evaluate.
    """
    args = run.args
    engines = (state.plan.engine for state in layer_states(run.model))
    folds = next((engine.folds for engine in engines), lambda: (0, 0))
    window = LogWindow(args, logger, args.padded_vocab_size, folds)
    bad_steps = BadSteps(args.max_skipped_updates)
    profiler = Profiler(args, rank(), run.iteration)
    stream = validation = saved_at = None
    run.set_precision()
    while run.iteration < args.train_iters:
        if run.data.skip_bad() or stream is None:
            stream = batches(run, run.train_data, run.data.samples)
        errors: dict[str, dict[str, float]] = {}
        watch = None
        if _is_due(run, args.log_quantization_error_interval):
            watch = quantization_errors(run.model, run.iteration, errors)
        with profiler.iteration(run.iteration):
            _step(run, stream, window, bad_steps, watch)
        if errors:
            logger.log_beside(run.iteration, metrics_of(errors))
        if bad_steps.too_many:
            _go_back(run, bad_steps)
            logger.rewind(run.iteration)
            window.restart()
            stream = None
            continue
        validation = None
        run.set_precision()
        if run.iteration % args.eval_interval == 0:
            validation = window.pause(lambda: _validate(run, logger))
        if args.save and args.save_interval and run.iteration % args.save_interval == 0:
            window.pause(lambda: save(run, logger))
            saved_at = run.iteration
        if not all_ranks(stop.received is None and not saving_failed(run)):
            finish_saving(run)
            _stop(run, stop, saved_at, logger)
            return None
    if validation is None:
        validation = _validate(run, logger)
    if args.save and saved_at != run.iteration:
        save(run, logger)
    return validation


def _is_due(run: Run, interval: int | None) -> bool:
    return bool(interval) and run.iteration % interval == 0


def _step(
    run: Run,
    stream: Any,
    window: LogWindow,
    bad_steps: BadSteps,
    watch: AbstractContextManager | None,
) -> None:
    """One iteration, counted as good or bad."""
    args = run.args
    run.beat(f"iteration {run.iteration + 1}")
    result = train_step(
        args,
        run.iteration,
        stream,
        run.model,
        run.optimizer,
        run.scheduler,
        window.timer,
        after_backward=run.after_backward,
        check_outputs=_is_due(run, args.check_output_norm_interval),
        watch=watch,
    )
    start = run.data.samples
    run.iteration += 1
    run.data.samples += args.global_batch_size
    if result.taken:
        bad_steps.good()
        window.add(
            run.iteration,
            run.trained_samples,
            result.loss,
            result.grad_norm,
            run.optimizer.param_groups[0]["lr"],
        )
    else:
        bad_steps.bad(start, run.data.samples)
        print_rank0(
            f"iteration {run.iteration}: update skipped, loss {result.loss:g} or a gradient is not "
            f"finite (samples {start} to {run.data.samples - 1})"
        )


def _go_back(run: Run, bad_steps: BadSteps) -> None:
    """To the newest checkpoint of this run, and from there on without the data of the bad steps."""
    directory, failed_at, ranges = run.args.save, run.iteration, bad_steps.ranges
    finish_saving(run)
    trouble = f"iteration {failed_at}: {len(ranges)} updates in a row skipped"
    newest = None if directory is None else valid_iteration(directory)
    if newest is None:
        raise TrainingError(f"{trouble}, and no checkpoint to go back to (--save, --save-interval)")
    if bad_steps.futile:
        raise TrainingError(f"{trouble}, again right after going back: other data does not help")
    restore(run, directory, newest)
    run.data.bad += ranges
    bad_steps.gone_back()
    print_rank0(
        f"{trouble}: back to iteration {run.iteration}, leaving out samples {ranges[0][0]} to "
        f"{ranges[-1][1] - 1}"
    )


def _stop(run: Run, stop: StopRequest, saved_at: int | None, logger: MetricLogger) -> None:
    if run.args.save and saved_at != run.iteration:
        save(run, logger)
    saved = f", checkpoint in {run.args.save}" if run.args.save else ""
    cause = stop.received or "a signal to another rank"
    print_rank0(f"stopped by {cause} after iteration {run.iteration}{saved}")


def _validate(run: Run, logger: MetricLogger) -> float | None:
    if run.args.eval_iters == 0:
        return None
    start = time.perf_counter()
    loss = evaluate(
        run.args,
        run.iteration,
        lambda: batches(run, run.valid_data, 0),
        run.model,
        before_batch=lambda: run.beat(f"the evaluation after iteration {run.iteration}"),
    )
    logger.log_validation(run.iteration, loss, time.perf_counter() - start)
    return loss
