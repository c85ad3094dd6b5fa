"""Tracker of a Transformer Engine module's calls, which its quantizers share.

A module quantizes its operands one by one, in forward and in backward, and does not say for which
call: dY in backward must take the random key of X in forward.
"""

import weakref
from collections import deque
from collections.abc import Callable

from megatron_lowbit.layers import LinearContext


class CallTracker:
    """Contexts of one module's calls. Backward passes come in the order of their forward passes.

    A call whose input autograd has let go of has no backward pass.

    Args:
        make_context: returns a call's context, given True if it trains.
    """

    def __init__(self, make_context: Callable[[bool], LinearContext]) -> None:
        self.forward: LinearContext | None = None
        self.backward: LinearContext | None = None
        self._make_context = make_context
        self._pending: deque[weakref.ref[LinearContext]] = deque()

    def open(self, training: bool) -> LinearContext:
        """Begin a call; one that trains waits for its backward pass."""
        self.forward = context = self._make_context(training)
        if training:
            self._pending.append(weakref.ref(context))
        return context

    def open_backward(self) -> LinearContext:
        """Begin the backward pass of the oldest call that waits for it."""
        while self._pending:
            context = self._pending.popleft()()
            if context is not None:
                self.backward = context
                return context
        raise RuntimeError("a backward pass without its forward pass")
