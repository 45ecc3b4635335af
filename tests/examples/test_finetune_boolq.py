"""examples/bert/finetune_boolq.py: from a checkpoint of the trainer on it beats the commoner answer, again alike, and refuses by name."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers import post_runs, refusals, tiny

YES, NO = 1, 2  # the passage holds one of them, three times


def rows(count: int, yes: int, seed: int) -> list[tuple[str, str, bool]]:
    """Questions of 2 tokens and passages of 4 to 9; `yes` of 8 rows are true."""
    draw, found = random.Random(seed), []
    for number in range(count):
        answer = number % 8 < yes
        passage = [draw.randrange(10, 59) for _ in range(draw.randrange(4, 10))]
        for place in draw.sample(range(len(passage)), 3):
            passage[place] = YES if answer else NO
        found.append((f"{seed} {draw.randrange(10, 59)}", " ".join(map(str, passage)), answer))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, a GPT, and a BoolQ of integers."""
    folder = tmp_path_factory.mktemp("boolq")
    corpus = tiny.write_data(folder)
    shape = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 24}
    tiny.run(tiny.config(corpus, objective="masked-lm", opt_level="O2", train_iters=5, save=str(folder / "encoder"), **shape))
    tiny.run(tiny.config(corpus, opt_level="O0", train_iters=1, lr_warmup_iters=0, save=str(folder / "gpt")))
    data = folder / "BoolQ"
    data.mkdir()
    dev, train = rows(64, 5, 3), rows(128, 4, 4)
    given = [{"question": q, "passage": p, "answer": str(a)} for q, p, a in dev]
    (data / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    given = [{"question": q, "passage": p, "label": a} for q, p, a in train] + [{"question": "5 5", "passage": "6"}]
    (data / "combined.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return folder


def flags(made: Path, **settings: Any) -> list[str]:
    given = {"load": made / "encoder", "data": made / "BoolQ", "epochs": 10, "lr": 1e-2, "dropout": 0.0, "micro_batch_size": 32} | settings
    words = []
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def run(made: Path, **settings: Any) -> int:
    return refusals.code(post_runs.example("bert/finetune_boolq.py", wants_transformers=False).main, flags(made, **settings))


@pytest.mark.parametrize("level", ["O3", *(pytest.param(level, marks=pytest.mark.nightly(20)) for level in ("O0", "O1", "O2"))])
def test_it_beats_the_commoner_answer(made: Path, tmp_path: Path, level: str, capsys: pytest.CaptureFixture[str]):
    assert run(made, opt_level=level, output=tmp_path / "a/found.json") == 0
    found = json.loads((tmp_path / "a/found.json").read_text())
    assert found["majority"] == 0.625
    assert found["accuracy"] == found["seeds"][0]["accuracy"] >= 0.8
    assert found["seeds"][0]["loss_last"] < 0.7 * found["seeds"][0]["loss_first"]
    assert (found["rows"]["train"], found["rows"]["dev"], found["rows"]["unanswered"]) == (128, 64, 1)
    assert (found["steps"], found["standard_deviation"]) == (40, None)
    told = capsys.readouterr().out
    assert f"accuracy {found['accuracy']:.4f}, majority answer 0.6250" in told


@pytest.mark.parametrize("precision", ["collage-plus", pytest.param("fp16-amp", marks=pytest.mark.nightly(20))])
def test_seeds_are_runs_of_their_own_and_come_again_alike(made: Path, tmp_path: Path, precision: str):
    short = {"precision": precision, "epochs": 1, "pooling": "first", "seq_length": 20, "dropout": 0.1, "micro_batch_size": 16}
    assert run(made, seed=[1, 2], output=tmp_path / "both.json", **short) == 0
    assert run(made, seed=[2], output=tmp_path / "one.json", **short) == 0
    both, one = (json.loads((tmp_path / name).read_text()) for name in ("both.json", "one.json"))
    assert both["seeds"][1] == one["seeds"][0]
    assert both["seeds"][0]["loss_first"] != both["seeds"][1]["loss_first"]
    accuracies = [each["accuracy"] for each in both["seeds"]]
    assert both["accuracy"] == pytest.approx(sum(accuracies) / 2)
    assert both["standard_deviation"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    assert both["precision"] == precision


def test_micro_batches_add_up_to_their_batch(made: Path, tmp_path: Path):
    losses = []
    for size in (32, 8):
        assert run(made, opt_level="O0", epochs=1, micro_batch_size=size, output=tmp_path / "found.json") == 0
        losses.append(json.loads((tmp_path / "found.json").read_text())["seeds"][0]["loss_last"])
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load": "gpt"}, "gpt contains a GPT with causal attention (--objective causal-lm)"),
        ({"load": "BoolQ"}, "holds no checkpoint"),
        ({"data": "gpt"}, "dev.jsonl does not exist: give a BoolQ file"),
        ({"seq_length": 25}, "--seq-length 25 exceeds the 24 positions of the encoder"),
        ({"precision": "O9"}, "--precision O9: choose one of"),
        ({"lr": 0}, "--lr 0.0: give a number in"),
        ({"micro_batch_size": 5}, "--global-batch-size 32 is not a multiple of --micro-batch-size 5"),
        ({"seed": [1, 1]}, "--seed 1 1 lists a seed twice"),
        ({"lr_warmup_fraction": 1}, "--lr-warmup-fraction 1 is out of range"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "BoolQ"}, "does not exist: expected a tokenizer.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(made: Path, tmp_path: Path, capsys, settings: dict[str, Any], message: str):
    settings = {name: made / value if name in ("load", "data", "tokenizer_model") else value for name, value in settings.items()}
    assert run(made, output=tmp_path / "found.json", **settings) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "found.json").exists()


def test_a_tokenizer_of_another_vocabulary_is_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizers = pytest.importorskip("tokenizers")
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    other.add_special_tokens(["<|endoftext|>"])
    other.save(str(tmp_path / "tokenizer.json"))
    assert run(made, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path) == 2
    assert "the tokenizer has a vocabulary of 4 ids, but" in capsys.readouterr().err


def test_a_passage_without_a_token_is_refused_by_its_line(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(made / "BoolQ", tmp_path / "BoolQ")
    with (tmp_path / "BoolQ/combined.jsonl").open("a") as stream:
        stream.write(json.dumps({"question": "7 7", "passage": "\u00ad", "label": True}) + "\n")
    drops = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(58)} | {"[UNK]": 58}, unk_token="[UNK]"))
    drops.normalizer = tokenizers.normalizers.Replace("\u00ad", "")
    drops.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    drops.add_special_tokens(["<|endoftext|>"])  # 60 ids, as the checkpoint has
    drops.save(str(tmp_path / "tokenizer.json"))
    assert run(made, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path, data=tmp_path / "BoolQ") == 2
    assert "in line 130 of" in capsys.readouterr().err
