"""Training on from a saved checkpoint is training without a break: losses, weights, states, scales, histories, to the bit.

One start of two processes does the runs of the default tests, one of each grid. In the nightly ones the first processes are ended by
SIGKILL and others go on; `tools/soak.py` ends them at random moments.
"""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from helpers.checkpoints import trained
from megatron.lm.config import Config
from msamp.numerics.recipe import GEMMS, by_name

STEPS, SAVED, WINDOW = 12, 6, 8  # delayed scaling's window is filled after the save; FP16's loss scale changes before and after it
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
GRIDS: dict[str, dict[str, Any]] = {
    "DP 2": {},  # at O3 with ZeRO
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, **DROPOUT},
    "PP 2": {"pipeline_model_parallel_size": 2, **DROPOUT},
}
COLLAGE = ("bf16-a", "bf16-kahan", "bf16-dmw", "bf16-d", "collage-light", "collage-plus", "collage-fp8")
LEVELS = ("fp32", "fp16-amp", "bf16", *COLLAGE, "coat", "O1", "O2", "O3", "O3+coat")
# Every recipe on one grid or another, and O3 on each.
KILLED = [(level, grid) for i, level in enumerate(LEVELS) for j, grid in enumerate(GRIDS) if level == "O3" or i % len(GRIDS) == j]
DEFAULT = [("collage-plus", "TP 2"), ("fp16-amp", "PP 2"), ("O3", "DP 2"), ("O3+muon", "DP 2"), ("bf16+sgd", "PP 2")]
LOSS_SCALE = {"initial_loss_scale": 2.0**21, "loss_scale_window": 3}  # it falls before the save, and rises and overflows after it
Seen = dict[tuple[str, str], tuple[list[float], list[Tensor]]]


def settings(prefix: str, run: tuple[str, str], **more: Any) -> Config:
    shared: dict[str, Any] = {
        "train_iters": STEPS,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "ddp_bucket_size": 5000,
        "num_attention_heads": 4,
    }
    lean = {"disable_bias_linear": True, "normalization": "RMSNorm"}
    precision, *states = run[0].split("+")
    shared["optimizer" if states[:1] in (["sgd"], ["muon"]) else "optimizer_state"] = states[0] if states else None
    shared["fp8_amax_history_len"] = WINDOW if by_name(precision).gemm == GEMMS["delayed"] else None
    moving = LOSS_SCALE if run[0] == "fp16-amp" else {}
    return tiny.config(prefix, precision=precision, **shared, **lean, **moving, **GRIDS[run[1]], **more)


def undisturbed(prefix: str, runs: Iterable[tuple[str, str]]) -> Seen:
    return {run: trained(settings(prefix, run)) for run in runs}


def first_half(prefix: str, folder: str, runs: Iterable[tuple[str, str]]) -> Seen:
    saves = {run: {"save": f"{folder}/{run}", "async_save": run[1] == "PP 2"} for run in runs}
    return {run: trained(settings(prefix, run, exit_interval=SAVED, **saves[run])) for run in runs}


def second_half(prefix: str, folder: str, runs: Iterable[tuple[str, str]]) -> Seen:
    return {run: trained(settings(prefix, run, load=f"{folder}/{run}", ckpt_step=SAVED)) for run in runs}


def through_and_again(prefix: str, folder: str) -> list[Seen]:
    """Runs that save in passing, in the background some of them, and others that start from there."""
    saves = {run: {"save": f"{folder}/{run}", "save_interval": SAVED, "async_save": run[1] == "PP 2"} for run in DEFAULT}
    return [{run: trained(settings(prefix, run, **saves[run])) for run in DEFAULT}, second_half(prefix, folder, DEFAULT)]


def until_killed(prefix: str, folder: str, runs: list[tuple[str, str]]) -> None:
    """What `undisturbed` and `first_half` saw goes into a file, and the process ends as by a power cut."""
    rank = torch.distributed.get_rank()
    torch.save([undisturbed(prefix, runs), first_half(prefix, folder, runs)], f"{folder}/seen_{rank}.pt")
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def seen(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Seen]]:
    """By rank, the runs that went through and those that started in the middle."""
    return dist.run(through_and_again, 2, str(gloo_prefix), str(tmp_path_factory.mktemp("resume")), timeout=800)


@pytest.mark.parametrize("run", DEFAULT, ids=" ".join)
def test_the_second_half_again_from_a_checkpoint(seen: list[list[Seen]], run: tuple[str, str]):
    for straight, second in seen:
        assert tiny.same(second[run][1], straight[run][1])
    straight, second = seen[0]
    assert len(straight[run][0]) == STEPS
    assert second[run][0] == straight[run][0][SAVED:]


def kill(prefix: str, folder: Path, runs: list[tuple[str, str]]) -> list[tuple[Seen, Seen, Seen]]:
    """By rank: undisturbed, up to the kill, and from there on."""
    with pytest.raises(RuntimeError, match="a process died"):
        dist.run(until_killed, 2, prefix, str(folder), runs, timeout=1500)
    after = dist.run(second_half, 2, prefix, str(folder), runs, timeout=1500)
    return [(*torch.load(folder / f"seen_{rank}.pt", weights_only=True), after[rank]) for rank in range(2)]


@pytest.fixture(scope="module")
def killed(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Seen, Seen, Seen]]:
    return kill(str(gloo_prefix), tmp_path_factory.mktemp("killed"), KILLED)


@pytest.mark.nightly(10)
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("run", KILLED, ids=" ".join)
def test_other_processes_go_on_after_a_kill(killed: list[tuple[Seen, Seen, Seen]], run: tuple[str, str]):
    for straight, first, second in killed:
        assert tiny.same(second[run][1], straight[run][1])
        assert not tiny.same(first[run][1], straight[run][1])
    losses, before, after = (half[run][0] for half in killed[0])
    assert (len(before), len(after)) == (SAVED, STEPS - SAVED)
    assert before + after == losses
