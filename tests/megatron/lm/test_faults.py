"""Faults of a run: bad steps named and counted, spikes and the way back, signals, the clock, and a run that resumes by itself."""

import contextlib
import itertools
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dist
import pytest
import tiny
import torch
from torch import Tensor

from megatron.lm import checkpoint, faults, pretrain, step, trainer
from megatron.lm.checks import check
from megatron.lm.config import Config
from megatron.lm.cpu_home import cpu_home
from megatron.lm.faults import LossSpikes, Requests, RunStopped
from megatron.lm.model.loss import mean_loss

ROOT = Path(__file__).parents[3]
FIRST, NORM = "decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
BATCH = 4  # sequences of a step of tiny's, on one process

Change = Callable[[step.StepResult, step.Training], step.StepResult]


def no_change(result: step.StepResult, training: step.Training) -> step.StepResult:
    return result


@contextlib.contextmanager
def patched(change: Change = no_change, spoil: Callable[[step.Training], list[str]] = lambda training: []) -> Iterator[None]:
    """Steps whose gradients of the parameters that `spoil` names become NaN on this rank, and whose result `change` changes."""

    def changed(training: step.Training, stream: step.Batches) -> step.StepResult:
        handles = [dict(training.model.named_parameters())[name].register_hook(lambda g: g * math.nan) for name in spoil(training)]
        try:
            return change(step.train_step(training, stream), training)
        finally:
            for handle in handles:
                handle.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", changed)
        yield


def at(*iterations: int, names: tuple[str, ...] = (FIRST,)) -> Callable[[step.Training], list[str]]:
    """For `patched`: which iterations to spoil."""
    return lambda training: list(names) if training.iteration + 1 in iterations else []


def told(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def trained(settings: Config) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Rows that this rank would write, and the bits of its weights."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        return rows, tiny.bits(made.training.model.parameters())


def louder(*iterations: int) -> Change:
    """For `patched`: the loss of some iterations is told ten times too large."""

    def change(result: step.StepResult, training: step.Training) -> step.StepResult:
        return replace(result, loss_sum=result.loss_sum * 10) if training.iteration in iterations else result

    return change


SPIKES = {"loss_spike_threshold": 3.0, "loss_spike_window": 3}


def rolling(prefix: Path | str, folder: Path | str, **settings: Any) -> Config:
    return tiny.config(prefix, save=str(folder), save_interval=4, loss_spike_action="rollback", **SPIKES, **settings)


class Once:
    """For `patched`: a loud loss at an iteration, the first so many times, on some ranks."""

    def __init__(self, iteration: int, times: int = 1, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.iteration, self.times, self.ranks = iteration, times, ranks

    def __call__(self, result: step.StepResult, training: step.Training) -> step.StepResult:
        if training.iteration != self.iteration or not self.times or torch.distributed.get_rank() not in self.ranks:
            return result
        self.times -= 1
        return louder(self.iteration)(result, training)


def signalled(number: int, iteration: int, ranks: tuple[int, ...] = (0,)) -> Change:
    """For `patched`: the process gets a signal in an iteration."""

    def change(result: step.StepResult, training: step.Training) -> step.StepResult:
        if training.iteration == iteration and torch.distributed.get_rank() in ranks:
            os.kill(os.getpid(), number)
        return result

    return change


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


# What only one of two ranks meets


def spoiled_on_rank_1(prefix: str, runs: dict[str, dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    spoil = at(2, names=names) if torch.distributed.get_rank() == 1 else at()
    with patched(spoil=spoil):
        return {name: told(trained(tiny.config(prefix, train_iters=3, **flags))[0], "skipped") for name, flags in runs.items()}


def one_rank_asks(prefix: str, folder: str) -> dict[str, Any]:
    """What two ranks do about what only rank 1 has met."""
    found: dict[str, Any] = {}
    for name, change, settings in (
        ("save", signalled(signal.SIGUSR1, 3, (1,)), tiny.config(prefix, train_iters=6, save=f"{folder}/save")),
        ("leave", signalled(signal.SIGTERM, 3, (1,)), tiny.config(prefix, train_iters=6, save=f"{folder}/leave")),
        ("roll back", Once(6, ranks=(1,)), rolling(prefix, f"{folder}/roll", precision="O3", train_iters=9)),
    ):
        with patched(change):
            rows, weights = trained(settings)
        found[name] = ([row["iteration"] for row in told(rows, "train")], weights)  # rank 0 writes the rows
    torch.distributed.barrier()
    found["saved"] = {name: saved(Path(folder, name)) for name in ("save", "leave")}
    return found


def seen_by_one(folder: str) -> str:
    own = Path(folder) / str(torch.distributed.get_rank())
    settings = tiny.config("corpus", load=str(own), save=str(own))
    try:
        return str(faults.begins_afresh(settings))
    except ValueError as error:
        return str(error)


def two_ranks(prefix: str, folder: str) -> dict[str, Any]:
    runs = {level: {"precision": level} for level in ("bf16", "O3")}
    found = {
        "spoiled": spoiled_on_rank_1(prefix, runs, (FIRST, NORM)),
        "asked": one_rank_asks(prefix, folder),
        "empty": seen_by_one(folder),
    }
    if torch.distributed.get_rank() == 1:
        Path(folder, "1").mkdir()
        Path(folder, "1", "latest_checkpointed_iteration.txt").write_text("4")
    return found | {"one has it": seen_by_one(folder)}


@pytest.fixture(scope="module")
def pair(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return dist.run(two_ranks, 2, str(gloo_prefix), str(tmp_path_factory.mktemp("pair")), timeout=800)


# Steps that are not finite


@pytest.mark.parametrize("level", ["fp32", "O2", "O3"])
def test_a_skipped_step_names_rank_and_tensors_in_the_order_of_backward(prefix: Path, capsys: pytest.CaptureFixture[str], level: str):
    norm = "decoder.layers.0.self_attention.linear_proj.weight"
    with patched(spoil=at(3, names=(norm, FIRST))):
        rows = tiny.run(tiny.config(prefix, precision=level, train_iters=5))
    assert told(rows, "skipped") == [
        {"kind": "skipped", "iteration": 3, "tensors": {"0": [f"the gradient of {name}" for name in (FIRST, norm)]}}
    ]
    assert f"skipped iteration 3 (1 in a row, the run stops at 20); not finite: rank 0: the gradient of {FIRST}" in capsys.readouterr().out
    assert [row["skipped"] for row in told(rows, "train")] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradients_are(prefix: Path, monkeypatch: pytest.MonkeyPatch, bad: float):
    calls = itertools.count(1)

    def spoiled(loss_sum: Tensor, loss_mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_loss(loss_sum + (bad if next(calls) == 2 else 0.0), loss_mask)

    monkeypatch.setattr(step, "mean_loss", spoiled)
    rows, _ = trained(tiny.config(prefix, opt_level="O2", train_iters=4))
    (row,) = told(rows, "skipped")
    assert row["iteration"] == 2
    assert row["tensors"]["0"][0] == "the loss"
    assert [row["skipped"] for row in told(rows, "train")] == [0, 1, 1, 1]


def test_a_norm_too_large_for_its_square_is_told(prefix: Path, capsys: pytest.CaptureFixture[str]):
    def huge(training: step.Training, stream: step.Batches) -> step.StepResult:
        p = training.model.decoder.final_layernorm.weight
        handle = p.register_hook(lambda g: torch.full_like(g, 1e30))
        try:
            return step.train_step(training, stream)
        finally:
            handle.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", huge)
        tiny.run(tiny.config(prefix, precision="fp32", train_iters=1, lr_warmup_iters=0, clip_grad=0.0))
    assert "no tensor by itself, but the gradient norm is 5.6" in capsys.readouterr().out


def test_the_run_stops_after_so_many_in_a_row_and_saves_nothing(prefix: Path, tmp_path: Path):
    settings = tiny.config(prefix, opt_level="O2", max_skipped_steps=3, save=str(tmp_path), save_interval=4, train_iters=12)
    with patched(spoil=at(2, 3, 5, 6, 7)), pytest.raises(RunStopped) as stopped:
        tiny.run(settings)
    for part in ("3 steps in a row", "the last one at iteration 7", f"rank 0: the gradient of {FIRST}", "--lr", "--max-skipped-steps"):
        assert part in str(stopped.value)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    with patched(spoil=at(2, 3, 5, 6, 8, 9)):  # each row is ended by a good step
        assert len(told(tiny.run(settings), "skipped")) == 6


def test_a_run_that_stops_ends_with_1_and_one_line(prefix: Path, capsys: pytest.CaptureFixture[str]):
    flags = [*FLAGS, "--data-path", str(prefix), "--max-skipped-steps", "2", "--train-iters", "6"]
    with cpu_home(), patched(spoil=at(3, 4)):  # else this process would stay in it
        assert pretrain.main(flags) == 1
    said = capsys.readouterr().err
    assert "error: 2 steps in a row were skipped" in said
    assert "Traceback" not in said


def test_the_rank_whose_gradient_was_not_finite_is_named(pair: list[dict[str, Any]]):
    """Also where the gradient travels without a scale, and where another rank's average of it is what the optimizer sees."""
    for rank in pair:
        assert list(rank["spoiled"]) == ["bf16", "O3"]
        for rows in rank["spoiled"].values():
            assert [row["tensors"] for row in rows] == [{"1": [f"the gradient of {NORM}", f"the gradient of {FIRST}"]}]


@pytest.mark.nightly
@pytest.mark.parametrize("virtual", [None, 1])
def test_a_pipeline_names_layers_as_one_process_has_them(gloo_prefix: Path, virtual: int | None):
    """The second stage's first layer is the model's third (without interleaving), and called so."""
    name = "decoder.layers.0.mlp.linear_fc2.weight" if virtual is None else "1.decoder.layers.0.mlp.linear_fc2.weight"
    grid = {"pipeline_model_parallel_size": 2, "num_layers": 4, "global_batch_size": 8, "num_layers_per_virtual_pipeline_stage": virtual}
    for ranks in dist.run(spoiled_on_rank_1, 2, str(gloo_prefix), {"it": {"precision": "O2", **grid}}, (name,)):
        layer = 2 if virtual is None else 3
        assert [row["tensors"] for row in ranks["it"]] == [{"1": [f"the gradient of decoder.layers.{layer}.mlp.linear_fc2.weight"]}]


# Spikes


def test_a_spike_is_a_loss_above_the_mean_of_a_whole_window():
    spikes = LossSpikes(2.0, 3)
    found = [spikes.mean_before(loss) for loss in (9.0, 1.0, 1.0, 7.4, 2.0, 7.0)]
    assert found == [None, None, None, pytest.approx(11 / 3), None, pytest.approx(10.4 / 3)]
    spikes.forget()
    assert [spikes.mean_before(loss) for loss in (7.0, 17.0)] == [None, pytest.approx(16.4 / 3)]
    assert [LossSpikes(0.0, 1).mean_before(loss) for loss in (1.0, 1e9)] == [None, None]


def test_a_spike_is_told_and_nothing_else_changes(prefix: Path, capsys: pytest.CaptureFixture[str]):
    settings = tiny.config(prefix, opt_level="O2", train_iters=8, **SPIKES)
    with patched(louder(2, 6)):
        rows, weights = trained(settings)
    (row,) = told(rows, "spike")  # at iteration 2 there was no window
    losses = tiny.losses(rows)
    assert (row["iteration"], row["loss"]) == (6, pytest.approx(losses[5], rel=1e-6))
    assert row["mean"] == pytest.approx(sum(losses[2:5]) / 3, rel=1e-6)
    assert "loss spike at iteration 6: " in capsys.readouterr().out
    assert tiny.same(weights, trained(tiny.config(prefix, opt_level="O2", train_iters=8))[1])


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


def test_a_spike_is_known_before_its_checkpoint_is_written(prefix: Path, tmp_path: Path):
    with patched(Once(8)):
        rows, _ = trained(rolling(prefix, tmp_path, train_iters=10))
    assert told(rows, "rollback") == [{"kind": "rollback", "iteration": 8, "to": 4, "passed_over": 4 * BATCH}]


def test_rollbacks_to_one_checkpoint_come_to_an_end(prefix: Path, tmp_path: Path):
    with patched(louder(6)), pytest.raises(RunStopped, match=r"3 rollbacks to iteration 4 in .*--lr.*--loss-spike-threshold"):
        trained(rolling(prefix, tmp_path, train_iters=10))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_without_a_checkpoint_of_its_own_a_run_goes_on(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What another run has left in the folder is no place to go back to."""
    tiny.run(tiny.config(prefix, train_iters=2, save=str(tmp_path)))
    settings = rolling(prefix, tmp_path, train_iters=8)
    with patched(Once(4)):
        rows, _ = trained(replace(settings, checkpoint=replace(settings.checkpoint, save_interval=6)))
    assert [row["iteration"] for row in told(rows, "train")] == [*range(1, 9)]
    assert "holds no checkpoint of this run so far: nothing to roll back to" in capsys.readouterr().out


def test_at_the_end_of_the_data_the_passed_over_is_made_up_for_from_its_start(prefix: Path):
    with tiny.trainer(tiny.config(prefix, train_iters=6)) as made:
        assert made.train_data is not None
        whole = len(made.train_data) // BATCH  # type: ignore[arg-type]
        tokens = [batch["tokens"] for batch in made._batches(made.train_data, 0)]
        made.training.consumed_samples, made.training.passed_over = 2 * BATCH, (whole - 3) * BATCH
        found = [batch["tokens"] for batch in itertools.islice(made._training_batches(), 4)]
        made.training.passed_over = (whole - 1) * BATCH
        again = next(made._training_batches())["tokens"]
    assert all(torch.equal(a, b) for a, b in zip(found, [tokens[-1], *tokens[:3]], strict=True))
    assert torch.equal(again, tokens[1])


# Signals and the clock


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


def test_sigterm_saves_and_leaves_and_a_second_one_does_not_interrupt_that(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    save = checkpoint.save

    def interrupted(training: step.Training, root: Path) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return save(training, root)

    monkeypatch.setattr(trainer.checkpoint, "save", interrupted)
    with patched(signalled(signal.SIGTERM, 3)):
        rows, _ = trained(tiny.config(prefix, train_iters=9, eval_iters=1, save=str(tmp_path)))
    assert [row["iteration"] for row in told(rows, "train")] == [1, 2, 3, 4]
    assert not told(rows, "valid")
    assert saved(tmp_path) == ["iter_0000004"]
    assert "leaving after iteration 4, saved: SIGTERM" in capsys.readouterr().out


def test_sigusr1_saves_and_goes_on(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with patched(signalled(signal.SIGUSR1, 3)):
        trained(tiny.config(prefix, train_iters=6, save=str(tmp_path)))
        assert saved(tmp_path) == ["iter_0000004", "iter_0000006"]
        trained(tiny.config(prefix, train_iters=6))
    assert "SIGUSR1: nothing is saved, since there is no --save" in capsys.readouterr().out


def test_the_clock_saves_and_leaves(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(tiny.config(prefix, train_iters=6, save=str(tmp_path), exit_duration_in_mins=1e-6))
    assert saved(tmp_path) == ["iter_0000002"]
    assert "leaving after iteration 2, saved: --exit-duration-in-mins 1e-06" in capsys.readouterr().out
    trained(tiny.config(prefix, train_iters=6, exit_duration_in_mins=1e-6))
    assert "leaving after iteration 2, nothing saved, since there is no --save" in capsys.readouterr().out


def test_all_ranks_do_what_one_is_asked(pair: list[dict[str, Any]]):
    a, b = (rank["asked"] for rank in pair)
    for name, iterations in {"save": [1, 2, 3, 4, 5, 6], "leave": [1, 2, 3, 4], "roll back": [*range(1, 8), *range(5, 10)]}.items():
        assert a[name][0] == iterations
        assert tiny.same(a[name][1], b[name][1])
    assert a["saved"] == {"save": ["iter_0000004", "iter_0000006"], "leave": ["iter_0000004"]}


FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --train-iters 4 --lr 1e-3 --eval-iters 0 --split 80,15,5 --log-interval 1 --fp8-min-gain 0"
)


def waited_for(done: Callable[[], Any], seconds: float = 100.0) -> Any:
    """What `done` returns when it is first true."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def test_a_process_saves_on_sigusr1_and_leaves_with_0_on_sigterm(prefix: Path, tmp_path: Path):
    """Signals as a batch system sends them: to the whole process group, the reader of the data included."""
    folder, metrics = tmp_path / "save", tmp_path / "metrics.jsonl"
    flags = ["--data-path", str(prefix), "--train-iters", "100000", "--save", str(folder), "--metrics-file", str(metrics)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron.lm.pretrain", *FLAGS, *flags, "--num-workers", "1"],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        waited_for(lambda: (metrics.is_file() and '"train"' in metrics.read_text()) or process.poll() is not None)
        os.killpg(process.pid, signal.SIGUSR1)
        waited_for(lambda: (folder / "latest_checkpointed_iteration.txt").is_file() or process.poll() is not None)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, err
    last = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert f"leaving after iteration {last}, saved: SIGTERM" in out
    assert len(saved(folder)) == 2
    assert tiny.read(metrics)[-1]["iteration"] == last


# A run that resumes by itself


def test_a_run_whose_load_is_its_save_starts_anew_and_then_resumes(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = str(tmp_path / "run")
    settings = tiny.config(prefix, opt_level="O2", train_iters=8, exit_interval=5, save=folder, load=folder + "/")
    check(settings, 1)
    first, _ = trained(settings)
    assert f"warning: --load {folder}/ holds no checkpoint, and is the folder of --save: training starts anew" in capsys.readouterr().out
    second, weights = trained(settings)
    said = capsys.readouterr().out
    assert "resumed from" in said
    assert "warning: --load" not in said
    straight, expected = trained(tiny.config(prefix, opt_level="O2", train_iters=8))
    assert tiny.losses(first + second) == tiny.losses(straight)
    assert tiny.same(weights, expected)


@pytest.mark.parametrize("settings", [{"save": "other"}, {}, {"save": "missing", "finetune": True}], ids=str)
def test_any_other_load_must_hold_a_checkpoint(prefix: Path, tmp_path: Path, settings: dict[str, Any]):
    flags = settings | ({"save": str(tmp_path / settings["save"])} if "save" in settings else {})
    with pytest.raises(ValueError, match=r"--load .*missing is no folder"):
        check(tiny.config(prefix, load=str(tmp_path / "missing"), **flags), 1)


def test_ranks_that_see_different_folders_are_refused(pair: list[dict[str, Any]]):
    for rank in pair:
        assert rank["empty"] == "True"
        assert rank["one has it"].startswith("rank 1 sees a checkpoint in --load")
        assert "rank 0 does not: name a folder that all machines share" in rank["one has it"]
