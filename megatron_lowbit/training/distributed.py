"""Process groups and seeds. The one place that sets randomness, always as a function of the step.

A checkpoint holds no random state: what an iteration draws follows from (seed, iteration,
microbatch) and the rank's place in the layout, so a resumed run repeats bit for bit.
"""

import os
import random
from argparse import Namespace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel

from megatron_lowbit.numerics.philox import derive_key
from megatron_lowbit.training.run_log import RUN_LOG

# megatron adds small offsets (tensor, expert rank) to its seed; the sum must stay below 2**63.
_MEGATRON_SEED_MASK = 2**62 - 1
_TORCH_SEED_MASK = 2**63 - 1
_NUMPY_SEED_MASK = 2**32 - 1
# Pipeline stages number their layers from zero: with one seed they would start as equals.
_PIPELINE_SEED_STRIDE = 100


def rank() -> int:
    """This process's global rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def print_rank0(*values: object) -> None:
    """Print from rank 0 only, unbuffered; every rank's log file gets it."""
    RUN_LOG.info(" ".join(map(str, values)))
    if rank() == 0:
        print(*values, flush=True)


def all_ranks(condition: bool) -> bool:
    """Whether the condition holds on every rank. Collective."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    flag = torch.tensor(int(condition), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def initialize_distributed(args: Namespace) -> None:
    """Join the process group, build megatron's groups and seed everything for initialization.

    Under torchrun (any launcher that torch.distributed.is_torchelastic_launched() knows) the ranks
    meet as it says; otherwise this process is a world of its own. NCCL where there is CUDA, gloo
    elsewhere.

    Reads from ``args``: distributed_timeout_minutes, seed, tensor_model_parallel_size,
    pipeline_model_parallel_size, virtual_pipeline_model_parallel_size (or None),
    context_parallel_size, expert_model_parallel_size.

    Raises UserError where the world size does not fit these sizes; the process group is closed.
    """
    _join(timedelta(minutes=args.distributed_timeout_minutes))
    try:
        _check_sizes(args, dist.get_world_size())
    except UserError:
        dist.destroy_process_group()
        raise
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    _seed_everything(args.seed)


def shutdown(failed: bool = False) -> None:
    """Take megatron's groups and the process group down. Harmless where there are none.

    After ``failed`` this waits for no other rank, which may wait for this one.
    """
    num_microbatches_calculator.unset_num_microbatches_calculator()
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    if failed and dist.get_backend() == "nccl":
        # NCCL's end in order is one more collective: the error would never be printed.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def set_iteration_seed(seed: int, iteration: int) -> None:
    """Reseed megatron's random states (dropout) for one iteration.

    Call it before the iteration's first :func:`set_step`: on a CPU it also seeds torch's default
    generator, which stands for the CUDA one there. Ranks of one tensor-parallel group share the
    state outside tensor-parallel regions, as megatron wants; all others draw apart.
    """
    key = derive_key(seed, iteration, _pipeline_rank(), _data_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(key & _MEGATRON_SEED_MASK)


def set_step(seed: int, iteration: int, microbatch: int) -> None:
    """Give this microbatch's forward its key: ``torch.initial_seed()`` on the default generator.

    A pure function of (seed, iteration, the microbatch's number in the global batch), below 2**63:
    data parallelism only spreads the same microbatches over ranks. Activation recomputation
    restores the generator, and the key with it.

    With expert parallelism the ranks of an expert group count as one, and the rank within it is
    added last, by XOR: experts take it out again (integrations/megatron_core/experts.py).
    """
    replicas = parallel_state.get_expert_data_parallel_world_size()
    number = microbatch * replicas + parallel_state.get_expert_data_parallel_rank()
    key = derive_key(seed, iteration, number, 0) & _TORCH_SEED_MASK
    rank_of_group = parallel_state.get_expert_model_parallel_rank()
    torch.default_generator.manual_seed(key ^ rank_of_group)


def _join(timeout: timedelta) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store, own_rank, size = dist.HashStore(), 0, 1
    if dist.is_torchelastic_launched():
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        launched, own_rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # A process may join several times: no group must find what the last one left in the store.
        joined = launched.add(f"megatron_lowbit/joined/{own_rank}", 1)
        store = dist.PrefixStore(f"megatron_lowbit/{joined}", launched)
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=size, timeout=timeout)


def _check_sizes(args: Namespace, world_size: int) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, expert = args.context_parallel_size, args.expert_model_parallel_size
    model = tensor * pipeline * context
    if world_size % model:
        raise UserError(
            f"world size {world_size} is not divisible by --tensor-model-parallel-size {tensor} x "
            f"--pipeline-model-parallel-size {pipeline} x --context-parallel-size {context}: "
            f"start a multiple of {model} processes"
        )
    # megatron gives experts the same tensor-parallel groups unless told otherwise.
    if world_size % (expert * tensor * pipeline):
        raise UserError(
            f"world size {world_size} is not divisible by --expert-model-parallel-size {expert} x "
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}: "
            f"start a multiple of {expert * tensor * pipeline} processes"
        )


def _seed_everything(seed: int) -> None:
    stage_seed = seed + _PIPELINE_SEED_STRIDE * _pipeline_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed & _NUMPY_SEED_MASK)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def _pipeline_rank() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def _data_rank() -> int:
    return parallel_state.get_data_parallel_rank()
