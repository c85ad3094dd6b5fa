"""The YAML schema of a recipe: megatron-core's ``configs`` and ordered ``matchers``, checked.

A config gives each role (``input``, ``weight``, ``grad``) a format and a rounding for all GEMMs,
and each GEMM (``fprop``, ``dgrad``, ``wgrad``) what differs there: a Hadamard transform, or other
settings of a role; ``fprop: null`` leaves a GEMM in high precision.
"""

import re
from contextlib import suppress
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import Hadamard, Quantizer, Rounding, format_by_name
from megatron_lowbit.recipes.precision import GEMM_ROLES, GemmPrecision, LinearPrecision
from megatron_lowbit.recipes.recipe import Recipe
from megatron_lowbit.recipes.rules import BlockRule, GlobRule, RegexRule, Rule


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def _known_format(name: Any) -> str | None:
    return None if name is None else format_by_name(str(name)).name


FormatName = Annotated[str | None, BeforeValidator(_known_format)]


class OperandSpec(_Strict):
    """One role: a format's name (null: high precision) and how its elements are rounded."""

    format: FormatName = None
    rounding: Literal["nearest", "stochastic"] = "nearest"


class HadamardSpec(_Strict):
    """The transform of a GEMM's operands; the fields of ``numerics.Hadamard``."""

    size: int = 16
    signs: Literal["fixed", "none"] = "fixed"
    output: Literal["bf16", "fp32"] = "bf16"


class GemmSpec(_Strict):
    """What one GEMM does differently from its roles' settings."""

    input: OperandSpec | None = None
    weight: OperandSpec | None = None
    grad: OperandSpec | None = None
    hadamard: HadamardSpec | None = None


class PrecisionSpec(_Strict):
    """One config: a linear layer's precision."""

    input: OperandSpec | None = None
    weight: OperandSpec | None = None
    grad: OperandSpec | None = None
    fprop: GemmSpec | None = GemmSpec()
    dgrad: GemmSpec | None = GemmSpec()
    wgrad: GemmSpec | None = GemmSpec()
    tensor_scale: Literal["shard", "group"] = "shard"

    def build(self) -> LinearPrecision:
        """The precision this spells out."""
        gemms = {gemm: self._gemm(gemm) for gemm in GEMM_ROLES}
        return LinearPrecision(**gemms, tensor_scale=self.tensor_scale)

    def _gemm(self, name: str) -> GemmPrecision:
        gemm: GemmSpec | None = getattr(self, name)
        if gemm is None:
            return GemmPrecision()
        quantizers = (self._quantizer(gemm, role) for role in GEMM_ROLES[name])
        transform = None if gemm.hadamard is None else Hadamard(**gemm.hadamard.model_dump())
        return GemmPrecision(*quantizers, transform)

    def _quantizer(self, gemm: GemmSpec, role: str) -> Quantizer | None:
        fields = {}
        for source in (self, gemm):
            spec = getattr(source, role)
            if spec is not None:
                fields |= spec.model_dump(exclude_unset=True)
            elif role in source.model_fields_set:
                fields = {}
        spec = OperandSpec(**fields)
        if spec.format is None:
            return None
        return Quantizer(format_by_name(spec.format), Rounding(spec.rounding))


def _extent(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    with suppress(ValueError, ZeroDivisionError):
        fraction = Fraction(str(value))
        if 0 < fraction <= 1 and not isinstance(value, bool | int):
            return fraction
    raise ValueError(f"{value!r} is neither a number of blocks nor a fraction such as 2/62 or 0.1")


def _expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


Extent = Annotated[int | Fraction, BeforeValidator(_extent)]


class _MatcherSpec(_Strict):
    config: str
    enabled: bool


class BlocksMatcher(_MatcherSpec):
    """The first and last blocks, as numbers or fractions of the model."""

    type: Literal["blocks"]
    first: Extent | None = None
    last: Extent | None = None


class GlobMatcher(_MatcherSpec):
    """Module paths by shell pattern."""

    type: Literal["glob"]
    pattern: str


class RegexMatcher(_MatcherSpec):
    """Module paths by regular expression."""

    type: Literal["regex"]
    pattern: Annotated[str, AfterValidator(_expression)]


MatcherSpec = Annotated[BlocksMatcher | GlobMatcher | RegexMatcher, Field(discriminator="type")]
_RULES = {"blocks": BlockRule, "glob": GlobRule, "regex": RegexRule}


class RecipeSpec(_Strict):
    """A whole recipe file."""

    name: str
    description: str = ""
    configs: dict[str, PrecisionSpec]
    matchers: dict[str, MatcherSpec]


def parse_recipe(raw: Any, source: str) -> Recipe:
    """Check a recipe's raw YAML data and build it.

    Args:
        raw: what the YAML holds.
        source: the file's name, for messages.

    Raises:
        UserError: the first thing wrong, by its key, and what would be right.
    """
    try:
        spec = RecipeSpec.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{source}: {_first_error(error)}") from None
    configs = {}
    for name, config in spec.configs.items():
        try:
            configs[name] = config.build()
        except ValueError as error:
            raise UserError(f"{source}: configs.{name}: {error}") from None
    rules = tuple(_rule(source, name, m, configs) for name, m in spec.matchers.items() if m.enabled)
    return Recipe(spec.name, spec.description, configs, rules)


def _rule(source: str, name: str, matcher: Any, configs: dict[str, LinearPrecision]) -> Rule:
    if matcher.config not in configs:
        raise UserError(
            f"{source}: matchers.{name}.config: no config {matcher.config!r}; "
            f"use one of {', '.join(configs)}"
        )
    fields = {key: value for key, value in matcher if key not in ("type", "enabled")}
    return _RULES[matcher.type](name=name, **fields)


_MODELS_BY_FIELD = {
    "input": OperandSpec,
    "weight": OperandSpec,
    "grad": OperandSpec,
    "fprop": GemmSpec,
    "dgrad": GemmSpec,
    "wgrad": GemmSpec,
    "hadamard": HadamardSpec,
    "blocks": BlocksMatcher,
    "glob": GlobMatcher,
    "regex": RegexMatcher,
}


def _first_error(error: ValidationError) -> str:
    """``key: what is wrong`` of the first error; for an unknown key, the keys there are."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    tag = path.pop(2) if path[:1] == ["matchers"] and len(path) > 3 else None
    if first["type"] == "union_tag_not_found":
        return f"{'.'.join(path)}.type: missing; use one of {', '.join(_RULES)}"
    if first["type"] != "extra_forbidden":
        message = first["msg"].removeprefix("Value error, ")
        return f"{'.'.join(path) or 'the file'}: {message[0].lower() + message[1:]}"
    parent = tag or (path[-2] if len(path) > 1 else "")
    model = _MODELS_BY_FIELD.get(parent, PrecisionSpec if path[0] == "configs" else RecipeSpec)
    return f"{'.'.join(path)}: no such key; use one of {', '.join(model.model_fields)}"
