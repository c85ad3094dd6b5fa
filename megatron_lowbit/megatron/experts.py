"""Mixture-of-experts layers: which experts a rank holds, and their router without TE."""

import torch
import torch.distributed as dist

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig


def use_torch_router() -> None:
    """Let the router multiply in torch where Transformer Engine is absent.

    It compares the name with None, but megatron-core 0.16.1 leaves it undefined then.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def first_local(config: TransformerConfig) -> int:
    """The global number of this rank's first expert."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * (
        (config.num_moe_experts or 0) // ranks
    )


def microbatch_key(is_expert: bool) -> int:
    """The key that ``set_step`` gave to this microbatch, for one kind of layer.

    An expert sees the tokens of all ranks of its group and takes no one's number: it then draws the
    same bits whichever rank holds it.
    """
    key = torch.initial_seed()
    return key ^ parallel_state.get_expert_model_parallel_rank() if is_expert else key


def replica_groups(is_expert: bool) -> list[dist.ProcessGroup]:
    """Groups that together span the ranks with parts or replicas of a layer."""
    if not is_expert:
        return [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
    return [
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    ]


def replica_id(is_expert: bool) -> tuple[int, int]:
    """This rank's place among those ranks; zeros on exactly one of them."""
    if not is_expert:
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
    return (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )
