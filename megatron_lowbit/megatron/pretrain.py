"""A pretraining run: Megatron-LM's own, with a recipe for its model."""

import errno
import gc
import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.megatron.arguments import in_one_line, parse_arguments
from megatron_lowbit.megatron.bad_iterations import bad_iterations_skipped
from megatron_lowbit.megatron.same_outcome import error_behind

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITER_FAILED = "unexpected pos"
_NO_MEMORY = "can't allocate memory"
"""What torch says, without an error of the operating system and on a CPU."""

ModelHook = Callable[[list[torch.nn.Module]], list[torch.nn.Module]]


def main(argv: Sequence[str] | None = None, hybrid: bool | None = None) -> None:
    """Pretrain what the command line says.

    Args:
        argv: arguments; None for the process's own.
        hybrid: the model that a script is for; None for either.

    Raises:
        UserError: arguments, recipe, data or checkpoint that do not fit.
        TrainingError: a run that cannot go on.
    """
    # Advice to Megatron-LM's own developers, and that Apex is absent: nothing a user can act on.
    # What megatron.training warns of, such as an argument that it drops, is shown.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    args = parse_arguments(argv, hybrid)
    if args.dry_run:
        from megatron_lowbit.megatron.dry_run import dry_run

        with torn_down(), upstream_refusals_named():
            dry_run(args)
        return
    with bad_iterations_skipped(args), torn_down(), upstream_refusals_named(), command_line(args):
        run(args)


def model_config_of(args: Namespace) -> Any:
    """Return Megatron-LM's configuration of the model that the arguments describe."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    from megatron_lowbit.megatron.hybrid import use_local_stack
    from megatron_lowbit.megatron.ignored_arguments import apply_ignored_arguments
    from megatron_lowbit.megatron.recipe_hook import use_recipe

    if args.hybrid_layer_pattern is None:
        model_config = gpt_config_from_args(args)
    else:
        model_config = hybrid_config_from_args(args)
        scan = use_local_stack(model_config)
        if scan is not None and args.rank == 0:
            print(f"Mamba scan: {scan}", flush=True)
    for line in apply_ignored_arguments(model_config, args):
        if args.rank == 0:
            print(line, flush=True)
    use_recipe(model_config, args)
    return model_config


def run(args: Namespace, hooks: Sequence[ModelHook] = ()) -> None:
    """Train with parsed and validated arguments, by Megatron-LM's own loop.

    Args:
        args: what ``parse_arguments`` returned.
        hooks: called in turn with the model's chunks once a recipe has taken over their layers,
            before Megatron-LM wraps them; each returns the chunks.
    """
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_lowbit.megatron.checkpoint_guard import CheckpointGuard
    from megatron_lowbit.megatron.datasets import provide_datasets
    from megatron_lowbit.megatron.forward_step import forward_step

    kind = ModelType.encoder_or_decoder
    with unfit_model_named():
        model_config = model_config_of(args)
        container = pretrain_cfg_container_from_args(args, model_config)
    with (
        machine_limits_named(args),
        metrics_kept(args),
        closing(CheckpointGuard(args)) as guard,
        unfit_checkpoint_named(args),
        model_released(model_config),
    ):
        model_config.pre_wrap_hooks.insert(0, guard)
        model_config.pre_wrap_hooks += hooks
        pretrain(container, provide_datasets, kind, forward_step, store=rendezvous_store(args))


@contextmanager
def model_released(model_config: Any) -> Iterator[None]:
    """Let a model go once it has been trained, and with it process groups and their threads.

    Megatron-LM's wrapper and the optimizer refer to autograd's nodes, and the nodes' hooks to both:
    cycles that Python does not collect. Its caches of rotary angles refer to the model's modules.
    """
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    wrapped: list[torch.nn.Module] = []

    def remember(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        wrapped.extend(chunks)
        return chunks

    model_config.post_wrap_hooks.append(remember)
    try:
        yield
    finally:
        for chunk in wrapped:
            if hasattr(chunk, "grad_accs"):
                chunk.grad_accs.clear()
        model_config.transformer.grad_scale_func = None
        for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
            embedding.forward.cache_clear()


def rendezvous_store(args: Namespace) -> torch.distributed.Store | None:
    """Return where ranks meet; None leaves it to the launcher's environment variables."""
    dist = torch.distributed
    if dist.is_torchelastic_launched():
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        launched, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
        # A process may train several times: no run must find what the last one left in the store.
        joined = launched.add(f"megatron_lowbit/joined/{rank}", 1)
        return dist.PrefixStore(f"megatron_lowbit/{joined}", launched)
    return dist.HashStore() if args.world_size == 1 and "MASTER_ADDR" not in os.environ else None


@contextmanager
def metrics_kept(args: Namespace) -> Iterator[None]:
    """Keep metrics.jsonl and a picture of the loss in ``--save``, on the rank that logs."""
    if args.save is None or args.rank != args.world_size - 1:
        yield
        return
    from megatron.training import global_vars

    from megatron_lowbit.megatron.metrics import MetricsWriter

    folder = Path(args.save)
    board, tokens = global_vars.get_tensorboard_writer(), args.global_batch_size * args.seq_length
    writer = MetricsWriter(folder, board, args.log_interval, tokens)
    global_vars._GLOBAL_TENSORBOARD_WRITER = writer
    try:
        yield
    finally:
        writer.close()
        if writer.started:  # A refused run leaves the folder, maybe another run's, as it is.
            _draw_loss(args, writer.path)


def _draw_loss(args: Namespace, metrics: Path) -> None:
    """Draw the loss curve; a run that had nothing to do has none."""
    if not metrics.is_file() or "lm_loss" not in metrics.read_text():
        return
    from megatron_lowbit.analysis.loss_curve import plot_loss

    name = "+".join(args.precision_recipe or ["bf16"])
    picture = metrics.with_name("loss.png")
    plot_loss({Path(name).stem: metrics}, picture)
    print(f"checkpoint {args.save}, loss curve {picture}", flush=True)


@contextmanager
def command_line(args: Namespace) -> Iterator[None]:
    """Let ``sys.argv`` be what Megatron-LM can parse: its fault tolerance parses it once more."""
    before = sys.argv
    sys.argv = [before[0], *args.upstream_command_line]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def upstream_refusals_named() -> Iterator[None]:
    """Turn an assertion of Megatron-LM's into a UserError with its place."""
    try:
        yield
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if f"{os.sep}megatron{os.sep}" not in frame.filename:
            raise
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"Megatron-LM ({where}): {in_one_line(error)}") from error


@contextmanager
def unfit_model_named() -> Iterator[None]:
    """Turn what Megatron-LM's configuration of a model refuses into a UserError."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(in_one_line(error)) from error


@contextmanager
def unfit_checkpoint_named(args: Namespace) -> Iterator[None]:
    """Turn Megatron-LM's refusal of a checkpoint, such as of another shape, into a UserError."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        yield
    except (CheckpointException, CheckpointingException) as error:
        refusal = error_behind(error, CheckpointingException)
        if args.load is None or refusal is None:
            raise
        raise UserError(f"--load {args.load}: {in_one_line(refusal)}") from error


@contextmanager
def machine_limits_named(args: Namespace) -> Iterator[None]:
    """Turn a disk that fills up, and memory that does not suffice, into one line."""
    try:
        yield
    except (UserError, TrainingError):
        raise
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        failure = error_behind(error, OSError)
        # torch's writer in C++ reports a full disk by the position that it found itself at.
        if _WRITER_FAILED in str(error) or (failure and failure.errno in _FULL):
            place = f"--save {args.save}" if args.save else "a file of the run"
            raise TrainingError(f"{place}: cannot be written to, the disk may be full") from error
        message = in_one_line(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in message:
            raise UserError(
                f"the run does not fit into memory, --dry-run says what it needs: {message}"
            ) from error
        raise


@contextmanager
def torn_down() -> Iterator[None]:
    """Leave no process group and no global state of Megatron-LM behind."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training.training import destroy_global_state

    try:
        yield
    except SystemExit as ended:
        # Megatron-LM leaves so after --exit-interval, --exit-duration-in-mins and signals.
        if ended.code not in (None, 0):
            raise
    finally:
        failed = sys.exc_info()[0] is not None
        destroy_global_state()
        destroy_moe_metrics_tracker()  # has as many layers as the first run
        if torch.distributed.is_initialized():
            if failed and torch.distributed.get_backend() == "nccl":
                # NCCL's end in order is one more collective, which failed ranks never join.
                torch.distributed.distributed_c10d._abort_process_group()
            else:
                torch.distributed.destroy_process_group()
        # Models refer to groups, and to themselves: until they are collected, threads of each group
        # of gloo wake up a hundred times a second.
        gc.collect()
