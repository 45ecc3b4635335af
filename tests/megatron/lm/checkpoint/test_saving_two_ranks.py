"""Saving on two ranks: each writes its share, and what fails on one is told by both. One launch serves all tests."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import checkpoints, dist, tiny
from helpers.checkpoints import tensors
from helpers.kills import FULL, failing
from megatron.lm.checkpoint import Saver, latest, load, load_for_inference, save, saving
from megatron.lm.checkpoint.files.folder import INFO_FILE, iteration_of
from megatron.lm.training.state import Training

SHARED: dict[str, Any] = {"train_iters": 6, "global_batch_size": 8, "micro_batch_size": 4, "ddp_bucket_size": 5000}
O3: dict[str, Any] = {"opt_level": "O3", "grad_exchange": "nccl", "hidden_dropout": 0.1}  # with mu; rows of one tensor on two ranks
TP: dict[str, Any] = {"precision": "fp32", "tensor_model_parallel_size": 2, "micro_batch_size": 8}
TOKENS = torch.arange(32).view(2, 16)


def two_ranks(prefix: str, folder: str) -> dict[str, Any]:
    root = Path(folder)
    shared = SHARED | O3
    seen: dict[str, Any] = {
        "straight": checkpoints.trained(tiny.config(prefix, **shared)),
        "first": checkpoints.trained(tiny.config(prefix, **shared, exit_interval=3, save=str(root / "O3"))),
        "resumed": checkpoints.trained(tiny.config(prefix, **shared, load=str(root / "O3"))),
    }
    with tiny.trainer(tiny.config(prefix, **shared, load=str(root / "O3"), save=str(root / "again"), async_save=True)) as made:
        seen["in use"] = in_use(made.training, root / "again")
        with Saver(made.training) as saver:
            saver.save()
        seen["full"] = full(made.training, root)
        seen["damaged"] = damaged(made.training, root)
    with tiny.trainer(tiny.config(prefix, **SHARED | TP)) as made:
        save(made.training, root / "TP")
        with torch.no_grad():
            seen["logits"] = made.training.model.eval()(TOKENS, torch.arange(16).expand(2, 16), None)
    return seen


def in_use(training: Training, root: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "locked", failing(ValueError(f"--save {root} is in use")))
        with pytest.raises(ValueError, match="is in use") as error, Saver(training):
            pass
    return str(error.value)


def full(training: Training, root: Path) -> str:
    """What a save says whose data rank 1 cannot write."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr(os, "fsync", failing(FULL))
        with pytest.raises(ValueError, match="cannot save to") as error:
            save(training, root / "full")
    return str(error.value)


def damaged(training: Training, root: Path) -> str:
    """What loading says when a byte of the file of rank 1 is another."""
    file = latest(root / "O3") / "__1_0.bin"
    whole = file.read_bytes()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    torch.distributed.barrier()
    before = tiny.bits(p.detach() for p in training.model.parameters())
    with pytest.raises(ValueError, match="damaged") as error:
        load(training)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file.write_bytes(whole)
    torch.distributed.barrier()
    assert tiny.same(before, tiny.bits(p.detach() for p in training.model.parameters()))
    return str(error.value)


@pytest.fixture(scope="module")
def ranks(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What two processes saw, by rank, and where they saved."""
    folder = tmp_path_factory.mktemp("two")
    return dist.run(two_ranks, 2, str(gloo_prefix), str(folder), timeout=600), folder


def test_two_ranks_resume_bit_for_bit(ranks: tuple[list[dict[str, Any]], Path]):
    for rank in ranks[0]:
        (losses, bits), (before, _), (after, resumed) = rank["straight"], rank["first"], rank["resumed"]
        assert before + after == losses
        assert tiny.same(bits, resumed)
    assert len(ranks[0][0]["first"][0]) == len(ranks[0][0]["resumed"][0]) == 3


def test_each_rank_writes_its_share(ranks: tuple[list[dict[str, Any]], Path]):
    folder = ranks[1] / "O3" / "iter_0000003"
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.bin", "__1_0.bin", INFO_FILE, "plan.json"]
    sizes = [(folder / f"__{rank}_0.bin").stat().st_size for rank in range(2)]
    assert min(sizes) > 0.8 * max(sizes)
    held = tensors(folder)
    mu = [float(x) for key, x in held.items() if key.startswith("mu/")]
    assert len(mu) == 8
    assert all(value != 1 for value in mu)


def test_the_background_of_two_ranks_writes_what_was_loaded(ranks: tuple[list[dict[str, Any]], Path]):
    assert checkpoints.same(*(tensors(ranks[1] / name / "iter_0000003") for name in ("O3", "again")))


@pytest.mark.parametrize(
    ("what", "said"),
    [("in use", "is in use"), ("full", "No space left on device; free space"), ("damaged", "__1_0.bin is damaged: its SHA-256")],
)
def test_what_fails_on_one_rank_is_told_by_both(ranks: tuple[list[dict[str, Any]], Path], what: str, said: str):
    first, second = (rank[what] for rank in ranks[0])
    assert first == second
    assert said in first
    assert [path for path in ranks[1].rglob("*.partial") if iteration_of(path.with_suffix("")) is not None] == []


def test_a_tensor_parallel_checkpoint_is_one_model_for_inference(ranks: tuple[list[dict[str, Any]], Path]):
    with tiny.started(tiny.config("unread")), torch.no_grad():
        model, _, _ = load_for_inference(ranks[1] / "TP")
        found = model(TOKENS, torch.arange(16).expand(2, 16), None)
    torch.testing.assert_close(found, torch.cat([rank["logits"] for rank in ranks[0]], dim=-1), rtol=1e-5, atol=1e-6)
