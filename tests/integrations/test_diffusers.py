"""Models of diffusers: a transformer (DiT) and a UNet with cross attention, trained to remove noise, and its average of weights."""

import functools

import pytest
import torch
from torch import nn

import msamp
from helpers import dist, host_loops, hosts
from msamp.numerics.metrics import sqnr_db

diffusers = hosts.need("diffusers")
LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O3"])
pytestmark = pytest.mark.filterwarnings("ignore:less than half")


def dit(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, num_layers=layers, sample_size=8, patch_size=2,
        num_embeds_ada_norm=32,
    )  # fmt: skip


def unet() -> nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32,), cross_attention_dim=32,
        attention_head_dim=8, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
    )  # fmt: skip


# The UNet takes ten seconds for a level; at O3 its weights, gradients and states are all those of the others.
BUILDS = pytest.mark.parametrize(("build", "level"), [(dit, "O1"), (dit, "O2"), (dit, "O3"), (unet, "O3")])


def predicted(model: nn.Module, step: int, rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The noise that the model finds in four latents, and the true one; others in each step, and for each number of rows."""
    seed = torch.Generator().manual_seed(10 * step + rows)
    clean, noise = (torch.randn(4, 4, 8, 8, generator=seed) for _ in range(2))
    when, words = torch.randint(0, 100, (4,), generator=seed), torch.randn(4, 6, 32, generator=seed)
    noisy = diffusers.DDPMScheduler(num_train_timesteps=100).add_noise(clean / 2, noise, when)
    condition = {"encoder_hidden_states": words} if hasattr(model, "mid_block") else {"class_labels": torch.arange(4)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step)  # a DiT drops labels at random
        return model(noisy, when, **condition).sample, noise


def loss_of_noise(model: nn.Module, step: int, rows: int = 0) -> torch.Tensor:
    return nn.functional.mse_loss(*predicted(model, step, rows))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of_noise(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def begin(build, level: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (model, optimizer) if level is None else msamp.initialize(model, optimizer, level)


@pytest.mark.promise(
    "Hosts", "A DiT and a UNet of diffusers end within 1.5 % of their loss in FP32, resume bit for bit and load elsewhere."
)
@BUILDS
def test_it_ends_where_it_ends_in_fp32_saves_and_resumes(build, level, tmp_path):
    want = train(*begin(build, None), range(8))
    model, optimizer = begin(build, level)
    losses = train(model, optimizer, range(4))
    torch.save([msamp.exact_state_dict(model), optimizer.state_dict()], tmp_path / "saved.pt")
    losses += train(model, optimizer, range(4, 8))
    assert sum(losses[-4:]) == pytest.approx(sum(want[-4:]), rel=0.015)
    assert sum(losses[-4:]) < sum(losses[:4])
    resumed, other = begin(build, level)
    states = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.load_state_dict(states[0])
    other.load_state_dict(states[1])
    assert train(resumed, other, range(4, 8)) == losses[4:]
    model.save_pretrained(tmp_path)
    exported = type(build()).from_pretrained(tmp_path)
    assert all(x.equal(msamp.plain_state_dict(model, optimizer)[name]) for name, x in exported.state_dict().items())
    with torch.no_grad():
        assert sqnr_db(predicted(exported.eval(), 99)[0], predicted(model.eval(), 99)[0]) > 20


def test_a_compiled_model_trains_alike():
    host_loops.check_the_compiled_model_trains_alike(functools.partial(dit, layers=1), loss_of_noise)


def test_two_processes_train_as_one():
    ranks = dist.run(of_a_rank, 2, "O3")
    host_loops.check_two_processes_are_one(ranks, of_a_rank("O3"))


def of_a_rank(level: str) -> dict[str, object]:
    return host_loops.on_this_rank(dit, loss_of_noise, level)
