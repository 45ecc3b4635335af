"""Blends, also of a file, splits, and FP8-LM's Table 10 as an example of one."""

import json
import shlex
from pathlib import Path

import pytest
from megatron.core.datasets.utils import get_blend_from_list

from megatron.lm.config.blend_file import describe, parse_blend, parse_split, read_blend, read_blend_per_split
from megatron.lm.config.cli import parse_args, to_argv

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def files() -> None:
    """Unlike its neighbours this file writes into its folder."""


PER_SPLIT = "--per-split-data-args-path"
TABLE_10 = ROOT / "examples" / "data" / "fp8_lm_table_10.txt"
REQUIRED = shlex.split(
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 2 --lr 1e-3"
)


def test_the_paper_s_blend_adds_up_to_more_than_100_and_is_normalised():
    words = read_blend(str(TABLE_10))
    blend = parse_blend(words)
    assert len(blend.prefixes) == 13
    assert blend.weights is not None
    assert sum(blend.weights) == pytest.approx(101.41)
    line = describe(words)
    assert line is not None
    assert line.startswith("data: data/commoncrawl_text_document 50.99 %, data/c4_text_document 25.20 %, ")
    assert line.endswith("; the weights sum to 101.41 and are normalized")


def test_the_trainer_takes_it_as_data_path(tmp_path: Path):
    (tmp_path / "blend").write_text("3 a\n1 b\n")
    config = parse_args([*REQUIRED, "--data-args-path", str(tmp_path / "blend")])
    assert config.data.data_path == ("3", "a", "1", "b")
    assert parse_args(to_argv(config)) == config, "a checkpoint remembers the blend, not the file"


@pytest.mark.parametrize(
    ("content", "train", "valid", "test"),
    [
        ({"train": [30, "a", 0.7, "b"], "valid": ["c"], "test": ["d", "e"]}, ("30", "a", "0.7", "b"), ("c",), ("d", "e")),
        ({"train": "1 a 2 b", "valid": "c", "test": None}, ("1", "a", "2", "b"), ("c",), ()),
        ({"train": ["a"], "valid": []}, ("a",), (), ()),
    ],
)
def test_the_trainer_takes_a_blend_for_each_split(
    tmp_path: Path, content: object, train: tuple[str, ...], valid: tuple[str, ...], test: tuple[str, ...]
):
    (tmp_path / "blends").write_text(json.dumps(content))
    config = parse_args([*REQUIRED, "--per-split-data-args-path", str(tmp_path / "blends")])
    assert (config.data.train_data_path, config.data.valid_data_path, config.data.test_data_path) == (train, valid, test)
    assert parse_args(to_argv(config)) == config, "a checkpoint remembers the blends, not the file"


def test_a_blend_is_megatron_cores(tmp_path: Path):
    (tmp_path / "blends").write_text('{"train": [30, "a", 0.7, "b"], "valid": "c d"}')
    words = read_blend_per_split(str(tmp_path / "blends"))
    blends = [parse_blend(words[split]) for split in ("train", "valid")]
    assert [(blend.prefixes, blend.weights) for blend in blends] == [
        tuple(None if part is None else list(part) for part in get_blend_from_list(list(words[split]))) for split in ("train", "valid")
    ]


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, ["--data-args-path"], "cannot be read"),
        ("# none\n", ["--data-args-path"], "--data-args-path"),
        ("1 a\n", ["--data-path", "b", "--data-args-path"], "--data-path and --data-args-path"),
        (None, [PER_SPLIT], "cannot be read"),
        ("[]", [PER_SPLIT], PER_SPLIT),
        ('{"train": ["a"], "validation": ["b"]}', [PER_SPLIT], "'validation'"),
        ('{"valid": ["a"]}', [PER_SPLIT], "no training data"),
        ('{"train": ["a", true]}', [PER_SPLIT], "'train'"),
        ('{"train": ["a"]}', ["--valid-data-path", "b", PER_SPLIT], "--valid-data-path and --per-split-data-args-path"),
        ('{"train": ["a"]}', ["--data-args-path", "b", PER_SPLIT], "--data-args-path and --per-split-data-args-path"),
    ],
)
def test_what_is_no_blend_is_refused(tmp_path: Path, capsys, content: str | None, words: list[str], message: str):
    if content is not None:
        (tmp_path / "blends").write_text(content)
    with pytest.raises(SystemExit) as ended:
        parse_args([*REQUIRED, *words, str(tmp_path / "blends")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["1", "a", "b"], ["a", "1"], ["1", "a", "2"], ["0", "a", "1", "b"], ["-1", "a"], ["nan", "a"]])
def test_bad_blends(words):
    with pytest.raises(ValueError, match="--data-path"):
        parse_blend(words)


def test_splits():
    assert parse_split("969,30,1") == pytest.approx([0.969, 0.03, 0.001])
    assert parse_split("8, 2") == [0.8, 0.2, 0.0]
    for bad in ("", "a,b", "1,-1", "0,0,0", "1,1,1,1", "nan,1"):
        with pytest.raises(ValueError, match="969,30,1"):
            parse_split(bad)
