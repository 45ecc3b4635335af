"""Scores against the model's own logits, and a checkpoint against its export."""

import shutil
from pathlib import Path

import pytest
import torch

from helpers import hosts, texts
from megatron.lm.checkpoint import load_for_inference
from megatron.lm.evaluation.models import CheckpointModel, FolderModel, opened
from megatron.lm.evaluation.scoring_model import ScoringModel
from megatron.lm.processes import process_groups
from megatron.lm.processes.cpu_home import cpu_home

SHARE = {"fp32": 1e-5, "O3": 0.05}  # of nats; in FP8 the scales of inputs are other ones


def directly(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first, by the model's forward."""
    with cpu_home():
        try:
            model, _, tokenizer = load_for_inference(folder)
            x = torch.tensor([tokens[:-1]], device=process_groups.device())
            with torch.no_grad():
                logits = model(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0), None)[0, :, : tokenizer.vocab_size].float()
            return logits.log_softmax(-1).cpu()[torch.arange(len(tokens) - 1), tokens[1:]]
        finally:
            process_groups.shutdown()


@pytest.mark.parametrize("level", ["fp32", "O3"])
def test_scores_are_those_of_the_model_in_batches_and_alone(made: dict[str, Path], level: str):
    with opened(made[level]) as model:
        assert isinstance(model, CheckpointModel)
        tokens = [model.eod, *model.encode(texts.SPEECH)]
        sequences = [tokens[:33], tokens[40:47], tokens[3:5], tokens[10:30]]
        starts = [1, 4, 1, 19]
        together = model.score(sequences, starts)
        alone = [model.score([sequence], [start])[0] for sequence, start in zip(sequences, starts, strict=True)]
    assert not torch.distributed.is_initialized()
    for sequence, start, first, second in zip(sequences, starts, together, alone, strict=True):
        expected = directly(made[level], sequence)[start - 1 :]
        torch.testing.assert_close(first, expected, atol=SHARE[level], rtol=0)
        torch.testing.assert_close(first, second, atol=1e-5 if level == "fp32" else 0.02, rtol=0)


@pytest.mark.parametrize(
    ("ours", "theirs", "precision"),
    [("fp32", "hf", "float32"), ("O3", "fp8", "fp8 export"), ("O3", "blocks", "fp8 export, weights only")],
)
def test_an_export_scores_as_its_checkpoint(made: dict[str, Path], ours: str, theirs: str, precision: str):
    if theirs == "blocks":
        hosts.need("accelerate", "eval")  # transformers requires it for this layout
    with opened(made[ours]) as model:
        sequence = [model.eod, *model.encode(texts.SPEECH)][:33]
        expected = model.score([sequence], [1])[0]
    with opened(made[theirs]) as folder:
        assert isinstance(folder, FolderModel)
        assert [folder.eod, *folder.encode(texts.SPEECH)][:33] == sequence
        assert folder.seq_length == 32
        found = folder.score([sequence, sequence[:5]], [1, 2])
    torch.testing.assert_close(found[0], expected, atol=SHARE[ours], rtol=0)
    torch.testing.assert_close(found[1], expected[1:4], atol=SHARE[ours], rtol=0)
    assert folder.about["precision"] == precision


@pytest.mark.parametrize(("sequence", "start"), [([1], 1), ([1, 2], 0), ([1, 2], 2), ([1] * 34, 1)])
def test_what_cannot_be_scored_is_refused(made: dict[str, Path], sequence: list[int], start: int):
    with opened(made["fp32"]) as model, pytest.raises(ValueError, match=f"a sequence of {len(sequence)} tokens from position {start}"):
        model.score([sequence], [start])


def test_a_model_that_diverged_is_refused(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ScoringModel, "head", lambda self, hidden: torch.full((len(hidden), 64), float("nan")))
    with opened(made["fp32"]) as model, pytest.raises(ValueError, match="diverged"):
        model.score([[1, 2]], [1])


def test_what_is_neither_is_refused(tmp_path: Path, made: dict[str, Path]):
    with (
        pytest.raises(ValueError, match="none does not exist: give a checkpoint folder of the trainer, or a Hugging Face folder"),
        opened(tmp_path / "none"),
    ):
        pass
    with pytest.raises(ValueError, match="holds no checkpoint"), opened(tmp_path):
        pass
    broken = Path(shutil.copytree(made["hf"], tmp_path / "broken"))
    for file in broken.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"broken contains neither model.safetensors nor model.safetensors.index.json"), opened(broken):
        pass
