"""The pretraining run: build everything from the arguments, train, evaluate, save."""

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.megatron.allreduce_norm import (
    describe as describe_all_reduces,
)
from megatron_lowbit.megatron.config import transformer_config
from megatron_lowbit.megatron.mamba import use_best_scan
from megatron_lowbit.megatron.models import build_model, quantizable_layers
from megatron_lowbit.megatron.mxnorm import mxnorm_layers
from megatron_lowbit.transformer_engine.installed import choose
from megatron_lowbit.kernels.engine import Engine, select_engine
from megatron_lowbit.recipes import (
    Layer,
    Recipe,
    load_recipes,
    precision_table,
)
from megatron_lowbit.recipes.mxnorm import check_mxnorm
from megatron_lowbit.training.arguments import resolve_batch_size
from megatron_lowbit.training.checkpoint import valid_iteration
from megatron_lowbit.training.data import (
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
from megatron_lowbit.training.expert_arguments import EXPERT_SHAPE
from megatron_lowbit.training.hybrid_arguments import HYBRID_SHAPE
from megatron_lowbit.training.loop import train
from megatron_lowbit.training.optimizer import (
    build_optimizer,
    implementations,
    wrap_data_parallel,
)
from megatron_lowbit.training.run import Run, restore, start_from
from megatron_lowbit.training.run_log import RUN_LOG, rank_log_file
from megatron_lowbit.training.step import data_parallel_size
from megatron_lowbit.data.tokenizer import Tokenizer, load_tokenizer, padded_vocab_size
from megatron_lowbit.training.watchdog import Watchdog, lost_ranks_named


def pretrain(
    args: Namespace,
    after_backward: Callable[[int, list], None] | None = None,
    work: Callable[[Run], None] = train,
) -> None:
    """Run a pretraining job; collective over all ranks that were started.

    ``after_backward``, for experiments and injected faults, is called with the iteration (from 0)
    and the model's chunks after each backward pass. ``work`` is done with the run once it is built
    and loaded.

    Raises:
        UserError: arguments, recipe, data or checkpoint that do not fit; nothing is left half-made.
        TrainingError: losses or gradients stay non-finite, or another rank died or hangs.
    """
    recipe = load_recipes(args.recipes, args.recipe_set)
    tokenizer = load_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    for prefix in parse_data_path(args.data_path)[0]:
        check_dataset(prefix, tokenizer)
    initialize_distributed(args)
    with Watchdog(args.distributed_timeout_minutes, rank()) as watchdog:
        failed = True
        try:
            with rank_log_file(args.log_file_dir, rank()), lost_ranks_named(watchdog):
                run = _build(args, recipe, tokenizer)
                run.after_backward, run.beat = after_backward, watchdog.beat
                _load(run)
                work(run)
            failed = False
        finally:
            shutdown(failed)


def _build(args: Namespace, recipe: Recipe, tokenizer: Tokenizer) -> Run:
    resolve_batch_size(args, data_parallel_size())
    init_num_microbatches_calculator(
        rank(), None, args.global_batch_size, args.micro_batch_size, data_parallel_size()
    )
    cuda = torch.cuda.is_available()
    if args.bf16 and not cuda:
        print_rank0("--bf16: no GPU here, computing in FP32")
    args.transformer_impl, why = choose(args.transformer_impl, _own_layers(args))
    config = transformer_config(args, torch.bfloat16 if args.bf16 and cuda else torch.float32)
    engine = select_engine(torch.device("cuda" if cuda else "cpu"), args.quantization_engine)
    args.padded_vocab_size = padded_vocab_size(
        tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    chunks = build_model(args, config, recipe, engine, args.padded_vocab_size)
    _announce(args, recipe, engine, chunks, why)
    model = wrap_data_parallel(args, config, chunks)
    optimizer, scheduler = build_optimizer(args, config, model)
    print_rank0(f"optimizer: {implementations(config)}")
    _connect(args, config, model, optimizer)
    train_data, valid_data, _ = build_datasets(args, tokenizer, _sample_counts(args))
    shape = _model_shape(args, tokenizer.vocab_size)
    return Run(args, recipe, config, model, optimizer, scheduler, train_data, valid_data, shape)


def _own_layers(args: Namespace) -> str | None:
    """What asks for this project's layers, if anything does."""
    if args.num_experts is not None:
        return "experts are not wired up to it"
    if args.fused_allreduce_norm:
        return "--fused-allreduce-norm is not in it"
    return "MXNorm is not in it" if args.normalization == "MXNorm" else None


def _announce(
    args: Namespace, recipe: Recipe, engine: Engine, chunks: list, why_layers: str
) -> None:
    """Say what will run where, after checking that the recipe fits the model."""
    layers = quantizable_layers(chunks)
    recipe.check_rules(layers)
    if args.normalization == "MXNorm":
        check_mxnorm(recipe, layers, args.hidden_size)
    if rank() == 0:
        # Without a terminal rich assumes 80 columns, which breaks names apart.
        console = Console(width=None if sys.stdout.isatty() else 130, record=True)
        console.print(precision_table(recipe, layers))
        for switch in recipe.switches:
            console.print(f"switch {switch}")
        if recipe.switches or any(recipe.precision_for(layer).quantized for layer in layers):
            console.print(f"quantization engine: {engine.name} ({engine.reason})")
            for line in _products(recipe, engine, layers):
                console.print(line)
        console.print(f"transformer layers: {args.transformer_impl} ({why_layers})")
        if args.transformer_impl == "transformer_engine":
            for line in _kernels(recipe, layers):
                console.print(line)
        if args.fused_allreduce_norm:
            console.print(describe_all_reduces(chunks))
        if args.normalization == "MXNorm":
            active, inactive = mxnorm_layers(chunks)
            console.print(
                f"MXNorm, p {args.mxnorm_p:g}: {active} linear_qkv and linear_fc1 on rank 0; "
                f"RMSNorm in {inactive} that are not quantized"
            )
        if args.hybrid_override_pattern is not None:
            console.print(f"Mamba scan: {use_best_scan()}")
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        console.print(f"parameters on rank 0: {parameters:,}")
        RUN_LOG.info("model and recipe\n" + console.export_text().rstrip())


def _products(recipe: Recipe, engine: Engine, layers: list[Layer]) -> list[str]:
    """How the engine multiplies each pair of formats that the recipe asks for."""
    lines = {}
    for layer in layers:
        for precision in recipe.precision_for(layer).gemms.values():
            sides = (precision.lhs, precision.rhs)
            lhs, rhs = (None if side is None else side.format for side in sides)
            if precision.quantized:
                pair = " x ".join(
                    "bf16" if format is None else format.name for format in (lhs, rhs)
                )
                lines[f"  {pair}: {engine.describe(lhs, rhs)}"] = None
    return list(lines)


def _kernels(recipe: Recipe, layers: list[Layer]) -> list[str]:
    """Whose kernels compute the layers of each configuration, inside Transformer Engine's."""
    from megatron_lowbit.transformer_engine.layers import kernels

    lines = {}
    for layer in layers:
        rule = recipe.rule_for(layer)
        name = "high precision" if rule is None else rule.config
        lines[f"  {name}: {kernels(recipe.precision_for(layer))} kernels"] = None
    return list(lines)


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


def _model_shape(args: Namespace, vocab_size: int) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit; the vocabulary's padding need not."""
    names = _SHAPE
    if args.num_experts is not None:
        names += EXPERT_SHAPE
    if args.hybrid_override_pattern is not None:
        names += HYBRID_SHAPE
    shape = {name: getattr(args, name) for name in names} | {"vocab_size": vocab_size}
    if args.use_rope_scaling:
        shape |= {"use_rope_scaling": True, "rope_scaling_factor": args.rope_scaling_factor}
    if args.openai_gelu:
        shape["openai_gelu"] = True
    if args.normalization == "MXNorm":
        shape["normalization"] = "RMSNorm"  # the same parameters
    return shape


def _load(run: Run) -> None:
    args = run.args
    if args.load is None:
        return
    run.beat(f"looking for a checkpoint in {args.load}")
    iteration = valid_iteration(args.load, fall_back=args.load_latest_valid)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise UserError(f"--load {args.load} holds no checkpoint")
        print_rank0(f"--load {args.load} holds no checkpoint: starting from random weights")
        return
    if args.finetune:
        start_from(run, args.load, iteration)
        print_rank0(f"loaded the model of {args.load} at iteration {iteration}; starting at 0")
        return
    restore(run, args.load, iteration)
    print_rank0(f"loaded {args.load} at iteration {run.iteration}")
