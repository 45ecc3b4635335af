"""From checkpoint to text: a tiny one of each kind, on the command line."""

import json
import re
from pathlib import Path

import pytest
import torch

from helpers import checkpoints, tiny
from megatron.lm.checkpoint import load_for_inference
from megatron.lm.evaluation.generation import Sampling
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home
from megatron.lm.tools import generate


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of an O3 run on tokens 0 to 58, 59 being the end of a document."""
    folder = tmp_path_factory.mktemp("run")
    return checkpoints.saved(tiny.write_data(folder), folder / "checkpoint", opt_level="O3", train_iters=20)


@pytest.fixture(autouse=True)
def home():
    with cpu_home():
        yield


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = generate.main([str(word) for word in words])
    return code, *capsys.readouterr()


def greedy(folder: Path, prompt: list[int], n: int) -> list[int]:
    """The likeliest tokens by the model's own forward, everything computed anew for each."""
    model, config, _ = load_for_inference(folder)
    try:
        tokens = list(prompt)
        for _ in range(n):
            x = torch.tensor([tokens[-config.model.seq_length :]], device=process_groups.device())
            with torch.no_grad():
                logits = model(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0), None)[0, -1, : tiny.VOCABULARY]
            tokens.append(int(logits.argmax()))
        return tokens
    finally:
        process_groups.shutdown()


def test_one_prompt_gives_text_and_the_speed_is_told(trained: Path, capsys):
    code, out, err = run(capsys, "--load", trained, "--prompt", "3 4 5", "--tokens", 8, "--temperature", 0)
    assert code == 0
    assert out == " ".join(map(str, greedy(trained, [3, 4, 5], 8))) + "\n"
    assert re.search(r"^3 tokens of 1 prompts in .*, 8 tokens generated in .* s \([\d.]+ tokens/s\)$", err, re.MULTILINE)
    assert not torch.distributed.is_initialized()


def test_several_prompts_give_lines_of_json_each_as_alone(trained: Path, tmp_path: Path, capsys):
    prompts = ["3 4 5", "7", "1 2 3 4 5 6 7 8"]
    (tmp_path / "prompts").write_text("\n".join(prompts) + "\n\n")
    common = ["--load", trained, "--tokens", 12, "--seed", 4]
    code, out, err = run(capsys, *common, "--prompt-file", tmp_path / "prompts", "--batch-size", 2)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["prompt"] for row in rows] == prompts
    assert err.count("tokens generated") == 2
    _, again, _ = run(capsys, *common, *(word for prompt in prompts for word in ("--prompt", prompt)))
    assert [json.loads(line) for line in again.splitlines()] == rows
    for i, row in enumerate(rows):
        _, alone, _ = run(capsys, *common[:-1], 4 + i, "--prompt", prompts[i])
        assert alone == row["prompt"] + row["continuation"] + "\n"


def test_without_a_prompt_a_document_begins(trained: Path, capsys):
    code, out, _ = run(capsys, "--load", trained, "--tokens", 3, "--temperature", 0)
    assert code == 0
    found = greedy(trained, [59], 3)[1:]
    assert out.split() == [str(token) for token in (found[: found.index(59)] if 59 in found else found)]


def test_nothing_appended_is_the_prompt(trained: Path, capsys):
    assert run(capsys, "--load", trained, "--prompt", "3 4", "--tokens", 0)[1] == "3 4\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load", "nowhere"], "nowhere"),
        (["--prompt", "1 " * 17], "prompt 1 has 17 tokens, but the model supports 16: shorten it"),
        (["--prompt", "60"], "token id 60 is not in"),
        (["--temperature", "-1"], "temperature -1.0 must be finite"),
        (["--top-k", "-1"], "top-k -1 must be 0 or more"),
        (["--top-p", "0"], "top-p 0.0 must be greater than 0"),
        (["--seed", str(2**64)], "seed 18446744073709551616 must be"),
        (["--prompt", "1", "--prompt-file", "x"], "--prompt and --prompt-file x contradict each other"),
        (["--prompt-file", "no-such-file"], "no-such-file does not exist: give a file with one prompt per line"),
    ],
)
def test_bad_input_is_one_line(trained: Path, capsys, words, message):
    code, out, err = run(capsys, *([] if "--load" in words else ["--load", trained]), *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not torch.distributed.is_initialized()


def test_an_empty_file_of_prompts_is_refused(trained: Path, tmp_path: Path, capsys):
    (tmp_path / "empty").write_text("\n \n")
    code, _, err = run(capsys, "--load", trained, "--prompt-file", tmp_path / "empty")
    assert code == 2
    assert "contains no prompt: write one per line" in err


@pytest.mark.parametrize(("flag", "value"), [("--tokens", "-1"), ("--tokens", "1000001"), ("--batch-size", "0")])
def test_counts_out_of_range_are_refused(capsys, flag, value):
    with pytest.raises(SystemExit) as ended:
        generate.main(["--load", "x", flag, value])
    assert ended.value.code == 2
    assert f"{value} is out of range" in capsys.readouterr().err


def test_a_prompt_of_no_text_is_refused_whoever_calls(trained: Path):
    with pytest.raises(ValueError, match="--prompt is not UTF-8 text"):
        next(generate.continuations(trained, ["a\udcff"], n=1, sampling=Sampling(), batch_size=1))
