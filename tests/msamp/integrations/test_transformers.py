"""The Trainer of transformers with the optimizer of `msamp.initialize`: several processes, saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, hosts
from msamp.numerics.tensor import ScalingTensor

transformers = hosts.need("transformers")
hosts.need("accelerate")
TOKENS = torch.randint(0, 60, (16, 16), generator=torch.Generator().manual_seed(0))


def trainer(folder: str, steps: int, **settings: Any) -> Any:
    from msamp.integrations.transformers import Trainer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, save_steps=2, logging_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_grad_norm=0.1, learning_rate=1e-2, lr_scheduler_type="constant", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    return Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=rows, **settings)


def train(folder: str) -> dict[str, Any]:
    first = trainer(folder, 2, recipe="O3")
    first.train()
    resumed = trainer(folder, 3, recipe="O3")
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    model = resumed.model
    return {
        "kind": type(resumed.model_wrapped).__name__,
        "low": sum(isinstance(p, ScalingTensor) for p in model.parameters()),
        "weights": [p.detach().dequantize() if isinstance(p, ScalingTensor) else p.detach() for p in model.parameters()],
        "norms": [row["grad_norm"] for row in first.state.log_history if "grad_norm" in row],
        "losses": [row["loss"] for row in resumed.state.log_history if "loss" in row],
        "step": resumed.state.global_step,
    }


@pytest.mark.promise("Hosts", "Our Trainer trains, clips, saves and resumes on two processes at O3.")
@pytest.mark.nightly(40)
def test_two_processes_train_save_and_resume(tmp_path: Path):
    first, second = dist.run(train, 2, str(tmp_path))
    assert first["kind"] == "LlamaForCausalLM"
    assert first["low"] == 7
    assert all(a.equal(b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert min(first["norms"]) > 0.1
    assert first["losses"][-1] < first["losses"][0]
    assert first["step"] == 3
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert again(input_ids=TOKENS, labels=TOKENS).loss < 4.5


def test_a_captured_trainer_trains_as_one_that_is_not(tmp_path: Path):
    found, roll = [], {"_prepare_inputs": lambda self, inputs: {name: rows.roll(1, -1) for name, rows in inputs.items()}}
    for capture in (False, True):
        own = trainer(str(tmp_path), 6, recipe="O3", capture=capture)
        own.__class__ = type("Mine", (type(own),), roll)
        own._prepare_inputs = lambda inputs, of_class=own._prepare_inputs: of_class(of_class(inputs))
        own.train()
        rows = [row for row in own.state.log_history if "grad_norm" in row]
        weights = [p.detach().dequantize() if isinstance(p, ScalingTensor) else p.detach() for p in own.model.parameters()]
        found.append(([row["grad_norm"] for row in rows], [row["learning_rate"] for row in rows], [row["loss"] for row in rows], weights))
        assert {int(x) for name, x in own.model.named_buffers() if name.endswith("scaling.seen")} == {6}, "a step is recorded once"
    (norms, rates, losses, weights), captured = found
    assert (own._captured.obstacle, own._captured._eager_steps) == (None, {}), "released"
    assert (norms, rates) == captured[:2]
    assert losses == pytest.approx(captured[2], rel=1e-4)  # the sum of two micro-batches is rounded elsewhere
    assert all(a.equal(b) for a, b in zip(weights, captured[3], strict=True))
