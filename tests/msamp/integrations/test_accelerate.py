"""Hugging Face accelerate with the optimizer of `msamp.initialize`: one process and several agree, what it clips, what it saves."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from helpers import dist, hosts
from msamp.numerics.tensor import ScalingTensor

accelerate = hosts.need("accelerate")
Accelerator = hosts.need("msamp.integrations.accelerate").Accelerator
ROOT = Path(__file__).resolve().parents[3]
ROWS = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
MICRO_BATCHES = 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().dequantize() if isinstance(p, ScalingTensor) else p.detach().clone() for p in model.parameters()]


def train(level: str, folder: str | None = None) -> dict[str, Any]:
    """Steps of two micro-batches of this rank's rows, clipped, with a schedule; saved, gone on, loaded, gone on."""
    accelerator = Accelerator(cpu=True, recipe=level, gradient_accumulation_steps=MICRO_BATCHES)
    ranks = accelerator.num_processes
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // ranks))  # accelerate steps it once a process
    loader = torch.utils.data.DataLoader(ROWS, batch_size=8 // ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    assert type(model) is nn.Sequential
    norms = []

    def epoch() -> None:
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x[:, :16]).square().mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    epoch()
    trained = values(model)
    found = {"norms": list(norms), "weights": trained}
    if folder is not None:
        accelerator.save_state(folder)
        accelerator.save_model(model, f"{folder}/model")
        epoch()
        whole = values(model)
        accelerator.load_state(folder)
        assert all(a.equal(b) for a, b in zip(values(model), trained, strict=True))
        epoch()
        found["resumed"] = all(a.equal(b) for a, b in zip(values(model), whole, strict=True))
    return found


def trains(folder: str) -> dict[str, dict[str, Any]]:
    return {level: train(level, f"{folder}/{level}") for level in ("O2", "O3")}


def fresh_state() -> None:
    for each in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.state.PartialState):
        each._reset_state()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch):
    fresh_state()
    yield
    fresh_state()


@pytest.mark.promise("Hosts", "Our Accelerator on two processes trains what one trains, and resumes bit for bit.")
@pytest.mark.nightly(30)
def test_two_processes_train_as_one_does_save_and_resume(tmp_path: Path):
    from safetensors.torch import load_file

    first, second = dist.run(trains, 2, str(tmp_path))
    for level in ("O2", "O3"):
        fresh_state()
        want = train(level)
        assert all(a.equal(b) for a, b in zip(first[level]["weights"], second[level]["weights"], strict=True))
        assert want["norms"][0] > 0.2
        assert first[level]["norms"] == pytest.approx(want["norms"], rel=0.1)
        assert first[level]["norms"] == second[level]["norms"]
        assert all((a - b).norm() < 0.05 * b.norm() + 1e-2 for a, b in zip(first[level]["weights"], want["weights"], strict=True))
        assert first[level]["resumed"]
        assert second[level]["resumed"]
        saved = load_file(tmp_path / level / "model" / "model.safetensors")
        assert {name: x.dtype for name, x in saved.items()} == {name: x.dtype for name, x in net().state_dict().items()}


def test_a_state_whose_empty_histories_accelerate_has_joined_is_loaded(tmp_path: Path):
    assert train("coat", str(tmp_path))["resumed"]


@pytest.mark.parametrize("settings", [{"mixed_precision": "fp16"}, {"mixed_precision": "fp8"}])
def test_precisions_that_hold_no_fp8_weights_are_refused(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    made = Accelerator(cpu=True)
    monkeypatch.setattr(type(made), "mixed_precision", property(lambda self: settings["mixed_precision"]))
    with pytest.raises(ValueError, match=r"mixed_precision is 'fp.*it must be 'no' or 'bf16'"):
        made.check()


@pytest.mark.parametrize("how", ["environment", "handler", "Trainer"])
def test_accelerates_backend_for_ms_amp_is_refused_in_our_words(how: str, monkeypatch: pytest.MonkeyPatch):
    made = Accelerator(cpu=True)
    if how != "handler":
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    settings = {"kwargs_handlers": [accelerate.utils.MSAMPRecipeKwargs(opt_level="O2")]} if how == "handler" else {}
    with pytest.raises(ValueError, match=r"Microsoft's MS-AMP.*mixed_precision.*recipe='O2'"):
        made.check() if how == "Trainer" else Accelerator(cpu=True, **settings)


@pytest.mark.parametrize("torchao", [False, True])
def test_a_launch_configured_for_ms_amp_ends_in_the_words_that_the_guide_names(torchao: bool, tmp_path: Path):
    """Without a package of FP8 the launcher itself ends before the script starts; with one, `import msamp` and our Accelerator speak."""
    if torchao:
        (tmp_path / "torchao").mkdir()
        (tmp_path / "torchao/__init__.py").touch()
        (tmp_path / "torchao-0.16.0.dist-info").mkdir()
        (tmp_path / "torchao-0.16.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.16.0\n")
    (tmp_path / "fp8.yaml").write_text(
        "distributed_type: 'NO'\nfp8_config:\n  backend: MSAMP\n  opt_level: O2\nmixed_precision: fp8\nnum_processes: 1\nuse_cpu: true\n"
    )
    (tmp_path / "loop.py").write_text("from msamp.integrations.accelerate import Accelerator\n\nAccelerator(recipe='O2')\n")
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fp8.yaml", "loop.py"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode
    guide = " ".join((ROOT / "docs/guide/moving.md").read_text().split())
    assert '"FP8 is not available on this machine"' in guide
    assert ("RuntimeError: FP8 is not available on this machine" in done.stderr) == (not torchao)
    assert ("UserWarning: accelerate's fp8_backend MSAMP" in done.stderr) == torchao
    assert ("ValueError: accelerate's fp8_backend MSAMP and its MSAMPRecipeKwargs are for Microsoft's" in done.stderr) == torchao


def test_fp8_of_accelerate_is_refused_before_it_looks_for_packages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match=r"mixed_precision is 'fp8'.*recipe"):
        Accelerator(cpu=True)


def test_what_cannot_be_spread_and_what_cannot_be_paired_is_refused(monkeypatch: pytest.MonkeyPatch):
    made, model = Accelerator(cpu=True), net()
    with pytest.raises(ValueError, match=r"2 models and 1 optimizers to convert; pass one of each"):
        made.prepare(model, net(), torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(type(made), "distributed_type", property(lambda self: accelerate.utils.DistributedType.FSDP))
    with pytest.raises(ValueError, match=r"accelerate is set to FSDP, which does not support FP8 weights; choose MULTI_GPU"):
        made.check()


def test_a_compiled_model_trains_alike():
    """accelerate compiles in `prepare`, behind the conversion."""
    found = []
    for backend in ("no", "aot_eager"):
        fresh_state()
        torch._dynamo.reset()
        accelerator = Accelerator(cpu=True, recipe="O2", dynamo_backend=backend)
        plain = net()
        model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        assert hasattr(model, "_orig_mod") == (backend != "no")
        losses = []
        for step in range(4):
            x = ROWS[8 * step : 8 * step + 8]
            loss = (model(x) - x[:, :16]).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert list(accelerator.get_state_dict(model)) == list(net().state_dict())


def test_a_captured_step_of_what_accelerate_has_prepared():
    import msamp

    curves = []
    for captured in (False, True):
        accelerator = Accelerator(cpu=True, recipe="O2", gradient_accumulation_steps=MICRO_BATCHES)
        model = net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            for part in x.chunk(MICRO_BATCHES):
                with accelerator.accumulate(model):  # noqa: B023
                    loss = (model(part) - part[:, :16]).square().mean()  # noqa: B023
                    accelerator.backward(loss)  # noqa: B023
            accelerator.clip_grad_norm_(model.parameters(), 0.1)  # noqa: B023
            return loss

        step, curve = msamp.capture(model, optimizer, forward_backward), []
        for number in range(6):
            x = ROWS.roll(number, 0)
            loss = step(x) if captured else forward_backward(x).detach()
            if not captured:
                optimizer.step()
                optimizer.zero_grad()
            curve.append(float(loss))
        curves.append(curve)
    plain = net()
    model, optimizer = msamp.initialize(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), "O2")
    for number in range(6):  # by hand: all but the last micro-batch under no_sync
        first, last = ROWS.roll(number, 0).chunk(MICRO_BATCHES)
        with optimizer.no_sync():
            ((model(first) - first[:, :16]).square().mean() / MICRO_BATCHES).backward()
        loss = (model(last) - last[:, :16]).square().mean()
        (loss / MICRO_BATCHES).backward()
        msamp.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss) == curves[0][number]
    assert curves[0] == curves[1]
    assert step.obstacle is None
