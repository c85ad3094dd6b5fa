"""Choice of Transformer Engine's own recipe for a precision, and its settings.

Data only: nothing here needs Transformer Engine. Names and meanings are as in version 2.20.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_lowbit.errors import require
from megatron_lowbit.kernels.routes import FOLDED, route
from megatron_lowbit.numerics import Hadamard, Quantizer, Rounding
from megatron_lowbit.numerics.block_format import BlockFormat
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tensor, FP8Tile
from megatron_lowbit.numerics.block_formats.mx import BLOCK, MX
from megatron_lowbit.numerics.block_formats.nvfp4 import NVFP4
from megatron_lowbit.numerics.formats import E4M3, E5M2
from megatron_lowbit.numerics.gemms import GEMM_ROLES, Gemm
from megatron_lowbit.recipes import LinearPrecision


@dataclass(frozen=True)
class Native:
    """A recipe of Transformer Engine: its class, and all arguments that a precision decides.

    Also those that are the defaults, for environment variables may have changed those.
    ``power_2_scale`` goes into the quantization parameters of all three roles, where not None.
    ``megatron`` are the fields of megatron-core's TEQuantizationRecipe that say the same, or None.
    ``multiple``: what Transformer Engine refuses a weight for whose dimensions are no multiples.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    power_2_scale: bool | None = None
    megatron: dict[str, Any] | None = None
    multiple: int = 16

    def multiplies(self, weight: Sequence[int]) -> bool:
        """Return True if Transformer Engine multiplies a weight of this shape in all GEMMs."""
        return all(size % self.multiple == 0 for size in weight)


class _NativeFormat(NamedTuple):
    """A recipe class for a format, the compute capability it needs, and the reader of settings."""

    name: str
    capability: tuple[int, int]
    takes: Callable[[Any], bool]
    settings: Callable[["_Reader"], Native]


def native_recipe(precision: LinearPrecision, capability: tuple[int, int]) -> Native | None:
    """Return the recipe for a linear layer's precision on a GPU of a compute capability.

    None where Transformer Engine has no kernels: another format, several formats in one layer, a
    mean that is split off, a GEMM in high precision, or a GPU that lacks the format. None, too, on
    GPUs of compute capability 9.x where folding serves one of the GEMMs: this project's is then the
    faster.

    Raises:
        UserError: there is a recipe for the formats, but it lacks something that is asked for.
    """
    quantizers = [operand.quantizer for operand in precision.operands()]
    if None in quantizers or folds_on_hopper(precision, capability):
        return None
    types = {type(quantizer.format) for quantizer in quantizers}
    native = _NATIVE_FORMATS.get(types.pop()) if len(types) == 1 else None
    if native is None or capability < native.capability:
        return None
    if not all(native.takes(q.format) and not q.splits_mean for q in quantizers):
        return None
    return native.settings(_Reader(native.name, precision))


def kernels(precision: LinearPrecision, capability: tuple[int, int]) -> str:
    """Describe whose kernels compute a layer of Transformer Engine in this precision."""
    if not precision.quantized:
        return "Transformer Engine BF16"
    native = layer_recipe(precision, capability)
    return "this project's" if native is None else f"Transformer Engine {native.name}"


def layer_recipe(
    precision: LinearPrecision, capability: tuple[int, int], weight: Sequence[int] = ()
) -> Native | None:
    """Return the recipe as :func:`native_recipe` does; None for delayed scaling.

    megatron-core's layers take no delayed scaling one by one, and Transformer Engine's checkpoints
    of it are pickles. None, too, for a ``weight`` of a shape that Transformer Engine refuses.
    """
    recipe = None if precision.history_length else native_recipe(precision, capability)
    return recipe if recipe is not None and recipe.multiplies(weight) else None


def misfits(
    weights: Iterable[tuple[Sequence[int], LinearPrecision]], capability: tuple[int, int]
) -> set[tuple[int, ...]]:
    """Return the shapes of weights that Transformer Engine refuses in their precision."""
    return {
        tuple(shape)
        for shape, precision in weights
        if (recipe := layer_recipe(precision, capability)) and not recipe.multiplies(shape)
    }


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
        self.name, self.precision, self.gemms = name, precision, precision.gemms.values()
        self.refuse(any(g.accumulation is not None for g in self.gemms), "emulated accumulation")
        self.refuse(precision.falls_back, "fallback")
        self.refuse(precision.fprop.hot_channels is not None, "hot_channels")
        self.refuse(precision.shares_operands, "axis: fprop or dgrad, nor requantize")
        self.refuse(any(g.tensor_scale == "group" for g in self.gemms), "tensor_scale: group")

    def refuse(self, is_set: bool, what: str) -> None:
        """Raise UserError for a setting that the recipe lacks, if it is set."""
        require(not is_set, f"Transformer Engine's {self.name} has no {what}: omit it, or "
                "use --transformer-impl local")  # fmt: skip

    def roles(self, what: str, value: Callable[[Quantizer], Any]) -> dict[str, Any]:
        """Return the value of each role, which both GEMMs that take it have in common."""
        values: dict[str, Any] = {}
        for operand in self.precision.operands():
            role, setting = operand.role, value(operand.quantizer)
            other = values.setdefault(role, setting) != setting
            self.refuse(other, f"{role} with one {what} in one GEMM and another in the other")
        return values

    def everywhere(self, what: str, value: Callable[[Quantizer], Any]) -> Any:
        """Return a value that all six operands have in common."""
        values = set(self.roles(what, value).values())
        self.refuse(len(values) > 1, f"{what} of each role of its own")
        return values.pop()

    def square_weights(self, what: str) -> bool:
        """Return True if weights have square blocks; refuse them elsewhere."""
        square = self.roles("block", lambda q: q.format.block_rows > 1)
        self.refuse(square["input"] or square["grad"], f"{what} but for weights")
        return square["weight"]

    def no_transform(self, *gemms: str) -> None:
        """Refuse Hadamard transforms in GEMMs."""
        for gemm in gemms:
            has_one = self.precision.gemms[gemm].hadamard is not None
            self.refuse(has_one, f"hadamard transform in {gemm}")

    def fp8(self, recipe: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Refuse stochastic rounding and transforms; return both ways to say the FP8 format.

        ``recipe`` is megatron-core's name. The format is E4M3, or HYBRID with gradients in E5M2.
        """
        rounding = self.everywhere("rounding", lambda q: q.rounding)
        self.refuse(rounding is Rounding.STOCHASTIC, "stochastic rounding")
        self.no_transform(*GEMM_ROLES)
        elements = self.roles("format", lambda q: q.format.element)
        others = {elements["input"], elements["weight"]} - {E4M3}
        self.refuse(bool(others), "input or weight in another format than E4M3")
        name = "HYBRID" if elements["grad"] == E5M2 else "E4M3"
        megatron = {"fp8_quantization_recipe": recipe, "fp8_format": name.lower()}
        return {"fp8_format": name}, megatron


def _tiles(read: _Reader) -> Native:
    arguments, megatron = read.fp8("blockwise")
    power_2 = read.everywhere("scale_format", lambda q: q.format.scale_format) == "pow2"
    dimensions = read.roles("block", lambda q: 2 if q.format.block_rows > 1 else 1)
    two_square = list(dimensions.values()).count(2) > 1
    read.refuse(two_square, "GEMM of 128x128 with 128x128 tiles")
    for role, argument in (("input", "x"), ("weight", "w"), ("grad", "grad")):
        arguments[f"{argument}_block_scaling_dim"] = dimensions[role]
    usual = power_2 and dimensions == {"input": 1, "weight": 2, "grad": 1}
    return Native(read.name, arguments, power_2, megatron if usual else None)


def _tensors(read: _Reader) -> Native:
    arguments, megatron = read.fp8("tensorwise")
    power_2 = read.everywhere("scale_format", lambda q: q.format.scale_format) == "pow2"
    if any(gemm.delayed for gemm in read.gemms):
        return _delayed(read, arguments, power_2)
    return Native(read.name, arguments, power_2, None if power_2 else megatron)


def _delayed(read: _Reader, arguments: dict[str, Any], power_2: bool) -> Native:
    read.name = "DelayedScaling"
    delayed = {gemm.delayed for gemm in read.gemms}
    read.refuse(len(delayed) > 1, "amax_history of only one GEMM, or of each its own")
    history = delayed.pop()
    read.refuse(power_2, "scale_format: pow2")
    read.refuse(history.algorithm != "max", f"amax_history algorithm: {history.algorithm}")
    read.refuse(history.just_in_time is not None, "amax_history just_in_time")
    # megatron-core's layers take no delayed scaling one by one.
    arguments |= {"amax_history_len": history.length, "amax_compute_algo": "max"}
    return Native(read.name, arguments)


def _mxfp8(read: _Reader) -> Native:
    arguments, megatron = read.fp8("mxfp8")
    rounding = read.everywhere("scale_rounding", lambda q: q.format.scale_rounding)
    read.refuse(rounding != "rceil", f"scale_rounding: {rounding}")
    square = read.square_weights("square blocks")
    arguments["enable_2d_quantization"] = square
    return Native(read.name, arguments, megatron=None if square else megatron, multiple=32)


def _nvfp4(read: _Reader) -> Native:
    square = read.square_weights("16x16 blocks")
    rounding = read.roles("rounding", lambda q: q.rounding)
    stochastic = {role for role in rounding if rounding[role] is Rounding.STOCHASTIC}
    read.refuse(bool(stochastic - {"grad"}), "stochastic rounding but for gradients")
    read.no_transform(Gemm.FPROP, Gemm.DGRAD)
    transform = read.precision.wgrad.hadamard
    other = transform not in (None, Hadamard())
    read.refuse(other, "hadamard transform but of 16 points, fixed signs and BF16 output")
    read.refuse(any(gemm.delayed for gemm in read.gemms), "amax_history")
    arguments = {
        "disable_rht": transform is None,
        "disable_stochastic_rounding": not stochastic,
        "disable_2d_quantization": not square,
    }
    megatron = {"fp4_quantization_recipe": "nvfp4"}
    return Native(read.name, arguments, megatron=None if any(arguments.values()) else megatron)


_NATIVE_FORMATS: dict[type[BlockFormat], _NativeFormat] = {
    FP8Tensor: _NativeFormat("Float8CurrentScaling", (8, 9), lambda f: True, _tensors),
    FP8Tile: _NativeFormat("Float8BlockScaling", (9, 0), lambda f: f.block == TILE, _tiles),
    MX: _NativeFormat(
        "MXFP8BlockScaling",
        (10, 0),
        lambda f: f.element in (E4M3, E5M2) and f.block == BLOCK,
        _mxfp8,
    ),
    NVFP4: _NativeFormat("NVFP4BlockScaling", (10, 0), lambda f: not f.options, _nvfp4),
}
