"""What `msamp generate` and `msamp evaluate tasks` answer: the export, or why a model has none."""

import shutil
from pathlib import Path

import pytest

from helpers import texts, tiny
from megatron.lm.processes.cpu_home import cpu_home
from megatron.lm.tools import convert_checkpoint, evaluate, generate


@pytest.mark.parametrize(
    ("command", "library"), [((generate, []), "pipeline('text-generation'"), ((evaluate, ["tasks"]), "lm_eval --model hf")]
)
def test_the_export_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], command, library: str):
    load = texts.trained(tmp_path, precision="bf16", train_iters=1)
    tool, words = command
    assert tool.main([*words, "--load", str(load), "--prompt", "Peace"]) == 2
    error = capsys.readouterr().err
    assert f"msamp convert to-hf --load {load} --output {load}-hf; then" in error
    assert library in error
    assert error.count("\n") == 1
    with cpu_home():
        assert convert_checkpoint.main(["to-hf", "--load", str(load), "--output", f"{load}-hf"]) == 0
    assert tool.main([*words, "--load", f"{load}-hf"]) == 2
    assert f"{load}-hf is a Hugging Face folder" in capsys.readouterr().err
    shutil.rmtree(load)
    assert tool.main([*words, "--load", str(load)]) == 2, "a folder that does not exist yet"


def test_a_model_without_an_export_is_told_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prefix = tiny.write_data(tmp_path / "data")
    tiny.run(tiny.config(prefix, train_iters=1, squared_relu=True, save=str(tmp_path / "saved")))
    assert generate.main(["--load", str(tmp_path / "saved")]) == 2
    assert "--squared-relu" in capsys.readouterr().err
