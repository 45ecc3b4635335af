"""Two cases of a tiny model in turn on the CPU, the table by hand, and what is refused."""

import csv
from pathlib import Path

import pytest

from tools.bench import rows, side_by_side
from tools.bench.side_by_side import measure, table

ROOT = Path(__file__).resolve().parents[3]
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --fp8-min-gain 0"


def other_tree(folder: Path) -> Path:
    """A tree whose program answers with the same times always."""
    for name, text in {"tools/bench/side_by_side.py": OTHER_TREE, "megatron/lm/step.py": ""}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("ours", [False, pytest.param(True, marks=pytest.mark.nightly(10))], ids=["another tree", "this tree twice"])
def test_two_trees_take_turns(tmp_path, capfd, ours):
    file, before = tmp_path / "rows.csv", ROOT if ours else other_tree(tmp_path / "tree")
    words = ["--tree", f"before={before}", "--cases", "before bf16", "now O2 --adam-beta2 0.999", "--preset", "125m", f"--flags={TINY}"]
    words += ["--micro-batch-size", "1", "--vocab-size", "64", "--warm-up", "1", "--rounds", "2", "--steps", "2", "--csv", str(file)]
    assert side_by_side.main([*words, "--commit", "abc"]) == 0
    assert "now O2 --adam-beta2 0.999: eager steps, 0.0 GiB" in capfd.readouterr().out
    with file.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert [(row["quantity"], row["case"].split()[0]) for row in found] == [
        (quantity, tree) for quantity in ("step", "update") for tree in ("before", "now")
    ]
    step, other, update, other_update = found
    assert 0 < float(update["ms"]) < float(step["ms"])
    assert 0 < float(other_update["ms"]) < float(other["ms"])
    assert (step["from_first"], step["commit"], step["rounds"]) == ("+0.00", "abc", "2")
    assert float(other["from_first"]) > -100


def test_the_table_by_hand():
    rounds = [
        {"now a": {"step": [10.0, 10.0, 30.0], "update": [1.0, 1.0, 1.0]}, "now b": {"step": [11.0, 11.0, 11.0], "update": [2.0] * 3}},
        {"now a": {"step": [20.0, 20.0, 20.0], "update": [1.0, 1.0, 1.0]}, "now b": {"step": [20.0, 21.0, 90.0], "update": [1.0] * 3}},
        {"now a": {"step": [20.0, 20.0, 20.0], "update": [1.0, 1.0, 1.0]}, "now b": {"step": [19.0, 19.0, 19.0], "update": [1.0] * 3}},
    ]
    found = list(table(rounds))
    assert [(row["case"], row["quantity"], row["ms"]) for row in found] == [
        ("now a", "step", 20.0), ("now b", "step", 19.0), ("now a", "update", 1.0), ("now b", "update", 1.0)
    ]  # fmt: skip
    percent = [(row["from_first"], row["least"], row["most"]) for row in found]
    assert percent[:2] == [("+0.00", "+0.00", "+0.00"), ("+5.00", "-5.00", "+10.00")]
    assert percent[3] == ("+0.00", "+0.00", "+100.00")


def test_every_round_begins_with_another_case():
    order = []

    class Pretended:
        def __init__(self, case):
            self.case = case

        def steps(self, number):
            order.append((self.case, number))
            return {}

    found = measure([Pretended(case) for case in "abc"], 4, 5)
    assert "".join(case for case, _ in order) == "abcbcacababc"
    assert {number for _, number in order} == {5}
    assert [list(times) for times in found] == [list("abc")] * 4


OTHER_TREE = """
import json, sys
assert sys.argv[sys.argv.index("--serve") + 1] in ("O2", "bf16")
sys.stdin.readline()
print(json.dumps({"captured": False, "gib": 1.5, "trainer": __file__}), flush=True)
for line in sys.stdin:
    print(json.dumps({"step": [2.0] * int(line), "update": [1.0] * int(line)}), flush=True)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cases", "before O2"], "before O2"),
        (["--cases", "now O2", "now O2"], "twice"),
        (["--tree", "before=/nowhere", "--cases", "now O2"], "/nowhere"),
    ],
)
def test_refusals(words, message, capsys):
    try:
        code = side_by_side.main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (rows.ROOT / "tools/bench/results/side_by_side.csv").exists()


@pytest.mark.gpu
def test_a_gpu_replays_graphs_and_times_the_update_by_events(tmp_path, capfd):
    file = tmp_path / "rows.csv"
    words = ["--cases", "now O2", "now O3", "--preset", "125m", f"--flags={TINY.replace('16', '64')}", "--micro-batch-size", "1"]
    words += ["--rounds", "2", "--steps", "2", "--csv", str(file), "--commit", "abc"]
    assert side_by_side.main(words) == 0
    assert capfd.readouterr().out.count("replayed graphs") == 2
    with file.open(newline="") as stream:
        found = {(row["case"], row["quantity"]): float(row["ms"]) for row in csv.DictReader(stream)}
    assert all(0 < found[case, "update"] < found[case, "step"] for case in ("now O2", "now O3"))
