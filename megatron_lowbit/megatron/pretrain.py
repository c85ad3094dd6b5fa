"""A pretraining run from the command line to Megatron-LM's ``pretrain``, with a recipe."""

import gc
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.arguments.upstream import command_line
from megatron_lowbit.errors import UserError, say
from megatron_lowbit.folders import reason
from megatron_lowbit.megatron.run import errors
from megatron_lowbit.megatron.run.bad_iterations import skip_bad_iterations
from megatron_lowbit.replaced import replaced
from megatron_lowbit.storage import files

ModelHook = Callable[[list[torch.nn.Module]], list[torch.nn.Module]]


def main(argv: Sequence[str] | None = None, hybrid: bool | None = None) -> None:
    """Run the pretraining that a command line describes.

    Raises UserError for wrong arguments, recipe, data or checkpoint, and TrainingError where the
    run cannot continue.

    Args:
        argv: arguments without the program's name; None for the process's own.
        hybrid: True for a script that trains hybrids, False for GPTs, None for both.
    """
    # These warnings address Megatron-LM's developers, or say that Apex is absent. Warnings of
    # megatron.training, such as of an argument that it drops, are shown.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    with ExitStack() as contexts:
        # --deterministic-mode turns on torch's deterministic algorithms, for the whole process.
        contexts.callback(_restore_determinism, torch.get_deterministic_debug_mode())
        args = parse_arguments(argv, hybrid)
        if not args.dry_run:
            contexts.enter_context(skip_bad_iterations(args))
        contexts.enter_context(teardown())
        contexts.enter_context(errors.translate_assertions())
        contexts.enter_context(errors.translate_missing_packages())
        if args.dry_run:
            from megatron_lowbit.megatron.run.dry_run import dry_run

            dry_run(args)
        else:
            # Megatron-LM's fault tolerance parses the command line again.
            contexts.enter_context(command_line(args.upstream_command_line))
            run(args)


def run(args: Namespace, hooks: Sequence[ModelHook] = ()) -> None:
    """Train with the arguments of ``parse_arguments``, by Megatron-LM's own loop.

    ``hooks`` are functions from the model's chunks to its chunks, called in order after the recipe
    has taken over the linear layers and before Megatron-LM wraps the chunks.
    """
    from megatron.core.enums import ModelType
    from megatron.core.safe_globals import register_safe_globals
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_lowbit.megatron.datasets import provide_datasets
    from megatron_lowbit.megatron.forward_step import forward_step
    from megatron_lowbit.megatron.recipe_hook import model_config_of
    from megatron_lowbit.megatron.run.checkpoint_guard import CheckpointGuard
    from megatron_lowbit.megatron.run.pipeline import embedding_ranks
    from megatron_lowbit.megatron.run.short_log import short_log

    # Again: torch's context safe_globals, which transformers' Trainer enters as it resumes, takes
    # classes off the list that were on it before.
    register_safe_globals()
    model_type = ModelType.encoder_or_decoder
    with errors.translate_model_errors():
        model_config = model_config_of(args)
        container = pretrain_cfg_container_from_args(args, model_config)
    with (
        errors.translate_machine_limits(args),
        errors.translate_build_errors(model_config),
        unfilled_memory(args),
        explain_interruption(args),
        validate_once(),
        log_metrics(args),
        closing(CheckpointGuard(args)) as guard,
        release_model(model_config),
        short_log(args, model_config),
    ):
        model_config.pre_wrap_hooks.insert(0, guard)
        model_config.pre_wrap_hooks += hooks
        pretrain(
            container,
            provide_datasets,
            model_type,
            forward_step,
            get_embedding_ranks=partial(embedding_ranks, args),
            store=rendezvous_store(args),
        )


def _restore_determinism(mode: int) -> None:
    """Set torch's mode of determinism, and Inductor's, which set_deterministic_debug_mode omits."""
    if mode != torch.get_deterministic_debug_mode():
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def unfilled_memory(args: Namespace) -> AbstractContextManager[None]:
    """Keep deterministic mode from filling all new memory with NaN, which torch adds to it.

    A read of what nobody wrote would then repeat. There is none, and filling takes a small model
    15% of a step on an H200.
    """
    settings = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory and not args.deterministic_mode
    return replaced(settings, "fill_uninitialized_memory", fills)


@contextmanager
def explain_interruption(args: Namespace) -> Iterator[None]:
    """Let Ctrl-C say which iterations are lost, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if args.rank != 0:
            raise
        done, saved = getattr(args, "curr_iteration", 0), saved_iteration(args)
        if saved is None or saved > done:
            lost = "nothing was saved; the same command starts again"
            if args.save is not None:
                lost += f", and a --save-interval below {args.save_interval} saves earlier"
        else:
            load = "" if args.load == args.save else f" with --load {args.save}"
            lost = f"saved up to iteration {saved}; the same command{load} goes on from there"
        raise KeyboardInterrupt(f"interrupted after iteration {done}: {lost}") from None


def saved_iteration(args: Namespace) -> int | None:
    """Return the iteration of the newest checkpoint in ``--save``; None if there is none."""
    with suppress(UserError):
        return None if args.save is None else files.latest_iteration(args.save)
    return None


def validate_once() -> AbstractContextManager[None]:
    """Skip the validation after training where the loop has validated the last iteration.

    Megatron-LM would take other samples, and so report a second loss of that iteration.
    """
    from megatron.training import training

    upstream = training.evaluate_and_print_results
    validated: set[str] = set()

    def evaluate(prefix: str, *arguments: Any, **settings: Any) -> None:
        iteration = prefix.removesuffix(" on validation set")  # the end of it after training
        if iteration == prefix or iteration not in validated:
            validated.add(prefix)
            upstream(prefix, *arguments, **settings)

    return replaced(training, "evaluate_and_print_results", evaluate)


@contextmanager
def release_model(model_config: Any) -> Iterator[None]:
    """Remove references on exit that would keep a trained model and its process groups alive.

    Megatron-LM's wrapper and optimizer form reference cycles with autograd's nodes, which Python
    does not collect. Megatron-LM's caches of rotary embeddings hold the model's modules.
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
    """Return the store for rendezvous; None selects the launcher's environment variables."""
    dist = torch.distributed
    if dist.is_torchelastic_launched():
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        launched, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
        # A process may train several times, and each run needs keys of its own in the store.
        run_number = launched.add(f"megatron_lowbit/joined/{rank}", 1)
        return dist.PrefixStore(f"megatron_lowbit/{run_number}", launched)
    return dist.HashStore() if args.world_size == 1 and "MASTER_ADDR" not in os.environ else None


@contextmanager
def log_metrics(args: Namespace) -> Iterator[None]:
    """Write metrics.jsonl and a picture of the loss to ``--save``, on the rank that logs."""
    if args.save is None or args.rank != args.world_size - 1:
        yield
        return
    from megatron.training import global_vars

    from megatron_lowbit.megatron.run.metrics import MetricsWriter

    board = global_vars.get_tensorboard_writer()
    writer = MetricsWriter(Path(args.save), board, args.log_interval, args.seq_length)
    global_vars._GLOBAL_TENSORBOARD_WRITER = writer
    try:
        yield
    finally:
        try:
            writer.close()
            if writer.started:  # The folder of a refused run may belong to another run.
                _draw_loss(args, writer.path)
        except (OSError, UserError) as error:
            # The checkpoints are complete: a launcher must not start a finished run again.
            say(f"{args.save}: metrics or loss.png are not whole: {reason(error)}")


def _draw_loss(args: Namespace, metrics: Path) -> None:
    """Draw the loss curve if any iteration was trained."""
    if not metrics.is_file() or "lm_loss" not in metrics.read_text():
        return
    from megatron_lowbit.analysis.loss_curve import plot_loss

    name = "+".join(args.precision_recipe or ["bf16"])
    picture = metrics.with_name("loss.png")
    plot_loss({Path(name).stem: metrics}, picture)
    say(f"{saved_in(args)}, loss curve {picture}")


def saved_in(args: Namespace) -> str:
    """Return a part of a line that names the folder of the run's checkpoints."""
    checkpoint = "no checkpoint in" if saved_iteration(args) is None else "checkpoint"
    return f"{checkpoint} {args.save}"


def free_cuda_graphs() -> None:
    """Free graphs, which models hold: NCCL ends no communicator that one of them has captured.

    Megatron-LM is told, too: it would take the layers of the process's next run for captured ones.
    """
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    for graph in _living(torch.cuda.CUDAGraph):
        graph.reset()
    delete_cuda_graphs()


def _living(cls: type) -> list[Any]:
    """Return the living objects of a class, which are parts of reference cycles.

    isinstance() would ask all objects for their class, which proxies of freed ones do not have.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), cls)]


@contextmanager
def teardown() -> Iterator[None]:
    """Remove process groups and Megatron-LM's global state on exit."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.training.training import destroy_global_state

    try:
        yield
    except SystemExit as ended:
        # Megatron-LM exits after --exit-interval, --exit-duration-in-mins and signals.
        if ended.code not in (None, 0):
            raise
    finally:
        failed = sys.exc_info()[0] is not None
        if failed:
            # A failed run's traceback keeps the processes of data loaders alive. With
            # --exit-signal-handler they ignore the signal by which Python ends its children, and
            # Python would wait for them forever.
            for loader in _living(_MultiProcessingDataLoaderIter):
                loader._shutdown_workers()
        destroy_global_state()
        destroy_moe_metrics_tracker()  # It keeps the number of layers of the first run.
        # The next run may need generators of another class, as CUDA graphs do.
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        if torch.distributed.is_initialized():
            is_nccl = torch.distributed.get_backend() == "nccl"
            if is_nccl:
                free_cuda_graphs()
            if failed and is_nccl:
                # Destroying it would be one more collective, which failed ranks never join.
                torch.distributed.distributed_c10d._abort_process_group()
            else:
                torch.distributed.destroy_process_group()
        # Token dispatchers keep tensors of the last step, whose graph holds the hooks on the
        # model's parameters, and with them the model, in a cycle through autograd's nodes.
        for dispatcher in _living(MoETokenDispatcher):
            vars(dispatcher).clear()
        # Models hold process groups, and are part of reference cycles. The threads of a gloo group
        # wake up every 10 ms until it is collected.
        gc.collect()
