"""Changes of the layer specs from which Megatron-LM builds a model."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec

Change = Callable[[Any], Any]


def change_specs(model_config: Any, change: Change) -> None:
    """Let a model configuration build its layers from specs that ``change`` returns.

    Args:
        model_config: Megatron-LM's GPTModelConfig or HybridModelConfig.
        change: returns the spec to build in place of another.
    """
    if hasattr(model_config, "hybrid_stack_spec"):
        model_config.hybrid_stack_spec = change(model_config.hybrid_stack_spec)
        return
    before = model_config.transformer_layer_spec

    def spec(model_config: Any, vp_stage: int | None) -> Any:
        if isinstance(before, ModuleSpec):
            return change(before)
        return change((before or default_layer_spec)(model_config, vp_stage))

    model_config.transformer_layer_spec = spec


def change_parts(spec: Any, change: Change) -> Any:
    """Return a spec, or a list or builder of modules, with its parts changed."""
    if isinstance(spec, list):
        return [change(entry) for entry in spec]
    if isinstance(spec, partial):
        parts = {name: change(part) for name, part in spec.keywords.items()}
        return partial(spec.func, *spec.args, **parts)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {f.name: change(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return spec
