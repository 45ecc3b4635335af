"""MS-AMP has the same import name: where it is installed too it is named, and refused where its files and ours lie in one folder."""

import copy
import importlib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import msamp
from helpers.moe_model import KEEP, Mixture, train
from helpers.numerics import make
from msamp.integrations.loop_optimizer import LoopOptimizer
from msamp.integrations.ms_amp import check_alone
from msamp.integrations.takeover import check_optimizer, chosen_recipe, defaults_of, parameter_groups, retire
from msamp.nn.scaling_state import ScalingState
from msamp.numerics import recipe as recipes

PACKAGE = Path(msamp.__file__).parent


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed distributions, MS-AMP 0.4.0 among them."""
    (tmp_path / "ms_amp-0.4.0.dist-info").mkdir()
    (tmp_path / "ms_amp-0.4.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: MS-AMP\nVersion: 0.4.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.promise("Packaging", "MS-AMP in the same folder is refused before anything is converted.")
def test_in_one_folder_it_is_refused_before_a_layer_is_converted(site):
    (site / "msamp").symlink_to(PACKAGE)
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"^MS-AMP 0\.4\.0 is also installed in .* pip uninstall ms-amp msamp, then install the one"):
        msamp.initialize(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.promise("Packaging", "MS-AMP in another folder is named in a warning.")
def test_elsewhere_it_is_named_where_the_caller_of_initialize_stands(site):
    def initialize():
        check_alone()

    with pytest.warns(UserWarning, match=r"^MS-AMP 0\.4\.0 is also installed .*; import msamp imports this package") as told:
        initialize()
    assert [warning.filename for warning in told if "MS-AMP" in str(warning.message)] == [__file__]


@pytest.mark.parametrize("backend", ["MSAMP", "TE"])
def test_the_import_names_our_accelerator_where_accelerate_is_set_to_ms_amp(backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        importlib.reload(msamp)
    named = [w for w in told if "msamp.integrations.accelerate.Accelerator" in str(w.message)]
    assert len(named) == (backend == "MSAMP")


class Net(nn.Module):
    """As MS-AMP's examples/mnist.py has it, at a size for a test: convolutions, dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(144, 32)
        self.fc2 = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(nn.functional.max_pool2d(self.conv(x).relu(), 2), 1)
        return self.fc2(self.fc1(self.dropout(x)).relu()).log_softmax(1)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_loop_as_its_mnist_example_has_it(level):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = msamp.initialize(model, optimizer, opt_level=level)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    target, losses = torch.arange(64) % 10, []
    data = torch.randn(10, 1, 14, 14)[target] + 0.1 * torch.randn(64, 1, 14, 14)
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(data)
        loss = nn.functional.nll_loss(output.float(), target)
        scaler.scale(loss).backward()
        msamp.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


# How much the host has to issue for an eager step of a loop of one's own: it is what a small layer's step takes.


MOST = 12  # a linear layer with bias: 3 casts and a GEMM each way, one more GEMM, the bias's sum; cuBLAS clears memory for some GEMMs


def events(depth: int, recipe: str) -> int:
    """Kernels, copies and fills of one step once its history is full."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(depth))).to("cuda", torch.bfloat16)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), recipe)
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(each.device_type == torch.autograd.DeviceType.CUDA for each in seen.events())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["O1", "O2", "O3"])
def test_a_linear_layer_adds_few_launches_to_a_step(recipe):
    # A difference: what a step issues once, whatever the model, is not of the layers. Several kinds of state are updated in chunks.
    assert (events(24, recipe) - events(8, recipe)) / 16 <= MOST


# The public parts of which an integration of one's own is made. What `msamp.initialize` does with them: test_initialize.py.


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(make("normal", (4, 16))).square().sum().backward()
    optimizer.step()


def test_an_integration_of_one_s_own_is_initialize_bit_for_bit():
    torch.manual_seed(3)
    plain, other = nn.Linear(16, 16), nn.Linear(16, 16)
    other.load_state_dict(plain.state_dict())
    given = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    recipe = chosen_recipe("O1", None, None)
    check_optimizer(given, recipe)
    model = msamp.convert(nn.Sequential(plain), recipe)
    low = LoopOptimizer(parameter_groups(given, model, recipe), recipe, ScalingState(model), **defaults_of(given))
    retire(given, low)
    same, usual = msamp.initialize(nn.Sequential(other), torch.optim.AdamW(other.parameters(), lr=1e-2), recipe="O1")
    for _ in range(2):
        step(model, low)
        step(same, usual)
    for own, theirs in zip(model.parameters(), same.parameters(), strict=True):
        assert msamp.fp32_values(own).equal(msamp.fp32_values(theirs))
    assert given.param_groups is low.param_groups
    with pytest.raises(ValueError, match=r"this optimizer was replaced by msamp\.initialize"):
        given.step()


def test_the_recipe_is_the_one_that_all_arguments_name():
    assert chosen_recipe(None, None, None) == recipes.O2
    assert chosen_recipe(recipes.O3, "O3", None) == recipes.O3
    assert chosen_recipe("O1", None, "mxfp8").gemm == recipes.GEMMS["mxfp8"]
    with pytest.raises(ValueError, match="recipe is 'O1' and opt_level is 'O2'"):
        chosen_recipe("O1", "O2", None)


def test_the_states_of_experts_are_divided_among_their_matrices():
    model = Mixture()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
    train(model, adamw, 5)
    before = {name: adamw.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    want = train(*_continued(model, adamw), 1)
    model, low = msamp.initialize(model, adamw, "O1", accept=KEEP)
    names = low.param_groups[0]["param_names"]
    assert names == [name for name, _ in model.named_parameters()]
    moments = [low.state[p]["exp_avg"] for p in model.experts.fc1_weight.matrices]
    assert torch.stack(moments).equal(before["experts.fc1_weight"])
    assert all(int(low.state[p]["step"]) == 5 for p in model.parameters())
    assert train(model, low, 1) == pytest.approx(want, rel=0.03)


def _continued(model: nn.Module, adamw: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of both, in FP32."""
    again = Mixture()
    again.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(again.named_parameters(), lr=3e-3)
    other.load_state_dict(copy.deepcopy(adamw.state_dict()))
    return again, other
