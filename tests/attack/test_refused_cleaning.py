"""A refused command of clean_data leaves nothing that refuses the corrected one."""

import json
from pathlib import Path

import pytest

from megatron.lm.tools import clean_data

LINES = [json.dumps({"text": f"document {n} of some words"}) for n in range(100)]


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("bad", ["{", '{"other": "x"}', '{"text": 3}', "[1]"])
def test_the_corrected_command_runs(tmp_path: Path, bad: str, workers: str, capsys: pytest.CaptureFixture[str]):
    source, output = tmp_path / "in.jsonl", tmp_path / "new" / "folder" / "out.jsonl"
    command = ["--input", str(source), "--output", str(output), "--workers", workers, "--part-bytes", "400"]
    source.write_text("\n".join([*LINES, bad]) + "\n")
    assert clean_data.main(command) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    source.write_text("\n".join(LINES) + "\n")
    assert clean_data.main(command) == 0
    assert len(output.read_text().splitlines()) == 100
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl", "out.jsonl.counts.json"]
