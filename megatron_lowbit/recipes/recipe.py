"""Recipe: named precisions and the ordered rules that give each linear layer one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Literal

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes.precision import HIGH_PRECISION, LinearPrecision
from megatron_lowbit.recipes.rules import BlockRule, Layer, Rule


@dataclass(frozen=True)
class Progress:
    """How far a run is: finished iterations, consumed tokens, finished share of the iterations."""

    iteration: int = 0
    tokens: int = 0
    fraction: float = 0.0


Unit = Literal["iteration", "tokens", "fraction"]
"""By what a switch is placed: the fields of :class:`Progress`."""


@dataclass(frozen=True)
class Switch:
    """A change of precision during a run ("Pretraining LLMs with NVFP4", appendix D).

    Once ``unit`` of the progress reaches ``at``, ``recipe`` takes over ``all`` GEMMs, or those of
    the ``forward`` (fprop) or ``backward`` (dgrad, wgrad) pass.
    """

    name: str
    unit: Unit
    at: float
    part: Literal["all", "forward", "backward"]
    recipe: "Recipe"

    def reached(self, progress: Progress) -> bool:
        """Whether it has taken over."""
        return bool(getattr(progress, self.unit) >= self.at)

    def __str__(self) -> str:
        return f"{self.name}: from {self.unit} {self.at:g} on, {self.part} by {self.recipe.name}"


@dataclass(frozen=True)
class Recipe:
    """How a model's linear layers compute. Data only: any state is passed in, never held.

    ``backward`` is another recipe that gives dgrad and wgrad, where there is one. ``switches``
    apply in order.
    """

    name: str
    description: str
    configs: Mapping[str, LinearPrecision]
    rules: tuple[Rule, ...]
    switches: tuple[Switch, ...] = ()
    backward: "Recipe | None" = None

    def rule_for(self, layer: Layer) -> Rule | None:
        """The first of the recipe's own rules that matches; None leaves it in high precision."""
        return next((rule for rule in self.rules if rule.matches(layer)), None)

    def rule_names(self, layer: Layer) -> str:
        """Which rules decided, in a few letters."""
        rule = self.rule_for(layer)
        own = "-" if rule is None else rule.name
        return own if self.backward is None else f"{own} / {self.backward.rule_names(layer)}"

    def precision_for(self, layer: Layer) -> LinearPrecision:
        """The layer's precision."""
        rule = self.rule_for(layer)
        precision = HIGH_PRECISION if rule is None else self.configs[rule.config]
        if self.backward is None:
            return precision
        other = self.backward.precision_for(layer)
        return replace(precision, dgrad=other.dgrad, wgrad=other.wgrad)

    def at(self, progress: Progress) -> "Recipe":
        """The recipe in force at some point of a run, without switches."""
        current = replace(self, switches=())
        for switch in self.switches:
            if switch.reached(progress):
                forward = current if switch.part == "backward" else switch.recipe
                backward = current if switch.part == "forward" else switch.recipe
                current = combine(forward, backward)
        return current

    def phases(self) -> list[tuple[list[Switch], "Recipe"]]:
        """The switches that a run may have behind it, and the recipe in force then; start first.

        Whatever the run's length and batch size, so those of different units in any order.
        """
        points: list[list[Any]] = [
            sorted({0, *(switch.at for switch in self.switches if switch.unit == unit.name)})
            for unit in fields(Progress)
        ]
        found = []
        for point in product(*points):
            progress = Progress(*point)
            behind = [switch for switch in self.switches if switch.reached(progress)]
            found.append((behind, self.at(progress)))
        return found

    def check_rules(self, layers: Sequence[Layer]) -> None:
        """Raise a UserError for a rule that none of the model's linear layers matches.

        A rule whose layers all fall to earlier rules is in order: that is what order is for.
        """
        for rule in self.rules:
            outside = []
            if isinstance(rule, BlockRule) and layers:
                outside = rule.outside(layers[0].num_blocks)
            if outside:
                raise UserError(
                    f"recipe {self.name}: matcher {rule.name} names block {outside[0]}, but the "
                    f"model's blocks are 0 to {layers[0].num_blocks - 1}"
                )
            if not any(rule.matches(layer) for layer in layers):
                example = f"; a path looks like {layers[0].path}" if layers else ""
                raise UserError(
                    f"recipe {self.name}: matcher {rule.name} matches none of the model's "
                    f"{len(layers)} linear layers{example}"
                )
        for other in [self.backward, *(switch.recipe for switch in self.switches)]:
            if other is not None:
                other.check_rules(layers)


def combine(forward: Recipe, backward: Recipe) -> Recipe:
    """A recipe whose fprop is ``forward``'s, and whose dgrad and wgrad are ``backward``'s.

    Raises:
        UserError: one of two different recipes has switches: which of the two would they change?
            Or the backward one takes operands from its own fprop.
    """
    if forward == backward:
        return forward
    of_fprop = (p for c in backward.configs.values() for p in c.gemms.values() if p.rhs_of_fprop)
    if any(of_fprop):
        raise UserError(
            f"recipe {backward.name} has an operand with axis fprop, which takes the values of its "
            "own fprop: it cannot be combined with the fprop of another"
        )
    for recipe in (forward, backward):
        if recipe.switches:
            raise UserError(
                f"recipe {recipe.name} has switches and cannot be combined with another: write "
                "one recipe file, whose fprop, dgrad and wgrad say what each of them does"
            )
    sides = (forward.name.partition("+")[0], backward.name.rpartition("+")[2])
    name = sides[0] if sides[0] == sides[1] else "+".join(sides)
    # Of a recipe that is combined itself, only what decides dgrad and wgrad.
    return replace(forward, name=name, backward=backward.backward or backward)
