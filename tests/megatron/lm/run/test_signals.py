"""Signals and the clock, as one process hears them."""

import os
import signal

import pytest

from megatron.lm.run.signals import Requests


@pytest.mark.parametrize("save", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU])
def test_signals_are_heard_and_handlers_restored(save: signal.Signals):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, save)]
    requests = Requests(None)
    with requests.listening():
        assert requests.take() == [False, False, False, False]
        os.kill(os.getpid(), save)
        assert requests.take() == [False, True, False, False]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.take() == [True, False, False, False]  # one checkpoint a signal
        assert requests.take() == [True, False, False, False]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, save)] == before
    assert Requests(1e-9).take() == [False, False, True, False]
    assert Requests(1000.0).take() == [False, False, False, False]


def test_a_hangup_that_nohup_ignores_stays_ignored_and_the_kernels_repetitions_save_once():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        requests = Requests(None)
        with requests.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert requests.take() == [False, False, False, False]
            os.kill(os.getpid(), signal.SIGXCPU)
            assert requests.take() == [False, True, False, False]
            os.kill(os.getpid(), signal.SIGXCPU)
            assert requests.take() == [False, False, False, False]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_end_of_torchrun_is_noticed_and_that_of_a_shell_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launched = Requests(None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    by_hand = Requests(None)
    assert launched.take() == by_hand.take() == [False, False, False, False]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launched.take() == [False, False, False, True]
    assert by_hand.take() == [False, False, False, False]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_swallows_comes_again():
    class Swallowing:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # until the handler has run
                pass

    before = signal.getsignal(signal.SIGINT)
    requests = Requests(None)
    with requests.listening():
        swallowing = Swallowing()
        del swallowing
        with pytest.raises(KeyboardInterrupt):
            requests.take()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_ends_the_block_and_one_that_is_ignored_stays_so():
    with pytest.raises(KeyboardInterrupt), Requests(None).listening():
        os.kill(os.getpid(), signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Requests(None).listening():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
