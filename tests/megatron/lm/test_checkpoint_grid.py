"""Checkpoints of a model cut by tensor and pipeline parallelism: resumed bit for bit by the same grid, refused by name by any other.

One start of 2 processes serves all runs; the tests look at what it returns.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import dist
import pytest
import tiny
import torch
from torch import Tensor

from megatron.lm import checkpoint
from megatron.lm.checkpoint import latest, load_for_inference
from megatron.lm.config import Config
from megatron.lm.trainer import Trainer
from msamp.numerics.tensor import ScalingTensor

SHARED: dict[str, Any] = {"num_layers": 4, "num_attention_heads": 4, "global_batch_size": 8}
TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, VPP = {"sequence_parallel": True}, {"num_layers_per_virtual_pipeline_stage": 1}
DROPOUT, ONE_MICRO_BATCH = {"hidden_dropout": 0.1, "attention_dropout": 0.1}, {"micro_batch_size": 8}
# Grid and iterations, of which the last 3 are resumed: once with delayed scaling's window of 16 full at the save.
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "fp32 TP": ({"precision": "fp32", **TP, **ONE_MICRO_BATCH}, 6),
    "O3 TP+SP": ({"opt_level": "O3", **TP, **SP, **DROPOUT, **ONE_MICRO_BATCH}, 20),
    "O2 PP": ({"opt_level": "O2", **PP}, 6),
    "O3 interleaved": ({"opt_level": "O3", **PP, **VPP}, 6),
}
# What is saved, the flags of the grid that meets it, and what the refusal says of both.
OTHERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "TP at PP": (
        "fp32 TP",
        {"precision": "fp32", **PP},
        ["--tensor-model-parallel-size 1 (saved: 2)", "--pipeline-model-parallel-size 2 (saved: 1)"],
    ),
    "TP at DP": ("fp32 TP", {"precision": "fp32"}, ["--tensor-model-parallel-size 1 (saved: 2)"]),
    "PP at interleaved": ("O2 PP", {"opt_level": "O2", **PP, **VPP}, ["--num-layers-per-virtual-pipeline-stage 1 (saved: None)"]),
    "interleaved at PP": ("O3 interleaved", {"opt_level": "O3", **PP}, ["--num-layers-per-virtual-pipeline-stage None (saved: 1)"]),
}


def settings_of(prefix: str | Path, flags: dict[str, Any], steps: int = 6, **settings: Any) -> Config:
    return tiny.config(prefix, **SHARED | {"train_iters": steps} | flags | settings)


def states_of(made: Trainer) -> list[dict[str, Tensor]]:
    return [made.training.optimizer.state[piece.weight] for piece in made.training.optimizer.pieces()]


def everything(made: Trainer) -> list[Tensor]:
    """Every bit of this rank's weights, states, scales and random generator, and its place in the run."""
    training = made.training
    tensors: list[Any] = [value for key, value in training.model.state_dict().items() if not key.endswith("_extra_state")]
    tensors += [value for state in states_of(made) for _, value in sorted(state.items())]
    place = [training.iteration, training.schedule.num_steps, training.consumed_samples, training.grad_sync.steps]
    return tiny.bits([*tensors, torch.get_rng_state(), torch.tensor(place)])


def as_saved(made: Trainer, folder: Path) -> bool:
    """Whether this rank's weights and states are those in its own file."""
    saved = torch.load(folder / checkpoint._own_state_file(), weights_only=True)
    model = made.training.model.state_dict()
    weights = [key for key, value in saved["model"].items() if isinstance(value, Tensor | ScalingTensor)]
    found = [value for state in states_of(made) for _, value in sorted(state.items())]
    wanted = [value for _, state in sorted(saved["optimizer"]["state"].items()) for _, value in sorted(state.items())]
    return (
        bool(weights and wanted)
        and tiny.same(tiny.bits([model[key] for key in weights]), tiny.bits([saved["model"][key] for key in weights]))
        and tiny.same(tiny.bits(found), tiny.bits(wanted))
    )


def run(settings: Config) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        folder = settings.checkpoint.load
        loaded = as_saved(made, latest(Path(folder))) if folder else None
        made.run()
        return {"losses": tiny.losses(rows), "bits": everything(made), "loaded": loaded}


def refusals(settings: Config, folder: Path, ways: tuple[bool, ...] = (False, True)) -> tuple[list[str], bool]:
    """What a trainer ready to run says to the checkpoint in `folder`, all of it or the weights alone, and whether it is as it was."""
    said = []
    with tiny.trainer(settings) as made:
        before = everything(made)
        for finetune in ways:
            made.training.config = replace(settings, checkpoint=replace(settings.checkpoint, load=str(folder), finetune=finetune))
            with pytest.raises(ValueError, match="does not fit") as error:
                checkpoint.load(made.training)
            said.append(str(error.value))
        return said, tiny.same(before, everything(made))


def without_the_second_part(prefix: str, folder: Path) -> tuple[str, bool]:
    """What each rank says where the file of rank 1 is missing, and whether it is as it was."""
    settings = settings_of(prefix, RUNS["fp32 TP"][0])
    if torch.distributed.get_rank() == 1:
        (latest(folder) / "mp_rank_01_000.pt").rename(folder / "away.pt")
    with tiny.trainer(settings) as made:
        before = everything(made)
        made.training.config = replace(settings, checkpoint=replace(settings.checkpoint, load=str(folder)))
        with pytest.raises(ValueError, match="cannot be read") as error:
            checkpoint.load(made.training)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 1:
            (folder / "away.pt").rename(latest(folder) / "mp_rank_01_000.pt")
        return str(error.value), tiny.same(before, everything(made))


def save_and_resume(prefix: str, folder: str) -> dict[str, Any]:
    """Every run undisturbed, stopped before its last 3 steps, and resumed; then what the other grids say."""
    seen: dict[str, Any] = {}
    for name, (flags, steps) in RUNS.items():
        saved = f"{folder}/{name}"
        seen[name] = {
            "straight": run(settings_of(prefix, flags, steps)),
            "first": run(settings_of(prefix, flags, steps, exit_interval=steps - 3, save=saved)),
            "resumed": run(settings_of(prefix, flags, steps, load=saved)),
        }
    for name, (saved, flags, _) in OTHERS.items():
        seen[name] = refusals(settings_of(prefix, flags), Path(folder, saved))
    other_wire = settings_of(prefix, RUNS["O3 TP+SP"][0] | {"tp_wire": "fp8"}, 20)
    seen["other wire"] = refusals(other_wire, Path(folder, "O3 TP+SP"), (False,))
    seen["a part is missing"] = without_the_second_part(prefix, Path(folder, "fp32 TP"))
    return seen


@pytest.fixture(scope="module")
def saved(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What two processes saw, by rank, and where they saved."""
    folder = tmp_path_factory.mktemp("grids")
    return dist.run(save_and_resume, 2, str(gloo_prefix), str(folder), timeout=400), folder


@pytest.mark.parametrize("name", RUNS)
def test_the_same_grid_resumes_bit_for_bit(saved: tuple[list[dict[str, Any]], Path], name: str):
    steps = RUNS[name][1]
    for rank in saved[0]:
        runs = rank[name]
        assert runs["resumed"]["loaded"]
        assert runs["first"]["losses"] + runs["resumed"]["losses"] == runs["straight"]["losses"]
        assert tiny.same(runs["resumed"]["bits"], runs["straight"]["bits"])
        assert not tiny.same(runs["first"]["bits"], runs["straight"]["bits"])
    main = saved[0][0][name]
    assert (len(main["first"]["losses"]), len(main["resumed"]["losses"])) == (steps - 3, 3)


@pytest.mark.parametrize("name", RUNS)
def test_each_part_of_the_model_has_a_file(saved: tuple[list[dict[str, Any]], Path], name: str):
    flags, steps = RUNS[name]
    files = sorted(path.name for path in (saved[1] / name / f"iter_{steps - 3:07d}").iterdir())
    second = "mp_rank_01_000.pt" if "tensor_model_parallel_size" in flags else "mp_rank_00_001.pt"
    assert files == sorted(["mp_rank_00_000.pt", second, "rng_00000.pt", "rng_00001.pt"])


@pytest.mark.parametrize("name", OTHERS)
def test_another_grid_is_refused_by_name_on_every_rank(saved: tuple[list[dict[str, Any]], Path], name: str):
    said = OTHERS[name][2]
    first, second = (rank[name] for rank in saved[0])
    assert first == second
    messages, unchanged = first
    for message in messages:
        assert message.endswith(f"does not fit: {'; '.join(said)}. Give the saved values")
    assert unchanged


def test_another_wire_has_no_history_and_is_refused(saved: tuple[list[dict[str, Any]], Path]):
    for rank in saved[0]:
        messages, unchanged = rank["other wire"]
        assert "does not fit: --tp-wire fp8 (saved: bf16). Give the saved values" in messages[0]
        assert unchanged


def test_random_states_keep_their_numbers_when_there_are_more_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch):
    def name(tensor: int, pipeline: int, data: int) -> str:
        for kind, rank in (("tensor_model", tensor), ("pipeline_model", pipeline), ("data", data)):
            monkeypatch.setattr(checkpoint.parallel_state, f"get_{kind}_parallel_rank", lambda rank=rank: rank)
            monkeypatch.setattr(checkpoint.parallel_state, f"get_{kind}_parallel_world_size", lambda: 2)
        return checkpoint._own_rng_file()

    found = [name(tensor, pipeline, data) for data in range(2) for pipeline in range(2) for tensor in range(2)]
    assert found == [f"rng_{number:05d}.pt" for number in range(8)]


def test_a_missing_part_is_an_error_on_every_rank(saved: tuple[list[dict[str, Any]], Path]):
    first, second = (rank["a part is missing"] for rank in saved[0])
    assert first == second
    message, unchanged = first
    assert "mp_rank_01_000.pt cannot be read" in message
    assert unchanged


def test_one_process_refuses_a_part_of_a_model(saved: tuple[list[dict[str, Any]], Path], gloo_prefix: Path):
    messages, unchanged = refusals(settings_of(gloo_prefix, {"precision": "fp32"}), saved[1] / "fp32 TP")
    assert all("does not fit: --tensor-model-parallel-size 1 (saved: 2). Give the saved values" in message for message in messages)
    assert unchanged


@pytest.mark.parametrize("name", ["fp32 TP", "O3 interleaved"])
def test_sampling_refuses_a_model_in_parts(saved: tuple[list[dict[str, Any]], Path], name: str):
    with pytest.raises(ValueError, match=r"a model cut into 2 parts by tensor and pipeline .*--pipeline-model-parallel-size 1"):
        load_for_inference(saved[1] / name)
