"""The tensors of a checkpoint: model and optimizer to and from megatron's torch_dist format.

Saving is done in this process: no writer process is started that would import ``__main__`` anew.
One file a rank; a parameter's replicas are written once.

With torch's Adam (no Transformer Engine, no Apex) megatron.core 0.16.1 needs help in three places,
all here: a fresh optimizer has no state to describe, the distributed optimizer expects a ``step``
among the loaded tensors, and afterwards all parameters would share one ``step`` tensor.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.utils import unwrap_model

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import amax_history
from megatron_lowbit.megatron.fp32_parameters import fp32_as_main
from megatron_lowbit.training.checkpoint_pickle import CommonLoader, Reader, confined
from megatron_lowbit.training.checkpoint_ranks import error_behind
from megatron_lowbit.training.optimizer import parts

# What megatron calls content metadata: moments have their parameter's shape, whatever the layout.
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
_EXTRA_STATE = "_extra_state"
# Megatron-LM's number for its layout of common.pt.
_CHECKPOINT_VERSION = 3.0


def kind(optimizer: Any) -> str | None:
    """ "distributed", "plain" or None: their checkpoints do not load into each other."""
    if optimizer is None:
        return None
    distributed = isinstance(parts(optimizer)[0], DistributedOptimizer)
    return "distributed" if distributed else "plain"


def prepare(
    iteration: int, model: Sequence[torch.nn.Module], optimizer: Any, copy: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What :func:`write` takes: the tensors that this rank writes, and what all have in common.

    With ``copy`` they are copies in the CPU's memory, which training may leave behind. Collective,
    but an exception may leave it on one rank alone (after its last collective).
    """
    for chunk in model:
        if getattr(chunk, "ddp_config", None) and chunk.ddp_config.overlap_param_gather:
            # Until the next forward a rank has but its own share of the updated parameters.
            chunk.start_param_sync(force_sync=True)
    content = _sharded(model, optimizer, is_loading=False)
    content |= {"iteration": iteration, "checkpoint_version": _CHECKPOINT_VERSION}
    content["content_metadata"] = dict(_CONTENT)
    sharded, common = save_preprocess(content)
    tensors, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, True)
    if copy:
        common = deepcopy(common)
        for shard in chain.from_iterable(tensors.values()):
            if isinstance(shard, ShardedTensor):
                shard.data = shard.data.detach().to("cpu", copy=True)
    return torch_dist.mcore_to_pyt_state_dict(tensors, False), common


def write(
    directory: Path,
    tensors: dict[str, Any],
    common: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write what :func:`prepare` gave into an empty directory. Collective over ``group`` (all).

    A failure to write tensors raises on all ranks, one to write the rest on rank 0 alone, after the
    last collective.
    """
    torch_checkpoint.save(
        tensors,
        storage_writer=_Writer(directory, thread_count=1),
        planner=torch_dist.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        ),
        process_group=group,
    )
    if dist.get_rank() == 0:
        with open(directory / "common.pt", "wb") as file:
            torch.save(common, file)
            file.flush()
            os.fsync(file.fileno())
        save_config(CheckpointingConfig("torch_dist"), str(directory))


def read(directory: Path, model: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Load model and optimizer (or None) in place, after :func:`check_histories`. Collective."""
    content = _sharded(model, optimizer, is_loading=True)
    saved = _saved_tensors(directory)
    # A recipe new to the run has no histories there.
    histories = {k: tensor for k, tensor in content["amax_history"].items() if k in saved}
    content["amax_history"] = histories
    # megatron would validate the layout on rank 0 alone, and leave the others waiting for it.
    with confined():
        loaded = dist_checkpointing.load(
            content,
            str(directory),
            sharded_strategy=torch_dist.TorchDistLoadShardedStrategy(),
            common_strategy=CommonLoader(),
            validate_access_integrity=False,
        )
    for key, chunk in _chunks(model):
        empty = {name: torch.empty(0, dtype=torch.uint8) for name in chunk.state_dict()
                 if name.endswith(_EXTRA_STATE)}  # fmt: skip
        chunk.load_state_dict(empty | loaded[key])
    # megatron drops an empty dictionary: that of a run, or a checkpoint, without histories.
    amax_history.load_state(model, loaded.get("amax_history", {}))
    if optimizer is None:
        return
    with ExitStack() as stack:
        for part in parts(optimizer):
            stack.enter_context(fp32_as_main(part))
            if _is_torch_adam(part):
                stack.enter_context(_own_steps(part))
        optimizer.load_state_dict(loaded["optimizer"])
    for chunk in model:
        if getattr(chunk, "ddp_config", None) and chunk.ddp_config.use_distributed_optimizer:
            # From a BF16 checkpoint an FP32 run got but its own share unrounded.
            chunk.start_param_sync(force_sync=True)


def check_histories(directory: Path, model: Sequence[torch.nn.Module]) -> None:
    """Raise UserError where an amax history of this rank has another length in the checkpoint."""
    saved = _saved_tensors(directory)
    histories = amax_history.sharded_state(model)
    for key in sorted(histories.keys() & saved.keys()):
        there, here = (tuple(found[key].global_shape)[1] for found in (saved, histories))
        if there != here:
            raise UserError(
                f"{directory}: {key} has {there} steps, but this run's recipe keeps {here}; set "
                f"amax_history.length={there}"
            )


def check_precision(directory: Path, optimizer: Any) -> None:
    """Raise UserError where a plain optimizer cannot load what one of the other precision saved.

    In BF16 it has FP32 main parameters, under keys of their own; in FP32 it has none. A distributed
    optimizer saves FP32 parameters in both, under the same keys.
    """
    if kind(optimizer) != "plain":
        return
    there = any(key.startswith("optimizer.state.fp32_param.") for key in _saved_tensors(directory))
    here = isinstance(parts(optimizer)[0], Float16OptimizerWithFloat16Params)
    if there != here:
        saved, current = ("BF16" if has_main else "FP32" for has_main in (there, here))
        raise UserError(
            f"{directory}: saved by a run computing in {saved}, but this one is in {current}; "
            "without --use-distributed-optimizer, --bf16 must be as it was (on a CPU it is FP32)"
        )


def _saved_tensors(directory: Path) -> dict[str, Any]:
    """key -> sharded tensor without data, of every tensor of a checkpoint."""
    metadata = Reader(directory).read_metadata()
    return torch_dist.TorchDistLoadShardedStrategy().load_tensors_metadata(directory, metadata)


class _Writer(torch_checkpoint.FileSystemWriter):
    """torch's writer; what a full disk raises survives its way to the other ranks."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # torch.save turns it into a RuntimeError, and pickling that loses the chain to it.
            raise error_behind(error, OSError) or error from None


def _chunks(model: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """(key, bare model) of each chunk, under Megatron-LM's keys."""
    bare = unwrap_model(list(model))
    if len(bare) == 1:
        return [("model", bare[0])]
    return [(f"model{number}", chunk) for number, chunk in enumerate(bare)]


def _sharded(model: Sequence[torch.nn.Module], optimizer: Any, is_loading: bool) -> dict[str, Any]:
    # megatron adds a process group to the metadata it is given: never share this dict.
    metadata: dict[str, Any] = dict(_CONTENT)
    content = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _chunks(model)}
    if is_loading:
        content = {key: _without_extra_state(part) for key, part in content.items()}
    parameters = dict(content)
    content["amax_history"] = amax_history.sharded_state(model)
    if optimizer is not None:
        for part in filter(_is_torch_adam, parts(optimizer)):
            _fill_state(part)
        with ExitStack() as stack:
            for part in parts(optimizer):
                stack.enter_context(fp32_as_main(part))
            content["optimizer"] = optimizer.sharded_state_dict(
                parameters, is_loading=is_loading, metadata=metadata
            )
    return content


def _without_extra_state(content: dict[str, Any]) -> dict[str, Any]:
    """Without what modules save beside tensors: pickles that hold nothing that is needed here.

    Not asked for, they need not be there: a checkpoint loads whoever's layers the model is made of.
    """
    return {key: entry for key, entry in content.items() if not key.endswith(_EXTRA_STATE)}


def _is_torch_adam(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _fill_state(part: Any) -> None:
    """Zero moments and step zero for parameters that no step has touched yet."""
    part.init_state_fn(part.optimizer, part.config)
    for state in part.optimizer.state.values():
        state.setdefault("step", torch.zeros(()))


@contextmanager
def _own_steps(part: Any) -> Iterator[None]:
    """While ``part`` is loaded, see that every parameter gets a ``step`` tensor of its own."""

    def give_steps(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        # megatron hands one tensor to all, and none where the checkpoint precedes the first step.
        for state in state_dict["state"].values():
            state["step"] = state.get("step", torch.zeros(())).clone()

    hook = part.optimizer.register_load_state_dict_pre_hook(give_steps)
    if isinstance(part, DistributedOptimizer):
        part._set_main_param_and_optimizer_states = _keeping_step(part)
    try:
        yield
    finally:
        hook.remove()
        # Where it was replaced above, the class's method shows again.
        vars(part).pop("_set_main_param_and_optimizer_states", None)


def _keeping_step(part: DistributedOptimizer) -> Callable[..., None]:
    """megatron's method; among the loaded tensors it now finds ``step``, as it is in the state."""
    original = part._set_main_param_and_optimizer_states

    def set_states(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = part.model_param_group_index_map[model_param]
        main = part.optimizer.param_groups[group]["params"][order]
        original(model_param, {"step": part.optimizer.state[main]["step"], **tensors})

    return set_states
