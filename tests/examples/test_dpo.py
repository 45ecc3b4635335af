"""examples/rlhf/dpo.py: margins rise at O0 and O3, it goes on bit for bit, and bad input is one line."""

import json
import math

import pytest

from helpers import post_runs
from megatron.lm.post import saved


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    post_runs.toy(folder / "toy")
    rows = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"perhaps {n}?"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(made, save, **settings):
    given = {"load": made / "toy", "data": made / "pairs.jsonl", "save": save, "dtype": "bf16", "lr": 1e-3, "train_iters": 8,
             "seq_length": 64, "global_batch_size": 4, "log_interval": 4} | settings  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return post_runs.example("rlhf/dpo.py").main(words)


@pytest.mark.parametrize("level", ["O0", pytest.param("O2", marks=pytest.mark.nightly(3)), "O3"])
def test_it_begins_at_log_two_and_learns_to_prefer(made, tmp_path, level, capsys):
    from transformers import AutoModelForCausalLM

    assert run(made, tmp_path / "run", opt_level=level, rows=tmp_path / "rows.csv") == 0
    found = post_runs.metrics(tmp_path / "run")
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # policy and reference compute the same at first, in FP8 too
    assert found[-1]["loss"] < 0.6 * found[0]["loss"]
    assert found[-1]["accuracy"] == 1
    assert "reference_weight" in capsys.readouterr().out
    header, row = (line.split(",") for line in (tmp_path / "rows.csv").read_text().splitlines())
    cells = dict(zip(header, row, strict=True))
    share = float(cells["reference_weight_mib"]) * 2**20 / int(cells["parameters"])
    assert share == pytest.approx(2, rel=1e-3) if level == "O0" else 1.0 < share < 1.3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")


def test_held_out_pairs_are_judged_and_not_trained_on(made, tmp_path):
    assert run(made, tmp_path / "run", opt_level="O2", valid_rows=2) == 0
    found = post_runs.metrics(tmp_path / "run")
    assert found[-1]["valid_loss"] < math.log(2)
    assert found[-1]["valid_accuracy"] == 1
    assert "valid_loss" not in found[-2]
    lines = (made / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "others.jsonl").write_text("".join([*lines[:10], *(line.replace("perhaps", "maybe") for line in lines[10:])]))
    assert run(made, tmp_path / "other", opt_level="O2", valid_rows=2, data=tmp_path / "others.jsonl") == 0
    other = post_runs.metrics(tmp_path / "other")
    assert [row["loss"] for row in other] == [row["loss"] for row in found]
    assert other[-1]["valid_loss"] != found[-1]["valid_loss"]


def test_it_goes_on_bit_for_bit(made, tmp_path):
    assert run(made, tmp_path / "run", opt_level="O3", save_interval=4) == 0
    whole, found = (tmp_path / "run/model/model.safetensors").read_bytes(), post_runs.metrics(tmp_path / "run")
    saved.checkpoints(tmp_path / "run")[-1].unlink()
    (tmp_path / "run/model").rename(tmp_path / "before")
    assert run(made, tmp_path / "run", opt_level="O3", save_interval=4) == 0
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == whole
    assert post_runs.metrics(tmp_path / "run") == found


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([], {}, "has no rows"),
        ([{"prompt": "a", "chosen": "b"}], {}, "row 1 of .* a preference must have chosen, rejected"),
        ([{"prompt": "a" * 80, "chosen": "b", "rejected": "c"}], {}, "row 1 of .*--seq-length is 64: give --seq-length"),
        ([{"prompt": "a" * 80, "chosen": "b", "rejected": "c"}], {"long_rows": "cut"}, "alone fills --seq-length 64"),
        ([{"prompt": "a" * 80, "chosen": "b", "rejected": "c"}], {"long_rows": "drop"}, "no pair of .* fits --seq-length 64"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {"beta": 0}, "--beta 0.0 is out of range"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {"valid_rows": 1}, "--valid-rows 1 of 1 rows leaves no training data"),
    ],
)
def test_bad_input_is_one_line_and_code_2(made, tmp_path, capsys, rows, settings, said):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    post_runs.assert_refused(lambda: run(made, tmp_path / "run", data=file, **settings), tmp_path / "run", capsys, said)
