"""The strategy for Lightning: one process and several, saved and resumed, clipped, and what it refuses."""

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import nn

import msamp
from helpers import dist, hosts
from helpers.short_window import short
from msamp.numerics.tensor import ScalingTensor

hosts.need("lightning")
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402

from helpers.lightning_runs import ROWS as QUIET  # noqa: E402
from helpers.lightning_runs import Module, fit  # noqa: E402

# The first batch of an epoch is louder, so that a full window gives other scales than one that begins anew.
ROWS = QUIET * torch.tensor([8.0, 1.0, 1.0, 1.0]).repeat_interleave(8)[:, None]
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, and on what it calls small


def run(module: Module, epochs: int, folder: Any, **settings: Any) -> Any:
    """`fit` by our strategy, on this process's rows."""
    from msamp.integrations.lightning import Strategy

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    strategy = Strategy(cluster_environment=LightningEnvironment())
    return fit(module, epochs, folder, rows=ROWS[rank::ranks], strategy=strategy, devices=ranks, **settings)


@pytest.fixture(autouse=True)
def nothing_stays():
    """No process group, nor what Lightning tells the environment of its ranks, which accelerate would read in a later test."""
    with mock.patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().dequantize() if isinstance(p, ScalingTensor) else p.detach() for p in module.parameters()]


def trains(level: str, folder: str) -> dict[str, Any]:
    """Steps of two micro-batches, saved and resumed, and the same at one go."""
    whole, first, resumed = (Module(short(level, {})) for _ in range(3))  # whose windows are full when it is saved
    run(whole, 4, folder, accumulate_grad_batches=2)
    trainer = run(first, 2, folder, accumulate_grad_batches=2)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    run(resumed, 4, folder, checkpoint=f"{folder}/last.ckpt", accumulate_grad_batches=2)
    return {"whole": whole.losses, "parts": first.losses + resumed.losses, "weights": values(whole), "resumed": values(resumed)}


def by_hand(level: str, epochs: int) -> list[float]:
    """The losses of the same steps in a plain loop, with the first of two micro-batches under `no_sync`."""
    module, losses = Module(short(level, {})), []
    optimizer = module.initialized()
    for batch in ROWS.repeat(epochs, 1).split(16):
        for x, context in zip(batch.split(8), (optimizer.no_sync(), contextlib.nullcontext()), strict=True):
            with context:
                loss = module.training_step(x, 0)
                (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.promise("Hosts", "Lightning with our strategy trains, clips, saves and resumes bit for bit.")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(level: str, tmp_path: Path):
    found = trains(level, str(tmp_path))
    assert found["parts"] == found["whole"] == by_hand(level, 4)
    assert found["whole"][-1] < found["whole"][0]
    module = Module.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    assert all(type(x) is torch.Tensor for x in module.state_dict().values())
    assert (module.net(ROWS) - ROWS[:, :16]).square().mean() < found["whole"][0]


def several(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = trains("O3", folder)
    for level in ("O2", "O3"):  # the second under ZeRO
        (optimizer,) = run(Module(level), 1, folder, gradient_clip_val=1e-3).optimizers
        found[f"clipped at {level}"] = float(optimizer.grad_norm)
    for callback in (StochasticWeightAveraging(1e-2, swa_epoch_start=1), WeightAveraging()):
        module = Module("O3")
        run(module, 2, folder, callbacks=[callback])
        found[type(callback).__name__] = values(module)
    return found


@pytest.mark.nightly(40)
def test_two_processes_train_save_resume_clip_and_average(tmp_path: Path):
    first, second = dist.run(several, 2, str(tmp_path))
    for rank in (first, second):
        assert rank["parts"] == rank["whole"]
        assert all(a.equal(b) for a, b in zip(rank["weights"], rank["resumed"], strict=True))
        assert rank["clipped at O2"] == pytest.approx(1e-3, rel=0.05)
        assert rank["clipped at O3"] == pytest.approx(1e-3, rel=0.05)
    assert first["whole"] != second["whole"]
    for same in ("weights", "StochasticWeightAveraging", "WeightAveraging"):
        assert all(a.equal(b) for a, b in zip(first[same], second[same], strict=True))


class TwoParts(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return msamp.initialize(self, torch.optim.AdamW(self.net[0].parameters()))[1]


class Plain(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_what_nothing_would_average_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"configure_optimizers returned AdamW; .* that msamp\.initialize returns"):
        run(Plain(), 1, tmp_path)
    with pytest.raises(
        ValueError, match=r"net\.2\.weight requires a gradient but is not in the optimizer.*pass msamp\.initialize the whole"
    ):
        run(TwoParts(), 1, tmp_path)


class ByHand(Module):
    """A module that runs its own steps, captured or not."""

    def __init__(self, level: str, captured: bool) -> None:
        super().__init__(level)
        self.automatic_optimization, self.captured, self.step = False, captured, None

    def forward_backward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.net(x) - x[:, :16]).square().mean()
        self.manual_backward(loss)
        return loss

    def training_step(self, batch: Any, *_: Any) -> None:
        from msamp.integrations.lightning import capture

        x = batch[0] if isinstance(batch, list) else batch
        if self.captured:
            self.step = self.step or capture(self, self.forward_backward)
            loss = self.step(x)
        else:
            loss = self.forward_backward(x).detach()
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.losses.append(float(loss))


def test_a_captured_step_counts_and_trains_as_one_by_hand(tmp_path: Path):
    found = []
    for captured in (False, True):
        module = ByHand("O3", captured)
        trainer = run(module, 3, tmp_path)
        found.append((module.losses, trainer.global_step))
    assert found[0] == found[1]
    assert found[0][1] == len(module.losses)
