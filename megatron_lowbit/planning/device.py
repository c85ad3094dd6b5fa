"""A GPU at work: tensor cores of a GEMM, bandwidth of other kernels, links to other GPUs.

An all-gather or reduce-scatter of B bytes over n ranks moves B (n - 1) / n over each rank's slowest
link, an all-reduce twice that. Ranks are numbered as Megatron-LM does: tensor-parallel ones next to
each other, then data-parallel ones, then pipeline stages.
"""

from functools import cache
from typing import NamedTuple

from megatron_lowbit.kernels import routes
from megatron_lowbit.numerics.block_formats.fp8 import TILE, FP8Tile
from megatron_lowbit.numerics.gemms import Gemm
from megatron_lowbit.planning.hardware import GPU, SCANS
from megatron_lowbit.recipes import LinearPrecision
from megatron_lowbit.transformer_engine.native import folds_on_hopper, layer_recipe, native_recipe

BF16, FP32 = 2, 4
GIB = 2**30
BLACKWELL = (10, 0)
"""From here on GPUs have tensor cores for formats that only Transformer Engine uses."""
EXACT, FOLDED = "bf16", "fp8 per tensor"
"""GEMMs of exact BF16 numbers, and of FP8 with a scale per tensor, to which formats are folded."""
ADDS_PRODUCTS = {EXACT, FOLDED, "mxfp8", "nvfp4"}
"""GEMMs that add their product to an FP32 tensor, such as the main gradient."""
_ROUTED = {
    routes.TENSORS: FOLDED,
    routes.ROWS: "fp8 per row",
    routes.FOLDED: FOLDED,
    routes.EXACT: EXACT,
    routes.BLOCKS: "bf16 1x128 . 1x128",
    routes.DEQUANTIZED: "fp32",
}
"""The engine's routes, and the names of their GEMMs in ``hardware.yaml``."""
_NATIVE = {
    "Float8CurrentScaling": FOLDED,
    "DelayedScaling": FOLDED,
    "Float8BlockScaling": "mxfp8",  # Transformer Engine has MXFP8's GEMM multiply tiles there
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
"""Transformer Engine's recipes, and their GEMMs on Blackwell."""


@cache
def gemm_name(
    precision: LinearPrecision, gemm: Gemm, capability: tuple[int, int], transformer_engine: bool
) -> str:
    """Return the name in ``hardware.yaml`` of the GEMM that computes one of a layer's GEMMs."""
    sides = precision.gemms[gemm]
    if not sides.quantized:
        return EXACT
    if transformer_engine and capability >= BLACKWELL:
        native = native_recipe(precision, capability)
        if native is not None:
            return _NATIVE[native.name]
    if sides.accumulation is not None or sides.dequantizes:
        return "fp32"
    formats = [None if side is None else side.format for side in sides.sides]
    # Tiles that Transformer Engine multiplies itself are not folded.
    tiles = all(isinstance(format, FP8Tile) for format in formats)
    is_native = transformer_engine and tiles and not folds_on_hopper(precision, capability)
    route = routes.route(*formats, capability, sides.folding and not is_native)
    if route is not routes.TILES:
        return _ROUTED[route]
    square = any(format and format.block_rows == TILE for format in formats)
    return "fp8 1x128 . 128x128" if square else "fp8 1x128 . 1x128"


class Link(NamedTuple):
    """Bytes/s through one rank of a ring, and seconds that any collective takes."""

    bandwidth: float
    latency: float

    def send(self, count: float) -> float:
        """Time a transfer of so many bytes from one rank to another."""
        return count / self.bandwidth + self.latency

    def gather(self, count: float, ranks: int) -> float:
        """Time an all-gather or a reduce-scatter of so many bytes, all ranks' together."""
        return 0.0 if ranks == 1 else self.send(count * (ranks - 1) / ranks)


class Device(NamedTuple):
    """A GPU, what runs on it, and the number of GPUs on its host, which NVLink joins.

    ``accumulate``: weight gradients are added to FP32 main gradients, and the optimizer follows.
    """

    gpu: GPU
    transformer_engine: bool = True
    scan: str = SCANS[0]
    accumulate: bool = True
    gpus_per_node: int = 8

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory that torch's tensors may fill."""
        return (self.gpu["memory_gib"] - self.gpu["reserve_gib"]) * GIB

    @property
    def of_head(self) -> "Device":
        """The GPU as the output layer uses it: that is never Transformer Engine's."""
        return self._replace(transformer_engine=False)

    def gemm(self, precision: LinearPrecision, gemm: Gemm) -> str:
        """Return the name of the GEMM that computes one of a linear layer's GEMMs."""
        return gemm_name(precision, gemm, self.gpu.capability, self.transformer_engine)

    def is_lowbit(self, precision: LinearPrecision) -> bool:
        """Return True if this project's kernels compute a layer of Transformer Engine."""
        quantizes = self.transformer_engine and precision.quantized
        return quantizes and layer_recipe(precision, self.gpu.capability) is None

    def flops(self, gemm: str) -> float:
        """Return the FLOP/s of a GEMM of that name in a long step."""
        return self.gpu[f"gemm.{gemm}"] * self.gpu["gemm_sustained"] * 1e12

    def moved(self, count: float) -> float:
        """Time a kernel that reads and writes so many bytes."""
        return count / (self.gpu["copy_tb_per_s"] * self.gpu["kernel_share"] * 1e12)

    def multiplied(
        self, rows: float, inputs: int, outputs: int, gemm: str, added: float = 0.0
    ) -> float:
        """Time one GEMM of (rows, inputs) by (inputs, outputs), forward or backward.

        It takes its FLOPs or its bytes at the copy's bandwidth, whichever is longer. ``added``:
        bytes of the main gradient that it reads and writes to add its product.
        """
        touched = operand_bytes(gemm) * (rows * inputs + inputs * outputs)
        touched += BF16 * rows * outputs + added
        flops = 2.0 * rows * inputs * outputs
        return max(flops / self.flops(gemm), touched / (self.gpu["copy_tb_per_s"] * 1e12))

    def link(self, ranks: int, stride: int = 1, ring: bool = True) -> Link:
        """Return the link of ``ranks`` GPUs whose numbers are ``stride`` apart.

        Between hosts a ring has the network cards of all its ranks on a host; without ``ring``, as
        in an all-to-all or from point to point, each rank has only its own card.
        """
        nvlink = self.gpu["nvlink_gb_per_s"] * 1e9
        if ranks * stride <= self.gpus_per_node:
            return Link(nvlink, self.gpu["nvlink_latency_us"] * 1e-6)
        cards = max(1, self.gpus_per_node // stride) if ring else 1
        network = cards * self.gpu["network_gb_per_s"] * 1e9
        return Link(min(nvlink, network), self.gpu["network_latency_us"] * 1e-6)


def operand_bytes(gemm: str) -> int:
    """Return the bytes per element of the operands that a GEMM takes: BF16 numbers, or codes."""
    return BF16 if gemm.startswith(EXACT) else 1
