"""The YAML of a recipe: megatron-core's ``configs`` and ordered ``matchers``, and ``switches``.

A config gives each role (``input``, ``weight``, ``grad``) a format and a rounding for all GEMMs,
and each GEMM (``fprop``, ``dgrad``, ``wgrad``) what differs there: a Hadamard transform, or other
settings of a role; ``fprop: null`` leaves a GEMM in high precision. ``switches`` say when another
recipe takes over. ``formats`` are Python files that define formats.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.numerics import (
    FORMATS,
    Accumulation,
    DelayedScaling,
    Hadamard,
    Quantizer,
    Rounding,
    format_by_name,
)
from megatron_lowbit.numerics.extra_formats import load_format_file
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.numerics.oscillation import OscillationReset
from megatron_lowbit.recipes.matchers import Matcher
from megatron_lowbit.recipes.precision import GemmPrecision, LinearPrecision
from megatron_lowbit.recipes.recipe import Recipe, Switch, Unit
from megatron_lowbit.recipes.strict_model import (
    StrictModel,
    error_prefix,
    fields_of,
    first_error,
    wrong_key,
)


def _known_format(name: Any) -> str | None:
    return None if name is None else format_by_name(str(name)).name


def operand_keys(format: str | None) -> list[str]:
    """Return the keys that a role in this format (None: high precision) takes."""
    options = FORMATS[format].OPTIONS if format in FORMATS else {}
    return [*OperandSpec.model_fields, *options]


class OperandSpec(BaseModel):
    """Settings of one role: a format's name (null: high precision) and its elements' rounding.

    ``axis`` says whose contracted axis the blocks run along: the ``own`` GEMM's, or ``fprop``'s in
    dgrad and wgrad, too, which then take the values that fprop quantized. ``requantize`` quantizes
    those values for dgrad and wgrad, along their own axes. ``dgrad`` as a gradient's axis does for
    wgrad what ``fprop`` does for a weight. ``split_mean`` quantizes an input or a gradient as the
    residual from its mean over tokens. Any other key is an option of the format; null stands for
    the option's default.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    format: Annotated[str | None, BeforeValidator(_known_format)] = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    axis: Literal["own", "fprop", "dgrad"] = "own"
    requantize: StrictBool = False
    split_mean: StrictBool = False

    def build(self) -> Quantizer | None:
        """Build the quantizer; a ValueError names a key or value that the format does not take."""
        options = self.model_extra or {}
        given = {name: value for name, value in options.items() if value is not None}
        keys = operand_keys(self.format)
        if other := options.keys() - set(keys):
            # An option that no format has is a typo even if its value is null.
            known = {name for format in FORMATS for name in operand_keys(format)}
            if wrong := sorted((given.keys() & other) | (other - known)):
                raise ValueError(
                    f"{wrong[0]}: no such key with format {self.format}; "
                    f"use one of {', '.join(keys)}"
                )
        if self.format is None:
            return None
        format = format_by_name(self.format, **given)
        return Quantizer(format, Rounding(self.rounding), self.split_mean)

    def changed_by(self, other: "OperandSpec | None") -> "OperandSpec":
        """Copy with the fields that ``other`` sets, without options that a new format lacks."""
        if other is None:
            return self
        changes = other.model_dump(exclude_unset=True)
        own = self.model_dump(exclude_unset=True)
        if "format" in changes:
            kept = () if other.format is None else operand_keys(other.format)
            own = {name: v for name, v in own.items() if name in kept}
        return OperandSpec(**own | changes)

    def settings(self) -> tuple[Any, ...]:
        """Return what the fields say, with the defaults of the format's options."""
        return self.build(), self.rounding, self.axis, self.requantize, self.split_mean


def _signs(data: Any) -> Any:
    """Take null for ``none``: on a command line they are the same."""
    if not isinstance(data, dict) or "signs" not in data:
        return data
    signs = "none" if data["signs"] is None else data["signs"]
    if signs not in ("fixed", "fresh", "none") and type(signs) is not int:
        raise wrong_key("signs", f"{signs!r} is not 'fixed', 'fresh', 'none' or an integer seed")
    return {**data, "signs": signs}


AccumulationField = Annotated[Accumulation, fields_of(Accumulation)]


class _RoleSettings(StrictModel):
    """Settings of the roles, in a config or in one of its GEMMs."""

    input: OperandSpec | None = None
    weight: OperandSpec | None = None
    grad: OperandSpec | None = None


class GemmSpec(_RoleSettings):
    """Settings of one GEMM that differ from those of its roles."""

    hadamard: Annotated[Hadamard, fields_of(Hadamard), BeforeValidator(_signs)] | None = None
    accumulation: AccumulationField | None = None
    folding: bool | None = None
    fallback: Literal["bf16"] | None = None


class PrecisionSpec(_RoleSettings):
    """Settings of one config: a linear layer's precision."""

    fprop: GemmSpec | None = GemmSpec()
    dgrad: GemmSpec | None = GemmSpec()
    wgrad: GemmSpec | None = GemmSpec()
    tensor_scale: Literal["shard", "group"] = "shard"
    amax_history: Annotated[DelayedScaling, fields_of(DelayedScaling)] | None = None
    accumulation: AccumulationField | None = None
    folding: bool = True
    fallback: Literal["bf16"] | None = None

    def build(self) -> LinearPrecision:
        """Build the precision; a ValueError starts with the key that is wrong."""
        return LinearPrecision(**{gemm: self._gemm(gemm) for gemm in GEMM_ROLES})

    def idle_fields(self) -> dict[tuple[str, ...], str]:
        """Return the paths of fields that change nothing, such as amax_history of tiles, and why.

        A field that says what holds without it, as a default, is none of them.
        """
        given, idle = self.model_dump(exclude_unset=True), {}
        computed, in_force = _computed(self.build()), self._in_force()
        for path in leaves(given):
            try:
                other = PrecisionSpec.model_validate(_without(given, path))
                if _computed(other.build()) == computed and other._in_force() != in_force:
                    idle[path] = _READERS.get(path[-1], "no GEMM of the config reads it")
            except ValueError:
                continue  # other fields need it
        return idle

    def _in_force(self) -> dict[str, Any]:
        """Return what the fields say about each GEMM, whether its formats take notice or not."""
        found: dict[str, Any] = {}
        for name, roles in GEMM_ROLES.items():
            gemm: GemmSpec | None = getattr(self, name)
            if gemm is None:
                continue
            for role in roles:
                null = role in gemm.model_fields_set and getattr(gemm, role) is None
                found[f"{name}.{role}"] = null or self._operand(gemm, role).settings()
            for key in ("accumulation", "fallback"):
                found[f"{name}.{key}"] = getattr(
                    gemm if key in gemm.model_fields_set else self, key
                )
            found[f"{name}.folding"] = self.folding if gemm.folding is None else gemm.folding
        return found | {"scales": (self.tensor_scale, self.amax_history)}

    def _gemm(self, name: Gemm) -> GemmPrecision:
        gemm: GemmSpec | None = getattr(self, name)
        if gemm is None:
            return GemmPrecision()
        roles = GEMM_ROLES[name]
        for role in _RoleSettings.model_fields:
            if role in gemm.model_fields_set and role not in roles:
                good = ", ".join(roles)
                raise ValueError(f"{name}.{role}: no operand of {name}; use one of {good}")
        left, right = (self._operand(gemm, role) for role in roles)
        if name != "fprop" and (left.axis == "fprop" or left.requantize):
            key = "requantize" if left.requantize else "axis"
            raise ValueError(f"grad.{key}: fprop has no gradient; only input and weight take it")
        if right.axis == "dgrad":
            raise ValueError(f"{roles[1]}.axis: dgrad is for grad; use own or fprop")
        lhs, rhs = (self._quantizer(name, gemm, role) for role in roles)
        own = {key: getattr(gemm, key) for key in gemm.model_fields_set}
        rhs_of_fprop = name != "fprop" and rhs is not None and right.axis == "fprop"
        scaled_here = (lhs, None if rhs_of_fprop else rhs)
        tensor_scaled = any(side and side.format.tensor_scaled for side in scaled_here)
        with error_prefix(f"{name}: "):
            precision = GemmPrecision(
                lhs,
                rhs,
                gemm.hadamard,
                tensor_scale=self.tensor_scale,
                delayed=self.amax_history if tensor_scaled else None,
                accumulation=own.get("accumulation", self.accumulation),
                folding=self.folding if gemm.folding is None else gemm.folding,
                rhs_of_fprop=rhs_of_fprop,
                requantizes_rhs=name != "fprop" and rhs is not None and right.requantize,
                lhs_of_dgrad=name == "wgrad" and lhs is not None and left.axis == "dgrad",
                fallback=own.get("fallback", self.fallback) if lhs or rhs else None,
            )
        return precision

    def _quantizer(self, name: Gemm, gemm: GemmSpec, role: str) -> Quantizer | None:
        if role in gemm.model_fields_set and getattr(gemm, role) is None:
            return None
        try:
            return self._operand(gemm, role).build()
        except ValueError as error:
            option, change = str(error).partition(":")[0], getattr(gemm, role)
            of_gemm = change is not None and option in change.model_fields_set
            raise ValueError(f"{name}.{role}.{error}" if of_gemm else f"{role}.{error}") from None

    def _operand(self, gemm: GemmSpec, role: str) -> OperandSpec:
        """Return a role's settings in a GEMM."""
        return (getattr(self, role) or OperandSpec()).changed_by(getattr(gemm, role))


_READERS = {
    "amax_history": "no operand has a tensor scale",
    "tensor_scale": "no operand has a tensor scale",
    "folding": "no operand has scales that fold",
}
"""Reasons why fields have no effect that only some formats read."""


def _computed(precision: LinearPrecision) -> list[GemmPrecision]:
    """Return the GEMMs with the defaults of fields that their formats do not read."""
    return [
        replace(
            gemm,
            tensor_scale=gemm.tensor_scale if _any(gemm, "tensor_scaled") else "shard",
            folding=gemm.folding or not _any(gemm, "folds"),
        )
        for gemm in precision.gemms.values()
    ]


def _any(gemm: GemmPrecision, attribute: str) -> bool:
    return any(side is not None and getattr(side.format, attribute) for side in gemm.sides)


def leaves(settings: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a config's fields: those of roles and of GEMMs each, others as a whole."""
    for key, value in settings.items():
        is_section = key in GEMM_ROLES or key in _RoleSettings.model_fields
        if is_section and isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def _without(settings: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Copy a config without the field at a path."""
    key, *rest = path
    changed = {name: value for name, value in settings.items() if rest or name != key}
    if rest:
        changed[key] = _without(settings[key], tuple(rest))
    return changed


class SwitchSpec(StrictModel):
    """A change to another recipe, by name or file, at one of three measures of progress."""

    iteration: Annotated[int, Field(ge=0)] | None = None
    tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    to: str
    part: Literal["all", "forward", "backward"] = "all"
    enabled: bool = True

    @property
    def point(self) -> tuple[Unit, float]:
        """Unit and value of the measure that is given."""
        given = ((unit, getattr(self, unit)) for unit in get_args(Unit))
        return next((unit, value) for unit, value in given if value is not None)

    @model_validator(mode="after")
    def _has_one_point(self) -> "SwitchSpec":
        if [self.iteration, self.tokens, self.fraction].count(None) != 2:
            raise ValueError("give one of iteration, tokens, fraction")
        return self


class RecipeSpec(StrictModel):
    """A whole recipe file."""

    # The first field is validated first: it registers the formats that configs name.
    formats: Annotated[
        list[Annotated[str, AfterValidator(load_format_file)]],
        Field(max_length=16, default_factory=list),
    ]
    name: str
    description: str = ""
    configs: dict[str, PrecisionSpec]
    # A run asks every matcher about every layer, after every combination of switches.
    matchers: Annotated[dict[str, Matcher], Field(max_length=64)]
    switches: Annotated[dict[str, SwitchSpec], Field(max_length=16, default_factory=dict)]
    oscillation: Annotated[OscillationReset, fields_of(OscillationReset)] | None = None


def parse_recipe(raw: Any, source: str, load: Callable[[str], Recipe] | None) -> Recipe:
    """Check a recipe's raw YAML data and build it.

    Args:
        raw: what the YAML holds.
        source: the file's name, for messages.
        load: gives the recipe that a switch names; None where no switch is allowed.

    Raises:
        UserError: the first thing wrong, by its key, and what would be right.
    """
    try:
        spec = RecipeSpec.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{source}: {first_error(error)}") from None
    configs = {}
    for name, config in spec.configs.items():
        with error_prefix(f"{source}: configs.{name}."):
            configs[name] = config.build()
    matchers = {name: matcher for name, matcher in spec.matchers.items() if matcher.enabled}
    for name, matcher in matchers.items():
        require(
            matcher.config in configs,
            f"{source}: matchers.{name}.config: no config {matcher.config!r}; "
            f"use one of {', '.join(configs)}",
        )
    switches = []
    for name, switch in spec.switches.items():
        if switch.enabled:
            if load is None:
                raise UserError(f"recipe {spec.name} has switches of its own; name one without")
            with error_prefix(f"{source}: switches.{name}.to: "):
                target = load(switch.to)
                if target.oscillation:
                    raise ValueError(f"recipe {target.name} has an oscillation; name one without")
            switches.append(Switch(name, *switch.point, switch.part, target))
    if spec.oscillation is not None:
        for name, precision in configs.items():
            with error_prefix(f"{source}: oscillation: configs.{name}: "):
                _check_oscillates(precision)
    return Recipe(
        spec.name,
        spec.description,
        configs,
        matchers,
        tuple(switches),
        oscillation=spec.oscillation,
    )


def idle_fields(raw: Any) -> dict[tuple[str, ...], str]:
    """Return the paths of fields of a valid recipe's configs that change nothing, and why."""
    configs = RecipeSpec.model_validate(raw).configs
    return {
        ("configs", name, *path): why
        for name, config in configs.items()
        for path, why in config.idle_fields().items()
    }


def _check_oscillates(precision: LinearPrecision) -> None:
    """Raise ValueError unless fprop's quantized weight is a function of the weight alone."""
    fprop = precision.fprop
    if fprop.rhs is None:
        return
    if fprop.rhs.rounding is not Rounding.NEAREST_EVEN or fprop.hadamard is not None:
        raise ValueError("fprop's weight must be rounded to nearest, without a transform")
    if precision.history_length:
        raise ValueError("it does not go with amax_history")
