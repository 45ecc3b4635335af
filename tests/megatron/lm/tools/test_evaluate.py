"""The commands on tiny models, and what they refuse."""

import json
from pathlib import Path

import pytest

from helpers import refusals, texts
from megatron.lm.tools import convert_checkpoint, evaluate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `bf16` and `O3`, the latter's export `fp8`, and a text."""
    folder = tmp_path_factory.mktemp("tool")
    for level in ("bf16", "O3"):
        texts.trained(folder, precision=level, train_iters=4)
    assert convert_checkpoint.main(["export-fp8", "--load", str(folder / "O3"), "--output", str(folder / "fp8")]) == 0
    (folder / "held.txt").write_text(f"{texts.SPEECH}\n<|endoftext|>\nPeace.\n")
    (folder / "held.jsonl").write_text(json.dumps({"body": texts.SPEECH}) + "\n" + json.dumps({"body": "Peace."}) + "\n")
    return folder


def run(capsys, *words: object) -> tuple[int, str, str]:
    return refusals.code(evaluate.main, [str(word) for word in words]), *capsys.readouterr()


def test_several_models_stand_beside_each_other(made: Path, tmp_path: Path, capsys):
    loads = [made / name for name in ("bf16", "O3", "fp8")]
    code, out, err = run(capsys, *loads, "--text", made / "held.txt", "--output", tmp_path / "new" / "results.json")
    assert code == 0, err
    saved = json.loads((tmp_path / "new" / "results.json").read_text())
    assert list(saved) == [str(load) for load in loads]
    told = [entry["results"]["text"] for entry in saved.values()]
    assert {(row["bytes"], row["documents"], row["window"], row["stride"]) for row in told} == {(len(texts.SPEECH.encode()) + 6, 2, 32, 16)}
    bits = [row["bits_per_byte"] for row in told]
    assert bits[1] == pytest.approx(bits[2], rel=0.01), "the export has the same FP8 weights"
    assert [entry["about"]["precision"] for entry in saved.values()] == ["bf16", "O3", "fp8 export"]
    header, _, *rows = out.splitlines()
    assert header == "| task | metric | " + " | ".join(map(str, loads)) + " |"
    assert f"| text | bits_per_byte | {bits[0]:.4f} | {bits[1]:.4f} | {bits[2]:.4f} |" in rows


def test_a_later_model_that_fails_costs_no_result(made: Path, tmp_path: Path, capsys):
    output = tmp_path / "results.json"
    code, _, err = run(capsys, made / "O3", made / "none", "--text", made / "held.txt", "--output", output)
    row = json.loads(output.read_text())[str(made / "O3")]["results"]["text"]
    assert (code, f"bits_per_byte {row['bits_per_byte']}, " in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "none.txt"], "--text none.txt"),
        (["--text", __file__], "is not a .txt, .jsonl or .json file"),
        (["--text", "{made}/held.txt", "--stride", "33"], "stride 33 must be between 1 and the window, 32 tokens"),
        (["--text", "{made}/held.txt", "--window", "64"], "window 64 must be between 1 and 32"),
        (["--text", "{made}/held.jsonl"], "no key 'text'; it has 'body'"),
        (["{made}/none", "--text", "{made}/held.txt"], "none does not exist: give a checkpoint folder"),
        (["{made}/O3", "{made}/O3", "--text", "{made}/held.txt"], "a model is listed twice"),
        (["--text", "{made}/held.txt", "--stride", "0"], "0 is out of range"),
        (["--text", "{made}/held.txt", "--output", "{made}"], "is a folder: give a file in it"),
        ([], "the following arguments are required: --text ("),
    ],
)
def test_bad_input_is_one_line(made: Path, capsys, words: list[str], message: str):
    words = [word.format(made=made) for word in words]
    code, out, err = run(capsys, *([] if words[:1] and Path(words[0]).parent == made else [made / "O3"]), *words)
    assert (code, out) == (2, "")
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert message in told[0]


# Passages by the rule, from text whose passages are known.
