"""`examples/trl_tuning.py` and the tool that runs it at each level: every task to its end, one row per run, none twice."""

import csv
import json
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import hosts, post_runs

hosts.need("accelerate")
hosts.need("trl")
hosts.need("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return post_runs.toy(tmp_path_factory.mktemp("toy") / "model")


def words(toy: Path, folder: Path, task: str, *more: str) -> list[str]:
    rows = [{"instruction": f"{n}+{n}=", "output": str(2 * n)} for n in range(12)]
    pairs = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": f"no {n}"} for n in range(12)]
    data = folder / f"{task}.json"
    data.write_text(json.dumps(rows if task == "sft" else pairs), encoding="utf-8")
    given = [] if task == "grpo" else ["--data", str(data)]
    return [
        task,
        "--load",
        str(toy),
        *given,
        "--steps",
        "6",
        "--batch",
        "8",
        "--valid-rows",
        "4",
        "--seq-length",
        "64",
        "--lr",
        "1e-3",
        *more,
    ]


@pytest.mark.parametrize("task", ["sft", "dpo", "grpo"])
def test_each_task_is_trained_and_judged(toy: Path, tmp_path: Path, task: str):
    tuning = post_runs.example("trl_tuning.py")
    row = tuning.tune(tuning.parse(words(toy, tmp_path, task, "--opt-level", "O3")))
    assert len(row["curve"].split()) == 6
    if task == "grpo":
        assert 0 <= row["first_reward"] <= 1
        return
    assert row["own_loss"] < row["start_loss"]
    assert row["bf16_loss"] == pytest.approx(row["fp32_loss"], rel=0.02) == pytest.approx(row["own_loss"], rel=0.1)


def test_runs_on_file_are_skipped_and_none_is_forgotten(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tools.reproduce import compare_tuning

    monkeypatch.setattr(compare_tuning, "LEVELS", (("O0", "fp32"), ("O2", "bf16")))
    monkeypatch.setattr(compare_tuning, "RATES", {"sft": ("1e-3",)})
    tuning, one, used = post_runs.example("trl_tuning.py"), threading.Lock(), []

    def process(command: list[str], env: dict[str, str], **others: object) -> subprocess.CompletedProcess[str]:
        used.append(env["CUDA_VISIBLE_DEVICES"])
        with one:  # a new process could not import torchvision (`helpers.hosts`)
            return subprocess.CompletedProcess(command, 0, json.dumps(tuning.tune(tuning.parse(command[2:]))), "")

    monkeypatch.setattr(compare_tuning, "subprocess", SimpleNamespace(run=process))
    monkeypatch.setattr(compare_tuning, "cards", lambda: ["0", "1"])
    words(toy, tmp_path, "sft")
    rows = tmp_path / "rows.csv"
    flags = [
        "--load",
        str(toy),
        "--sft",
        str(tmp_path / "sft.json"),
        "--tasks",
        "sft",
        "--seeds",
        "1",
        "--steps",
        "2",
        "--seq-length",
        "64",
    ]
    monkeypatch.setattr("sys.argv", ["x", *flags, "--csv", str(rows), "--more", "--batch 4 --valid-rows 4"])
    assert not compare_tuning.main()
    first = rows.read_text(encoding="utf-8")
    found = list(csv.DictReader(first.splitlines()))
    assert [(row["opt_level"], row["dtype"]) for row in found] in ([("O0", "fp32"), ("O2", "bf16")], [("O2", "bf16"), ("O0", "fp32")])
    assert not compare_tuning.main()
    assert rows.read_text(encoding="utf-8") == first
    assert sorted(used) == ["0", "1"]


def test_data_is_given_where_a_task_has_some(capsys: pytest.CaptureFixture[str]):
    tuning = post_runs.example("trl_tuning.py")
    for task, flags, message in (("sft", [], "sft needs --data"), ("grpo", ["--data", "x.json"], "grpo has no --data")):
        with pytest.raises(SystemExit):
            tuning.parse([task, "--load", "model", *flags])
        assert message in capsys.readouterr().err
