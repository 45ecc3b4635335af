"""The records: the best rows of each model and card, each with a command that its tool takes."""

import argparse
import re
import shlex

import pytest

from tools.bench import bench_grid, bench_step
from tools.docs import records
from tools.docs.evidence import ROOT

CELLS = records.records().cells


def test_fastest_and_leanest_are_the_best_of_the_rows():
    rows = list(records.measured())
    assert len(CELLS) >= 15
    for name, cards, what, speed, gib, commit, _, _ in CELLS:
        alike = [
            row
            for _, row in rows
            if records.model(row) == name.removesuffix(" †")
            and "{} x {}".format(*records.cards(row)) == cards
            and (row["case"].split()[0] == "O0") == what.endswith("BF16")
        ]
        assert commit in {row["commit"] for row in alike}
        if what.startswith("fastest"):
            assert int(speed.replace(",", "")) == max(int(row["tokens_s_gpu"]) for row in alike)
        else:
            assert float(gib) == round(min(map(records.peak, alike)), 1)


@pytest.mark.parametrize("command", sorted({line[-1].strip("`") for line in CELLS}))
def test_each_command_is_one_that_its_tool_takes(command, monkeypatch):
    words = shlex.split(command)
    tool = next(tool for tool in (bench_grid, bench_step) if f"tools/bench/{tool.__name__.rpartition('.')[2]}.py" in words)
    flags = words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]
    taken = {}

    class Parsed(Exception):
        pass

    def parse(self, args=None, namespace=None):
        found, rest = self.parse_known_args(args, namespace)
        taken.update(vars(found), rest=rest)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed):
        tool.main.__wrapped__(flags)
    assert taken["rest"] == []
    assert taken["preset"] in ("1.3b", "7b", "13b", "llama2-7b", "llama3-8b")


def test_layers_of_a_model_and_other_models_have_no_record():
    assert records.model({"preset": "llama3-8b --num-layers 8 --seq-length 8192 --vocab-size 128256"}) is None
    assert records.model({"preset": "llama3-8b --seq-length 8192 --fp8-min-gain 0 --vocab-size 128256"}) == "Llama-3-8B, sequence 8,192"


def test_the_page_describes_every_column_of_a_row():
    page = (ROOT / "docs/results/records.md").read_text(encoding="utf-8").partition("### A row")[2]
    named = [name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert named == list(records.pick(records.STEP)[0])


def test_the_lowest_loss_is_that_of_the_rows_with_several_seeds():
    cells = records.losses().cells
    rows = [row for row in records.pick(records.PRECISIONS) if int(row["seeds"]) > 1 and row["precision"] != "bf16"]
    assert [line[2] for line in cells][:2] == ["lowest", "BF16"]
    for line in cells:
        if line[2] == "lowest":
            assert line[4] in {row["valid_loss"] for row in rows}
            assert float(line[4]) == min(float(row["valid_loss"]) for row in rows if records.cards(row | {"gpus": "1"})[1] in line[1])
