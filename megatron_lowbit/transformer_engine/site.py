"""Which call of a linear layer the quantizers of a Transformer Engine module work for.

A module quantizes its operands one by one, in forward and in backward, and says nothing of the
call: of its random key, above all, which dY in backward must share with X in forward.
"""

import weakref
from collections import deque
from collections.abc import Callable

from megatron_lowbit.layers.call import LinearCall


class Site:
    """The calls of one module. Backward passes come in the order of their forward passes.

    ``make_call(training)`` makes a call's key and precision. Who opens calls: whoever runs the
    module, by :meth:`open` before each forward pass, if ``opened_outside``, and each that trains
    then has a backward pass; else the quantizer of its input, and a call whose input autograd has
    let go of will have none.
    """

    def __init__(
        self, make_call: Callable[[bool], LinearCall], opened_outside: bool = False
    ) -> None:
        self.opened_outside = opened_outside
        self.forward: LinearCall | None = None
        self.backward: LinearCall | None = None
        self._make_call = make_call
        self._pending: deque[Callable[[], LinearCall | None]] = deque()

    def open(self, training: bool) -> LinearCall:
        """Begin a call; one that trains waits for its backward pass."""
        self.forward = call = self._make_call(training)
        if training:
            self._pending.append((lambda: call) if self.opened_outside else weakref.ref(call))
        return call

    def open_backward(self) -> LinearCall:
        """Begin the backward pass of the oldest call that waits for it."""
        while self._pending:
            call = self._pending.popleft()()
            if call is not None:
                self.backward = call
                return call
        raise RuntimeError("a backward pass without its forward pass")
