"""Reset of oscillating weights (``numerics/oscillation.py``) in Megatron-LM's training loop.

Weights are the FP32 masters of Megatron-LM's optimizers, and the quantized ones what fprop
multiplies, made from the model's weights. Optimizers' moments stay as they are.
"""

from argparse import Namespace
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lowbit.megatron.features import Feature
from megatron_lowbit.megatron.features.logs import write_scalars
from megatron_lowbit.megatron.layers.state import device_of
from megatron_lowbit.megatron.run.errors import say_on_rank_0
from megatron_lowbit.numerics import Request
from megatron_lowbit.numerics.oscillation import WeightPaths
from megatron_lowbit.recipes import Recipe
from megatron_lowbit.recipes.matchers import OUTPUT_LAYER

METRIC = "oscillation/reset"
_LENGTHS = ("of_weight", "of_quantized")


class OscillationResets(Feature):
    """Measurement and reset of a rank's weights.

    Within a measurement a checkpoint holds the lengths of the paths up to its weights, so that a
    resumed run resets the same weights. A run that begins within one measures the rest of it.
    """

    submodule, prefix = "oscillation_resets", "oscillation."

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._paths: dict[str, WeightPaths] = {}
        self._measures = False

    @classmethod
    def is_on(cls, args: Namespace, recipe: Recipe) -> bool:
        return recipe.oscillation is not None

    def describe(self) -> Iterable[str]:
        yield f"oscillation: {self.run.recipe.oscillation}"

    @torch.no_grad()
    def begin_step(self, iteration: int, training: bool) -> None:
        """Add the last iteration's motion, and reset weights at the end of a measurement."""
        if not training:
            return
        reset = self.run.recipe.oscillation
        step = reset.step(iteration, self.run.iterations)
        # --iterations-to-skip may skip the iteration that ends a measurement.
        is_late = bool(self._paths) and not step
        self._measures = step is not None or is_late
        self._advance()
        if step == reset.over or is_late:
            _log(*self._reset_weights(reset.ratio), iteration)
            self._paths.clear()
            self._measures = step == 0
            self._advance()

    @torch.no_grad()
    def _advance(self) -> None:
        """Add the motion since the last call: none if the weights have not changed."""
        if not self._measures:
            return
        for path, layer in _layers(self.run.chunks).items():
            quantized = _quantized(layer)
            if quantized is None:
                self._paths.pop(path, None)
                continue
            if path not in self._paths:
                self._paths[path] = WeightPaths(layer.weight)
            self._paths[path].advance(_master(layer.weight), quantized)

    def _reset_weights(self, ratio: float) -> tuple[int, int]:
        """Set the weights that oscillate to their quantized values; count them, and all."""
        reset = total = 0
        layers = _layers(self.run.chunks)
        for path, paths in self._paths.items():
            weight, master = layers[path].weight, _master(layers[path].weight)
            oscillates = paths.ratio() >= ratio
            master.copy_(torch.where(oscillates, paths.quantized, master))
            weight.copy_(master)
            reset, total = reset + int(oscillates.sum()), total + oscillates.numel()
        return reset, total

    def extra_tensors(self, chunk: nn.Module, saved: Container[str] | None) -> dict[str, Tensor]:
        """Return the paths' lengths up to the present weights, or as the checkpoint has them."""
        layers = _layers([chunk])
        if saved is None:
            self._advance()
        else:
            for path, layer in layers.items():
                if f"{self.prefix}{path}.{_LENGTHS[0]}" in saved:
                    self._paths[path] = WeightPaths(layer.weight)
        return {
            f"{path}.{name}": getattr(self._paths[path], name)
            for path in layers
            if path in self._paths
            for name in _LENGTHS
        }

    def load_extra_tensors(self, chunk: nn.Module, tensors: dict[str, Tensor]) -> None:
        for path, layer in _layers([chunk]).items():
            lengths = [tensors.get(f"{path}.{name}") for name in _LENGTHS]
            if None not in lengths:
                paths = self._paths.setdefault(path, WeightPaths(layer.weight))
                paths.of_weight, paths.of_quantized = (x.to(layer.weight.device) for x in lengths)


def _layers(chunks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    modules = (module for chunk in chunks for module in chunk.modules())
    layers = {m.layer_state.plan.layer.path: m for m in modules if hasattr(m, "layer_state")}
    layers.pop(OUTPUT_LAYER, None)  # The embedding may share its weight.
    return layers


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
    request = Request(quantizer, needs_codes=True)
    codes, _ = plan.engine.quantize(layer.weight.detach(), request, None)
    return codes.dequantize()


def _log(reset: int, total: int, iteration: int) -> None:
    """Print and write the share of the whole model's weights that were reset."""
    counts = torch.tensor([reset, total], dtype=torch.float64, device=device_of(None))
    dist.all_reduce(counts)
    share = (counts[0] / counts[1].clamp(min=1)).item()
    say_on_rank_0(f"iteration {iteration}: {share:.3%} of the quantized weights oscillated, reset")
    write_scalars({METRIC: share}, iteration)
