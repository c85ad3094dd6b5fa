"""``--dry-run``: description of a run of any size, from one process and without training.

Megatron-LM's own model builders build one rank of each pipeline stage on torch's meta device, where
tensors have no memory. Torch's fake process group stands in for the other ranks.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.models.dist_utils import build_virtual_pipeline_stages
from rich.table import Table
from torch.overrides import TorchFunctionMode

from megatron_lowbit.arguments import compatibility
from megatron_lowbit.arguments.parse import on_described_machine
from megatron_lowbit.console import plain_console
from megatron_lowbit.kernels.engine import GpuEngine
from megatron_lowbit.megatron.layers.state import layer_states
from megatron_lowbit.megatron.recipe_hook import (
    RecipeHook,
    in_order,
    model_config_of,
    recipe_of,
    weight_shapes,
)
from megatron_lowbit.megatron.run.errors import translate_model_errors
from megatron_lowbit.megatron.run.load_source import LoadSource, check_starts_anew
from megatron_lowbit.recipes import Layer


class Parameters(NamedTuple):
    """Numbers of parameters.

    Attributes:
        rank: parameters on one rank of a pipeline stage.
        experts: parameters of experts on that rank.
        stage: parameters of the whole stage, over all of its ranks, without replicas.
    """

    rank: int
    experts: int
    stage: int


class Stage(NamedTuple):
    """First rank of a pipeline stage: number of blocks, parameters, and quantizable layers."""

    blocks: int
    parameters: Parameters
    layers: list[Layer]


def dry_run(args: Namespace) -> None:
    """Print the recipe, the parameters, and the planned memory and time of a run.

    Raises UserError for a model that cannot be built, or whose layers or CUDA graphs do not suit
    the recipe.
    """
    if args.rank != 0:
        return
    from megatron_lowbit.planning.hardware import gpu
    from megatron_lowbit.planning.report import describe_plan, planned_gpu

    check_starts_anew(args)
    # The models below are built without some of the arguments.
    compatibility.check(args, recipe_of(args))
    console = plain_console(130)
    gpu_name, reason = planned_gpu(args.dry_run_gpu)
    with translate_model_errors():
        stages = model_stages(args, on_described_machine(args), gpu(gpu_name).capability)
    console.print(parameter_table(args, stages))
    for line in describe_plan(args.given, args.world_size, gpu_name, reason):
        console.print(line)
    console.print("dry run: nothing was trained, nothing was written")


def model_stages(
    args: Namespace, on_gpus: Namespace | None = None, capability: tuple[int, int] | None = None
) -> list[Stage]:
    """Build the first rank of each pipeline stage.

    With ``on_gpus``, the arguments on GPUs of a compute ``capability``, the recipe's table for the
    whole model is printed.
    """
    # The fused all-reduce allocates memory that only real ranks share.
    changed: dict[str, Any] = {"fused_allreduce_norm": False}
    if args.transformer_impl == "local":
        # Context parallelism changes no parameter, but local attention refuses it.
        changed |= {"context_parallel_size": 1, "hierarchical_context_parallel_sizes": None}
    args = Namespace(**vars(args) | changed)
    stages, hooks, weights = [], [], []
    for number in range(args.pipeline_model_parallel_size):
        with rank_of_stage(args, number):
            hook, chunks = build(args)
            layers = [state.plan.layer for state in layer_states(chunks)]
        weights += weight_shapes(chunks)
        blocks = sum(len(chunk.decoder.layers) for chunk in chunks)
        stages.append(Stage(blocks, count_parameters(args, chunks), layers))
        hooks.append(hook)
    if (hook := hooks[0]) is not None:
        layers = in_order(layer for stage in stages for layer in stage.layers)
        hook.check(layers)
        if on_gpus is not None and capability is not None:
            if args.quantization_engine == "auto":
                hook.engine = GpuEngine(capability)
            hook.args = on_gpus
            hook.show(layers, weights, capability)
    return stages


@contextmanager
def rank_of_stage(args: Namespace, stage: int, replicas: int = 1) -> Iterator[None]:
    """Initialize this process as the first rank of a pipeline stage in a fake process group.

    ``replicas``: number of data-parallel replicas, which does not change the model.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pipeline = args.pipeline_model_parallel_size
    dense = (
        args.tensor_model_parallel_size * args.context_parallel_size * args.gtp_weight_remat_size
    )
    expert = args.expert_tensor_parallel_size * args.expert_model_parallel_size
    expert *= args.expert_gtp_weight_remat_size
    ranks = math.lcm(dense, expert) * replicas
    dist.init_process_group(
        "fake", store=FakeStore(), rank=stage * ranks, world_size=ranks * pipeline
    )
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            pipeline,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            gtp_remat_size=args.gtp_weight_remat_size,
            expert_gtp_remat_size=args.expert_gtp_weight_remat_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(
            args.seed, te_rng_tracker=args.te_rng_tracker, force_reset_rng=True
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(args: Namespace) -> tuple[RecipeHook | None, list[torch.nn.Module]]:
    """Build this rank's model chunks on the meta device, and apply the recipe to their layers."""
    config = model_config_of(args)
    config.transformer.init_model_with_meta_device = True
    config.finalize()
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    virtual = args.virtual_pipeline_model_parallel_size
    with _OnMeta():
        chunks = build_virtual_pipeline_stages(builder.build_model, groups, virtual)
    hook = next((hook for hook in config.pre_wrap_hooks if isinstance(hook, RecipeHook)), None)
    if hook is not None:
        hook.take_over(chunks, LoadSource.of(args))
    return hook, chunks


# Not torch.tensor, which makes small tensors with values, such as random states.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
              "randperm", "zeros")  # fmt: skip


class _OnMeta(TorchFunctionMode):
    """Mode in which all tensors are created on the meta device and stay there.

    The context ``torch.device("meta")`` applies only to calls without a device, and to none of the
    factories that the CPU runtime wraps.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.to, torch.Tensor.cuda):
            return args[0]
        if "device" in kwargs or getattr(function, "__name__", "") in _FACTORIES:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def count_parameters(args: Namespace, chunks: list[torch.nn.Module]) -> Parameters:
    """Count the parameters of a rank and of its whole pipeline stage."""
    rank = experts = stage = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            size, is_expert = parameter.numel(), ".experts." in name
            rank += size
            experts += size * is_expert
            # With tied embeddings and multi-token prediction, the output layer of a later chunk is
            # an unmarked copy of the first chunk's embedding.
            tied = not args.untie_embeddings_and_output_weights and name == "output_layer.weight"
            is_copy = tied or getattr(parameter, "shared_embedding", False)
            if is_copy and not chunk.pre_process:
                continue
            if getattr(parameter, "tensor_model_parallel", False):
                dense, expert = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
                size *= expert if is_expert else dense
            stage += size * (args.expert_model_parallel_size if is_expert else 1)
    return Parameters(rank, experts, stage)


def parameter_table(args: Namespace, stages: Sequence[Stage]) -> Table:
    """Build a table of the parameters on one rank of each pipeline stage."""
    total = sum(stage.parameters.stage for stage in stages)
    layout = (
        f"TP {args.tensor_model_parallel_size}, CP {args.context_parallel_size}, "
        f"EP {args.expert_model_parallel_size}, PP {args.pipeline_model_parallel_size}, "
        f"DP {args.data_parallel_size}"
    )
    table = Table(title=f"{total:,} parameters; world size {args.world_size}: {layout}")
    for heading in ("pipeline stage", "blocks", "parameters per rank", "of them in experts"):
        table.add_column(heading, justify="right")
    for number, (blocks, parameters, _) in enumerate(stages):
        cells = number, blocks, parameters.rank, parameters.experts
        table.add_row(*(f"{cell:,}" for cell in cells))
    return table
