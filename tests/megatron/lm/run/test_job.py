"""The command line is checked before work starts; whole runs are in tests/megatron/lm/test_pretrain.py."""

import shlex
import sys
from pathlib import Path

import pytest

from helpers import tiny
from megatron.lm.planning import fits
from megatron.lm.run import job

FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --train-iters 4 --lr 1e-3 --split 80,15,5 --fp8-min-gain 0"
)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return [*FLAGS, "--data-path", str(tiny.write_data(tmp_path))]


def test_the_memory_check_allows_attention_that_the_start_may_choose(flags: list[str], monkeypatch: pytest.MonkeyPatch):
    checked = []
    monkeypatch.setattr(fits, "check_fits", lambda config, *_, **__: checked.append(config.precision.attention_precision))
    for level in ("O3", "O0"):
        kept = job._judged([*flags, "--opt-level", level, "--attention-precision", "auto"])
        assert kept is not None
        assert kept.precision.attention_precision == "auto"
    assert checked == ["fp8", "auto"]


def test_the_groups_are_left_however_the_run_ends(flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from megatron.lm.processes import process_groups
    from megatron.lm.run import trainer

    class Fails:
        def __init__(self, config: object) -> None:
            raise ValueError("no")

    done: list[str] = []
    monkeypatch.setattr(process_groups, "initialize", lambda config: done.append("initialize"))
    monkeypatch.setattr(process_groups, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(trainer, "Trainer", Fails)
    assert job.job(flags) == 2
    assert (done, capsys.readouterr().err) == (["initialize", "shutdown"], "error: no\n")
    assert "megatron.core" in sys.modules
