"""Which call of a linear layer the quantizers of a Transformer Engine module work for.

A module quantizes its operands one by one, in forward and in backward, and says nothing of the
call: of its random key, above all, which dY in backward must share with X in forward.
"""

from collections import deque
from collections.abc import Callable

from megatron_lowbit.layers.call import LinearCall


class Site:
    """The calls of one module. Backward passes come in the order of their forward passes.

    ``make_call(training)`` makes a call's key and precision. Who opens calls: whoever runs the
    module, by :meth:`open` before each forward pass, if ``opened_outside``; else the quantizer of
    its input.
    """

    def __init__(
        self, make_call: Callable[[bool], LinearCall], opened_outside: bool = False
    ) -> None:
        self.opened_outside = opened_outside
        self.forward: LinearCall | None = None
        self.backward: LinearCall | None = None
        self._make_call = make_call
        self._pending: deque[LinearCall] = deque()

    def open(self, training: bool) -> LinearCall:
        """Begin a call; one that trains waits for its backward pass."""
        self.forward = self._make_call(training)
        if training:
            self._pending.append(self.forward)
        return self.forward

    def open_backward(self) -> LinearCall:
        """Begin the backward pass of the oldest call that waits for it."""
        if not self._pending:
            raise RuntimeError("a backward pass without its forward pass")
        self.backward = self._pending.popleft()
        return self.backward
