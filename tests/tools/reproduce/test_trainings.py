"""Small trainings: the bytes of a text as the trainer reads them, and Collage's loop."""

import pytest
import torch

from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from tools.reproduce import trainings
from tools.reproduce.coat_flow import Flow, Llama
from tools.reproduce.trainings import FP32, Loop, byte_data, byte_symbols, collage, pieces

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


def test_another_model_trains_in_the_same_loop():
    text = torch.frombuffer(bytearray(TEXT.encode()), dtype=torch.uint8)
    loop = Loop(width=32, layers=1, length=8, batch=4, steps=10, warm_up=2)
    (row,) = collage("plus", 0.99, loop, text, seed=1, build=lambda loop: Llama(loop, Flow()))
    assert 0 < row["valid_loss"] < 6
    assert row["edq"] == pytest.approx(row["update_norm"], rel=1e-2)


def test_pieces_are_random_and_reach_the_ends():
    text, loop = torch.arange(12, dtype=torch.uint8), Loop(width=32, layers=1, length=3, batch=64, steps=1)
    (found,) = pieces(text, loop, 1, 0)
    assert found.shape == (64, 4)
    assert (found[:, 1:] == found[:, :-1] + 1).all()
    assert (int(found.min()), int(found.max())) == (0, 10)  # the starts leave the last byte out


@pytest.mark.parametrize(("seen", "card"), [(["3", "5"], "3"), ([""], "")], ids=["two GPUs", "none"])
def test_a_training_takes_the_first_gpu_that_is_there(seen, card, tmp_path, monkeypatch):
    took = []
    monkeypatch.setattr(trainings, "cards", lambda: seen)
    monkeypatch.setattr(trainings, "train", lambda job, options, card: took.append(card))
    with pytest.raises(FileNotFoundError):  # nothing has trained, and there is no log
        trainings.trained("bf16", 1, 4, "", tmp_path, tmp_path)
    assert took == [card]
