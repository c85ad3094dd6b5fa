"""Context of one call of linear layers of one precision, such as a layer's experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lowbit.layers.context import LinearContext
from megatron_lowbit.numerics import Requests, Rounding
from megatron_lowbit.numerics.gemms import Gemm, Role
from megatron_lowbit.numerics.plan import Source
from megatron_lowbit.numerics.randomness import Key, operand_key, sign_key


@dataclass(frozen=True)
class GroupContext:
    """Context of a call of several linear layers, which differ in their keys alone.

    Args:
        context: of one of them; its weight cache keeps the weights of all.
        keys: of each; empty where the precision draws no random bits.
    """

    context: LinearContext
    keys: Sequence[Key] = ()

    def quantize(
        self,
        xs: Sequence[Tensor],
        role: Role,
        row: Gemm | None,
        col: Gemm | None,
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Quantize each layer's x (R, C), as :meth:`LinearContext.quantize` does."""

        def requests(gemm: Gemm | None) -> Requests | None:
            return None if gemm is None else self._requests(gemm, role)

        rows, plan = requests(row), self.context.plan()
        shared = rows and col and plan[col, role].source is Source.TRANSPOSE
        cols = rows if shared else requests(col)
        if rows is None and cols is None:
            return xs, [x.t() for x in xs]
        left, right = self.context.engine.quantize_all(xs, rows, cols)
        return xs if left is None else left, [x.t() for x in xs] if right is None else right

    def _requests(self, gemm: Gemm, role: Role) -> Requests | None:
        """Return how an operand is quantized; None for high precision."""
        context, precision = self.context, self.context.precision
        # Rows count from zero: experts' tokens are not split by sequence parallelism.
        template = context.request(gemm, role, 0)
        if template is None:
            return None
        draw_keys: Sequence[Key] = ()
        signs: Sequence[Key] = ()
        if template.quantizer.rounding is Rounding.STOCHASTIC:
            draw_keys = [operand_key(key, gemm, role) for key in self.keys]
        transform = precision.gemms[gemm].hadamard
        if transform is not None and transform.signs == "fresh":
            signs = [sign_key(key, gemm) for key in self.keys]
        return Requests(template, draw_keys, signs)

    def multiply(
        self,
        name: Gemm,
        lhs: Sequence[Any],
        rhs: Sequence[Any],
        outs: Sequence[Tensor],
        beta: bool = False,
    ) -> None:
        """Write one of the three products of each layer to its out, or add it to that."""
        precision, engine = self.context.precision.gemms[name], self.context.engine
        engine.gemm_all(lhs, rhs, outs, beta, precision.accumulation, precision.folding)


def can_group(context: LinearContext) -> bool:
    """Return True if layers of a context's precision can be quantized and multiplied together.

    All operands are quantized anew, by scales of each layer's own tensors, with known keys.
    """
    precision = context.precision
    operands = [(operand.gemm, operand.role) for operand in precision.operands()]
    return (
        not precision.shares_operands
        and not precision.falls_back
        and not isinstance(context.key, Tensor)
        and not any(context.shares_amax(*operand) for operand in operands)
    )
