"""Every documented `python tools/NAME.py` starts the tool that the wheel has."""

import subprocess
import sys

from helpers.starters import ROOT, is_starter, missing_starters


def test_every_tool_of_users_has_a_starter_of_two_lines():
    assert missing_starters(ROOT / "megatron/lm/tools") == []


def test_what_is_no_starter(tmp_path):
    assert is_starter("tools/report.py")
    assert not is_starter("tools/soak.py")
    assert not is_starter("megatron/lm/tools/report.py")
    (tmp_path / "soak.py").write_text("\ndef main(): ...\n")
    (tmp_path / "none_such.py").write_text("\ndef main(): ...\n")
    (tmp_path / "files.py").write_text("\ndef read_text(): ...\n")
    assert [complaint.split()[0] for complaint in missing_starters(tmp_path)] == ["none_such", "soak"]


def test_a_starter_ends_as_its_tool_does(tmp_path):
    line = [sys.executable, str(ROOT / "tools/inspect_scales.py"), str(tmp_path / "none.jsonl")]
    done = subprocess.run(line, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / 'none.jsonl'} does not exist")
    assert done.stderr.count("\n") == 1
