"""Features of training under a recipe: classes that hook into a run by the same few methods."""

from argparse import Namespace
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron_lowbit.megatron.layers.state import replica_id
from megatron_lowbit.recipes import Layer, Recipe


class Feature:
    """Part of training outside the model; a run calls the methods in this order.

    Attributes:
        run: the run's ``RecipeHook``: its recipe, arguments, chunks, layer states, and checkpoint.
        argument: argument that turns the feature on, if one alone does.
        submodule: name under which checkpoints of a chunk include the feature's tensors, if any.
        prefix: start of those tensors' keys in a checkpoint in the format torch_dist.
    """

    argument, submodule, prefix = "", "", ""

    def __init__(self, run: Any) -> None:
        self.run = run

    @classmethod
    def is_on(cls, args: Namespace, recipe: Recipe) -> bool:
        """Return True for a run that has the feature."""
        return not cls.argument or bool(getattr(args, cls.argument))

    def check_rank(self) -> None:
        """Raise UserError if this rank's layers do not fit."""

    def check(self, layers: Sequence[Layer]) -> None:
        """Raise UserError if the recipe does not fit the layers of the whole model."""

    def install(self) -> None:
        """Prepare the chunks, which Megatron-LM has not wrapped yet."""

    def describe(self) -> Iterable[str]:
        """Yield lines to print before the first step."""
        return ()

    def wrap(self, wrapped: list[Any]) -> None:
        """Prepare the chunks that Megatron-LM has wrapped."""

    def begin_step(self, iteration: int, training: bool) -> None:
        """Prepare an iteration (from 0) or an evaluation, before its first forward pass.

        At that moment the optimizer's step and the checkpoint of the last iteration are complete.
        """

    def begin_pass(self) -> None:
        """Prepare a forward pass of a chunk, once its random key is set."""

    def after_backward(self) -> None:
        """Finish an iteration when Megatron-LM has finalized its gradients."""

    def extra_tensors(
        self, chunk: torch.nn.Module, saved: Container[str] | None
    ) -> dict[str, Tensor]:
        """Return a chunk's tensors to save, by layer path.

        ``saved`` are keys in the checkpoint that is about to be loaded into the tensors, or None.
        """
        return {}

    def load_extra_tensors(self, chunk: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
        """Take over the tensors of a checkpoint."""


class ExtraTensors(torch.nn.Module):
    """Submodule through which a chunk's checkpoints include the tensors of a feature.

    ``saved`` are the keys of the tensors in the checkpoint to load, or None without a checkpoint.
    What the checkpoint lacks is not loaded.
    """

    def __init__(
        self, feature: Feature, chunk: torch.nn.Module, saved: Container[str] | None
    ) -> None:
        super().__init__()
        self._prefix, self._saved = feature.prefix, saved
        # As functions: a module among the attributes would become a submodule.
        self._tensors = partial(feature.extra_tensors, chunk)
        self._load = partial(feature.load_extra_tensors, chunk)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return all tensors to save, or those in the checkpoint to load."""
        return {
            prefix + path: ShardedTensor.from_rank_offsets(
                self._prefix + path, tensor, replica_id=replica_id(".local_experts." in path)
            )
            for path, tensor in self._tensors(self._saved).items()
            if self._saved is None or self._prefix + path in self._saved
        }

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        tensors = self._tensors(self._saved)
        destination |= {prefix + path: tensor for path, tensor in tensors.items()}

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *_: Any, **__: Any) -> None:
        keys = [key for key in state_dict if key.startswith(prefix)]
        self._load({key.removeprefix(prefix): state_dict[key] for key in keys})
        self._saved = None  # Later checkpoints hold all tensors.
