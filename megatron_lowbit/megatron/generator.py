"""The state of torch's default CPU generator: a seed, and what it draws next."""

import torch


def with_seed(state: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a state that draws the same numbers but has another ``torch.initial_seed()``.

    Args:
        state: as ``torch.get_rng_state()`` returns it.
        seed: from 0 to 2**64 - 1.
    """
    state = state.clone()
    # torch keeps the seed in front of the Mersenne twister's words.
    state[:8] = torch.tensor([seed], dtype=torch.uint64).view(torch.uint8)
    return state
