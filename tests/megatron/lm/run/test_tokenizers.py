"""Each tokenizer from text to text through the commands: preprocess, train, evaluate, save, resume bit for bit, bits per byte."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from helpers.texts import SPEECH
from helpers.tokenizer_files import llama3, sentence_pieces, token_list
from megatron.lm.processes import process_groups
from megatron.lm.tools import evaluate, preprocess_data

FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 "
    "--lr 5e-3 --eval-iters 1 --eval-interval 3 --log-interval 1 --precision fp32 --split 8,1,1"
)
TIK = "--vocab-size 336 --tiktoken-num-special-tokens 20 --tiktoken-pattern v1"
KINDS = {
    "SentencePieceTokenizer": (sentence_pieces, "", 360),
    "SentencePieceTokenizer legacy": (sentence_pieces, "--legacy-tokenizer", 365),
    "Llama2Tokenizer legacy": (sentence_pieces, "--legacy-tokenizer", 360),
    "Llama3Tokenizer": (llama3, "", 572),
    "TikTokenizer": (token_list, TIK, 336),
}

EACH_FORM = ("SentencePieceTokenizer legacy", "TikTokenizer")


pytestmark = pytest.mark.usefixtures("alone")


def train(folder: Path, *flags: str) -> list[dict[str, Any]]:
    return tiny.command(folder, *FLAGS, *flags)


@pytest.mark.promise("Data", "Datasets of SentencePiece, Llama 2, Llama 3 and TikToken tokenizers are made, trained on and evaluated.")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in EACH_FORM else [pytest.mark.nightly(10)]) for name in KINDS])
def test_from_text_to_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write, extra, size = KINDS[name]
    kind = ["--tokenizer-type", name.split()[0], "--tokenizer-model", str(write(tmp_path)), *extra.split()]
    text = tmp_path / "speech.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} {SPEECH}"}) + "\n" for i in range(20)))
    assert (
        preprocess_data.main(["--input", str(text), "--output-prefix", str(tmp_path / "speech"), "--append-eod", "--workers", "0", *kind])
        == 0
    )
    prefix = tmp_path / "speech_text_document"
    assert json.loads(Path(f"{prefix}.json").read_text())["vocab_size"] == size
    saved = tmp_path / "saved"
    data = [*kind, "--data-path", str(prefix)]
    whole = train(tmp_path, *data)
    first = train(tmp_path, *data, "--save", str(saved), "--exit-interval", "2")
    second = train(tmp_path, *data, "--save", str(saved), "--load", str(saved))
    assert tiny.losses(first) + tiny.losses(second) == tiny.losses(whole)
    assert tiny.losses(whole)[-1] < tiny.losses(whole)[0] - 0.1
    assert next(row for row in whole if row["kind"] == "valid")["bits_per_byte"] > 0
    (tmp_path / "held.txt").write_text(SPEECH[:200])
    capsys.readouterr()
    assert evaluate.main([str(saved), "--text", str(tmp_path / "held.txt")]) == 0
    assert "| text | bits_per_byte |" in capsys.readouterr().out
    process_groups.shutdown()
