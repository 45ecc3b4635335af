"""The fragments of docs/guide/own_loop.md about hosts run as printed, with what they take from their reader."""

import os
from unittest import mock

import pytest
import torch
from torch import nn

from helpers import guide_blocks, hosts

FRAGMENTS = {block.heading: block for block in guide_blocks.blocks("own_loop.md") if block.takes}
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, and on what it calls small


def run(heading: str, **given: object) -> dict[str, object]:
    block = FRAGMENTS[heading]
    assert set(block.takes) == given.keys()
    names = {"__name__": "fragment", **given}
    exec(compile(block.code, f"own_loop.md, {heading}", "exec"), names)
    return names


def test_the_trainer_s(tmp_path):
    transformers = hosts.need("transformers")
    hosts.need("accelerate")  # its Trainer wants it
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, per_device_train_batch_size=2)
    row = torch.arange(16)
    run(
        "Hugging Face Trainer",
        model=transformers.GPT2LMHeadModel(config),
        arguments=arguments,
        rows=[{"input_ids": row, "labels": row}] * 4,
    )
    assert list(tmp_path.rglob("*.safetensors"))


def test_accelerate_s():
    hosts.need("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    model = nn.Sequential(nn.Linear(32, 32))
    loader = torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=4)
    try:
        names = run("accelerate", model=model, optimizer=torch.optim.AdamW(model.parameters()), loader=loader)
        for x in names["loader"]:
            names["accelerator"].backward(names["model"](x).square().mean())
            names["optimizer"].step()
    finally:
        for each in (AcceleratorState, GradientState, PartialState):
            each._reset_state()


def test_lightning_s(tmp_path, monkeypatch):
    lightning = hosts.need("lightning")
    monkeypatch.chdir(tmp_path)  # where its logs and checkpoints go

    class Whole(lightning.LightningModule):
        """What the page's module leaves to its reader."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(32, 32)

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(x).square().mean()

    monkeypatch.setattr(lightning, "LightningModule", Whole)
    try:
        with mock.patch.dict(os.environ):  # which Lightning tells of its ranks, and accelerate would read in a later test
            run("Lightning", rows=torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=4))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
