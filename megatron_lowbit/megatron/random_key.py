"""The random key of a microbatch: a function of the seed, the iteration and the microbatch.

Layers derive their keys from it, so that a resumed, resharded or recomputed run draws the same
bits. The key is the seed of torch's default CPU generator: activation recomputation restores that
generator, and with it the key of the microbatch that it repeats. The generator's draws stay as they
are, so that dropout is the same with recipes and without.
"""

import torch
from megatron.core import parallel_state

from megatron_lowbit.cpu_runtime.megatron_patches import with_seed
from megatron_lowbit.numerics import randomness


def set_microbatch_key(seed: int, iteration: int, microbatch: int) -> None:
    """Give a forward pass its key.

    Data-parallel ranks number the microbatches of a global batch in turn: the same microbatches
    have the same keys in every layout. Context-parallel ranks, which hold other tokens of the same
    sequences, have keys of their own.

    With expert parallelism the ranks of an expert group count as one, and the rank within it is
    added last, by XOR: :func:`microbatch_key` takes it out again for experts.

    Args:
        seed: the run's ``--seed``.
        iteration: finished iterations.
        microbatch: this rank's microbatches of the iteration before this one.
    """
    replicas = parallel_state.get_expert_data_parallel_world_size()
    number = microbatch * replicas + parallel_state.get_expert_data_parallel_rank()
    context = parallel_state.get_context_parallel_rank()
    key = randomness.microbatch_key(seed, iteration, number, context)
    key ^= parallel_state.get_expert_model_parallel_rank()
    torch.set_rng_state(with_seed(torch.get_rng_state(), key))


def microbatch_key(is_expert: bool) -> int:
    """Return the key of the present microbatch for one kind of layer.

    An expert sees the tokens of all ranks of its group and takes no one's number: it then draws the
    same bits whichever rank holds it.
    """
    key = torch.initial_seed()
    return key ^ parallel_state.get_expert_model_parallel_rank() if is_expert else key
