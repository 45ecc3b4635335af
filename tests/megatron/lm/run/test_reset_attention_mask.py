"""--reset-attention-mask: documents of a sequence do not attend to each other, in the model and in whole runs on text."""

import shlex
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, texts, tiny
from megatron.lm.build import build_training
from megatron.lm.config import DataConfig
from megatron.lm.data.documents import document_numbers
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.model.gpt import GPT
from megatron.lm.processes import process_groups

EOD = 59
LENGTHS = (5, 1, 7, 3)  # of documents that fill a sequence


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [[*torch.randint(0, EOD, (length - 1,), generator=draw).tolist(), EOD] for length in LENGTHS]


def logits(model: GPT, tokens: list[int], *, apart: bool = False, reset: bool = False) -> Tensor:
    """[s, vocabulary] of one sequence."""
    device = process_groups.device()
    data = torch.tensor(tokens, device=device)
    numbers = document_numbers(data, EOD)
    positions = torch.arange(len(tokens), device=device)
    if reset:
        positions = torch.cat([torch.arange(int((numbers == n).sum()), device=device) for n in range(int(numbers[-1]) + 1)])
    mask = model.document_mask(numbers[None]) if apart else None
    with torch.no_grad():
        return model(data[None], positions[None], mask)[0]


MODELS: dict[str, dict[str, Any]] = {
    "rope, fp32": {"precision": "fp32"},
    "rope, bf16": {"precision": "bf16"},
    "learned positions": {"precision": "fp32", "position_embedding_type": "learned_absolute", "reset_position_ids": True},
    "no positions": {"precision": "fp32", "position_embedding_type": "none"},
    "qk layernorm": {"precision": "fp32", "qk_layernorm": True},
    "groups": {"precision": "fp32", "group_query_attention": True, "num_query_groups": 1},
    "math": {"precision": "fp32", "attention_backend": "math"},
    "bidirectional": {"precision": "fp32", "objective": "masked-lm"},
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", MODELS)
def test_documents_of_a_sequence_have_the_logits_that_each_has_alone(name: str):
    settings = tiny.config("corpus", reset_attention_mask=True, **MODELS[name])
    model = build_training(settings, tiny.VOCABULARY).model.eval()
    reset, tolerance = settings.data.reset_position_ids, 2**-5 if settings.precision.name == "bf16" else 1e-5
    together = logits(model, [*chain(*documents())], apart=True, reset=reset)
    alone = torch.cat([logits(model, document) for document in documents()])
    torch.testing.assert_close(together.float(), alone.float(), rtol=tolerance, atol=tolerance)
    mixed = logits(model, [*chain(*documents())])
    assert (mixed - alone)[: LENGTHS[0]].abs().max() <= tolerance or settings.model.objective == "masked-lm"
    assert (mixed - alone)[LENGTHS[0] :].abs().max() > 2 * tolerance


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of data whose documents are sentences, shorter than a sequence."""
    folder = tmp_path_factory.mktemp("text")
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(texts.tokenizer(folder)))
    sentences = [Document(texts={"text": part}, source_bytes=1) for part in texts.SPEECH.split(". ")] * 12
    write_datasets(sentences, {"text": folder / "text"}, EncodeOptions(data=data), workers=0)
    return f"--data-path {folder / 'text'} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {data.tokenizer_model}"


LEARNED = "--position-embedding-type learned_absolute --reset-position-ids --num-workers 1"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --lr 5e-3 "
    "--lr-decay-iters 4 --lr-warmup-iters 1 --eval-iters 1 --eval-interval 2 --log-interval 1 --split 80,15,5 --fp8-min-gain 0 "
    "--reset-attention-mask --eod-mask-loss "
)


def told(rows: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["iteration"], row["loss"]) for row in rows if row["kind"] in ("train", "valid", "test")]


def run(folder: Path, text: str, flags: str, iterations: int = 4) -> list[tuple[str, int, float]]:
    return told(tiny.command(folder, *shlex.split(f"{FLAGS} {text} {flags} --train-iters {iterations}")))


@pytest.mark.promise("Data", "With `--reset-attention-mask` documents of a sequence do not attend to each other; runs resume bit for bit.")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("flags", ["--opt-level O2", pytest.param(LEARNED, marks=pytest.mark.nightly(4))])
def test_a_run_on_text_trains_evaluates_saves_and_resumes(text: str, tmp_path: Path, flags: str):
    whole = run(tmp_path, text, flags)
    assert [kind for kind, _, _ in whole].count("valid") == 2
    save = f"{flags} --save {tmp_path / 'save'} --load {tmp_path / 'save'}"
    run(tmp_path, text, save, 2)
    assert run(tmp_path, text, save) == [row for row in whole if row[1] > 2]
    losses = [loss for kind, _, loss in whole if kind == "train"]
    assert losses[-1] < losses[0]
    plain = told(tiny.command(tmp_path, *shlex.split(f"{FLAGS} {text} {flags} --train-iters 1".replace("--reset-attention-mask ", ""))))
    assert plain[0][1] == 1
    assert plain[0][2] != whole[0][2]


def _grid(prefix: Path, settings: dict[str, Any]) -> list[float]:
    common: dict[str, Any] = {"seq_length": 64, "micro_batch_size": 2, "global_batch_size": 8, "train_iters": 3, "eval_iters": 1}
    rows = tiny.run(tiny.config(prefix, reset_attention_mask=True, precision="fp32", **(common | settings)))
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    "grid",
    [
        {"pipeline_model_parallel_size": 2},
        pytest.param({"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.nightly(3)),
        pytest.param({}, marks=pytest.mark.nightly(2)),
    ],
    ids=["PP", "TP", "DP"],
)
def test_a_grid_trains_as_one_process(gloo_prefix: Path, grid: dict[str, Any]):
    alone = _grid(gloo_prefix, {})
    assert len(alone) == 5
    assert dist.run(_grid, 2, gloo_prefix, grid, init=True)[0] == pytest.approx(alone, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "cudnn", "math"])
@pytest.mark.parametrize("graph", ["none", "step"])
def test_kernels_keep_documents_apart_in_graphs_too(prefix: Path, backend: str, graph: str):
    settings: dict[str, Any] = {
        "seq_length": 64,
        "hidden_size": 128,
        "cuda_graph": graph,
        "reset_attention_mask": True,
        "precision": "bf16",
    }
    expected = tiny.losses(tiny.run(tiny.config(prefix, **settings | {"attention_backend": "math", "cuda_graph": "none"})))
    assert tiny.losses(tiny.run(tiny.config(prefix, attention_backend=backend, **settings))) == pytest.approx(expected, rel=2e-3)
