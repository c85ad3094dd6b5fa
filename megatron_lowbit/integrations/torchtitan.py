"""Recipes in torchtitan: a converter of model configs, as torchtitan's own for FP8 and NVFP4.

A converted config builds :class:`LowbitLinear` in place of torchtitan's ``Linear``. Parallelism,
checkpoints and the training loop stay torchtitan's.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from megatron_lowbit.errors import require
from megatron_lowbit.pytorch import LowbitLinear
from megatron_lowbit.pytorch.convert import ONE_MATRIX, check_effect, check_recipe
from megatron_lowbit.recipes import Layer, LinearPrecision, load_recipe

_IN_BLOCK = re.compile(r"layers\.(\d+)\.")


class TitanLinear(LowbitLinear, Module):
    """A linear layer of a torchtitan model in a recipe's precision."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Config of ``Linear`` with a precision; weights of ``_peers`` share a tensor scale."""

        _precision: LinearPrecision
        _peers: "list[TitanLinear.Config]" = field(default_factory=list, compare=False, repr=False)
        _built: "TitanLinear | None" = field(default=None, compare=False, repr=False)

        def build(self, **kwargs: Any) -> "TitanLinear":
            """Build the layer; the last of several peers tells all of each other."""
            self._built = Linear.Config.build(self, **kwargs)
            if self is self._peers[-1]:
                modules = [peer._built for peer in self._peers]
                for module in modules:
                    module.scaled_with = tuple(other for other in modules if other is not module)
            return self._built

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.in_features, config.out_features, config.bias, precision=config._precision
        )

    def parallelize(self, parallel_dims: Any) -> None:
        """Refuse tensor parallelism, which would scale each shard of a weight by itself."""
        require(
            not parallel_dims.tp_enabled,
            "--parallelism.tensor_parallel_degree: LowbitConverter needs whole weights; set it to "
            "1 and shard the model by --parallelism.data_parallel_shard_degree",
        )
        super().parallelize(parallel_dims)


class LowbitConverter(QuantizationConverter):
    """Give the linear layers in a model's blocks the precision of a recipe.

    Args:
        config: the recipe by its name or file, and changes of its fields as ``load_recipe`` takes
            them.

    Raises:
        UserError: a recipe that :func:`megatron_lowbit.convert` refuses, or a model with experts or
            with other linear layers than torchtitan's ``Linear`` in its blocks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Name of the recipe and its overrides."""

        recipe: str
        recipe_set: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        self.recipe = load_recipe(config.recipe, config.recipe_set)
        check_recipe(self.recipe)

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replace the configs of the linear layers that the recipe quantizes, in place."""
        experts = [path for path, *_ in model_config.traverse(GroupedExperts.Config)]
        require(
            not experts,
            f"LowbitConverter: {experts[:1]} is a GroupedExperts, which it cannot quantize: give "
            "it a dense model",
        )
        found = [
            (Layer(path, int(match[1]), len(model_config.layers)), config, parent, name)
            for path, config, parent, name in model_config.traverse(Linear.Config)
            if (match := _IN_BLOCK.match(path))
        ]
        for layer, config, *_ in found:
            require(
                type(config) is Linear.Config,
                f"LowbitConverter: {layer.path} is a {type(config).__qualname__}, not Linear.Config"
                "; use the default tp_gemm_backend and no other converter before this one",
            )
        layers = [layer for layer, *_ in found]
        self.recipe.check_matchers(layers)
        check_effect(self.recipe, layers)
        groups: dict[Any, list[TitanLinear.Config]] = {}
        for layer, config, parent, name in found:
            precision = self.recipe.precision_for(layer)
            if not precision.quantized:
                continue
            values = {entry.name: getattr(config, entry.name) for entry in fields(config)}
            one_matrix = next((names for names in ONE_MATRIX if name in names), name)
            peers = groups.setdefault((id(parent), one_matrix, precision), [])
            peers.append(TitanLinear.Config(**values, _precision=precision, _peers=peers))
            setattr(parent, name, peers[-1])
        return model_config
