"""LoRA of peft on FP8 base weights, in both orders."""

import pytest
import torch
from torch import nn

import msamp
from helpers import dist, host_loops, hosts
from msamp.nn.linear import FP8Conv1D, FP8Linear
from msamp.numerics.metrics import sqnr_db

peft, transformers = hosts.need("peft"), hosts.need("transformers")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), transformers.pytorch_utils.Conv1D(32, 64)
        self.down.weight.data.mul_(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def adapted(order: str, trained: list[str] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network with adapters, and `trained` layers, made low-precision before or after they came, and trained for some steps."""
    torch.manual_seed(0)
    model, config = (
        Net(),
        peft.LoraConfig(r=16, lora_alpha=16, target_modules=["up"] if trained else ["up", "down"], modules_to_save=trained),
    )
    if order == "initialize first":
        model = msamp.initialize(model, opt_level="O2")[0]
        msamp.save_plain(model)
        model = peft.get_peft_model(model, config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    else:
        model = peft.get_peft_model(model, config)
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "O2")
    x = torch.randn(32, 32)
    losses = []
    for _ in range(8):
        loss = (model(x) - x).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    return model, optimizer


both_orders = pytest.mark.parametrize("order", ["initialize first", "adapters first"])


@both_orders
def test_the_base_is_fp8_and_the_adapters_are_not(order):
    model, _ = adapted(order)
    assert [name for name, m in model.named_modules() if isinstance(m, FP8Linear)] == [
        "base_model.model.up.base_layer",
        "base_model.model.down.base_layer",
    ]


@pytest.mark.promise("Conversion", "LoRA adapters train, save and merge on FP8 base weights.")
@both_orders
@pytest.mark.parametrize("safe", [False, True])
def test_adapters_merge_into_the_base(order, safe):
    model, _ = adapted(order)
    x = torch.randn(16, 32)
    want = model.eval()(x).detach()
    weight = model.base_model.model.up.base_layer.weight.dequantize()
    delta = model.base_model.model.up.get_delta_weight("default").detach()
    merged = model.merge_and_unload(safe_merge=safe)
    assert [type(m) for m in (merged.up, merged.down)] == [FP8Linear, FP8Conv1D]
    assert torch.allclose(merged.up.weight.dequantize(), weight + delta, rtol=1e-3, atol=1e-5)
    assert sqnr_db(want, merged(x)) > 20
    assert list(msamp.plain_state_dict(merged)) == list(Net().state_dict())


def test_a_merge_can_be_taken_back():
    model, _ = adapted("adapters first")
    weight = model.base_model.model.up.base_layer.weight.dequantize()
    model.merge_adapter()
    model.unmerge_adapter()
    assert torch.allclose(model.base_model.model.up.base_layer.weight.dequantize(), weight, rtol=2e-3, atol=1e-4)


@both_orders
@pytest.mark.parametrize("trained", [None, ["down"]])
def test_adapters_are_saved_and_loaded(order, trained, tmp_path):
    model, _ = adapted(order, trained)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    plain = peft.PeftModel.from_pretrained(Net(), tmp_path)
    x = torch.randn(16, 32)
    assert sqnr_db(plain.eval()(x), model.eval()(x)) > 20


def lora() -> nn.Module:
    """A network with adapters, of which alone is trained."""
    torch.manual_seed(0)
    return peft.get_peft_model(Net(), peft.LoraConfig(r=16, lora_alpha=16, target_modules=["up", "down"]))


def loss_of_rows(model: nn.Module, step: int, rows: int) -> torch.Tensor:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + rows))
    return (model(x) - x).square().mean()


@pytest.mark.promise("Hosts", "LoRA adapters on FP8 base weights resume bit for bit.")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(level, tmp_path):
    model, optimizer = host_loops.begin(lora, level)
    host_loops.trained(model, optimizer, loss_of_rows)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    want = host_loops.trained(model, optimizer, loss_of_rows, start=host_loops.STEPS)
    resumed, other = host_loops.begin(lora, level)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert host_loops.trained(resumed, other, loss_of_rows, start=host_loops.STEPS) == want
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), model.parameters(), strict=True) if a.requires_grad)


def test_a_compiled_model_trains_alike():
    host_loops.check_the_compiled_model_trains_alike(lora, loss_of_rows)


@pytest.mark.promise("Hosts", "PEFT on two processes with the same data has the losses of one to the bit.")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_two_processes_train_as_one(level):
    ranks = dist.run(lora_of_a_rank, 2, level)
    host_loops.check_two_processes_are_one(ranks, lora_of_a_rank(level))


def lora_of_a_rank(level: str) -> dict[str, object]:
    return host_loops.on_this_rank(lora, loss_of_rows, level)
