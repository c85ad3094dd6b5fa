"""A recipe as megatron-core's ``config.quant_recipe``, with block numbers that are global."""

import re
from dataclasses import dataclass
from typing import Any

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.quantization.quant_config import (
    MatchContext,
    QuantizationConfig,
    RecipeConfig,
)

from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.recipes import Layer, LinearPrecision, Recipe

_LAYER = re.compile(r"layers\.(\d+)")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+")


@dataclass(frozen=True)
class LayerPlan:
    """What one linear module needs to know: who it is, its precision, where it computes.

    ``norm`` is how it normalizes its input, if that is its task.
    """

    layer: Layer
    precision: LinearPrecision
    engine: Engine
    accumulate_main_grad: bool
    norm: MXNorm | None = None


class QuantRecipe(RecipeConfig):
    """The recipe for one pipeline stage (and virtual stage) of a model.

    megatron-core names modules by the stage's own layer numbers and the rank's own expert numbers.
    ``layer_offset`` is the number of blocks before the stage, ``first_expert`` the global number of
    the rank's first expert, so that rules see global ones.
    """

    def __init__(
        self,
        recipe: Recipe,
        num_blocks: int,
        layer_offset: int,
        engine: Engine,
        accumulate_main_grad: bool,
        first_expert: int = 0,
        norm: MXNorm | None = None,
    ) -> None:
        super().__init__(matchers=[], config_dict={})
        self.recipe = recipe
        self.num_blocks = num_blocks
        self.layer_offset = layer_offset
        self.engine = engine
        self.accumulate_main_grad = accumulate_main_grad
        self.first_expert = first_expert
        self.norm = norm

    def plan_of(self, module_path: str) -> LayerPlan | None:
        """The plan of the module at a path of this stage; None for a module outside the blocks."""
        number = _LAYER.search(module_path)
        if number is None:
            return None
        block = int(number[1]) + self.layer_offset
        path = _LAYER.sub(f"layers.{block}", module_path, count=1)
        path = _EXPERT.sub(lambda found: str(int(found[0]) + self.first_expert), path)
        layer = Layer(path, block, self.num_blocks)
        precision = self.recipe.precision_for(layer)
        return LayerPlan(layer, precision, self.engine, self.accumulate_main_grad, self.norm)

    def match(self, operator_context: MatchContext) -> QuantizationConfig | None:
        """What megatron-core asks for: the module's configuration, or None."""
        plan = self.plan_of(operator_context.module_path)
        if plan is None:
            return None
        where = MatchContext(plan.layer.path, plan.layer.block)
        return QuantizationConfig(self.content(plan), where, self.recipe.name)

    def content(self, plan: LayerPlan) -> dict[str, Any]:
        """A configuration's content: local layers take the plan itself."""
        return {"plan": plan}
