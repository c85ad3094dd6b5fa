"""A recipe: named precisions, and the ordered matchers that give each linear layer one of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product, starmap
from typing import Any, Literal

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.numerics import Rounding
from megatron_lowbit.numerics.oscillation import OscillationReset
from megatron_lowbit.numerics.precision import HIGH_PRECISION, LinearPrecision
from megatron_lowbit.recipes.matchers import OUTPUT_LAYER, BlocksMatcher, Layer, Matcher

NORMALIZED = ("self_attention.linear_qkv", "mlp.linear_fc1")
"""Ends of the paths of layers that MXNorm comes before."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run: finished iterations, consumed tokens, finished share of the iterations."""

    iteration: int = 0
    tokens: int = 0
    fraction: float = 0.0


Unit = Literal["iteration", "tokens", "fraction"]
"""A measure that a switch is placed by: a field of :class:`Progress`."""


@dataclass(frozen=True)
class Switch:
    """Change of precision during a run ("Pretraining LLMs with NVFP4", appendix D).

    Once ``unit`` of the progress reaches ``at``, ``recipe`` takes over ``all`` GEMMs, or GEMMs of
    the ``forward`` (fprop) or ``backward`` (dgrad, wgrad) pass.
    """

    name: str
    unit: Unit
    at: float
    part: Literal["all", "forward", "backward"]
    recipe: "Recipe"

    def reached(self, progress: Progress) -> bool:
        """Check whether it has taken over."""
        return bool(getattr(progress, self.unit) >= self.at)

    def __str__(self) -> str:
        return f"{self.name}: from {self.unit} {self.at:g} on, {self.part} by {self.recipe.name}"


@dataclass(frozen=True)
class Recipe:
    """Precision of a model's linear layers. Data only: any state is passed in, never held.

    Attributes:
        name: as in messages.
        description: one line.
        configs: precisions by name.
        matchers: by name, in the order in which they are tried.
        switches: changes during a run, which apply in order.
        backward: another recipe, which gives dgrad and wgrad in place of this one.
        oscillation: reset of oscillating weights, in the whole run; None for none.
        output_layer: the output layer's config; None for high precision. Matchers do not decide.
    """

    name: str
    description: str
    configs: Mapping[str, LinearPrecision]
    matchers: Mapping[str, Matcher]
    switches: tuple[Switch, ...] = ()
    backward: "Recipe | None" = None
    oscillation: OscillationReset | None = None
    output_layer: str | None = None

    def __repr__(self) -> str:
        lines = [f"Recipe {self.name}: {self.description}"]
        lines += [f"  config {name}: {precision}" for name, precision in self.configs.items()]
        for name, matcher in self.matchers.items():
            fields = matcher.model_dump(exclude={"config", "enabled"}, exclude_none=True)
            selects = ", ".join(f"{field}={value}" for field, value in fields.items())
            lines.append(f"  matcher {name}: {selects} -> {matcher.config}")
        lines += [f"  {OUTPUT_LAYER} -> {self.output_layer}"] if self.output_layer else []
        lines += [f"  switch {switch}" for switch in self.switches]
        lines += [f"  oscillation: {self.oscillation}"] if self.oscillation else []
        lines += [f"backward: {self.backward!r}"] if self.backward else []
        return "\n".join(lines)

    def matcher_for(self, layer: Layer) -> str | None:
        """Return the name of the first of the recipe's own matchers that matches a layer.

        For an output layer with a config it is the name of the key.
        """
        if layer.is_output:
            return OUTPUT_LAYER if self.output_layer else None
        return next((name for name, m in self.matchers.items() if m.matches(layer)), None)

    def matcher_names(self, layer: Layer) -> str:
        """Return the names of the matchers that decided about a layer; ``-`` for none."""
        name = self.matcher_for(layer) or "-"
        return name if self.backward is None else f"{name} / {self.backward.matcher_names(layer)}"

    def config_for(self, layer: Layer) -> str | None:
        """Return the name of a layer's config; None for one that no matcher matches."""
        if layer.is_output:
            return self.output_layer
        name = self.matcher_for(layer)
        return None if name is None else self.matchers[name].config

    def precision_for(self, layer: Layer) -> LinearPrecision:
        """Return a layer's precision: high precision where no matcher matches it."""
        config = self.config_for(layer)
        precision = HIGH_PRECISION if config is None else self.configs[config]
        if self.backward is None:
            return precision
        other = self.backward.precision_for(layer)
        if not precision.fprop.quantized:
            # What fprop multiplies are the very weight and input.
            other = other.without_requantize()
        return replace(precision, dgrad=other.dgrad, wgrad=other.wgrad)

    def summary(self, layers: Sequence[Layer]) -> str:
        """Describe how many of a model's linear layers are quantized, and why none of them is."""
        quantized = sum(self.precision_for(layer).quantized for layer in layers)
        text = f"recipe {self.name}: {quantized} of {len(layers)} linear layers quantized"
        if quantized or not any(precision.quantized for precision in self.configs.values()):
            return text
        matchers = sorted({self.matcher_names(layer) for layer in layers})
        return f"{text}; their matchers: {', '.join(matchers)}"

    def at(self, progress: Progress) -> "Recipe":
        """Return the recipe in force at some point of a run, without switches."""
        current = replace(self, switches=())
        for switch in self.switches:
            if switch.reached(progress):
                forward = current if switch.part == "backward" else switch.recipe
                backward = current if switch.part == "forward" else switch.recipe
                current = combine(forward, backward)
        return current

    def phases(self) -> list[tuple[list[Switch], "Recipe"]]:
        """Return the recipes that a run may have in force, each with the switches behind it.

        The first is in force at the start. Switches of different units may come in any order, since
        that depends on the run's length and batch size.
        """
        moments: list[list[Any]] = [
            sorted({0, *(switch.at for switch in self.switches if switch.unit == unit.name)})
            for unit in fields(Progress)
        ]
        return [
            ([switch for switch in self.switches if switch.reached(progress)], self.at(progress))
            for progress in starmap(Progress, product(*moments))
        ]

    def precisions(self) -> Iterator[LinearPrecision]:
        """Yield every precision that layers may have in a run, before and after switches."""
        for part in self._parts():
            yield from part.configs.values()

    @property
    def takes_output_layer(self) -> bool:
        """True if the output layer has a config at some time in a run."""
        return any(part.output_layer for part in self._parts())

    def _parts(self) -> Iterator["Recipe"]:
        """Yield the recipes that a run may have in force, and their backward ones."""
        for _, phase in self.phases():
            yield from filter(None, (phase, phase.backward))

    def check_matchers(self, layers: Sequence[Layer]) -> None:
        """Raise UserError unless each matcher matches some linear layer of a model.

        A matcher whose layers all fall to earlier ones is in order: that is what order is for. One
        that names a block that the model does not have is refused, too.
        """
        layers = [layer for layer in layers if not layer.is_output]
        for name, matcher in self.matchers.items():
            if isinstance(matcher, BlocksMatcher) and layers:
                blocks = layers[0].num_blocks
                for number in matcher.numbers or ():
                    require(
                        -blocks <= number < blocks,
                        f"recipe {self.name}: matcher {name} names block {number}, but the "
                        f"model's blocks are 0 to {blocks - 1}",
                    )
            example = f"; a path looks like {layers[0].path}" if layers else ""
            require(
                any(matcher.matches(layer) for layer in layers),
                f"recipe {self.name}: matcher {name} matches none of the model's "
                f"{len(layers)} linear layers{example}",
            )
        for other in filter(None, [self.backward, *(switch.recipe for switch in self.switches)]):
            other.check_matchers(layers)

    def check_switches(self) -> None:
        """Raise ValueError for a switch that later ones override as soon as it starts."""
        for number, switch in enumerate(self.switches, 1):
            later = [
                other
                for other in self.switches[number:]
                if other.at <= (switch.at if other.unit == switch.unit else 0)
            ]
            parts = {other.part for other in later}
            if {"all", switch.part} & parts or parts == {"forward", "backward"}:
                others = " and ".join(map(str, later))
                raise ValueError(
                    f"switches.{switch.name}: without effect, replaced by {others}; remove one"
                )

    def check_oscillation(self) -> None:
        """Raise ValueError unless fprop quantizes weights, as a function of only the weight."""
        if self.oscillation is None:
            return
        for name, precision in self.configs.items():
            fprop = precision.fprop
            if fprop.rhs is None:
                continue
            if fprop.rhs.rounding is not Rounding.NEAREST_EVEN or fprop.hadamard is not None:
                problem = "fprop's weight must be rounded to nearest, without a transform"
                raise ValueError(f"configs.{name}: {problem}")
            if precision.history_length:
                raise ValueError(f"configs.{name}: it does not go with amax_history")
        phases = (phase for _, phase in self.phases())
        if not any(precision.fprop.rhs for phase in phases for precision in phase.configs.values()):
            raise ValueError("without effect, fprop quantizes no weight; remove it")

    def check_mxnorm(self, layers: Sequence[Layer], hidden_size: int | None = None) -> None:
        """Raise UserError unless every precision of the layers after MXNorm has blocks that fit.

        They divide the hidden size, and a layer is quantized at some time in the run. A layer has
        RMSNorm for as long as it is in high precision.
        """
        normalized = [layer for layer in layers if layer.path.endswith(NORMALIZED)]
        active = False
        for switches, current in self.phases():
            when = "".join(f" (switch {switch})" for switch in switches)
            for layer in normalized:
                precision = current.precision_for(layer)
                if precision == HIGH_PRECISION:
                    continue
                active = True
                try:
                    block = norm_block(precision)
                except ValueError as error:
                    raise UserError(
                        f"--normalization MXNorm: {layer.path}{when}: {error}, or a layer whose "
                        "GEMMs are all in high precision"
                    ) from None
                require(
                    hidden_size is None or hidden_size % block == 0,
                    f"--normalization MXNorm: --hidden-size {hidden_size} is not a multiple of "
                    f"{layer.path}'s block of {block}{when}",
                )
        require(
            active or not normalized,
            f"--normalization MXNorm: recipe {self.name} quantizes none of its layers",
        )


def norm_block(precision: LinearPrecision) -> int:
    """Return the block size of fprop's input, whose absmaxes MXNorm uses, or raise ValueError."""
    quantizer = precision.fprop.lhs
    if quantizer is None or quantizer.format.block == 1:
        state = "is not quantized" if quantizer is None else f"is {quantizer.format.name}"
        raise ValueError(
            f"fprop's input {state}: MXNorm needs one quantized in blocks, such as mxfp8-e4m3"
        )
    if precision.wgrad.uses_fprop:
        key = "axis fprop" if precision.wgrad.rhs_of_fprop else "requantize"
        raise ValueError(f"wgrad's input has {key}: MXNorm's is quantized separately, along tokens")
    if precision.fprop.hadamard is not None:
        raise ValueError("fprop has a hadamard: MXNorm needs the absmaxes of the input itself")
    return quantizer.format.block


def combine(forward: Recipe, backward: Recipe) -> Recipe:
    """Combine two recipes: fprop of ``forward``, dgrad and wgrad of ``backward``.

    Raises UserError if one of two different recipes has switches: which of the two would they
    change? And if the backward one takes operands from its own fprop, unless it requantizes them
    and the forward one quantizes nothing.
    """
    if forward == backward:
        return forward
    # A recipe that is combined itself counts with what decides its dgrad and wgrad.
    decides = backward.backward or backward
    quantizes = any(config.fprop.quantized for config in forward.configs.values())
    gemms = [gemm for config in decides.configs.values() for gemm in config.gemms.values()]
    require(
        not any(gemm.rhs_of_fprop or (gemm.requantizes_rhs and quantizes) for gemm in gemms),
        f"recipe {backward.name} has an operand with axis fprop or requantize, which takes the "
        "values of its own fprop: it cannot be combined with the fprop of another",
    )
    require(
        not backward.oscillation,
        f"recipe {backward.name} has an oscillation: that is of weights as fprop quantizes them",
    )
    for recipe in (forward, backward):
        require(
            not recipe.switches,
            f"recipe {recipe.name} has switches and cannot be combined with another: write "
            "one recipe file, whose fprop, dgrad and wgrad say what each of them does",
        )
    sides = (forward.name.partition("+")[0], backward.name.rpartition("+")[2])
    name = sides[0] if sides[0] == sides[1] else "+".join(sides)
    return replace(forward, name=name, backward=decides)
