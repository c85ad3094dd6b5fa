"""megatron-core's data parallelism, optimizer and learning-rate schedule, from the arguments."""

from argparse import Namespace

import torch

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import Adam, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.megatron.fp32_parameters import number_as_stored


def wrap_data_parallel(
    args: Namespace, config: TransformerConfig, chunks: list[torch.nn.Module]
) -> list[DistributedDataParallel]:
    """The chunks with FP32 main gradients, all starting from data-parallel rank 0's parameters."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def implementations(config: TransformerConfig) -> str:
    """Which Adam megatron-core found, and who adds high-precision layers' weight gradients."""
    fused = "Apex, fused" if config.gradient_accumulation_fusion else "torch"
    return f"{Adam.__module__.partition('.')[0]} {Adam.__name__}, weight gradients by {fused}"


def build_optimizer(
    args: Namespace, config: TransformerConfig, model: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam with FP32 main parameters, and the schedule, both counted in samples."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        ),
        model,
    )
    for part in parts(optimizer):
        number_as_stored(part)
    batch = args.global_batch_size
    wsd_decay = None if args.lr_wsd_decay_iters is None else args.lr_wsd_decay_iters * batch
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.lr_decay_iters * batch,
        wd_incr_style="constant",
        # A schedule that differs from the checkpoint's is an error, not silently the saved one.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=wsd_decay,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
    return optimizer, scheduler


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that one is a chain of, or it alone."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
