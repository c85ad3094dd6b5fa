"""Tracker of a Transformer Engine module's calls, which its quantizers share.

A module quantizes its operands one by one, in forward and in backward, and does not say for which
call: dY in backward must take the random key of X in forward.
"""

import weakref
from collections import deque
from collections.abc import Callable

from torch import Tensor

from megatron_lowbit.layers import LinearContext


class CallTracker:
    """Contexts of one module's calls. Backward passes come in the order of their forward passes.

    Args:
        make_context: returns a call's context, given True if it trains.
        opened_outside: True if whoever runs the module begins calls by :meth:`open`, each of which
            has a backward pass if it trains. Otherwise the quantizer of its input begins them, and
            a call whose input autograd has let go of has no backward pass.
        main_grad: returns the tensor that wgrad is added to, or None to have it returned.
    """

    def __init__(
        self, make_context: Callable[[bool], LinearContext], opened_outside: bool = False,
        main_grad: Callable[[], Tensor | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.opened_outside, self.main_grad = opened_outside, main_grad
        self.forward: LinearContext | None = None
        self.backward: LinearContext | None = None
        self._make_context = make_context
        self._pending: deque[Callable[[], LinearContext | None]] = deque()

    def open(self, training: bool) -> LinearContext:
        """Begin a call; one that trains waits for its backward pass."""
        self.forward = context = self._make_context(training)
        if training:
            waiting = (lambda: context) if self.opened_outside else weakref.ref(context)
            self._pending.append(waiting)
        return context

    def open_backward(self) -> LinearContext:
        """Begin the backward pass of the oldest call that waits for it."""
        while self._pending:
            context = self._pending.popleft()()
            if context is not None:
                self.backward = context
                return context
        raise RuntimeError("a backward pass without its forward pass")
