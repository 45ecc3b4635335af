"""examples/bert/finetune_boolq.py: from a checkpoint of the trainer on it beats the commoner answer, again alike, and refuses by name."""

import json
import random
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
def test_it_beats_the_commoner_answer(made: Path, tmp_path: Path, level: str):
    assert run(made, opt_level=level, output=tmp_path / "a/found.json") == 0
    found = json.loads((tmp_path / "a/found.json").read_text())
    assert found["majority"] == 0.625
    assert found["accuracy"] == found["seeds"][0]["accuracy"] >= 0.8
    losses = found["seeds"][0]["losses"]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert found["rows"] == {"train": 128, "dev": 64, "unanswered": 1, "steps": 40}
    assert found["standard_deviation"] is None


def test_micro_batches_add_up_to_their_batch(made: Path, tmp_path: Path):
    losses = []
    for size in (32, 8):
        assert run(made, opt_level="O0", epochs=1, micro_batch_size=size, output=tmp_path / "found.json") == 0
        losses.append(json.loads((tmp_path / "found.json").read_text())["seeds"][0]["losses"])
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load": "gpt"}, "gpt contains a GPT with causal attention (--objective causal-lm)"),
        ({"load": "BoolQ"}, "holds no checkpoint"),
        ({"data": "gpt"}, "dev.jsonl cannot be read"),
        ({"seq_length": 25}, "--seq-length 25 exceeds the 24 positions of the encoder"),
        ({"precision": "O9"}, "--precision O9: choose one of"),
        ({"lr": 0}, "--lr 0.0: give a number in"),
        ({"micro_batch_size": 5}, "--global-batch-size 32 is not a multiple of --micro-batch-size 5"),
        ({"seed": [1, 1]}, "--seed 1 1 lists a seed twice"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(made: Path, tmp_path: Path, capsys, settings: dict[str, Any], message: str):
    settings = {name: made / value if name in ("load", "data", "tokenizer_model") else value for name, value in settings.items()}
    assert run(made, output=tmp_path / "found.json", **settings) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "found.json").exists()
