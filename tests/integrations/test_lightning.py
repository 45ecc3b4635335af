"""Lightning's own Trainer and strategies with the optimizer of `msamp.initialize`: one process."""

import pytest
import torch

import msamp
from helpers import hosts
from msamp.numerics.tensor import ScalingTensor

hosts.need("lightning")
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging  # noqa: E402

from helpers.lightning_runs import Module, fit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, and on what it calls small
every_level = pytest.mark.parametrize("level", ["O2", "O3"])


class InConfigureModel(Module):
    """Which Lightning calls before it loads a checkpoint."""

    def configure_model(self) -> None:
        self.made = self.initialized()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.made


class SavedPlain(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self.initialized()
        msamp.save_plain(self, optimizer)
        return optimizer


@pytest.mark.promise("Hosts", "Lightning's own strategies resume bit for bit with `initialize` in `configure_model`.")
@every_level
def test_initialize_in_configure_model_trains_saves_and_resumes_bit_for_bit(level, tmp_path):
    whole, first, resumed = (InConfigureModel(level) for _ in range(3))
    fit(whole, 3, tmp_path)
    fit(first, 2, tmp_path).save_checkpoint(tmp_path / "last.ckpt")
    fit(resumed, 3, tmp_path, tmp_path / "last.ckpt")
    assert first.losses + resumed.losses == whole.losses
    assert whole.losses[-1] < whole.losses[0]


@every_level
def test_initialize_in_configure_optimizers_resumes_from_plain_weights(level, tmp_path):
    whole, first, resumed = (SavedPlain(level) for _ in range(3))
    fit(whole, 3, tmp_path)
    trainer = fit(first, 2, tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fit(resumed, 3, tmp_path, tmp_path / "last.ckpt")
    # Windows of delayed scaling begin anew; 12 steps have not filled them.
    assert first.losses + resumed.losses == whole.losses
    again = Module.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    want = msamp.plain_state_dict(first, trainer.optimizers[0])
    assert all(x.equal(want[name]) for name, x in again.state_dict().items())


def test_exact_weights_are_not_loaded_before_configure_optimizers(tmp_path):
    """Lightning loads before the layers are FP8, and torch names what it cannot place; the ways out are the two tests above and the
    strategy of `msamp.integrations.lightning`."""
    fit(first := Module(), 1, tmp_path).save_checkpoint(tmp_path / "last.ckpt")
    assert isinstance(first.net[0].weight, ScalingTensor)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*net\.0\.scaling\.amax"):
        fit(Module(), 2, tmp_path, tmp_path / "last.ckpt")


class Seen(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, module, *_) -> None:
        self.weights.append(msamp.fp32_values(module.net[0].weight.detach()).clone())


@pytest.mark.promise("Hosts", "Lightning's weight averaging averages the weights.")
@every_level
def test_averages_of_lightning_are_those_of_the_weights(level, tmp_path):
    seen = Seen()
    module = Module(level)
    fit(module, 3, tmp_path, callbacks=[seen, WeightAveraging()])
    mean = torch.stack(seen.weights).mean(0)
    want = ScalingTensor.quantize(mean, module.net[0].weight.format).dequantize()
    assert torch.allclose(msamp.fp32_values(module.net[0].weight.detach()), want, rtol=0.13, atol=1e-5)  # a step of E4M3
    seen, module = Seen(), Module(level)
    fit(module, 4, tmp_path, callbacks=[seen, StochasticWeightAveraging(1e-2, swa_epoch_start=2)])
    mean = torch.stack([seen.weights[4 * epoch - 1] for epoch in (1, 2, 3)]).mean(0)
    want = ScalingTensor.quantize(mean, module.net[0].weight.format).dequantize()
    assert torch.allclose(msamp.fp32_values(module.net[0].weight.detach()), want, rtol=0.13, atol=1e-5)  # a step of E4M3
