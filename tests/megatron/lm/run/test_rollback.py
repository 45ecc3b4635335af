"""The way back to a run's own checkpoint, and a run that resumes by itself."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny
from helpers.faulty import BATCH, Once, louder, patched, rolling, told, trained
from megatron.lm.config.rules.check import check
from megatron.lm.errors import RunStopped
from megatron.lm.run.signals import Requests
from msamp.numerics.tensor import ScalingTensor


@pytest.mark.parametrize("level", [pytest.param("bf16", marks=pytest.mark.nightly), "O3"])
def test_a_rollback_goes_on_from_the_checkpoint_with_the_data_behind_the_spike(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str
):
    with patched(Once(6)):
        rows, weights = trained(rolling(prefix, tmp_path / "a", precision=level, train_iters=12))
    assert [row["iteration"] for row in told(rows, "train")] == [*range(1, 8), *range(5, 13)]
    assert told(rows, "rollback") == [{"kind": "rollback", "iteration": 7, "to": 4, "passed_over": 3 * BATCH}]
    assert "rolled back from iteration 7 to iteration 4 (1 of 3 times to" in capsys.readouterr().out

    tiny.run(tiny.config(prefix, precision=level, train_iters=12, exit_interval=4, save=str(tmp_path / "b")))
    with tiny.trainer(tiny.config(prefix, precision=level, train_iters=12, load=str(tmp_path / "b"))) as made:
        made.training.passed_over = 3 * BATCH
        rest: list[dict[str, Any]] = []
        made.metrics.write = rest.append  # type: ignore[method-assign]
        made.run()
        assert tiny.same(weights, tiny.bits(made.training.model.parameters()))
    assert tiny.losses(rows)[7:] == tiny.losses(rest)

    resumed = tiny.run(tiny.config(prefix, precision=level, train_iters=12, load=str(tmp_path / "a"), ckpt_step=8))
    assert tiny.losses(resumed) == tiny.losses(rows)[-4:]  # the checkpoint tells how much was passed over


def test_rollbacks_to_one_checkpoint_come_to_an_end(prefix: Path, tmp_path: Path):
    with patched(louder(6)), pytest.raises(RunStopped, match=r"3 rollbacks to iteration 4 in .*--lr.*--loss-spike-threshold"):
        trained(rolling(prefix, tmp_path, train_iters=10))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.promise("Checkpoints", "A rollback loads a healthy checkpoint.")
def test_a_rollback_passes_over_an_unhealthy_checkpoint(prefix: Path, tmp_path: Path):
    settings = tiny.config(prefix, train_iters=10, save=str(tmp_path), save_interval=4)
    with tiny.trainer(settings) as made:
        made.run()
        made.training.iteration, made.training.problem = 12, "it diverged"
        assert made.saver is not None
        with made.saver:
            made._save()
        assert made.rollback.iteration == 10
        assert "rolled back from iteration 12 to iteration 10 (1 of 3 times" in made.rollback.go(made.training)


def test_a_run_whose_load_is_its_save_starts_anew_and_then_resumes(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(tmp_path / "run")
    settings = tiny.config(prefix, opt_level="O2", train_iters=8, exit_interval=5, save=folder, load=folder + "/")
    check(settings, 1)
    first, _ = trained(settings)
    assert (
        f"warning: --load {folder}/ holds no checkpoint, and is the folder of --save: training starts from scratch"
        in capsys.readouterr().out
    )
    second, weights = trained(settings)
    said = capsys.readouterr().out
    assert "resumed from" in said
    assert "warning: --load" not in said
    straight, expected = trained(tiny.config(prefix, opt_level="O2", train_iters=8))
    assert tiny.losses(first + second) == tiny.losses(straight)
    assert tiny.same(weights, expected)


# Runs whose copies of the weights are compared now and then.


def damaged(prefix: Path, folder: str, interval: int | None) -> tuple[int, str]:
    """A run that compares before its saves, and by `interval`; rank 1 flips a bit of a weight after iteration 3. Where it ends, and why."""
    settings = tiny.config(
        prefix,
        opt_level="O2",
        train_iters=5,
        check_weight_hash_across_dp_replicas_interval=interval,
        save=folder,
        save_interval=5 if interval else 2,
    )
    with tiny.trainer(settings) as made:
        training, watch = made.training, made.step_watch
        look = watch.look

        def flip(result, iteration, now):
            if iteration == 3 and torch.distributed.get_rank() == 1:
                p = training.model.decoder.layers[1].self_attention.linear_proj.weight
                assert isinstance(p, ScalingTensor)
                p.payload.view(torch.uint8)[0, 0] ^= 1
            return look(result, iteration, now)

        watch.look = flip
        try:
            made.run()
        except RunStopped as stopped:
            return training.iteration, str(stopped)
        return training.iteration, ""


@pytest.mark.promise("Checkpoints", "Copies of the weights that differ between ranks stop a run before it saves them.")
@pytest.mark.parametrize("interval", [None, pytest.param(2, marks=pytest.mark.nightly(3))])
def test_a_flipped_bit_of_one_rank_stops_all_and_nothing_is_saved_after_it(prefix: Path, tmp_path: Path, interval: int | None):
    ends = dist.run(damaged, 2, prefix, str(tmp_path), interval)
    named = (
        "damaged after iteration 4: decoder.layers.1.self_attention.linear_proj.weight differs between rank 0 and rank 1. No checkpoint was"
    )
    assert [(iteration, named in why) for iteration, why in ends] == [(4, True), (4, True)]
    saved = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert saved == ([] if interval else ["iter_0000002"])


# Signals and the clock, as one process hears them.


@pytest.mark.parametrize("save", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU])
def test_signals_are_heard_and_handlers_restored(save: signal.Signals, request: pytest.FixtureRequest):
    inherited = signal.signal(save, signal.SIG_DFL)  # nohup has tests ignore SIGHUP
    request.addfinalizer(lambda: signal.signal(save, inherited))
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


def test_an_interrupt_ends_the_block_and_one_that_is_ignored_stays_so():
    with pytest.raises(KeyboardInterrupt), Requests(None).listening():
        os.kill(os.getpid(), signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Requests(None).listening():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
