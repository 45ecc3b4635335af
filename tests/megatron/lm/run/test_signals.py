"""Signals and the clock, as one process hears them."""

import os
import signal

from megatron.lm.run.signals import Requests


def test_signals_are_heard_and_handlers_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    requests = Requests(None)
    with requests.listening():
        assert requests.take() == [False, False, False]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take() == [False, True, False]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.take() == [True, False, False]  # one checkpoint a signal
        assert requests.take() == [True, False, False]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert Requests(1e-9).take() == [False, False, True]
    assert Requests(1000.0).take() == [False, False, False]
