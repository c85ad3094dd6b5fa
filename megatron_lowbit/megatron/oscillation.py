"""Reset of oscillating weights (``numerics/oscillation.py``) in Megatron-LM's training loop.

Weights are the FP32 masters of Megatron-LM's optimizers, and the quantized ones what fprop
multiplies, made from the model's weights. Optimizers' moments stay as they are.
"""

from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megatron_lowbit.megatron import experts
from megatron_lowbit.megatron.layer_state import device_of
from megatron_lowbit.megatron.quantization_log import write_scalars
from megatron_lowbit.megatron.rank_errors import say_on_rank_0
from megatron_lowbit.numerics import Request
from megatron_lowbit.numerics.oscillation import OscillationReset, WeightPaths

PREFIX = "oscillation."
"""Start of the keys of paths in a checkpoint, before a layer's global path."""
METRIC = "oscillation/reset"
_LENGTHS = ("of_weight", "of_quantized")


class OscillationResets(nn.Module):
    """Measurement and reset of a rank's weights, as a submodule that checkpoints include.

    Within a measurement a checkpoint holds the lengths of the paths up to its weights, so that a
    resumed run resets the same weights. A run that begins within one measures the rest of it.

    Args:
        layers: linear layers of the rank's chunks.
        reset: the recipe's.
        total: iterations of the run.
        saved: keys of the tensors in the checkpoint to load, or None without a checkpoint.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        reset: OscillationReset,
        total: int,
        saved: Container[str] | None,
    ) -> None:
        super().__init__()
        # In a dictionary: as submodules they would be saved here, too.
        self._layers = {layer.layer_state.plan.layer.path: layer for layer in layers}
        self._reset, self._total, self._saved = reset, total, saved
        self._paths: dict[str, WeightPaths] = {}
        self._measures = False

    @torch.no_grad()
    def begin_step(self, iteration: int, training: bool) -> None:
        """Add the last iteration's motion, before the first forward pass of an iteration."""
        if not training:
            return
        step = self._reset.step(iteration, self._total)
        if not step:
            self._paths.clear()
        self._measures = step is not None
        self._advance()
        if step == self._reset.over:
            _log(*self._reset_weights(), iteration)
            self._paths.clear()
            self._measures = False

    @torch.no_grad()
    def _advance(self) -> None:
        """Add the motion since the last call: none if the weights have not changed."""
        if not self._measures:
            return
        for path, layer in self._layers.items():
            quantized = _quantized(layer)
            if quantized is None:
                self._paths.pop(path, None)
                continue
            if path not in self._paths:
                self._paths[path] = WeightPaths(layer.weight)
            self._paths[path].advance(_master(layer.weight), quantized)

    def _reset_weights(self) -> tuple[int, int]:
        """Set the weights that oscillate to their quantized values; count them, and all."""
        reset = total = 0
        for path, paths in self._paths.items():
            weight, master = self._layers[path].weight, _master(self._layers[path].weight)
            oscillates = paths.ratio() >= self._reset.ratio
            master.copy_(torch.where(oscillates, paths.quantized, master))
            weight.copy_(master)
            reset, total = reset + int(oscillates.sum()), total + oscillates.numel()
        return reset, total

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the paths' lengths: those up to now to save, those in the checkpoint to load."""
        self._prepare()
        return {
            prefix + key: ShardedTensor.from_rank_offsets(
                PREFIX + key, length, replica_id=experts.replica_id(is_expert=False)
            )
            for key, length in self._lengths().items()
        }

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        self._prepare()
        destination |= {prefix + key: length for key, length in self._lengths().items()}

    def _prepare(self) -> None:
        """Measure up to the present weights, or make room for what the checkpoint holds."""
        if self._saved is None:
            self._advance()
            return
        for path, layer in self._layers.items():
            if f"{PREFIX}{path}.{_LENGTHS[0]}" in self._saved:
                self._paths[path] = WeightPaths(layer.weight)

    def _lengths(self) -> dict[str, Tensor]:
        return {
            f"{path}.{name}": getattr(paths, name)
            for path, paths in self._paths.items()
            for name in _LENGTHS
        }

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *_: Any, **__: Any) -> None:
        for path, layer in self._layers.items():
            found = [state_dict.get(f"{prefix}{path}.{name}") for name in _LENGTHS]
            if None not in found:
                paths = self._paths.setdefault(path, WeightPaths(layer.weight))
                paths.of_weight, paths.of_quantized = (one.to(layer.weight.device) for one in found)
        self._saved = None  # Later checkpoints hold what is measured then.


def _master(weight: Tensor) -> Tensor:
    """Return the FP32 master of a weight, or the weight itself where it is the optimizer's."""
    master = getattr(weight, "main_param", None)
    return weight.detach() if master is None else master


def _quantized(layer: nn.Module) -> Tensor | None:
    """Return the FP32 values of a layer's weight that fprop multiplies; None in high precision."""
    plan = layer.layer_state.plan
    quantizer = plan.precision.fprop.rhs
    if quantizer is None:
        return None
    codes, _ = plan.engine.quantize(
        layer.weight.detach(), Request(quantizer, needs_codes=True), None
    )
    return codes.dequantize()


def _log(reset: int, total: int, iteration: int) -> None:
    """Print and write the share of the whole model's weights that were reset."""
    counts = torch.tensor([reset, total], dtype=torch.float64, device=device_of(None))
    dist.all_reduce(counts)
    share = (counts[0] / counts[1].clamp(min=1)).item()
    say_on_rank_0(f"iteration {iteration}: {share:.3%} of the quantized weights oscillated, reset")
    write_scalars({METRIC: share}, iteration)
