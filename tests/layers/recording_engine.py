"""An engine that records its calls."""

from megatron_lowbit.kernels.engine import ReferenceEngine


class RecordingEngine(ReferenceEngine):
    """Reference engine that records requests, what is quantized and what is multiplied.

    ``quantized`` has (format, shape) of each side, ``multiplied`` the operands of each GEMM and
    ``accumulations`` how it sums.
    """

    def __init__(self):
        super().__init__("tests")
        self.requests, self.quantized, self.multiplied, self.accumulations = [], [], [], []

    @property
    def shapes(self):
        """Shapes of what is quantized."""
        return [shape for _, shape in self.quantized]

    def quantize(self, x, row, col, amaxes=(None, None)):
        """Record and quantize both sides."""
        self.requests += [side for side in (row, col) if side]
        sides = [(row, x.shape), (None if col is row else col, x.t().shape)]
        self.quantized += [(side.quantizer.format.name, tuple(s)) for side, s in sides if side]
        return super().quantize(x, row, col, amaxes)

    def gemm(self, lhs, rhs, bias=None, accumulation=None, *rest):
        """Record and multiply."""
        self.multiplied.append((lhs, rhs))
        self.accumulations.append(accumulation)
        return super().gemm(lhs, rhs, bias, accumulation, *rest)
