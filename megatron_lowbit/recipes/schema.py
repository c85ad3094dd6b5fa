"""The YAML of a recipe: megatron-core's ``configs`` and ordered ``matchers``, and ``switches``.

A config gives each role (``input``, ``weight``, ``grad``) a format and a rounding for all GEMMs,
and each GEMM (``fprop``, ``dgrad``, ``wgrad``) what differs there: a Hadamard transform, or other
settings of a role; ``fprop: null`` leaves a GEMM in high precision. ``switches`` name recipes that
take over. ``output_layer`` names the output layer's config, for which there is no matcher.
``formats`` are Python files that define formats.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from operator import getitem
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

from megatron_lowbit.errors import UserError, error_prefix, require
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
from megatron_lowbit.numerics.precision import GemmPrecision, LinearPrecision
from megatron_lowbit.recipes.matchers import Matcher
from megatron_lowbit.recipes.recipe import Recipe, Switch, Unit
from megatron_lowbit.recipes.yaml_reader import (
    Integer,
    Number,
    StrictModel,
    fields_of,
    first_error,
    wrong_key,
)

Path = tuple[str, ...]


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
        fields = self.model_dump(exclude_unset=True)
        if "format" in changes:
            shared = () if other.format is None else operand_keys(other.format)
            fields = {name: value for name, value in fields.items() if name in shared}
        return OperandSpec(**fields | changes)


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
    """Settings of one GEMM that differ from its roles'."""

    hadamard: Annotated[Hadamard, fields_of(Hadamard), BeforeValidator(_signs)] | None = None
    accumulation: AccumulationField | None = None
    folding: bool | None = None
    fallback: Literal["bf16"] | None = None
    hot_channels: Annotated[Number, Field(gt=0, le=1)] | None = None


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

    def effects(self) -> dict[Path, str | None]:
        """Return each field's path, and the reason if it changes nothing, as amax_history of tiles.

        None stands for an effect, and for a field that says what holds without it, as a default.
        """
        given = self.model_dump(exclude_unset=True)
        precision, in_force = self.build(), self._in_force()
        effects: dict[Path, str | None] = {}
        for path in _leaves(given):
            effects[path] = None
            without = deepcopy(given)
            del reduce(getitem, path[:-1], without)[path[-1]]
            try:
                other = PrecisionSpec.model_validate(without)
                if other.build() == precision and other._in_force() != in_force:
                    effects[path] = _READERS.get(path[-1], "no GEMM of the config reads it")
            except ValueError:
                continue  # other fields need it
        return effects

    def _in_force(self) -> list[Any]:
        """Return the settings of all GEMMs, whether their formats take notice or not."""
        settings: list[Any] = [self.tensor_scale, self.amax_history]
        for name, roles in GEMM_ROLES.items():
            gemm: GemmSpec | None = getattr(self, name)
            if gemm is not None:
                operands = [self._operand(gemm, role) for role in roles]
                settings.append((name, self._shared(gemm)))
                settings += [
                    (operand.build(), *(getattr(operand, key) for key in OperandSpec.model_fields))
                    for operand in operands
                ]
        return settings

    def _shared(self, gemm: GemmSpec) -> dict[str, Any]:
        """Return the settings that a GEMM has from its config, unless it has its own."""
        folding = self.folding if gemm.folding is None else gemm.folding
        return {"folding": folding, "hot_channels": gemm.hot_channels} | {
            key: getattr(gemm if key in gemm.model_fields_set else self, key)
            for key in ("accumulation", "fallback")
        }

    def _operand(self, gemm: GemmSpec, role: str) -> OperandSpec:
        """Return a role's settings in a GEMM, where null stands for high precision."""
        if role in gemm.model_fields_set and getattr(gemm, role) is None:
            return OperandSpec()
        return (getattr(self, role) or OperandSpec()).changed_by(getattr(gemm, role))

    def _quantizer(self, name: Gemm, gemm: GemmSpec, role: str) -> Quantizer | None:
        try:
            return self._operand(gemm, role).build()
        except ValueError as error:
            option, change = str(error).partition(":")[0], getattr(gemm, role)
            of_gemm = change is not None and option in change.model_fields_set
            raise ValueError(f"{name}.{role}.{error}" if of_gemm else f"{role}.{error}") from None

    def _gemm(self, name: Gemm) -> GemmPrecision:
        gemm: GemmSpec | None = getattr(self, name)
        if gemm is None:
            return GemmPrecision()
        roles = GEMM_ROLES[name]
        for role in _RoleSettings.model_fields:
            if role in gemm.model_fields_set and role not in roles:
                good = ", ".join(roles)
                raise ValueError(f"{name}.{role}: no operand of {name}; use one of {good}")
        if name != "fprop" and gemm.hot_channels is not None:
            raise ValueError(f"{name}.hot_channels: only fprop takes it")
        left, right = (self._operand(gemm, role) for role in roles)
        if name != "fprop" and (left.axis == "fprop" or left.requantize):
            key = "requantize" if left.requantize else "axis"
            raise ValueError(f"grad.{key}: fprop has no gradient; only input and weight take it")
        if right.axis == "dgrad":
            raise ValueError(f"{roles[1]}.axis: dgrad is for grad; use own or fprop")
        lhs, rhs = (self._quantizer(name, gemm, role) for role in roles)
        formats = [side.format for side in (lhs, rhs) if side]
        rhs_of_fprop = name != "fprop" and rhs is not None and right.axis == "fprop"
        tensor_scaled = any(format.tensor_scaled for format in formats)
        makes_scale = any(
            side and side.format.tensor_scaled for side in (lhs, None if rhs_of_fprop else rhs)
        )
        shared = self._shared(gemm)
        with error_prefix(f"{name}: "):
            return GemmPrecision(
                lhs,
                rhs,
                gemm.hadamard,
                tensor_scale=self.tensor_scale if tensor_scaled else "shard",
                delayed=self.amax_history if makes_scale else None,
                accumulation=shared["accumulation"],
                folding=shared["folding"] or not any(format.folds for format in formats),
                rhs_of_fprop=rhs_of_fprop,
                requantizes_rhs=name != "fprop" and rhs is not None and right.requantize,
                lhs_of_dgrad=name == "wgrad" and lhs is not None and left.axis == "dgrad",
                fallback=shared["fallback"] if formats else None,
                hot_channels=gemm.hot_channels,
            )


_READERS = {
    "amax_history": "no operand has a tensor scale",
    "tensor_scale": "no operand has a tensor scale",
    "folding": "no operand has scales that fold",
}
"""Reasons why fields have no effect that only some formats read."""


def _leaves(settings: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    """Yield the paths of a config's fields: one by one in roles and GEMMs, others as a whole."""
    for key, value in settings.items():
        is_section = key in GEMM_ROLES or key in _RoleSettings.model_fields
        if is_section and isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


class SwitchSpec(StrictModel):
    """A change to another recipe, by name or file, at one of three measures of progress."""

    iteration: Annotated[Integer, Field(ge=0)] | None = None
    tokens: Annotated[Number, Field(ge=0, allow_inf_nan=False)] | None = None
    fraction: Annotated[Number, Field(ge=0, lt=1)] | None = None
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
    output_layer: str | None = None

    def effects(self) -> dict[Path, str | None]:
        """Return the :meth:`PrecisionSpec.effects` of all configs."""
        return {
            ("configs", name, *path): why
            for name, config in self.configs.items()
            for path, why in config.effects().items()
        }

    def unused_configs(self) -> dict[str, str]:
        """Return the name of each config that no layer can have, with the reason."""
        matchers = self.matchers.values()
        used = {self.output_layer, *(matcher.config for matcher in matchers if matcher.enabled)}
        listed = ", ".join(name for name in self.configs if name in used)
        return {
            name: f"no matcher has config {name!r}, but {listed or 'none'}"
            for name in self.configs
            if name not in used
        }

    def build(self, source: str, load: Callable[[str], Recipe] | None) -> Recipe:
        """Build the recipe; raise UserError for the first thing wrong, by its key.

        ``source`` is the file's name, for messages; ``load`` gives the recipe that a switch names,
        None where no switch is allowed.
        """
        configs = {}
        for name, config in self.configs.items():
            with error_prefix(f"{source}: configs.{name}."):
                configs[name] = config.build()
        matchers = {name: matcher for name, matcher in self.matchers.items() if matcher.enabled}
        advice = f"use one of {', '.join(configs)}"
        for name, matcher in matchers.items():
            require(
                matcher.config in configs,
                f"{source}: matchers.{name}.config: no config {matcher.config!r}; {advice}",
            )
        require(
            self.output_layer in (None, *configs),
            f"{source}: output_layer: no config {self.output_layer!r}; {advice}",
        )
        switches = []
        for name, switch in self.switches.items():
            if not switch.enabled:
                continue
            if load is None:
                raise UserError(f"recipe {self.name} has switches of its own; name one without")
            with error_prefix(f"{source}: switches.{name}.to: "):
                target = load(switch.to)
                if target.oscillation:
                    raise ValueError(f"recipe {target.name} has an oscillation; name one without")
            switches.append(Switch(name, *switch.point, switch.part, target))
        recipe = Recipe(
            self.name, self.description, configs, matchers, tuple(switches),
            oscillation=self.oscillation, output_layer=self.output_layer,
        )  # fmt: skip
        with error_prefix(f"{source}: "):
            recipe.check_switches()
        with error_prefix(f"{source}: oscillation: "):
            recipe.check_oscillation()
        return recipe


def parse_recipe(raw: Any, source: str) -> RecipeSpec:
    """Check the fields of a recipe's raw YAML data; raise UserError that names the first wrong."""
    try:
        return RecipeSpec.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{source}: {first_error(error)}") from None
