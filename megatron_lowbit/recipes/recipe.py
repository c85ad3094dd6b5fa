"""Recipe: named precisions and the ordered rules that give each linear layer one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes.precision import HIGH_PRECISION, LinearPrecision
from megatron_lowbit.recipes.rules import Layer, Rule


@dataclass(frozen=True)
class Recipe:
    """How a model's linear layers compute. Data only: any state is passed in, never held."""

    name: str
    description: str
    configs: Mapping[str, LinearPrecision]
    rules: tuple[Rule, ...]

    def rule_for(self, layer: Layer) -> Rule | None:
        """The first rule that matches; None leaves the layer in high precision."""
        return next((rule for rule in self.rules if rule.matches(layer)), None)

    def precision_for(self, layer: Layer) -> LinearPrecision:
        """The layer's precision."""
        rule = self.rule_for(layer)
        return HIGH_PRECISION if rule is None else self.configs[rule.config]

    def check_rules(self, layers: Sequence[Layer]) -> None:
        """Raise a UserError for a rule that none of the model's linear layers matches.

        A rule whose layers all fall to earlier rules is in order: that is what order is for.
        """
        for rule in self.rules:
            if not any(rule.matches(layer) for layer in layers):
                example = f"; a path looks like {layers[0].path}" if layers else ""
                raise UserError(
                    f"recipe {self.name}: matcher {rule.name} matches none of the model's "
                    f"{len(layers)} linear layers{example}"
                )
