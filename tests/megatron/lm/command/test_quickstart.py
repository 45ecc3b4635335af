"""The quick start around its two trainings: their flags, the verdict, and that nothing is deleted or left running by mistake."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron.lm.command import quickstart
from megatron.lm.config import cli
from megatron.lm.config.rules import check
from megatron.lm.tools.report import Run


@pytest.fixture
def options(tmp_path):
    return quickstart.Options(iters=40, processes=2, out=tmp_path / "out", data=tmp_path / "data")


def with_loss(name, *losses):
    return Run(name=name, train=[], valid=[{"iteration": 1, "loss": loss} for loss in losses])


def metrics(loss):
    train = {"kind": "train", "iteration": 40, "loss": loss, "skipped": 0, "tokens_per_s": 1.0, "memory_gib": 1.0}
    valid = {"kind": "valid", "iteration": 40, "loss": loss, "ppl": 1.0, "bits_per_byte": 1.5}
    return json.dumps(train) + "\n" + json.dumps(valid) + "\n"


def test_trainer_accepts_the_flags_and_the_levels_differ_in_nothing_else(options):
    options.data.mkdir()
    for name in ("train_text_document.bin", "train_text_document.idx", "valid_text_document.bin", "valid_text_document.idx"):
        (options.data / name).write_bytes(b"x")
    (options.data / "tokenizer.json").write_text("{}")
    configs = [cli.parse_args(quickstart.training_flags(level, options)) for level in quickstart.LEVELS]
    for config in configs:
        check.check(config, world_size=options.processes)
    assert [config.precision.name for config in configs] == ["bf16", "O2"]
    assert [c.model for c in configs[1:]] == [configs[0].model]
    assert [(c.optimizer, c.training) for c in configs[1:]] == [(configs[0].optimizer, configs[0].training)]
    assert configs[0].training.train_iters % configs[0].training.eval_interval == 0
    assert [config.logging.record_precision is not None for config in configs] == [False, True]
    assert configs[1].logging.record_interval == 4


def test_impossible_options_are_refused_before_anything_happens(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quickstart, "run", lambda *a, **k: pytest.fail("nothing should run"))
    assert quickstart.main(["--processes", "3", "--out", str(tmp_path / "out")]) == 2
    assert "--processes 3 must divide" in capsys.readouterr().err
    find = quickstart.importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(quickstart.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
        assert quickstart.main(["--out", str(tmp_path / "out")]) == 2
    assert "requires matplotlib" in capsys.readouterr().err
    for flags in (["--iters", "0"], ["--processes", "100000"], ["--data", ""]):
        with pytest.raises(SystemExit):
            quickstart.main([*flags, "--out", str(tmp_path / "out")])
        assert f"argument {flags[0]}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / quickstart.LEVELS[1]).mkdir()
    (tmp_path / quickstart.LEVELS[1] / "thesis.tex").write_text("x")
    assert quickstart.main(["--out", str(tmp_path)]) == 2
    assert "choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "other", "problems"),
    [
        ((5.0,), (5.04,), []),
        ((5.0,), (4.96,), []),
        ((5.0,), (5.06,), ["the losses of O2 and of O0 differ by more than 1 %"]),
        ((5.0,), (float("nan"),), ["the losses of O2 and of O0 differ", "the loss of O2 is not 10 %"]),
        ((6.0,), (6.0,), ["the loss of O0 is not 10 %", "the loss of O2 is not 10 %"]),
        ((6.0, 5.0), (6.0, 5.0), []),
        ((), (5.0,), ["O0 was never evaluated"]),
    ],
)
def test_verdict(base, other, problems):
    found = quickstart.verdict(with_loss("O0", *base), with_loss("O2", *other), entropy=6.6)
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True))


def test_only_its_own_folders_are_emptied(tmp_path):
    mine, foreign = tmp_path / "mine", tmp_path / "foreign"
    quickstart.fresh(mine)
    (mine / quickstart.MARKER).write_text("x")
    (mine / "old").write_text("x")
    quickstart.fresh(mine)
    assert list(mine.iterdir()) == []
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="choose another --out"):
        quickstart.fresh(foreign)
    with pytest.raises(ValueError, match="is a file"):
        quickstart.fresh(foreign / "thesis.tex")
    assert (foreign / "thesis.tex").read_text() == "x"


SLEEPER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1] + ".part").write_text(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def test_an_interruption_ends_the_command(tmp_path):
    pids = tmp_path / "pids"

    def interrupt():
        while not pids.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            quickstart.run([sys.executable, "-c", SLEEPER, str(pids)], 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


@pytest.mark.parametrize(("loss", "code"), [(5.01, 0), (5.5, 1)])
def test_the_whole_course(monkeypatch, tmp_path, capsys, loss, code):
    """With the commands replaced by what they leave behind."""
    out, data = tmp_path / "out", tmp_path / "data"

    def fake_run(command, threads):
        line = " ".join(command)
        if "prepare_text" in line:
            data.mkdir(exist_ok=True)
            (data / "meta.json").write_text('{"unigram_entropy_nats": 6.6}')
        elif "pretrain" in line:
            level = command[command.index("--opt-level") + 1]
            Path(command[command.index("--metrics-file") + 1]).write_text(metrics(5.0 if level == "O0" else loss))

    monkeypatch.setattr(quickstart, "run", fake_run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        arguments = ["--iters", "40", "--processes", "2", "--out", str(out), "--data", str(data)]
        assert quickstart.main(arguments) == code
        assert quickstart.main(arguments) == code, "a second run replaces the first"
    finally:
        signal.signal(signal.SIGTERM, before)
    summary = (out / "summary.txt").read_text()
    assert summary.startswith(f"validation loss: O0 5.0000, O2 {loss:.4f}\n")
    assert ("FAILED" in summary) == bool(code)
    assert summary.endswith("PASS\n") != bool(code)
    assert ('class="pass">PASS<' in (out / "report.html").read_text()) != bool(code)
    assert "--opt-level O2" in (out / "O2/command.txt").read_text()
    assert str(out / "report.html") in capsys.readouterr().out
