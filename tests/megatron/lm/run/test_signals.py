"""Signals and the clock, as one process hears them."""

import os
import signal

import pytest

from megatron.lm.run.signals import Requests


def test_signals_are_heard_and_handlers_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    requests = Requests(None)
    with requests.listening():
        assert requests.take() == [False, False, False, False]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.take() == [False, True, False, False]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.take() == [True, False, False, False]  # one checkpoint a signal
        assert requests.take() == [True, False, False, False]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert Requests(1e-9).take() == [False, False, True, False]
    assert Requests(1000.0).take() == [False, False, False, False]


def test_the_end_of_torchrun_is_noticed_and_that_of_a_shell_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launched = Requests(None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    by_hand = Requests(None)
    assert launched.take() == by_hand.take() == [False, False, False, False]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launched.take() == [False, False, False, True]
    assert by_hand.take() == [False, False, False, False]
