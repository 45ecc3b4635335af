"""--objective masked-lm in whole runs: it learns at every level, resumes bit for bit, under tensor parallelism and in a longer phase."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.checkpoint import load_for_inference
from megatron.lm.config import Config
from megatron.lm.evaluation.models import opened
from megatron.lm.processes.cpu_home import cpu_home
from megatron.lm.processes.process_groups import shutdown
from megatron.lm.tools.convert.hugging_face import hf_config

LIMITS = {"O0": 0.02, "O2": 0.05, "O3": 0.05}  # most by which a loss of two processes may differ from that of one


def settings(folder: Path, level: str = "O2", **changes: Any) -> Config:
    values = {"objective": "masked-lm", "opt_level": level, "mask_prob": 0.3, "position_embedding_type": "learned_absolute"} | changes
    return tiny.config(tiny.write_data(folder) if not (folder / "corpus.bin").exists() else folder / "corpus", **values)


def continued(run: Config, folder: Path, **training: Any) -> Config:
    return replace(run, training=replace(run.training, **training), checkpoint=replace(run.checkpoint, load=str(folder)))


@pytest.mark.parametrize("level", ["O2", pytest.param("O0", marks=pytest.mark.nightly), pytest.param("O3", marks=pytest.mark.nightly)])
def test_it_learns_and_resumes_bit_for_bit(tmp_path: Path, level: str):
    whole = tiny.losses(tiny.run(settings(tmp_path, level, train_iters=60)))
    assert sum(whole[-10:]) / 10 < sum(whole[:5]) / 5 - 0.15
    run = settings(tmp_path, level, train_iters=60, save=str(tmp_path / "saved"), exit_interval=3)
    first = tiny.losses(tiny.run(run))
    assert first + tiny.losses(tiny.run(continued(run, tmp_path / "saved", exit_interval=6))) == whole[:6]


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_it_learns_on_a_gpu_with_dropout(tmp_path: Path, level: str):
    losses = tiny.losses(tiny.run(settings(tmp_path, level, train_iters=60, hidden_dropout=0.1, attention_dropout=0.1)))
    assert sum(losses[-10:]) / 10 < sum(losses[:5]) / 5 - 0.1


def test_every_token_sees_all_of_its_sequence_and_what_wants_a_gpt_refuses_it(tmp_path: Path):
    tiny.run(settings(tmp_path, train_iters=2, save=str(tmp_path / "saved")))
    with cpu_home(), torch.no_grad():
        model, config, tokenizer = load_for_inference(tmp_path / "saved")
        tokens, positions = torch.arange(8)[None], torch.arange(8)[None]
        other = tokens.clone()
        other[0, 7] = 30
        first, last = model(tokens, positions, None), model(other, positions, None)
        shutdown()
    assert config.padded_vocab_size(tiny.VOCABULARY + 1) == 64
    assert not first[0, 0].equal(last[0, 0])
    with pytest.raises(ValueError, match="masked-lm"), opened(tmp_path / "saved"):
        pass
    with pytest.raises(ValueError, match="no supported architecture attends to both sides"):
        hf_config(config.model, tiny.VOCABULARY + 1, torch.float32, tokenizer.eod)


@pytest.mark.nightly
@pytest.mark.parametrize("level", LIMITS)
def test_two_tensor_parallel_processes_train_as_one(tmp_path: Path, level: str):
    alone = tiny.losses(tiny.run(settings(tmp_path, level, train_iters=10)))
    grid = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    split = tiny.losses(dist.run(tiny.run, 2, settings(tmp_path, level, train_iters=10, **grid))[0])
    assert split == pytest.approx(alone, abs=LIMITS[level])
