"""Stop signals are noted, and only while asked for."""

import os
import signal

import pytest

from megatron_lowbit.training.signals import STOP_SIGNALS, stop_on_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_noted_instead_of_fatal(number):
    with stop_on_signals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == signal.Signals(number).name


def test_handlers_come_back_also_after_an_exception():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(KeyError), stop_on_signals():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
        raise KeyError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
