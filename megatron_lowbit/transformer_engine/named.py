"""Factory of quantizers that Megatron-LM's own scripts import by name."""

import sys
from argparse import Namespace
from collections import Counter
from typing import Any

from transformer_engine.pytorch.tensor import IdentityQuantizer

from megatron_lowbit.errors import require
from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.numerics.randomness import derive_key, layer_key, microbatch_key
from megatron_lowbit.recipes import LinearPrecision
from megatron_lowbit.recipes.te_config import FACTORIES
from megatron_lowbit.transformer_engine.quantizers import Factory

_REFUSED = {
    "gradient_accumulation_fusion": "Transformer Engine would lose the weight gradients; add "
    "--no-gradient-accumulation-fusion",
    "fp8_param_gather": "parameters stay in BF16; omit --fp8-param-gather",
    "fp4_param_gather": "parameters stay in BF16; omit --fp4-param-gather",
}
"""Arguments of Megatron-LM that custom quantizers cannot serve, with what to do."""


class NamedFactory(Factory):
    """Factory whose random numbers are a function of Megatron-LM's seed, iteration and ranks.

    Torch's CPU generator would not do: it is the same on all data-parallel ranks, and the data
    loader of the first tensor-parallel rank draws from it. Calls of a layer are counted from each
    iteration's first, so that a resumed run draws what the whole run does. Recomputation counts as
    another call, whose numbers the backward pass takes. Without Megatron-LM's arguments, and
    without :func:`announce_step`, the numbers are :class:`Factory`'s.
    """

    def __init__(self, name: str, precision: LinearPrecision, engine: Engine) -> None:
        super().__init__(precision, engine)
        self.__module__, self.__name__ = FACTORIES, name
        self._iteration, self._calls = 0, Counter[str]()

    def __reduce__(self) -> str:
        """Return the name, as which Transformer Engine pickles the factory into checkpoints."""
        return self.__name__

    def __call__(self, role: Any) -> IdentityQuantizer:
        """Return the quantizer for a role; UserError for arguments that are not for quantizers."""
        args = _arguments()
        for name, reason in _REFUSED.items():
            given = getattr(args, name, False)
            require(not given, f"a quantizer factory and {name}: {reason}")
        if getattr(args, "num_experts", None):
            # The data-parallel rank numbers keys: all ranks of one expert must have the same.
            dense, experts = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
            message = f"must be {dense}, as tensor_model_parallel_size"
            require(
                experts == dense,
                f"a quantizer factory and expert_tensor_parallel_size {experts}: {message}",
            )
        return super().__call__(role)

    def key(self, layer: str) -> int:
        """Return the key of a layer's next call on this rank."""
        args = _arguments()
        if args is None:
            return super().key(layer)
        ranks = sys.modules["megatron.core.parallel_state"]
        iteration = getattr(args, "curr_iteration", 0)
        if iteration != self._iteration:
            self._iteration, self._calls = iteration, Counter()
        replicas, replica = ranks.get_data_parallel_world_size(), ranks.get_data_parallel_rank()
        number = self._calls[layer] * replicas + replica
        self._calls[layer] += 1
        context = ranks.get_context_parallel_rank()
        # Transformer Engine numbers the layers of each pipeline stage from 1.
        place = derive_key(layer, ranks.get_pipeline_model_parallel_rank())
        return layer_key(microbatch_key(args.seed, iteration, number, context), place)


_announced: Namespace | None = None
"""Seed and iteration of a run without Megatron-LM's arguments."""


def announce_step(seed: int, iteration: int) -> None:
    """Tell the factories the step that begins, in a run without Megatron-LM's arguments."""
    global _announced
    _announced = Namespace(seed=seed, curr_iteration=iteration)


def _arguments() -> Any:
    """Return the arguments of Megatron-LM's script, or what was announced; None without both."""
    return _announced or getattr(
        sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None
    )
