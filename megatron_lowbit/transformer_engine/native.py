"""Choice of Transformer Engine's own recipe for a precision, and its settings.

Data only: nothing here needs Transformer Engine. Names and meanings are those of version 2.20.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.routes import FOLDED, route
from megatron_lowbit.numerics import Hadamard, Quantizer, Rounding
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor, FP8Tile
from megatron_lowbit.numerics.block_formats.mx import BLOCK, MX
from megatron_lowbit.numerics.block_formats.nvfp4 import NVFP4
from megatron_lowbit.numerics.formats import E4M3, E5M2
from megatron_lowbit.recipes import LinearPrecision

_ROLES = {"input": "inp", "weight": "weight", "grad": "grad"}
"""Roles, and how Transformer Engine's recipes abbreviate them."""


@dataclass(frozen=True)
class Native:
    """A recipe of Transformer Engine: its class, and all arguments that a precision decides.

    Also those that are the defaults, for environment variables may have changed those.
    ``power_2_scale`` goes into the quantization parameters of all three roles, where not None.
    ``megatron`` are the fields of megatron-core's TEQuantizationRecipe that say the same, or None.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    power_2_scale: bool | None = None
    megatron: dict[str, Any] | None = None


class _Kind(NamedTuple):
    """A recipe class, the compute capability it needs, and how its settings are read off."""

    name: str
    capability: tuple[int, int]
    holds: Callable[[BlockFormat], bool]
    settings: Callable[["_Reader"], Native]


def native_recipe(precision: LinearPrecision, capability: tuple[int, int]) -> Native | None:
    """Return the recipe for a linear layer's precision on a GPU of a compute capability.

    None where Transformer Engine has no kernels: another format, several formats in one layer, a
    GEMM in high precision, or a GPU that lacks the format. None, too, on GPUs of compute capability
    9.x where folding serves one of the GEMMs: this project's is then the faster.

    Raises:
        UserError: there is a recipe for the formats, but it lacks something that is asked for.
    """
    quantizers = [operand.quantizer for operand in precision.operands()]
    if None in quantizers or folds_on_hopper(precision, capability):
        return None
    for kind in _KINDS:
        if all(kind.holds(quantizer.format) for quantizer in quantizers):
            return kind.settings(_Reader(kind.name, precision)) if capability >= kind.capability \
                else None  # fmt: skip
    return None


def folds_on_hopper(precision: LinearPrecision, capability: tuple[int, int]) -> bool:
    """Return True if the GPU is a Hopper and folding serves one of the GEMMs."""
    return capability[0] == 9 and any(
        route(gemm.lhs.format, gemm.rhs.format, capability, gemm.folding) is FOLDED
        for gemm in precision.gemms.values()
        if gemm.lhs is not None and gemm.rhs is not None
    )


class _Reader:
    """Reads one value for each role off a precision; refuses what the recipe has no word for."""

    def __init__(self, name: str, precision: LinearPrecision) -> None:
        self.name, self.precision = name, precision
        if any(gemm.accumulation is not None for gemm in precision.gemms.values()):
            raise self.lacks("emulated accumulation")
        if precision.falls_back:
            raise self.lacks("fallback")
        if any(gemm.rhs_of_fprop for gemm in precision.gemms.values()):
            raise self.lacks("axis: fprop")
        if any(gemm.tensor_scale == "group" for gemm in precision.gemms.values()):
            raise self.lacks("tensor_scale: group")

    def lacks(self, what: str) -> UserError:
        """Return the error that names a setting that the recipe lacks."""
        return UserError(
            f"Transformer Engine's {self.name} has no {what}: leave it out, or use "
            "--transformer-impl local"
        )

    def of(self, role: str, what: str, value: Callable[[Quantizer], Any]) -> Any:
        """Return the quantizer that both GEMMs that take a role have in common."""
        found = {value(o.quantizer) for o in self.precision.operands() if o.role == role}
        if len(found) > 1:
            raise self.lacks(f"{role} with one {what} in one GEMM and another in the other")
        return found.pop()

    def everywhere(self, what: str, value: Callable[[Quantizer], Any]) -> Any:
        """Return an attribute that all six operands have in common."""
        found = {self.of(role, what, value) for role in _ROLES}
        if len(found) > 1:
            raise self.lacks(f"{what} of each role of its own")
        return found.pop()

    def hadamard(self, gemms: Iterable[str]) -> Hadamard | None:
        """Return the transform that these GEMMs have in common; the others must have none."""
        found = {self.precision.gemms[gemm].hadamard for gemm in gemms}
        for gemm, precision in self.precision.gemms.items():
            if gemm not in gemms and precision.hadamard is not None:
                raise self.lacks(f"hadamard transform in {gemm}")
        return found.pop() if found else None

    def nearest(self) -> None:
        """Refuse stochastic rounding and transforms."""
        if self.everywhere("rounding", lambda q: q.rounding) is Rounding.STOCHASTIC:
            raise self.lacks("stochastic rounding")
        self.hadamard(())

    def fp8_format(self) -> str:
        """Return E4M3, or HYBRID with gradients in E5M2."""
        elements = {r: self.of(r, "format", lambda q: q.format.element) for r in _ROLES}
        if elements["input"] != E4M3 or elements["weight"] != E4M3:
            raise self.lacks("input or weight in another format than E4M3")
        return "HYBRID" if elements["grad"] == E5M2 else "E4M3"


def _tiles(read: _Reader) -> Native:
    read.nearest()
    fp8_format = read.fp8_format()
    power_2 = read.everywhere("scale_format", lambda q: q.format.scale_format) == "pow2"
    dimensions = {r: read.of(r, "block", lambda q: 2 if q.format.block_rows > 1 else 1)
                  for r in _ROLES}  # fmt: skip
    if list(dimensions.values()).count(2) > 1:
        raise read.lacks("GEMM of 128x128 with 128x128 tiles")
    arguments = {"fp8_format": fp8_format}
    for role, letter in (("input", "x"), ("weight", "w"), ("grad", "grad")):
        arguments[f"{letter}_block_scaling_dim"] = dimensions[role]
    usual = power_2 and dimensions == {"input": 1, "weight": 2, "grad": 1}
    megatron = {"fp8_quantization_recipe": "blockwise", "fp8_format": fp8_format.lower()}
    return Native(read.name, arguments, power_2, megatron if usual else None)


def _tensors(read: _Reader) -> Native:
    read.nearest()
    fp8_format = read.fp8_format()
    power_2 = read.everywhere("scale_format", lambda q: q.format.scale_format) == "pow2"
    if any(gemm.delayed for gemm in read.precision.gemms.values()):
        return _delayed(read, fp8_format, power_2)
    megatron = {"fp8_quantization_recipe": "tensorwise", "fp8_format": fp8_format.lower()}
    return Native(read.name, {"fp8_format": fp8_format}, power_2, None if power_2 else megatron)


def _delayed(read: _Reader, fp8_format: str, power_2: bool) -> Native:
    read.name = "DelayedScaling"
    delayed = {gemm.delayed for gemm in read.precision.gemms.values()}
    if len(delayed) > 1:
        raise read.lacks("amax_history of one GEMM alone, or of each its own")
    history = delayed.pop()
    if power_2:
        raise read.lacks("scale_format: pow2")
    if history.algorithm != "max":
        raise read.lacks(f"amax_history algorithm: {history.algorithm}")
    if history.just_in_time is not None:
        raise read.lacks("amax_history just_in_time")
    # megatron-core's layers take no delayed scaling one by one.
    arguments = {"fp8_format": fp8_format, "amax_history_len": history.length}
    return Native(read.name, arguments | {"amax_compute_algo": "max"})


def _mxfp8(read: _Reader) -> Native:
    read.nearest()
    fp8_format = read.fp8_format()
    rounding = read.everywhere("scale_rounding", lambda q: q.format.scale_rounding)
    if rounding != "rceil":
        raise read.lacks(f"scale_rounding: {rounding}")
    square = {r: read.of(r, "block", lambda q: q.format.block_rows > 1) for r in _ROLES}
    if square["input"] or square["grad"]:
        raise read.lacks("square blocks but for weights")
    arguments = {"fp8_format": fp8_format, "enable_2d_quantization": square["weight"]}
    megatron = {"fp8_quantization_recipe": "mxfp8", "fp8_format": fp8_format.lower()}
    return Native(read.name, arguments, megatron=None if square["weight"] else megatron)


def _nvfp4(read: _Reader) -> Native:
    square = {r: read.of(r, "block", lambda q: q.format.block_rows > 1) for r in _ROLES}
    if square["input"] or square["grad"]:
        raise read.lacks("16x16 blocks but for weights")
    rounding = {r: read.of(r, "rounding", lambda q: q.rounding) for r in _ROLES}
    stochastic = {r for r in _ROLES if rounding[r] is Rounding.STOCHASTIC}
    if stochastic - {"grad"}:
        raise read.lacks("stochastic rounding but for gradients")
    transform = read.hadamard(("wgrad",))
    if transform not in (None, Hadamard()):
        raise read.lacks("hadamard transform but of 16 points, fixed signs and BF16 output")
    if any(gemm.delayed for gemm in read.precision.gemms.values()):
        raise read.lacks("amax_history")
    arguments = {
        "disable_rht": transform is None,
        "disable_stochastic_rounding": not stochastic,
        "disable_2d_quantization": not square["weight"],
    }
    megatron = {"fp4_quantization_recipe": "nvfp4"}
    return Native(read.name, arguments, megatron=None if any(arguments.values()) else megatron)


def _holds_tiles(format: BlockFormat) -> bool:
    return isinstance(format, FP8Tile) and format.block == TILE


def _holds_mxfp8(format: BlockFormat) -> bool:
    return isinstance(format, MX) and format.element in (E4M3, E5M2) and format.block == BLOCK


def _holds_nvfp4(format: BlockFormat) -> bool:
    return isinstance(format, NVFP4) and not format.options


_KINDS = (
    _Kind("Float8CurrentScaling", (8, 9), lambda f: isinstance(f, FP8Tensor), _tensors),
    _Kind("Float8BlockScaling", (9, 0), _holds_tiles, _tiles),
    _Kind("MXFP8BlockScaling", (10, 0), _holds_mxfp8, _mxfp8),
    _Kind("NVFP4BlockScaling", (10, 0), _holds_nvfp4, _nvfp4),
)
