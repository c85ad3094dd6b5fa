"""Random states of megatron in torch's default CPU generator.

On a GPU, megatron's states are those of the CUDA generator, and the seed of the CPU generator is
the key of the microbatch (random_key.py). Without CUDA, one generator holds both. Megatron may then
change the numbers that it draws next, but not ``torch.initial_seed()``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch


def with_seed(state: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a state that draws the same numbers, but has another ``torch.initial_seed()``.

    Args:
        state: state as returned by ``torch.get_rng_state()``.
        seed: from 0 to 2**64 - 1.
    """
    state = state.clone()
    # torch stores the seed before the state of the Mersenne twister.
    state[:8] = torch.tensor([seed], dtype=torch.uint64).view(torch.uint8)
    return state


def patch_random_states(random: ModuleType) -> None:
    """Make ``megatron.core.tensor_parallel.random`` use torch's default CPU generator."""

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):  # type: ignore[name-defined, misc]
        """megatron's tracker of named random states, with the CPU generator."""

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Draw from the named state inside the context; restore the outer state on exit.

            Raises:
                KeyError: the name was not added.
            """
            outer_name, outer_state = self._current_state_name, torch.get_rng_state()
            # Forks may be nested, and an inner fork may use the outer one's name.
            if outer_name in self.states_:
                self.states_[outer_name] = outer_state
            _set_draws(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                _set_draws(self.states_.get(outer_name, outer_state))
                self._current_state_name = outer_name

    random.CudaRNGStatesTracker = CpuRNGStatesTracker  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_, **__: _set_draws(state)  # type: ignore[attr-defined]


def _set_draws(state: torch.Tensor) -> None:
    """Set the numbers that the CPU generator draws next, without its ``torch.initial_seed()``."""
    torch.set_rng_state(with_seed(state, torch.initial_seed()))


def with_own_generator(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap megatron's function that builds data loaders to give each loader its own generator.

    A loader draws a number whenever an iteration over it begins, as after a resumption. From the
    default generator, this would change the numbers of dropout.
    """

    @functools.wraps(build)
    def build_loader(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        if loader is not None:
            loader.generator = torch.Generator()
        return loader

    return build_loader
