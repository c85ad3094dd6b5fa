"""Numbers of the tokens of each expert, which need not leave the device, and their order."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Permutation(NamedTuple):
    """Order in which rows of several experts (T, K) are made from tokens (T0, K).

    Attributes:
        tokens: (T,), int32, the token of each row.
        sum_by_token: returns the sum (T0, K) of the rows (T, K) of each token.
    """

    tokens: Tensor
    sum_by_token: Callable[[Tensor], Tensor]


class DeviceCounts:
    """Numbers of tokens that the CPU does not know yet.

    ``counts`` (E,), int64, has the number of tokens of each expert, on any device, ``rows`` is
    their sum. A ``permutation`` is of tokens, fewer than ``rows``, that are the experts' input in
    place of rows.
    """

    def __init__(self, counts: Tensor, rows: int, permutation: Permutation | None = None) -> None:
        self.counts, self.rows, self.permutation = counts, rows, permutation
        self._on_host: list[int] | None = None

    def tolist(self) -> "DeviceCounts":
        """Return the object itself, where Megatron-LM's grouped MLP asks a tensor for a list."""
        return self

    def on_host(self) -> list[int]:
        """Return the numbers; the first call waits for the device and copies them."""
        if self._on_host is None:
            self._on_host = self.counts.tolist()
        return self._on_host


TokensPerExpert = Sequence[int] | DeviceCounts


def counts_on_host(tokens_per_expert: TokensPerExpert) -> list[int]:
    """Return numbers of tokens as a list, for which those on a device are copied."""
    if isinstance(tokens_per_expert, DeviceCounts):
        return tokens_per_expert.on_host()
    return list(tokens_per_expert)


def permutation_of(x: Tensor, tokens_per_expert: TokensPerExpert) -> Permutation | None:
    """Return the permutation of x; None for rows of experts, such as a second layer's input."""
    if not isinstance(tokens_per_expert, DeviceCounts) or len(x) == tokens_per_expert.rows:
        return None
    return tokens_per_expert.permutation


def permuted(x: Tensor, tokens_per_expert: TokensPerExpert) -> Tensor:
    """Return the rows of experts (T, K), which are copies where x is of tokens."""
    permutation = permutation_of(x, tokens_per_expert)
    if permutation is None:
        return x
    rows: Tensor = _Permute.apply(x, permutation)  # type: ignore[no-untyped-call]
    return rows


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return x.index_select(0, permutation.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.permutation.sum_by_token(grad), None
