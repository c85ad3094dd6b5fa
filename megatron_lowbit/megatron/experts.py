"""Mixture-of-experts layers: which experts a rank holds, and which ranks share them."""

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


def first_local(config: TransformerConfig) -> int:
    """Return the global number of this rank's first expert."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_expert_model_parallel_rank()
    return rank * ((config.num_moe_experts or 0) // ranks)


def replica_groups(is_expert: bool) -> list[dist.ProcessGroup]:
    """Return groups that together span the ranks with parts or replicas of a layer."""
    if not is_expert:
        return [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
    return [
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    ]


def replica_id(is_expert: bool) -> tuple[int, int]:
    """Return this rank's place among those ranks; zeros on exactly one of them."""
    if not is_expert:
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
    return (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )
