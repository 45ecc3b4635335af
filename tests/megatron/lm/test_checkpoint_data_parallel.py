"""Checkpoints of several processes: resumed by as many bit for bit, by fewer or more, and with ZeRO switched on or off.

One start of processes serves all runs of a size; the tests look at what it returns.
"""

from pathlib import Path
from typing import Any

import dist
import pytest
import tiny
import torch
from torch import Tensor

from megatron.lm.checkpoint import latest, state_file
from megatron.lm.config import Config
from megatron.lm.trainer import Trainer
from msamp.numerics.tensor import ScalingTensor

SHARED = {"train_iters": 12, "global_batch_size": 8, "ddp_bucket_size": 5000}  # rows of one tensor on several ranks
ZERO = {"use_distributed_optimizer": True}
RUNS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2"},
    "O2 ZeRO": {"opt_level": "O2", **ZERO},
    "O3": {"opt_level": "O3"},
    "O3 nccl": {"opt_level": "O3", "grad_exchange": "nccl"},
    "O3 fp8-sr": {"opt_level": "O3", "grad_accum_dtype": "fp8-sr", "micro_batch_size": 2},
}
CROSSED = {"O2": "O2 ZeRO", "O2 ZeRO": "O2"}
ELSEWHERE = ("O2", "O2 ZeRO", "O3", "O3 nccl")
LIMIT = 5e-3  # largest relative difference of a loss after the resume from that of the run that was not disturbed


def settings_of(prefix: str, run: str, **settings: Any) -> Config:
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return tiny.config(prefix, **{"micro_batch_size": 8 // processes, **SHARED, **RUNS[run], **settings})


def everything(made: Trainer) -> list[Tensor]:
    """Every bit of the weights, of this process's states, of scales and mu."""
    training = made.training
    tensors: list[Any] = [value for key, value in training.model.state_dict().items() if not key.endswith("_extra_state")]
    for piece in training.optimizer.pieces():
        tensors += [value for _, value in sorted(training.optimizer.state[piece.weight].items())]
    tensors += training.grad_sync.state_dict()["mu"].values()
    return tiny.bits([*tensors, torch.tensor([training.schedule.num_steps, training.consumed_samples, training.grad_sync.steps])])


def run(settings: Config) -> dict[str, Any]:
    """Losses (rank 0 has them), final bits, and of a resumed run whether it started from the states that were saved."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        loaded = as_saved(made) if settings.checkpoint.load else None
        made.run()
        return {"losses": tiny.losses(rows), "bits": everything(made), "loaded": loaded}


def as_saved(made: Trainer) -> bool:
    """Whether optimizer, weights and mu are those of the newest checkpoint; collective, and only rank 0 sees all states."""
    assert made.config.checkpoint.load is not None
    saved = torch.load(latest(Path(made.config.checkpoint.load)) / state_file(), weights_only=True)
    training = made.training
    optimizer, sync, model = training.optimizer.state_dict(), training.grad_sync.state_dict(), training.model.state_dict()
    main = torch.distributed.get_rank() == 0
    states = not main or tiny.same(flat(optimizer["state"]), flat(saved["optimizer"]["state"]))
    weights = all(tiny.same(tiny.bits([model[key]]), tiny.bits([value])) for key, value in saved["model"].items() if is_weight(value))
    return states and weights and (sync["steps"], sync["mu"]) == (saved["grad_sync"]["steps"], saved["grad_sync"]["mu"])


def is_weight(value: object) -> bool:
    return isinstance(value, Tensor | ScalingTensor)


def flat(states: dict[int, dict[str, Tensor]]) -> list[Tensor]:
    return tiny.bits([value for _, state in sorted(states.items()) for _, value in sorted(state.items())])


def save_and_resume(prefix: str, folder: str) -> dict[str, dict[str, Any]]:
    """Every run undisturbed, stopped after 6 steps and resumed; those at O2 also resumed with ZeRO on instead of off, and off."""
    seen: dict[str, dict[str, Any]] = {}
    for name in RUNS:
        saved = f"{folder}/{name}"
        seen[name] = {
            "straight": run(settings_of(prefix, name)),
            "first": run(settings_of(prefix, name, exit_interval=6, save=saved)),
            "resumed": run(settings_of(prefix, name, load=saved)),
        }
        if name in CROSSED:
            seen[name]["crossed"] = run(settings_of(prefix, CROSSED[name], load=saved))
    return seen


def resume(prefix: str, folder: str) -> dict[str, dict[str, Any]]:
    return {name: run(settings_of(prefix, name, load=f"{folder}/{name}")) for name in ELSEWHERE}


@pytest.fixture(scope="module")
def saved(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What two processes saw, by rank, and where they saved."""
    folder = tmp_path_factory.mktemp("two")
    return dist.run(save_and_resume, 2, str(gloo_prefix), str(folder), timeout=400), folder


@pytest.fixture(scope="module")
def elsewhere(saved: tuple[Any, Path], gloo_prefix: Path) -> dict[int, list[dict[str, Any]]]:
    """The same runs gone on with by one process and by four, by rank."""
    return {1: [resume(str(gloo_prefix), str(saved[1]))], 4: dist.run(resume, 4, str(gloo_prefix), str(saved[1]), timeout=400)}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_resume_bit_for_bit(saved: tuple[list[dict[str, Any]], Path], name: str):
    first, second = (rank[name] for rank in saved[0])
    assert len(first["first"]["losses"]) == len(first["resumed"]["losses"]) == 6
    assert first["first"]["losses"] + first["resumed"]["losses"] == first["straight"]["losses"]
    for rank in (first, second):
        assert rank["resumed"]["loaded"]
        assert tiny.same(rank["resumed"]["bits"], rank["straight"]["bits"])
    files = sorted(path.name for path in (saved[1] / name / "iter_0000006").iterdir())
    assert files == ["mp_rank_00_000.pt", "rng_00000.pt", "rng_00001.pt"]


@pytest.mark.parametrize("name", CROSSED)
def test_zero_may_be_switched_on_or_off(saved: tuple[list[dict[str, Any]], Path], name: str):
    for rank in saved[0]:
        crossed, straight = rank[name]["crossed"], rank[CROSSED[name]]["straight"]
        assert crossed["loaded"]
        assert crossed["losses"] == straight["losses"][6:]
        assert tiny.same(crossed["bits"], straight["bits"])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_fewer_or_more_processes_go_on(saved: tuple[list[dict[str, Any]], Path], elsewhere: dict, name: str, processes: int):
    ranks = [rank[name] for rank in elsewhere[processes]]
    assert all(rank["loaded"] for rank in ranks)
    assert ranks[0]["losses"] == pytest.approx(saved[0][0][name]["straight"]["losses"][6:], rel=LIMIT)


def test_a_checkpoint_is_the_same_with_zero_and_without(saved: tuple[list[dict[str, Any]], Path]):
    plain, zero = (torch.load(saved[1] / name / "iter_0000006" / state_file(), weights_only=True) for name in CROSSED)
    assert tiny.same(flat(plain["optimizer"]["state"]), flat(zero["optimizer"]["state"]))
    assert plain["optimizer"]["param_groups"] == zero["optimizer"]["param_groups"]
    assert plain["model"].keys() == zero["model"].keys()


def test_mu_is_saved(saved: tuple[list[dict[str, Any]], Path]):
    state = torch.load(saved[1] / "O3 nccl" / "iter_0000006" / state_file(), weights_only=True)["grad_sync"]
    assert state["steps"] == 6
    assert len(state["mu"]) == 8
    assert all(float(mu) != 1 for mu in state["mu"].values())
