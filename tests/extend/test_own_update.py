"""An update that no source file knows: momentum SGD whose one state, `momentum_buffer`, is E4M3 with a scale a tensor.

It is registered here, in every process, beside a recipe that names it. The trainer then trains the tiny GPT with it on two processes, with
and without ZeRO, saves, resumes, plans its memory and reports it; nothing but this file says `momentum_buffer`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import checkpoints, dist, tiny
from megatron.lm.checkpoint.reader import CheckpointReader
from megatron.lm.config import Config
from megatron.lm.planning.fits import report
from megatron.lm.planning.memory import plan
from megatron.lm.run.trainer import Trainer
from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.reference.store import load, store_
from msamp.kernels.tables import Tables
from msamp.numerics import recipe
from msamp.numerics.formats import BF16, COAT_E4M3, E4M3, FP32
from msamp.numerics.recipe import Recipe, StateFormats
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim import updates
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.update_error import rehearse
from msamp.optim.updates import MASTER, State, StepInputs, Update, UpdateBatch

STEPS, SAVED = 6, 3
ZERO = {"with ZeRO": True, "without": False}


class Momentum(Update):
    """buffer = momentum buffer + g; p = (1 - lr weight_decay) p - lr buffer, with the first beta for the momentum."""

    def numbers(self, group: Any) -> list[float]:
        return [float(group["lr"]), group["betas"][0], group["weight_decay"]]

    def run(self, tables: Tables, batch: UpdateBatch, inputs: StepInputs) -> None:
        amaxes, kept, coefficient, usable = inputs
        if not usable:
            return
        lr, momentum, weight_decay = batch.hyper.tolist()
        clip = torch.ones(()) if coefficient is None else coefficient
        bounds = momentum * amaxes[1, batch.indices] + amaxes[GRAD, batch.indices] * clip
        buffers, masters = load(batch.states["momentum_buffer"]), load(batch.masters)
        torch._foreach_add_(batch.steps, 1)
        for buffer, master, g in zip(buffers, masters, batch.grads, strict=True):
            buffer.mul_(momentum).add_(fp32_values(g) * clip)
            master.mul_(1 - lr * weight_decay).add_(buffer, alpha=-lr)
        master_bounds = 2.0 * amaxes[self.master_row, batch.indices]
        store_(batch.states["momentum_buffer"], buffers, bounds)
        store_(batch.masters, masters, master_bounds)
        if batch.weights:
            store_(batch.weights, load(batch.masters), master_bounds)
        kept[: self.master_row, batch.places] = self.stored_amaxes(batch)


MOMENTUM = Momentum("momentum", (MASTER, State("momentum_buffer", "m", "momentum")), kept=("momentum_buffer",))
MATRICES, VECTORS = StateFormats(m=E4M3, update="momentum"), StateFormats(update="momentum")
RECIPE = Recipe(name="bf16-momentum", compute=BF16, gemm=None, weight=BF16, states=MATRICES, vectors=VECTORS)


def register() -> None:
    updates.register(MOMENTUM)
    recipe.register(RECIPE)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known in this process too, to the end of the test."""
    monkeypatch.setattr(recipe, "_TABLE", dict(recipe._TABLE))
    register()


def settings(prefix: str, zero: bool, **more: Any) -> Config:
    shared = {"train_iters": STEPS, "global_batch_size": 8, "ddp_bucket_size": 5000, "lr": 0.2, "clip_grad": 1.0}
    return tiny.config(prefix, precision=RECIPE.name, use_distributed_optimizer=zero, **shared, **more)


def trained(config: Config) -> dict[str, Any]:
    """A run, and what this rank has at its end."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(config) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        optimizer = made.training.optimizer
        return {
            "rows": rows,
            "everything": checkpoints.everything(made),
            "weights": tiny.bits(made.training.model.parameters()),
            "held": sum(optimizer.state[holding.weight]["momentum_buffer"].numel() for holding in optimizer.holdings()),
            "keys": sorted({key for state in optimizer.state.values() for key in state}),
            "scaled": sum(isinstance(state["momentum_buffer"], ScalingTensor) for state in optimizer.state.values()),
        }


def two_processes(prefix: str, folder: str) -> dict[str, Any]:
    register()
    found: dict[str, Any] = {}
    for name, zero in ZERO.items():
        save, steps = f"{folder}/{zero}", f"{folder}/{zero}.jsonl"
        whole = settings(prefix, zero, record_precision=steps, record_interval=STEPS, save_interval=SAVED)
        found[name] = {
            "whole": trained(checkpoints.pointed(whole, save=save)),
            "resumed": trained(checkpoints.pointed(settings(prefix, zero, ckpt_step=SAVED), load=save)),
            "resumed the other way": trained(checkpoints.pointed(settings(prefix, not zero, ckpt_step=SAVED), load=save)),
        }
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("momentum")


@pytest.fixture(scope="module")
def prefix(folder: Path) -> str:
    return str(tiny.write_data(folder))


@pytest.fixture(scope="module")
def ranks(prefix: str, folder: Path) -> list[dict[str, Any]]:
    return dist.run(two_processes, 2, prefix, str(folder), timeout=400)


@pytest.mark.parametrize("name", ZERO)
def test_it_trains_the_gpt_and_both_ranks_have_the_same_weights(ranks: list[dict[str, Any]], name: str):
    first, second = (rank[name]["whole"] for rank in ranks)
    losses = tiny.losses(first["rows"])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1
    assert tiny.same(first["weights"], second["weights"])
    assert first["keys"] == ["master", "momentum_buffer", "step"]
    assert first["scaled"]


def test_zero_changes_no_bit_and_each_rank_holds_its_own_share_of_the_state(ranks: list[dict[str, Any]]):
    with_zero, without = ([rank[name]["whole"] for rank in ranks] for name in ZERO)
    assert tiny.same(with_zero[0]["weights"], without[0]["weights"])
    assert tiny.losses(with_zero[0]["rows"]) == tiny.losses(without[0]["rows"])
    assert sum(rank["held"] for rank in with_zero) == without[0]["held"] == without[1]["held"]
    assert max(rank["held"] for rank in with_zero) < 0.7 * without[0]["held"]


@pytest.mark.parametrize("name", ZERO)
def test_a_resumed_run_is_the_run_that_never_stopped(ranks: list[dict[str, Any]], name: str):
    for rank in ranks:
        assert tiny.same(rank[name]["resumed"]["everything"], rank[name]["whole"]["everything"])
        assert tiny.same(rank[name]["resumed the other way"]["weights"], rank[name]["whole"]["weights"])
    assert tiny.losses(ranks[0][name]["resumed"]["rows"]) == tiny.losses(ranks[0][name]["whole"]["rows"])[SAVED:]


@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
def test_its_checkpoint_holds_the_state_and_one_scale_a_tensor(ranks: list[dict[str, Any]], folder: Path, zero: bool):
    stored = CheckpointReader(folder / str(zero)).stored.tensors
    buffers = [key for key in stored if key.startswith("momentum_buffer/")]
    scaled = {key.partition(".scale_inv@")[0] for key in buffers if ".scale_inv@" in key}
    plain = {key for key in buffers if ".scale_inv@" not in key}
    assert len(plain) == len([key for key in stored if key.startswith("step/")])
    assert scaled == {key for key in plain if stored[key].dtype == E4M3.dtype}
    assert 5 < len(scaled) < len(plain)
    assert not any(key.startswith("exp_avg") for key in stored)


def test_a_checkpoint_of_another_update_is_refused_by_name(ranks: list[dict[str, Any]], prefix: str, folder: Path):
    config = checkpoints.pointed(settings(prefix, zero=False), load=str(folder / "False"))
    config = replace(config, precision=replace(config.precision, precision="bf16"))
    with tiny.started(config), pytest.raises(ValueError, match=r"has no exp_avg, which this run's optimizer requires.*--no-load-optim"):
        Trainer(config)


@pytest.mark.parametrize("name", ZERO)
def test_the_plan_and_the_reports_count_it(ranks: list[dict[str, Any]], prefix: str, name: str):
    planned = plan(settings(prefix, ZERO[name]), 2)
    (row,) = (row for row in ranks[0][name]["whole"]["rows"] if row["kind"] == "precision")
    assert list(row["bytes_per_parameter"]) == ["weight", "master", "grad", "momentum"]
    first = planned[0]
    assert list(first.states) == ["master", "momentum"]
    for column in first.states:
        assert first.states[column] == pytest.approx(row["bytes_per_parameter"][column] * first.parameters)
    least = min(ranks, key=lambda rank: rank[name]["whole"]["held"])[name]["whole"]["held"]
    assert least <= first.states["momentum"] < 1.2 * max(rank[name]["whole"]["held"] for rank in ranks)
    assert "momentum" in report(settings(prefix, ZERO[name]), 2)


@pytest.mark.parametrize("name", ZERO)
def test_the_recorder_says_what_rounding_it_costs(ranks: list[dict[str, Any]], folder: Path, name: str):
    last = tiny.read(folder / f"{ZERO[name]}.jsonl")[-1]
    column = last["columns"]["casts"].index("sqnr_db")
    told = {layer: tensors["momentum"][column] for layer, tensors in last["casts"].items() if "momentum" in tensors}
    assert len(told) > 5
    assert all(15 < sqnr < 45 for sqnr in told.values())
    assert last["total"]


# ---------------------------------------------------------------------------------------------------------------- one step


def test_it_is_torch_s_momentum_but_for_the_rounding_of_the_state():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) * 0.1 for shape in ((24, 16), (8, 8))]
    gradients = [[torch.randn(x.shape, generator=generator) * 1e-2 for x in start] for _ in range(2)]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    optimizer = LowPrecisionOptimizer(ours, lr=0.5, betas=(0.75, 0.0), weight_decay=0.0, formats=MATRICES)
    reference = torch.optim.SGD(theirs, lr=0.5, momentum=0.75)
    carried = [torch.zeros(()) for _ in start]
    for number, gs in enumerate(gradients):
        for p, q, g in zip(ours, theirs, gs, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        if number:
            assert {part.rounded for part in rehearse(optimizer)} == {frozenset({"momentum"})}
        optimizer.step()
        reference.step()
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            kept, exact = optimizer.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"]
            assert isinstance(kept, ScalingTensor)
            assert kept.format is E4M3
            # The weight is updated from the state before it is rounded: what the first step rounds shows in the second.
            assert p.equal(q) == (number == 0)
            assert ((p - q).abs() <= 0.5 * 0.75 * carried[i] + 2.0**-22).all()
            half_a_unit = 2.0**-4 * exact.abs() + 2.0**-10 * kept.scale_inv
            if number == 0:
                assert ((fp32_values(kept) - exact).abs() <= half_a_unit).all()
            carried[i] = half_a_unit


def test_what_it_does_not_take_is_refused_by_name():
    with pytest.raises(ValueError, match=r"m is coat-e4m3.*update 'momentum' requires one for momentum_buffer; choose one of fp32, bf16"):
        LowPrecisionOptimizer([nn.Parameter(torch.ones(2, 2))], formats=StateFormats(m=COAT_E4M3, update="momentum"))


def test_the_state_of_fp32_is_plain():
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = LowPrecisionOptimizer([p], formats=VECTORS)
    p.grad = torch.ones(4, 4)
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].dtype is FP32.dtype
    assert optimizer.state_dict()["state"][0].keys() == {"step", "momentum_buffer"}
