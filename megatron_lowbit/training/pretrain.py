"""The pretraining run: build everything from the arguments, train, evaluate, save."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megatron_lowbit.analysis.loss_curve import plot_loss
from megatron_lowbit.errors import UserError
from megatron_lowbit.integrations.megatron_core import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.integrations.megatron_core.gpt import (
    build_gpt,
    quantizable_layers,
    transformer_config,
)
from megatron_lowbit.integrations.megatron_core.linear import set_recipe
from megatron_lowbit.kernels.engine import Engine, select_engine
from megatron_lowbit.recipes import (
    Progress,
    Recipe,
    load_combined,
    load_recipe,
    precision_table,
)
from megatron_lowbit.training.arguments import resolve_batch_size
from megatron_lowbit.training.checkpoint import (
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)
from megatron_lowbit.training.data import (
    batch_iterator,
    build_datasets,
    check_dataset,
    parse_data_path,
)
from megatron_lowbit.training.distributed import (
    initialize_distributed,
    print_rank0,
    rank,
    shutdown,
)
from megatron_lowbit.training.metrics import METRICS_FILE, MetricLogger
from megatron_lowbit.training.optimizer import build_optimizer, wrap_data_parallel
from megatron_lowbit.training.step import data_parallel_size, evaluate, train_step
from megatron_lowbit.training.tokenizer import Tokenizer, load_tokenizer, padded_vocab_size


@dataclass
class _Run:
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

    @property
    def consumed_samples(self) -> int:
        return self.iteration * self.args.global_batch_size

    def set_precision(self) -> None:
        """Compute as the recipe says at this point of the run."""
        progress = Progress(
            iteration=self.iteration,
            tokens=self.consumed_samples * self.args.seq_length,
            fraction=self.iteration / self.args.train_iters,
        )
        current = self.recipe.at(progress)
        if current != self.active_recipe:
            set_recipe(self.model, current)
            if self.recipe.switches:
                print_rank0(f"iteration {self.iteration}: recipe {current.name}")
            self.active_recipe = current


def pretrain(args: Namespace) -> None:
    """Run a pretraining job; collective over all ranks that were started.

    Raises:
        UserError: arguments, recipe, data or checkpoint that do not fit; nothing is left half-made.
    """
    load = load_recipe if len(args.recipes) == 1 else load_combined
    recipe = load(*args.recipes, args.recipe_set)
    tokenizer = load_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    for prefix in parse_data_path(args.data_path)[0]:
        check_dataset(prefix, tokenizer)
    initialize_distributed(args)
    try:
        run = _build(args, recipe, tokenizer)
        _load(run)
        _train(run)
    finally:
        shutdown()


def _build(args: Namespace, recipe: Recipe, tokenizer: Tokenizer) -> _Run:
    resolve_batch_size(args, data_parallel_size())
    init_num_microbatches_calculator(
        rank(), None, args.global_batch_size, args.micro_batch_size, data_parallel_size()
    )
    cuda = torch.cuda.is_available()
    if args.bf16 and not cuda:
        print_rank0("--bf16: no GPU here, computing in FP32")
    config = transformer_config(args, torch.bfloat16 if args.bf16 and cuda else torch.float32)
    engine = select_engine(torch.device("cuda" if cuda else "cpu"), args.quantization_engine)
    vocab = padded_vocab_size(
        tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    chunks = build_gpt(args, config, recipe, engine, vocab)
    _announce(recipe, engine, chunks)
    model = wrap_data_parallel(args, config, chunks)
    optimizer, scheduler = build_optimizer(args, config, model)
    _connect(args, config, model, optimizer)
    train_data, valid_data, _ = build_datasets(args, tokenizer, _sample_counts(args))
    shape = _model_shape(args, vocab)
    return _Run(args, recipe, config, model, optimizer, scheduler, train_data, valid_data, shape)


def _announce(recipe: Recipe, engine: Engine, chunks: list) -> None:
    """Say what will run where, after checking that every layer rule names something."""
    layers = quantizable_layers(chunks)
    recipe.check_rules(layers)
    if rank() == 0:
        # Without a terminal rich assumes 80 columns, which breaks names apart.
        console = Console() if sys.stdout.isatty() else Console(width=130)
        console.print(precision_table(recipe, layers))
        for switch in recipe.switches:
            console.print(f"switch {switch}")
        if recipe.switches or any(recipe.precision_for(layer).quantized for layer in layers):
            console.print(f"quantization engine: {engine.name} ({engine.reason})")
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        console.print(f"parameters on rank 0: {parameters:,}")


def _connect(args: Namespace, config: TransformerConfig, model: list, optimizer: Any) -> None:
    """Callbacks through which megatron-core's schedules drive data parallelism."""
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        hooks = [chunk.no_sync for chunk in model]
        config.no_sync_func = hooks[0] if len(hooks) == 1 else hooks
    if args.overlap_param_gather:
        starts = [chunk.start_param_sync for chunk in model]
        config.param_sync_func = starts[0] if len(starts) == 1 else starts


def _sample_counts(args: Namespace) -> tuple[int, int, int]:
    batch = args.global_batch_size
    return args.train_iters * batch, args.eval_iters * batch, 0


_SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "swiglu", "squared_relu", "normalization", "disable_bias_linear",
    "position_embedding_type", "rotary_base", "rotary_percent", "max_position_embeddings",
    "untie_embeddings_and_output_weights",
)  # fmt: skip


def _model_shape(args: Namespace, padded_vocab: int) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit."""
    return {name: getattr(args, name) for name in _SHAPE} | {"padded_vocab_size": padded_vocab}


def _load(run: _Run) -> None:
    args = run.args
    if args.load is None:
        return
    iteration = latest_iteration(args.load)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise UserError(f"--load {args.load} holds no checkpoint")
        print_rank0(f"--load {args.load} holds no checkpoint: starting from random weights")
        return
    # Before loading: which layers have amax histories to load depends on it.
    run.iteration = iteration
    run.set_precision()
    loaded = load_checkpoint(args.load, run.model, run.optimizer, run.scheduler, run.model_shape)
    saved = loaded["state"]
    if saved["global_batch_size"] != args.global_batch_size:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} differs from the checkpoint's "
            f"{saved['global_batch_size']}: data would repeat or be skipped"
        )
    print_rank0(f"loaded {args.load} at iteration {run.iteration}")


def _save(run: _Run) -> Path:
    state = {
        "model": run.model_shape,
        "global_batch_size": run.args.global_batch_size,
        "consumed_samples": run.consumed_samples,
        "recipes": run.args.recipes,
        "recipe_set": run.args.recipe_set,
    }
    return save_checkpoint(
        run.args.save, run.iteration, run.model, run.optimizer, run.scheduler, state
    )


def _batches(run: _Run, dataset: Any, consumed_samples: int) -> Any:
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


def _train(run: _Run) -> None:
    args = run.args
    save_dir = Path(args.save) if args.save else None
    board = Path(args.tensorboard_dir) if args.tensorboard_dir else None
    with MetricLogger(save_dir, board, args.train_iters, run.iteration, rank() == 0) as logger:
        validation = _iterate(run, logger)
    print_rank0(f"validation loss {validation:.4f} after {run.iteration} iterations")
    if save_dir is not None and rank() == 0:
        plot_loss({run.recipe.name: save_dir / METRICS_FILE}, save_dir / "loss.png")
        print_rank0(f"checkpoint {save_dir}, loss curve {save_dir / 'loss.png'}")


def _iterate(run: _Run, logger: MetricLogger) -> float:
    """Train to the last iteration; returns the final validation loss."""
    args = run.args
    batches = _batches(run, run.train_data, run.consumed_samples)
    window = _Window(args, logger)
    validation = saved_at = None
    run.set_precision()
    while run.iteration < args.train_iters:
        result = train_step(args, run.iteration, batches, run.model, run.optimizer, run.scheduler)
        run.iteration += 1
        window.add(run, *result)
        validation = None
        run.set_precision()
        if run.iteration % args.eval_interval == 0:
            validation = window.pause(lambda: _validate(run, logger))
        if args.save and args.save_interval and run.iteration % args.save_interval == 0:
            window.pause(lambda: _save(run))
            saved_at = run.iteration
    if validation is None:
        validation = _validate(run, logger)
    if args.save and saved_at != run.iteration:
        _save(run)
    return validation


def _validate(run: _Run, logger: MetricLogger) -> float:
    loss = evaluate(run.args, run.iteration, lambda: _batches(run, run.valid_data, 0), run.model)
    logger.log_validation(run.iteration, loss)
    return loss


class _Window:
    """Means over ``--log-interval`` iterations, and their speed without evaluation and saving."""

    def __init__(self, args: Namespace, logger: MetricLogger) -> None:
        self.args, self.logger = args, logger
        self._restart()

    def _restart(self) -> None:
        self.losses: list[float] = []
        self.since = time.perf_counter()

    def pause(self, work: Callable[[], Any]) -> Any:
        """Run work whose time does not count."""
        start = time.perf_counter()
        result = work()
        self.since += time.perf_counter() - start
        return result

    def add(self, run: _Run, loss: float, grad_norm: float) -> None:
        """Take one iteration's results; log where the interval is full, or the run at its end."""
        self.losses.append(loss)
        if run.iteration % self.args.log_interval and run.iteration < self.args.train_iters:
            return
        tokens = len(self.losses) * self.args.global_batch_size * self.args.seq_length
        self.logger.log(
            run.iteration,
            lm_loss=sum(self.losses) / len(self.losses),
            grad_norm=grad_norm,
            learning_rate=run.optimizer.param_groups[0]["lr"],
            tokens_per_second=tokens / (time.perf_counter() - self.since),
            consumed_tokens=run.consumed_samples * self.args.seq_length,
        )
        self._restart()
